"""The parts of a plan: the machine, the run as far as it is known, and the findings about both."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mini_trainer.distributed.memory import resident_memory
from mini_trainer.distributed.messages import say
from mini_trainer.model.method import Method
from mini_trainer.run.inputs import Errors, RunInputs
from mini_trainer.run.plan.simulation import PlannedModel, Ranks
from mini_trainer.sampler import RunPosition


@dataclass
class Findings:
    """The lines, warnings and problems that a plan prints."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: Errors = field(default_factory=Errors)

    def add_problem(self, text: str) -> None:
        self.problems.append(ValueError(text))

    def print(self) -> None:
        count = len(self.problems)
        say("\n".join(self.lines))
        for warning in self.warnings:
            say(f"warning: {warning}")
        say(f"\n{count or 'no'} problem{'' if count == 1 else 's'} found")
        for problem in self.problems:
            say(f"  - {problem}")


@dataclass(frozen=True)
class Target:
    """The machine that is planned for."""

    ranks: Ranks
    device: torch.device
    name: str
    peak_flops: float | None
    limit: int | None  # bytes that a rank may use
    is_here: bool  # these are the ranks that this start has
    keeps_freed: bool  # a process keeps memory that it does not need any more

    @property
    def base(self) -> int:
        """Bytes of a rank beside its tensors."""
        return resident_memory() if self.device.type == "cpu" else 0


@dataclass(frozen=True)
class PlannedReference:
    """The work of a reference model before the first step."""

    num_rows: int  # samples that no run has scored
    flops: float
    num_bytes: int  # weights on a rank of another model, which is there while it scores


@dataclass(frozen=True)
class PlannedTeacher:
    """The work of a teacher in every step."""

    flops: float  # of its forward pass over a global batch
    num_bytes: int  # of its weights on a rank


@dataclass(frozen=True)
class PlannedRun:
    """The run, as its files describe it; None where something is wrong."""

    inputs: RunInputs
    start: RunPosition
    make_method: Callable[[], Method]  # for another model than the inputs'
    model: PlannedModel | None
    reference: PlannedReference | None = None  # None also if the objective has none
    teacher: PlannedTeacher | None = None  # one that reads each micro-batch
