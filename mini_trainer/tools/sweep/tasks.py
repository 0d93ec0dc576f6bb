"""A sweep's trials shared among tasks of an array job: each runs its own, and a start without --task collects.

    OUTPUT_DIR/tasks/3_of_8/    lock and journal of a task; results are read from the runs, failures from here

No task reads what another one writes, so that none waits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mini_trainer.distributed.ending import RunError
from mini_trainer.distributed.lock import RunLock
from mini_trainer.distributed.messages import say
from mini_trainer.distributed.process import find_task
from mini_trainer.options import parse_shard

TASKS = "tasks"  # directory in the sweep's


@dataclass(frozen=True)
class Task:
    """One of `count` tasks, numbered from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def name_folder(self, root: Path) -> Path:
        return root / TASKS / f"{self.index}_of_{self.count}"

    def has(self, number: int) -> bool:
        """Whether it runs the trial."""
        return number % self.count == self.index - 1


WHOLE = Task(1, 1)


def choose_task(given: str | None, *, search: str) -> Task | None:
    """The task of this process: the one that is given, or its place among those that srun has started; ValueError for
    none, and for a search whose trials are compared on the way."""
    found = find_task()
    if given is None and found is None:
        return None
    try:
        task = Task(*found) if given is None else Task(*parse_shard(given))
    except ValueError as error:
        raise ValueError(f"--task {error}") from None
    if search == "halving":
        raise ValueError(
            f"--task {task}: search: halving compares all trials of a rung, which only one process sees: run the sweep"
            " as one job, with num_parallel trials at a time"
        )
    if given is None:
        say(f"task {task} of srun: runs its share of the trials")
    return task


@contextmanager
def holding_tasks(root: Path) -> Iterator[list[Path]]:
    """Keeps tasks from running meanwhile, and yields their folders; RunError if one of them runs."""
    locks, folders = [], sorted((root / TASKS).glob("*_of_*"))
    try:
        for folder in folders:
            try:
                locks.append(RunLock(folder))
            except RunError as error:
                message = str(error).replace("--output-dir ", "the sweep's task in ")
                raise RunError(error.code, message) from None
        yield folders
    finally:
        for lock in locks:
            lock.release()
