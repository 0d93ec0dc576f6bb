"""Samples -> the micro-batch that a rank trains on: one packed row, what a family adds to it, and its targets.

T tokens in a row, n sequences, N targets.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ranks.row_group import RowGroup

Part = TypeVar("Part")


@dataclass
class Blocks:
    """Tokens that see each other both ways: those of an image."""

    of: Tensor  # (T,) int64: the image that each token is of; -1 for text
    are_everywhere: bool = True  # not only where attention is limited to a window (Gemma 4)


@dataclass  # not frozen: of those, torch.compile would compile again for each new value of each field
class Row:
    """Sequences packed into one row: their tokens, their places, and which of them see each other."""

    input_ids: Tensor  # (1, T) int64
    position_ids: Tensor  # (1, T) int64, restarts at 0 in every sequence
    cu_seqlens: Tensor  # (n + 1,) int32, cumulative lengths
    max_seqlen: int
    seq_lengths: list[int]
    is_two_sided: bool = False  # whether a model that looks both ways may do so
    blocks: Blocks | None = None
    chunks: "Row | None" = None  # the same row with borders inside of sequences (see `chunk_sequences`)
    # The ranks that share the row: this is one part of it, with all of its borders (see take_part). None: it is whole.
    row_group: RowGroup | None = None


@dataclass
class Targets:
    """What an objective adds to a row. Each objective's own class of it has more."""

    index: Tensor  # (N,) int64: the tokens of the row, or the sequences, that have a target
    sources: Tensor | None = None  # (N,) int64: the data set that each target is of; None: all of the first
    num_sources: int = 1  # data sets

    def find_sequences(self, row: Row) -> Tensor:  # (N,)
        """The sequence of the row that each target is of."""
        return torch.searchsorted(row.cu_seqlens[1:].long(), self.index, right=True)

    def find_sources(self) -> Tensor:  # (N,) int64
        """The data set of each target."""
        return torch.zeros_like(self.index) if self.sources is None else self.sources

    def with_sample_sources(self, sources: np.ndarray) -> "Targets":
        """The targets, which may keep the data set (samples,) of each sample, too."""
        return self

    def take_part(self, part: slice) -> "Targets":
        """The targets of the row's tokens in `part` (--context-parallel)."""
        raise NotImplementedError(f"{type(self).__name__} cannot be divided over the ranks that share a row")

    def gather(self, row_group: RowGroup, *, num_tokens: int) -> "Targets":
        """The targets of all parts of a row, of which the first `num_tokens` tokens count. All ranks of the group call
        this."""
        raise NotImplementedError(f"{type(self).__name__} cannot be divided over the ranks that share a row")


class MicroBatch:
    """What one rank computes one forward and backward pass on.

    A plain class, since blocks are handed it: FSDP's hooks would walk into a dataclass, and cast its tensors.
    """

    def __init__(self, row: Row, targets: Targets, *, extras: Any = None, draws: list[int] | None = None):
        """`extras`: what the family adds. `draws`: of each sequence its sample's position in the stream that a run
        draws from; None where nothing is trained."""
        self.row, self.targets, self.extras, self.draws = row, targets, extras, draws

    def with_row(self, row: Row) -> "MicroBatch":
        return MicroBatch(row, self.targets, extras=self.extras, draws=self.draws)

    def with_targets(self, targets: Targets) -> "MicroBatch":
        return MicroBatch(self.row, targets, extras=self.extras, draws=self.draws)

    def map(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """With `function` applied to every tensor."""
        row, targets, extras = (map_tensors(part, function) for part in (self.row, self.targets, self.extras))
        return MicroBatch(row, targets, extras=extras, draws=self.draws)

    def to(self, device: torch.device) -> "MicroBatch":
        """On `device`; the copy does not wait if the memory is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        return self.map(Tensor.pin_memory)


def map_tensors(part: Part, function: Callable[[Tensor], Tensor]) -> Part:
    """The part with `function` applied to its tensors, and to those in dataclasses, dicts and micro-batches in it."""
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, MicroBatch):
        return part.map(function)
    if isinstance(part, dict):
        return {name: map_tensors(value, function) for name, value in part.items()}
    if is_dataclass(part):
        return replace(part, **{entry.name: map_tensors(getattr(part, entry.name), function) for entry in fields(part)})
    return part


def pack_row(sequences: Sequence[np.ndarray]) -> Row:
    """One row of the token ids of sequences, each (length,)."""
    lengths = [len(input_ids) for input_ids in sequences]
    return Row(
        input_ids=torch.from_numpy(np.concatenate(sequences).astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        max_seqlen=max(lengths),
        seq_lengths=lengths,
    )


def chunk_sequences(row: Row, size: int) -> Row:
    """The row with a border every `size` tokens of a sequence, for attention that does not look across."""
    lengths = [min(size, length - start) for length in row.seq_lengths for start in range(0, length, size)]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    cu_seqlens = cu_seqlens.to(row.cu_seqlens.device, non_blocking=True)
    return replace(row, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), seq_lengths=lengths)
