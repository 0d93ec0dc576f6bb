"""Metrics of a step: one line of training_metrics_0.jsonl."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mini_trainer.batch_packer import cost_samples
from mini_trainer.model.flops import FlopCount
from mini_trainer.model.optim.optimizers import StepSums
from mini_trainer.objectives.objective import TARGETS, TOKENS, Objective
from mini_trainer.sampler import Batch, RunPosition, count_drawn


@dataclass(frozen=True)
class StepMetrics:
    """One line of training_metrics_0.jsonl. Token and sample counts are over all ranks, and without those of --keep."""

    step: int  # 1 after the first optimizer step
    epoch: float  # samples drawn so far / samples in the data set
    lr: float
    loss: float  # mean over the batch's trained tokens
    grad_norm: float  # before clipping
    num_samples: int
    num_loss_counted_tokens: int  # trained
    num_total_tokens: int  # trained and masked
    grad_accum: int  # micro-batches on each rank, also of --keep
    time_per_batch: float  # seconds, from the batch to the updated weights
    tokens_per_second: float  # num_total_tokens over time_per_batch and data_wait_seconds
    samples_per_second: float
    total_samples_accumulated: int
    total_tokens_accumulated: int
    peak_memory_usage_GB: float  # largest of any rank: allocated on CUDA, resident on CPU
    packing_efficiency: float  # tokens, also of --keep / (micro-batches x ranks x max_tokens_per_gpu)
    rank_balance: float  # mean / max of the ranks' cost, over the micro-batches: 1 is perfect
    data_wait_seconds: float  # longest that a rank waited for its batch
    mfu: float | None  # model FLOP utilisation; null if the device's peak is unknown


@dataclass(frozen=True)
class SourceMetrics:
    """Metrics of one of several data sets in a step, and the run's progress on it."""

    loss: float | None  # mean over its trained tokens; null if it had none
    num_loss_counted_tokens: int
    num_samples: int
    epoch: float  # passes over its own samples


@dataclass(frozen=True)
class StepMeter:
    """Computes the metrics of steps; holds the constants of a run."""

    epoch_length: int  # samples
    max_tokens_per_gpu: int
    flops: FlopCount
    peak_flops: float | None  # of one device; None if unknown
    objective: Objective

    def measure(
        self, batch: Batch, sums: StepSums, position: RunPosition, *, lr: float, seconds: float
    ) -> dict[str, Any]:
        """Returns the metrics, by name, of one step that took `seconds` and ended at `position`."""
        batch_tokens = int(batch.lengths.sum())
        row_tokens = sum(int(part.lengths.sum()) for part in batch.parts)
        world_size = len(batch.table[0]) * batch.num_sharing
        costs = np.concatenate([self.cost_table(part) for part in batch.parts])
        total_seconds = seconds + sums.data_wait_seconds
        batch_flops = sum(self.flops.of_rows(part.sample_ids, part.data, self.objective) for part in batch.parts)
        metrics = StepMetrics(
            step=position.step,
            epoch=position.num_samples / self.epoch_length,
            lr=lr,
            loss=sums.loss_sum / (batch.divisors[TARGETS] or 1),
            grad_norm=sums.grad_norm,
            num_samples=len(batch.lengths),
            num_loss_counted_tokens=batch.num_loss_tokens,
            num_total_tokens=batch_tokens,
            grad_accum=len(costs),
            time_per_batch=seconds,
            tokens_per_second=batch_tokens / total_seconds,
            samples_per_second=len(batch.lengths) / total_seconds,
            total_samples_accumulated=position.num_samples,
            total_tokens_accumulated=position.num_tokens,
            peak_memory_usage_GB=sums.peak_memory_bytes / 1e9,
            packing_efficiency=row_tokens / (len(costs) * world_size * self.max_tokens_per_gpu),
            rank_balance=float(costs.mean(axis=1).sum() / costs.max(axis=1).sum()),
            data_wait_seconds=sums.data_wait_seconds,
            mfu=None if self.peak_flops is None else batch_flops / total_seconds / (self.peak_flops * world_size),
        )
        own = self.objective.describe_step(sums.reports, batch.divisors)
        sources = measure_sources(batch, sums, position, self.objective)
        return asdict(metrics) | own | sources | measure_routers(batch, sums)

    def cost_table(self, batch: Batch) -> np.ndarray:  # (K, ranks, or groups of those that share rows)
        """The cost of each cell of the batch's table."""
        load = batch.data.load_of(batch.sample_ids)
        sample_costs = cost_samples(batch.lengths, self.flops.attention_cost, load)
        return np.array([[sample_costs[indices].sum() for indices in row] for row in batch.table])


def measure_sources(batch: Batch, sums: StepSums, position: RunPosition, objective: Objective) -> dict[str, dict]:
    """`SourceMetrics` and the objective's own of each data set by name, as `sources`, if there are several."""
    data = batch.data
    if len(data.sources) == 1:
        return {}
    source_of, trained = data.numbers.source_of(batch.sample_ids), data.num_loss_tokens[batch.sample_ids]
    drawn, sources, divisors = count_drawn(data, position.num_samples), {}, sums.reports.get("source_divisors")
    for i, name in enumerate(data.names):
        num_trained = int(trained[source_of == i].sum())
        divisor = num_trained if divisors is None else float(divisors[i])
        metrics = SourceMetrics(
            loss=float(sums.reports["source_losses"][i]) / divisor if divisor else None,
            num_loss_counted_tokens=num_trained,
            num_samples=int((source_of == i).sum()),
            epoch=int(drawn[i]) / len(data.kept_of[i]),
        )
        sources[name] = asdict(metrics) | objective.describe_source(sums.reports, i, divisor)
    return {"sources": sources}


def measure_routers(batch: Batch, sums: StepSums) -> dict[str, float]:
    """The experts' auxiliary loss, and their load balance: mean / max load over layers; 1 is perfect.
    Empty if the auxiliary loss is off."""
    if "router_loss" not in sums.reports:
        return {}
    loads = sums.reports["expert_loads"]  # (layers, experts)
    return {
        "router_aux_loss": float(sums.reports["router_loss"]) / max(1, batch.divisors[TOKENS]),
        "expert_balance": float(loads.mean(axis=1).sum() / max(1, loads.max(axis=1).sum())),
    }
