"""Python's garbage collector, paused while many objects are made that stay.

Imports of torch and transformers make over half a million objects, which live as long as the process. The collector
would scan them all eight times: over one CPU second of the six until a tiny model's first step
(benchmarks/start_up.py).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def pause_collector() -> None:
    """Stops automatic collections; a script calls this before its heavy imports."""
    gc.disable()


def resume_collector() -> None:
    """Resumes automatic collections, which never scan what exists now."""
    gc.freeze()
    gc.enable()


@contextmanager
def without_collector() -> Iterator[None]:
    """Stops automatic collections for as long as the block runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
