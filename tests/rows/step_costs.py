"""What the packer makes small."""

from collections.abc import Sequence

import numpy as np

from mini_trainer.batch_packer import SampleLoad, cost_samples


def sum_step_costs(
    micro_batches: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    attention_cost: float = 0.0,
    load: SampleLoad | None = None,
) -> float:
    """The sum over steps of the costliest micro-batch."""
    costs = cost_samples(np.asarray(lengths, np.int64), attention_cost, load).tolist()
    return float(sum(max(sum(costs[i] for i in indices) for indices in step) for step in micro_batches))
