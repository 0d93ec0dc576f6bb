"""Packs the samples of one global batch into balanced micro-batches, the same table on every rank.

A table has K steps; in each step every rank runs one micro-batch of at most `max_tokens_per_gpu` tokens,
and all wait for the costliest. So `pack_batch` looks first for the fewest steps, then for the least sum
over steps of the costliest micro-batch. Both are NP-hard; mini_trainer/data/packers/texts.py and
mini_trainer/data/packers/images.py hold the heuristics, compiled.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class SampleLoad(NamedTuple):
    """The load of samples in addition to one sequence of tokens each: images, or several sequences."""

    patches: np.ndarray | None = None  # (n,) int64 that enter the vision tower, of all images of a sample
    costs: np.ndarray | None = None  # (n,) float64: of the images, in the unit of a sample's own cost
    cap: int | None = None  # patches of a micro-batch; None: any number
    squares: np.ndarray | None = None  # (n,) float64: sum of the squared lengths of a sample's sequences

    @property
    def is_plain(self) -> bool:
        return self.squares is None and (self.patches is None or not self.patches.any())


def pack_batch(
    lengths: Sequence[int] | np.ndarray,
    max_tokens_per_gpu: int,
    num_ranks: int,
    attention_cost: float = 0.0,
    load: SampleLoad | None = None,
) -> list[list[list[int]]]:
    """Returns `micro_batches[k][rank]`, lists of indices into `lengths`; `[]` if a rank idles.

    `lengths` are tokens per sample (n,). A micro-batch costs the sum of L + attention_cost * L**2 over its
    samples, plus their `load`. Each sample is in exactly one micro-batch, none exceeds
    `max_tokens_per_gpu` or the images' own cap, and every rank has the same number. The costliest step comes
    first, so a run that lacks memory fails at once. Never needs more steps than first-fit decreasing. Raises
    ValueError for samples that cannot be packed.
    """
    lengths = _check_lengths(lengths, max_tokens_per_gpu, num_ranks)
    if not (attention_cost >= 0 and np.isfinite(attention_cost)):
        raise ValueError(f"attention_cost is {attention_cost}; it must be finite and not negative")
    if len(lengths) == 0:
        return []
    cap = min(int(max_tokens_per_gpu), int(lengths.sum()))  # keeps capacity products within int64
    if load is not None and not load.is_plain:
        from mini_trainer.data.packers.images import assign_with_images

        sizes, caps = _check_sizes(lengths, load, cap)
        costs = cost_samples(lengths, attention_cost, load)
        bins, num_steps = assign_with_images(sizes, costs, caps, int(num_ranks))
    else:
        from mini_trainer.data.packers.texts import assign_bins

        by_length = np.argsort(-lengths, kind="stable")
        descending = lengths[by_length]
        bin_of, num_steps = assign_bins(descending, cost_samples(descending, attention_cost), cap, int(num_ranks))
        bins = np.empty(len(lengths), np.int64)
        bins[by_length] = bin_of
    indices = np.argsort(bins, kind="stable").tolist()
    ends = np.cumsum(np.bincount(bins, minlength=num_steps * num_ranks)).tolist()
    starts = [0, *ends]
    table = [indices[start:end] for start, end in zip(starts, ends, strict=False)]
    steps = [table[first : first + num_ranks] for first in range(0, len(table), num_ranks)]
    # Bins are sorted costliest first: reversing every other step keeps rank 0 from always being the slowest.
    return [step[::-1] if k % 2 else step for k, step in enumerate(steps)]


def batch_lengths_to_minibatches_lpt(
    batch_lengths: Sequence[int], max_tokens_per_rank: int, num_ranks: int, rank: int
) -> list[list[int]]:
    """Returns one rank's column of `pack_batch` at attention_cost 0, `[-1]` if the rank idles."""
    return _take_column(pack_batch(batch_lengths, max_tokens_per_rank, num_ranks), num_ranks, rank)


def batch_lengths_to_minibatches(
    batch_lengths: Sequence[int], max_tokens_per_rank: int, num_ranks: int, rank: int
) -> list[list[int]]:
    """Returns one rank's column of a greedy table, `[-1]` if the rank idles: `pack_batch`'s baseline.
    Each sample, in the order given, joins the rank with the fewest tokens; if it does not fit, it opens a new step."""
    steps: list[list[list[int]]] = []
    tokens: list[int] = []  # per rank in the last step
    for i, length in enumerate(_check_lengths(batch_lengths, max_tokens_per_rank, num_ranks).tolist()):
        if not steps or min(tokens) + length > max_tokens_per_rank:
            steps.append([[] for _ in range(num_ranks)])
            tokens = [0] * num_ranks
        emptiest = tokens.index(min(tokens))
        steps[-1][emptiest].append(i)
        tokens[emptiest] += length
    return _take_column(steps, num_ranks, rank)


def _take_column(table: list[list[list[int]]], num_ranks: int, rank: int) -> list[list[int]]:
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}; with num_ranks={num_ranks} it must be in 0..{num_ranks - 1}")
    return [step[rank] or [-1] for step in table]


def cost_samples(lengths: np.ndarray, attention_cost: float, load: SampleLoad | None = None) -> np.ndarray:
    """Returns L + attention_cost * L**2 per sequence, summed over a sample's, and its images' cost, float64 (n,)."""
    tokens = lengths.astype(np.float64)
    squares = tokens * tokens if load is None or load.squares is None else load.squares
    costs = tokens + attention_cost * squares
    return costs if load is None or load.costs is None else costs + load.costs


def _check_lengths(lengths: Sequence[int] | np.ndarray, max_tokens_per_gpu: int, num_ranks: int) -> np.ndarray:
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; it must be at least 1")
    if max_tokens_per_gpu < 1:
        raise ValueError(f"the cap is {max_tokens_per_gpu} tokens per micro-batch; it must be at least 1")
    array = np.asarray(lengths)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"lengths must be a flat list of integers, got {array.ndim}-d {array.dtype}")
    if array.min() < 1:
        i = int(array.argmin())
        raise ValueError(f"lengths[{i}] is {array[i]}; every sample needs at least 1 token: drop it")
    if array.max() > max_tokens_per_gpu:
        i = int(array.argmax())
        raise ValueError(
            f"lengths[{i}] is {array[i]} tokens, more than the cap of {max_tokens_per_gpu} per micro-batch: "
            f"raise max_tokens_per_gpu to at least {array[i]}, or truncate or drop the sample"
        )
    return array.astype(np.int64)


def _check_sizes(lengths: np.ndarray, load: SampleLoad, cap: int) -> tuple[np.ndarray, np.ndarray]:
    """The two sizes of each sample, (n, 2), and their two caps; ValueError for a sample beyond that of patches."""
    patches = np.zeros_like(lengths) if load.patches is None else load.patches.astype(np.int64)
    total = max(1, int(patches.sum()))
    if load.cap is not None and patches.max() > load.cap:
        i = int(patches.argmax())
        raise ValueError(
            f"sample {i} has {patches[i]} patches of images, more than the cap of {load.cap} per micro-batch: raise"
            f" max_image_tokens_per_gpu to at least {patches[i]}, or drop the sample"
        )
    caps = [cap, total if load.cap is None else min(load.cap, total)]
    return np.stack([lengths, patches], axis=1), np.array(caps, np.int64)
