"""A model's scores on a tokenized data set, packed and without gradients: for validation and evaluation.

N targets, n samples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mini_trainer.batch_packer import pack_batch
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.messages import show_progress
from mini_trainer.distributed.world import World, count_sharing, gather_on_rank0
from mini_trainer.model.flops import count_flops
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.objective import Objective, PackedModel
from mini_trainer.sampler import prefetch, read_micro_batch

NUM_PACKED = 8192  # samples that are packed together


@dataclass(frozen=True)
class DataScores:
    """The scores of a whole data set, the same on any number of ranks and for any micro-batch size."""

    sums: Tensor  # (data sets or n, scores) fp64, on the CPU of every rank
    # (N, 2 + ...) fp64, on rank 0 if the objective has predictions: row and token in the data, then its own numbers
    predictions: np.ndarray | None


@torch.no_grad()
def score_data(
    model: PackedModel,
    data: Mixture,
    objective: Objective,
    *,
    cap: int,
    world: World,
    by_sample: bool = False,
    progress: Callable[[str], None] | None = None,
) -> DataScores:
    """The scores of `data`, summed over each data set, or for each sample. All ranks call this.
    `cap`: tokens of a micro-batch on one rank. `progress` hears of every micro-batch; without it there is a bar."""
    cap = max(cap * count_sharing(world.row_group), data.longest)
    batches = list(plan_batches(data, cap, attention_cost=count_flops(model.model).attention_cost, world=world))
    counter = range(len(batches)) if progress else show_progress(range(len(batches)), "samples", unit="batch")
    was_training = model.training
    model.eval()
    sums, predictions = torch.zeros(0), []
    micro_batches = prefetch(read_batches(data, batches, objective, by_sample=by_sample, world=world))
    for k, rows, micro_batch in zip(counter, batches, micro_batches, strict=True):
        if progress is not None:
            progress(f"micro-batch {k + 1}")
        scores = model.score(model.prepare(micro_batch.to(world.device)))
        if k == 0:
            sums = scores.sums.new_zeros(len(data.lengths) if by_sample else len(data.sources), scores.sums.shape[1])
        if not by_sample:
            sums += scores.sums
        elif len(rows):
            sums[rows] = scores.sums
        if scores.predictions is not None:
            found = scores.predictions.cpu()
            found[:, 0] = torch.from_numpy(rows)[found[:, 0].long()]
            predictions.append(found)
    dist.all_reduce(sums)
    reshard(model)
    model.train(was_training)
    return DataScores(sums.cpu(), gather_rows(torch.cat(predictions), world) if predictions else None)


def plan_batches(data: Mixture, cap: int, *, attention_cost: float, world: World) -> Iterator[np.ndarray]:  # of (rows,)
    """This rank's rows, a micro-batch at a time: as many as every other rank has, the last of which may be empty."""
    num_sharing = count_sharing(world.row_group)
    for start in range(0, len(data.kept), NUM_PACKED):
        rows = data.kept[start : start + NUM_PACKED]
        num_rows, load = world.world_size // num_sharing, data.load_of(rows)
        for cell in pack_batch(data.lengths[rows], cap, num_rows, attention_cost, load):
            yield rows[cell[world.rank // num_sharing]]


def read_batches(
    data: Mixture, batches: list[np.ndarray], objective: Objective, *, by_sample: bool, world: World
) -> Iterator[MicroBatch]:
    for rows in batches:
        yield read_micro_batch(data, rows, objective, row_group=world.row_group, by_sample=by_sample)
        data.release_pages()


def gather_rows(rows: Tensor, world: World) -> np.ndarray | None:  # (N, 2 + ...)
    """The rows of all ranks, sorted by their first two numbers, on rank 0; None on the others."""
    parts = gather_on_rank0(world, rows.numpy())
    if parts is None:
        return None
    gathered = np.concatenate(parts)
    return gathered[np.lexsort((gathered[:, 1], gathered[:, 0]))]
