"""Python's garbage collector while a script imports its libraries.

Imports make over half a million objects, nearly all of which live as long as the process. The collector would scan them
all eight times: one CPU second of six until a tiny model's first step (benchmarks/start_up.py).
"""

import gc


def pause_collector() -> None:
    """Stops automatic collections; a script calls this before its heavy imports."""
    gc.disable()


def resume_collector() -> None:
    """Resumes automatic collections, which never scan what exists now."""
    gc.freeze()
    gc.enable()
