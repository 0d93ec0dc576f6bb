"""The training step that train.py, plans and benchmarks share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.devices import memory_kind
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.world import World
from mini_trainer.model.method import Method
from mini_trainer.model.optim.optimizers import StepSums, clip_gradients, local_gradients, reduce_step, set_step
from mini_trainer.model.sharding import prepare_backward
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.objective import TARGETS, LossSums, PackedModel
from mini_trainer.options import ComputeOptions, DataOptions, OptimizationOptions, ShardingOptions
from mini_trainer.sampler import Batch, derive_seed

if TYPE_CHECKING:
    from mini_trainer.model.optim.averages import WeightAverage


@dataclass(frozen=True)
class StepOptions:
    """The options that affect how a step is computed."""

    data: DataOptions
    compute: ComputeOptions
    sharding: ShardingOptions
    optimization: OptimizationOptions


@dataclass(frozen=True)
class TrainState:
    """The objects that a step changes, and the ranks that run it."""

    model: PackedModel
    method: Method
    optimizer: torch.optim.Optimizer
    world: World
    num_steps_before: int = 0  # steps of the runs that this one continues
    average: "WeightAverage | None" = None


def train_step(
    state: TrainState,
    batch: Batch,
    options: StepOptions,
    *,
    lr: float,
    data_wait_seconds: float = 0.0,
    flags: Callable[[], int] = lambda: 0,
    progress: Callable[[str], None] = lambda where: None,
) -> StepSums:
    """Runs one optimizer step on a global batch: gradients, their sum over ranks, the update. All ranks call this.
    `flags` is called before the reduction, which ORs them over ranks; `progress` is called for every micro-batch.
    RunError before the update if a loss or gradient is not finite."""
    world = state.world
    step = state.num_steps_before + batch.step
    torch.manual_seed(derive_seed(options.data.seed, step, world.rank))  # for dropout
    sums, shared = [], sum_ahead(state.model, batch, world)
    micro_batches = [micro_batch for part in batch.parts for micro_batch in part.micro_batches]
    for k, micro_batch in enumerate(micro_batches):
        progress(describe_micro_batch(batch.step, micro_batches, k))
        prepare_backward(state.model, options.sharding, is_last=k + 1 == len(micro_batches))
        micro_batch = state.model.prepare(micro_batch.to(world.device))
        sums.append(run_backward(state.model, micro_batch, batch.divisors, shared=shared))
    raised = flags()
    state.method.constrain_gradients()
    reduced = reduce_step(
        sums,
        local_gradients(state.model),
        device=world.device,
        num_shards=world.num_shards,
        data_wait_seconds=data_wait_seconds,
        flags=raised,
    )
    if not reduced.finite:
        raise RunError(ExitCode.NON_FINITE, describe_bad_step(batch, reduced))
    max_grad_norm = options.optimization.max_grad_norm
    clip_gradients(local_gradients(state.model), grad_norm=reduced.grad_norm, max_grad_norm=max_grad_norm)
    update_weights(state, step=step, lr=lr, num_samples=len(batch.sample_ids))
    return reduced


def sum_ahead(model: PackedModel, batch: Batch, world: World) -> dict[str, Tensor]:
    """Sums that a global batch's losses share, over its micro-batches and ranks; empty if they share none.
    This is an additional forward pass over the whole batch, without gradients."""
    totals: dict[str, Tensor] = {}
    for micro_batch in batch.micro_batches if model.looks_ahead else ():
        for name, own in model.look_ahead(micro_batch.to(world.device)).items():
            totals[name] = totals[name] + own if name in totals else own
    for total in totals.values():
        dist.all_reduce(total)
    return totals


def run_backward(
    model: PackedModel,
    micro_batch: MicroBatch,
    divisors: Mapping[str, float],
    *,
    shared: Mapping[str, Tensor] | None = None,
) -> LossSums:
    """Accumulates the micro-batch's gradient; returns its sums, without gradients. `divisors` are the global batch's,
    over all ranks; FSDP sums gradients (see apply_sharding), which gives that of the mean. `shared`: the result of
    `sum_ahead`."""
    sums = model(micro_batch, shared)
    loss = sums.loss / (divisors[TARGETS] or 1)
    for name, extra in sums.extra.items():
        loss = loss + extra / max(1, divisors[name])
    loss.backward()
    return LossSums(sums.loss.detach(), reports=sums.reports)


def update_weights(state: TrainState, *, step: int, lr: float, num_samples: int) -> None:
    """Applies the gradients of `num_samples`, accumulated in optimizer step `step` (0-based), then clears them."""
    set_step(state.optimizer, step=step, learning_rate=lr)
    with memory_kind("optimizer"):
        state.optimizer.step()
    state.method.constrain_weights()
    if state.average is not None:
        state.average.update(step, num_samples=num_samples)
    state.optimizer.zero_grad()


def describe_micro_batch(step: int, micro_batches: Sequence[MicroBatch], k: int) -> str:
    """Describes the run's place, for messages about hangs and out-of-memory errors."""
    lengths = micro_batches[k].row.seq_lengths
    return (
        f"step {step + 1}, micro-batch {k + 1} of {len(micro_batches)} ({sum(lengths):,} tokens in"
        f" {len(lengths)} samples, the longest {max(lengths):,})"
    )


def describe_bad_step(batch: Batch, sums: StepSums) -> str:
    """Describes where a loss or gradient was not finite: step, ranks and rows of the data set."""
    cells = [(part, row) for part in batch.parts for row in part.table]
    num_ranks = len(batch.table[0]) * batch.num_sharing
    bad = sums.bad_micro_batches or [(k, rank) for k in range(len(cells)) for rank in range(num_ranks)]
    rows: dict[Mixture, list[int]] = {}
    for k, group in dict.fromkeys((k, rank // batch.num_sharing) for k, rank in bad):
        part, row = cells[k]
        rows.setdefault(part.data, []).extend(part.sample_ids[row[group]])
    return (
        f"step {batch.step + 1}: the {'loss' if sums.bad_micro_batches else 'gradient'} is not finite (loss"
        f" {sums.loss_sum}, grad_norm {sums.grad_norm}); stopped before the update. Rows of"
        f" {'; '.join(data.name_rows(ids) for data, ids in rows.items())} (rank"
        f" {', '.join(str(rank) for rank in sorted({rank for _, rank in bad}))})"
    )
