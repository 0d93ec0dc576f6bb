"""Who may run at a time where pytest-xdist shares the tests out: a test with promises about seconds runs alone.

Two locks of files: whoever wants to run takes the turn, then the floor, and gives the turn back; a test that shares
the floor holds it together with others, one that runs alone holds both. So nobody waits for ever.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold(path: Path, kind: int) -> Iterator[None]:
    """Holds a lock of `kind`, fcntl.LOCK_SH or LOCK_EX, which ends with the process at the latest."""
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield


@contextlib.contextmanager
def take_floor(directory: Path, *, is_alone: bool) -> Iterator[None]:
    """While it is entered no test of another worker runs, or none that must be alone."""
    with contextlib.ExitStack() as held, contextlib.ExitStack() as turn:
        turn.enter_context(hold(directory / "turn", fcntl.LOCK_EX))
        held.enter_context(hold(directory / "floor", fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH))
        if not is_alone:
            turn.close()
        yield
