"""Programs besides training. Start with `mini-trainer WORD`, `python tools/NAME.py` or `torchrun tools/NAME.py`."""
