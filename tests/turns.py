"""Who may run at a time where pytest-xdist shares the tests out: tests with promises about seconds run alone.

Two locks of files: whoever wants to run takes the turn, then the floor. A test that shares the floor holds it together
with others and gives the turn back at once; one that runs alone keeps both. So nobody waits for ever.
"""

import contextlib
import fcntl
from pathlib import Path


class Floor:
    """One worker's hold on the floor, which all workers that use the same directory share. It ends with the process."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.held: contextlib.ExitStack | None = None
        self.is_alone = False

    def take(self, *, is_alone: bool) -> None:
        """Waits until no other worker runs a test, or none that must be alone; at once for whoever is alone already."""
        if self.held is not None and self.is_alone and is_alone:
            return
        self.give_back()
        with contextlib.ExitStack() as turn, contextlib.ExitStack() as floor:
            self._lock(turn, "turn", fcntl.LOCK_EX)
            self._lock(floor, "floor", fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
            if is_alone:
                floor.push(turn.pop_all())
            self.held, self.is_alone = floor.pop_all(), is_alone

    def give_back(self) -> None:
        if self.held is not None:
            self.held.close()
            self.held = None

    def _lock(self, stack: contextlib.ExitStack, name: str, kind: int) -> None:
        file = stack.enter_context((self.directory / name).open("a"))
        fcntl.flock(file, kind)
