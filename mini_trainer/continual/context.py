"""The state that the stages of one sequence of tasks share, and that a task hands to the next."""

from dataclasses import dataclass
from pathlib import Path

from mini_trainer.continual.data import Prepared
from mini_trainer.continual.held_out import HeldOut
from mini_trainer.continual.running import Runner
from mini_trainer.continual.settings import ContinualSettings


@dataclass(frozen=True, kw_only=True)
class Context:
    """One order of the tasks with one seed."""

    settings: ContinualSettings
    runner: Runner
    prepared: dict[str, Prepared]  # by task or probe
    held_out: HeldOut  # of all sequences
    known: Path | None  # data that is replayed with every task
    folder: Path
    seed: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model between two tasks."""

    path: str  # of the model to measure: of an export, of an adapter, or a name on the hub
    start: str  # of the model that the next task trains
    adapter: Path | None = None  # that the next task trains further
    statistics: Path | None = None  # of OSFT, as are the bases
    bases: Path | None = None
