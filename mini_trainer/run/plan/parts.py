"""The parts of a plan: the machine, the known parts of the run, the packing of its batches, and the findings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from mini_trainer.batch_packer import cost_samples, pack_batch
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.devices import resident_memory
from mini_trainer.distributed.messages import say
from mini_trainer.model.flops import FlopCount
from mini_trainer.model.method import Method
from mini_trainer.objectives.objective import Objective
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
    """The machine to plan for."""

    ranks: Ranks
    device: torch.device
    name: str
    peak_flops: float | None
    limit: int | None  # bytes that a rank may use
    is_here: bool  # these are the ranks that this start has
    keeps_freed: bool  # a process keeps freed memory

    @property
    def base(self) -> int:
        """Bytes of a rank besides its tensors."""
        return resident_memory() if self.device.type == "cpu" else 0


@dataclass(frozen=True)
class PlannedReference:
    """The work of a reference model before the first step."""

    num_rows: int  # samples that no run has scored
    flops: float
    num_bytes: int  # weights of a separate model on a rank while it scores


@dataclass(frozen=True)
class PlannedTeacher:
    """The work of a teacher in every step."""

    flops: float  # of its forward pass over a global batch
    num_bytes: int  # of its weights on a rank


@dataclass(frozen=True)
class PlannedRun:
    """The run as described by its files; None for parts with errors."""

    inputs: RunInputs
    start: RunPosition
    make_method: Callable[[], Method]  # for another model than the inputs'
    model: PlannedModel | None
    reference: PlannedReference | None = None  # None also if the objective has none
    teacher: PlannedTeacher | None = None  # one that reads each micro-batch


@dataclass(frozen=True)
class Packing:
    """Measurements of the next global batches; all arrays (batches,)."""

    cap: int  # tokens of a row
    num_micro_batches: np.ndarray
    fill: np.ndarray  # tokens / (micro-batches x ranks x cap)
    idle: np.ndarray  # share of the ranks' time spent on waiting for the slowest
    flops: np.ndarray
    num_tokens: int  # of the largest row that trains, without what is read ahead
    num_trained: int  # most in one micro-batch
    num_seen: int  # most that a teacher reads beside one, in a row of its own

    def describe(self) -> str:
        counts = self.num_micro_batches
        return (
            f"micro-batches of at most {self.cap:,} tokens, in the next {len(counts)} batches: {counts.mean():.1f} a"
            f" step on each rank ({counts.min()} to {counts.max()}), {self.fill.mean():.0%} full; ranks idle"
            f" {self.idle.mean():.2%} of the time due to imbalance, at most {self.idle.max():.2%}"
        )


def pack_batches(
    data: Mixture,
    batches: Iterator[np.ndarray],
    flops: FlopCount,
    objective: Objective,
    *,
    world_size: int,
    cap: int,
) -> Packing:
    """Packs global batches: the rows of each."""
    rows = []
    for ids in batches:
        sizes, trained = data.sizes[ids], data.num_loss_tokens[ids]
        load = data.load_of(ids)
        table = pack_batch(sizes, cap, world_size, flops.attention_cost, load)
        costs = cost_samples(sizes, flops.attention_cost, load)
        in_row = count_row_tokens(data, ids, objective)
        loads = np.array([[costs[indices].sum() for indices in row] for row in table])  # (micro-batches, ranks)
        cells = [indices for row in table for indices in row]
        rows.append(
            (
                len(table),
                sizes.sum() / (len(cells) * cap),
                1 - loads.mean(axis=1).sum() / loads.max(axis=1).sum(),
                flops.of_rows(ids, data, objective),
                max(in_row[indices].sum() for indices in cells),
                max(trained[indices].sum() for indices in cells),
                max((sizes - data.lengths[ids])[indices].sum() for indices in cells),
            )
        )
    *measured, num_tokens, num_trained, num_seen = map(np.array, zip(*rows, strict=True))
    return Packing(cap, *measured, int(num_tokens.max()), int(num_trained.max()), int(num_seen.max()))


def count_row_tokens(data: Mixture, rows: np.ndarray, objective: Objective) -> np.ndarray:  # (rows,)
    """Tokens of each sample in the row that trains."""
    sequences, most = data.list_sequences(rows), objective.num_trained_sequences
    return sequences.sum_by_row(sequences.lengths * (True if most is None else sequences.places < most))
