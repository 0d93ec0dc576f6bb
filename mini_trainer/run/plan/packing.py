"""How the next batches of a run fall into micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mini_trainer.batch_packer import cost_samples, pack_batch
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.model.flops import FlopCount
from mini_trainer.objectives.objective import Objective


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
            f" {self.idle.mean():.2%} of the time for lack of balance, at most {self.idle.max():.2%}"
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
