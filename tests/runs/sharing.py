"""One global batch on several ranks, in rows of their own or in rows that they share."""

from collections.abc import Sequence

from small_runs import make_samples_of

from mini_trainer.distributed.world import RowGroup, World, count_sharing
from mini_trainer.model.optim.optimizers import StepSums, local_gradients, reduce_step
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.run.step import run_backward

DIVISOR = 100  # of losses: any number, the same for all

# Sequences of rows, to be dealt out to 4 ranks. Of rows that 2 or 4 of them share, borders are where a part ends, one
# token before, one after, several in a part; some divide by 4 and some do not; one sequence is in all parts.
BORDERS = {
    "at a part's end": ((16, 16, 32), (32, 32), (8, 8, 48), (16, 16, 16, 16)),
    "beside it": ((15, 1, 17, 31), (33, 31), (17, 15, 15, 17), (31, 2, 31)),
    "several in a part": ((17, 31, 4, 4, 1, 1), (5, 9, 3, 3, 3, 3, 30), (2, 2, 2), (3,) * 20),
    "none, or nothing to do": ((33,), (), (64,), (1, 1, 1)),
}


def run_rows(
    model: PackedModel,
    objective: CausalLM,
    rows: Sequence[tuple[int, ...]],
    *,
    world: World,
    row_group: RowGroup | None,
) -> StepSums:
    """The step's sums; leaves the gradients in the model. Every rank takes as many of the rows as every other one."""
    num_sharing = count_sharing(row_group)
    sums = []
    for lengths in rows[world.rank // num_sharing :: world.world_size // num_sharing]:
        micro_batch = objective.pack(make_samples_of(lengths, seed=sum(lengths)), row_group=row_group)
        sums.append(run_backward(model, micro_batch, {"targets": DIVISOR, "tokens": DIVISOR}))
    gradients = local_gradients(model)
    return reduce_step(sums, gradients, device=world.device, num_shards=world.num_shards, data_wait_seconds=0.0)
