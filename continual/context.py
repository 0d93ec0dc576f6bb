"""What the stages of one sequence of tasks share, and what a task hands on to the next."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from continual.data import Prepared
from continual.settings import Settings
from continual.stages import Runner


@dataclass(frozen=True, kw_only=True)
class Context:
    """One order of the tasks with one seed."""

    settings: Settings
    runner: Runner
    prepared: dict[str, Prepared]  # by task or probe
    folder: Path
    seed: int

    @cached_property
    def held_out(self):  # HeldOut, whose imports take seconds and only replay needs
        from continual.held_out import HeldOut

        return HeldOut(self.prepared.values(), self.settings)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model between two tasks."""

    path: str  # of the model to measure: of an export, of an adapter, or a name on the hub
    start: str  # of the model that the next task trains
    adapter: Path | None = None  # that the next task trains further
    statistics: Path | None = None  # of OSFT, as are the bases
    bases: Path | None = None
