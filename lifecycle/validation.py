"""Whether a run learns: the model measured on data that it is not trained on, and what that says of going on."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from batch_packer import pack_batch
from corpus.mixture import Mixture
from disk import hash_json, written_aside
from families.micro_batch import MicroBatch
from lifecycle.step import TrainState
from model.fingerprints import fingerprint_data
from model.sharding import reshard
from objectives.objective import Objective
from ranks.ending import log
from ranks.row_group import count_sharing
from ranks.world import World, call_on_rank0
from sampler import prefetch, read_micro_batch

NUM_PACKED = 8192  # samples that are packed together


@dataclass(frozen=True)
class Progress:
    """What the validations of a run have found so far; JSON, so that checkpoints hold it."""

    data: str  # the sets' digest: losses on other data cannot be compared
    num_validations: int = 0  # of the whole run, on whatever data
    last_step: int | None = None
    metric: str = "loss"  # that tells the best
    best_value: float | None = None  # of it, after at least one step
    best_step: int | None = None
    num_worse: int = 0  # validations since the best

    def after(self, value: float | None, *, step: int, more_is_better: bool) -> "Progress":
        """With one validation more, in which the metric was `value`; that of step 0 is no candidate for the best."""
        seen = replace(self, last_step=step, num_validations=self.num_validations + 1)
        if step == 0:
            return seen
        is_number, best = value is not None and math.isfinite(value), self.best_value
        if is_number and (best is None or (value > best if more_is_better else value < best)):
            return replace(seen, best_value=value, best_step=step, num_worse=0)
        return replace(seen, num_worse=self.num_worse + 1)

    def has_enough(self, patience: int | None) -> bool:
        return patience is not None and self.num_worse >= patience


def start_progress(data: Mixture, previous: dict[str, Any] | None, *, metric: str) -> Progress:
    """What is known at a start: the checkpoint's `previous`, if it is of the same data and metric."""
    digests = [
        fingerprint_data(source.path, source=None, lengths=source.lengths, kept=source.kept) for source in data.sources
    ]
    if previous is not None and "best_loss" in previous:  # as checkpoints had it when the loss was the only metric
        previous = {("best_value" if name == "best_loss" else name): value for name, value in previous.items()}
    known = None if previous is None else Progress(**previous)
    fresh = Progress(data=hash_json(digests), metric=metric)
    if known is None or (known.data, known.metric) == (fresh.data, fresh.metric):
        return known or fresh
    changed = "validation data" if known.data != fresh.data else "--best-metric"
    log.warning(
        f"warning: the {changed} is not what it was before this start: the best {known.metric} there was"
        f" ({known.best_value}, after step {known.best_step}) cannot be compared, and is forgotten"
    )
    return replace(fresh, num_validations=known.num_validations)


def validate(
    state: TrainState,
    data: Mixture,
    objective: Objective,
    *,
    cap: int,
    attention_cost: float,
    predictions_file: Path | None = None,
    progress: Callable[[str], None] = lambda where: None,
) -> dict[str, Any]:
    """The scores of all sets together, and of each; in how many seconds. All ranks.

    Weighted by tokens: the same on any number of ranks, and for any `cap` (a rank's tokens of a micro-batch).
    """
    start = time.monotonic()
    cap = max(cap * count_sharing(state.world.row_group), data.longest)
    sums, predictions = score_model(state, data, objective, cap=cap, attention_cost=attention_cost, progress=progress)
    scores = call_on_rank0(state.world, lambda: summarize_sets(data, objective, sums, predictions))
    if predictions_file is not None:
        call_on_rank0(state.world, lambda: write_predictions(predictions_file, data, objective, predictions))
    return scores["all"] | {"seconds": time.monotonic() - start, "sets": scores["sets"]}


def summarize_sets(
    data: Mixture, objective: Objective, sums: Tensor, predictions: np.ndarray | None
) -> dict[str, dict[str, Any]]:
    """What the objective says of all sets together, and of each by its name."""
    if predictions is None:
        of_sets = [None] * len(sums)
    else:
        sources = data.source_of(predictions[:, 0].astype(int))
        of_sets = [predictions[sources == i, 2:] for i in range(len(sums))]
    of_all = None if predictions is None else predictions[:, 2:]
    return {
        "all": objective.summarize(sums.sum(0), of_all),
        "sets": {
            name: objective.summarize(row, of_set) for name, row, of_set in zip(data.names, sums, of_sets, strict=True)
        },
    }


def write_predictions(path: Path, data: Mixture, objective: Objective, predictions: np.ndarray) -> None:
    """A line for each target: data set, row (from 1) and token (from 0) there, and what the objective says of it."""
    with written_aside(path) as (aside,), aside.open("w", encoding="utf-8") as file:
        for row, token, *prediction in predictions:
            source, number = data.locate(int(row))
            place = {"data": source.name, "row": number, "token": int(token)}
            file.write(json.dumps(place | objective.describe_prediction(np.array(prediction))) + "\n")


@torch.no_grad()
def score_model(
    state: TrainState,
    data: Mixture,
    objective: Objective,
    *,
    cap: int,
    attention_cost: float,
    progress: Callable[[str], None],
) -> tuple[Tensor, np.ndarray | None]:
    """The sums (sets, scores) of each set's scores over all its samples, each of which one rank has.

    Where the objective has predictions, rank 0 gets all of them, in the order of the data: (N, 2 + ...) fp64, row and
    token first.
    """
    model, world = state.model, state.world
    parts = read_parts(data, objective, cap=cap, attention_cost=attention_cost, world=world)
    model.eval()
    sums, predictions = 0, []
    for k, (rows, micro_batch) in enumerate(prefetch(parts)):
        progress(f"validation, micro-batch {k + 1}")
        scores = model.score(micro_batch.to(world.device))
        sums = sums + scores.sums
        if scores.predictions is not None:
            found = scores.predictions.cpu()
            found[:, 0] = torch.from_numpy(rows)[found[:, 0].long()]
            predictions.append(found)
    dist.all_reduce(sums)
    reshard(model)
    model.train()
    return sums.cpu(), gather_rows(torch.cat(predictions), world) if predictions else None


def gather_rows(rows: Tensor, world: World) -> np.ndarray | None:  # (N, 2 + ...)
    """The rows of all ranks, sorted by their first two numbers, on rank 0; None on the others."""
    counts = torch.zeros(world.world_size, dtype=torch.long, device=world.device)
    counts[world.rank] = len(rows)
    dist.all_reduce(counts)
    padded = torch.zeros(int(counts.max()), rows.shape[1], dtype=rows.dtype, device=world.device)
    padded[: len(rows)] = rows.to(world.device)
    parts = [torch.empty_like(padded) for _ in range(world.world_size)]
    dist.all_gather(parts, padded)
    if world.rank > 0:
        return None
    gathered = torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)]).cpu().numpy()
    return gathered[np.lexsort((gathered[:, 1], gathered[:, 0]))]


def read_parts(
    data: Mixture, objective: Objective, *, cap: int, attention_cost: float, world: World
) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """This rank's micro-batches of all samples with their rows, as many as every other rank has.

    `cap`: tokens of a packed row, of all ranks that share it.
    """
    num_sharing = count_sharing(world.row_group)
    for start in range(0, len(data.kept), NUM_PACKED):
        rows = data.kept[start : start + NUM_PACKED]
        images = data.images_of(rows)
        for cell in pack_batch(data.lengths[rows], cap, world.world_size // num_sharing, attention_cost, images):
            own = rows[cell[world.rank // num_sharing]]
            yield own, read_micro_batch(data, own, objective, row_group=world.row_group)
        data.release_pages()
