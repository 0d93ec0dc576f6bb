"""Programs beside training. Each starts by `mini-trainer WORD`, `python tools/NAME.py` or `torchrun tools/NAME.py`."""
