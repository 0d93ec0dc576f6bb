"""Whether a run learns: the model measured on data that it is not trained on, and what that says of going on."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from batch_packer import pack_batch
from corpus.mixture import Mixture
from disk import hash_json
from lifecycle.step import TrainState
from model.fingerprints import fingerprint_data
from model.sharding import reshard
from objectives.micro_batch import MicroBatch
from objectives.objective import Objective
from ranks.ending import log
from sampler import RunPosition, prefetch, read_micro_batch

NUM_PACKED = 8192  # samples that are packed together


@dataclass(frozen=True)
class Progress:
    """What the validations of a run have found so far; JSON, so that checkpoints hold it."""

    data: str  # the sets' digest: losses on other data cannot be compared
    num_validations: int = 0  # of the whole run, on whatever data
    last_step: int | None = None
    best_loss: float | None = None  # after at least one step
    best_step: int | None = None
    num_worse: int = 0  # validations since the best

    def after(self, loss: float, *, step: int) -> "Progress":
        """With one validation more; that of step 0 is no candidate for the best."""
        seen = replace(self, last_step=step, num_validations=self.num_validations + 1)
        if step == 0:
            return seen
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            return replace(seen, best_loss=loss, best_step=step, num_worse=0)
        return replace(seen, num_worse=self.num_worse + 1)

    def has_enough(self, patience: int | None) -> bool:
        return patience is not None and self.num_worse >= patience


def start_progress(data: Mixture, previous: dict[str, Any] | None) -> Progress:
    """What is known at a start: the checkpoint's `previous`, if it is of the same data."""
    digests = [
        fingerprint_data(source.path, source=None, lengths=source.lengths, kept=source.kept) for source in data.sources
    ]
    known = None if previous is None else Progress(**previous)
    fresh = Progress(data=hash_json(digests))
    if known is None or known.data == fresh.data:
        return known or fresh
    log.warning(
        f"warning: the validation data is not what it was before this start: the best loss there was"
        f" ({known.best_loss}, after step {known.best_step}) cannot be compared, and is forgotten"
    )
    return replace(fresh, num_validations=known.num_validations)


def validate(
    state: TrainState,
    data: Mixture,
    objective: Objective,
    *,
    cap: int,
    attention_cost: float,
    position: RunPosition,
    epoch_length: int,
    progress: Callable[[str], None] = lambda where: None,
) -> dict[str, Any]:
    """A line of validation_metrics_0.jsonl but for `is_best`: the scores of all sets together, and of each. All ranks.

    Weighted by tokens: the same on any number of ranks, and for any `cap` (tokens of a micro-batch).
    """
    start = time.monotonic()
    sums = score_model(
        state, data, objective, cap=max(cap, data.longest), attention_cost=attention_cost, progress=progress
    )
    return {
        "step": position.step,
        "epoch": position.num_samples / epoch_length,
        "total_samples_accumulated": position.num_samples,
        **objective.summarize(sums.sum(0)),
        "seconds": time.monotonic() - start,
        "sets": {name: objective.summarize(row) for name, row in zip(data.names, sums, strict=True)},
    }


@torch.no_grad()
def score_model(
    state: TrainState,
    data: Mixture,
    objective: Objective,
    *,
    cap: int,
    attention_cost: float,
    progress: Callable[[str], None],
) -> Tensor:  # (sets, scores) fp64
    """The sums of each set's scores over all its samples, each of which one rank has."""
    model, world = state.model, state.world
    parts = read_parts(
        data, objective, cap=cap, attention_cost=attention_cost, rank=world.rank, world_size=world.world_size
    )
    model.eval()
    sums = 0
    for k, micro_batch in enumerate(prefetch(parts)):
        progress(f"validation, micro-batch {k + 1}")
        sums = sums + model.score(micro_batch.to(world.device))
    dist.all_reduce(sums)
    reshard(model)
    model.train()
    return sums.cpu()


def read_parts(
    data: Mixture, objective: Objective, *, cap: int, attention_cost: float, rank: int, world_size: int
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of all samples, as many as every other rank has."""
    for start in range(0, len(data.kept), NUM_PACKED):
        rows = data.kept[start : start + NUM_PACKED]
        for cell in pack_batch(data.lengths[rows], cap, world_size, attention_cost):
            yield read_micro_batch(data, rows[cell[rank]], objective)
        data.release_pages()
