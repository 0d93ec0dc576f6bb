"""Samples -> the micro-batch that a rank trains on: one packed row, and where it is trained."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from chat.labels import IGNORED
from objectives.columns import Sample
from ranks.row_group import RowGroup


@dataclass  # not frozen: of those, torch.compile would compile again for each new value of each field
class MicroBatch:
    """Sequences packed into one row, for one forward and backward on one rank: T tokens, n sequences."""

    input_ids: Tensor  # (1, T) int64
    position_ids: Tensor  # (1, T) int64, restarts at 0 in every sequence
    cu_seqlens: Tensor  # (n + 1,) int32, cumulative lengths
    targets: Tensor  # (T,) int64: the next token's label; IGNORED where nothing is trained or the sequence ends.
    # Of classifiers each token's own class, or (n, K) fp32 what each sequence is to be given (see pack_classified).
    trained_index: Tensor  # (N,) int64: where in targets there is one
    target_weights: Tensor | None  # (T,) fp32, of each target's loss; None: all are 1
    max_seqlen: int
    seq_lengths: list[int]
    # Of each sequence its sample's position in the stream that a run draws from; None where nothing is trained.
    draws: list[int] | None = None
    sources: Tensor | None = None  # (N,) int64: the data set that each trained position is of; None: all of the first
    num_sources: int = 1  # data sets
    chunks: "MicroBatch | None" = None  # the same row with borders inside of sequences (see `chunk_sequences`)
    token_type_ids: Tensor | None = None  # (1, T) int64: which text of a pair each token is of; None: there are none
    pixels: dict[str, Tensor] = field(default_factory=dict)  # what the tower takes of its images, by argument
    num_image_tokens: int = 0  # places for features of images
    axis_positions: Tensor | None = None  # (3, 1, T) int64: positions on several axes (Qwen2-VL); None: there is one
    blocks: Tensor | None = None  # (T,) int64: the image that each token is of, whose tokens see each other both ways
    has_blocks_everywhere: bool = True  # not only where attention looks no further than a window (Gemma 4)
    is_two_sided: bool = False  # whether a model that looks both ways may do so
    # The ranks that share the row: this is one part of it, with all of its borders (see take_part). None: it is whole.
    row_group: RowGroup | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """On `device`; the copy does not wait if the memory is pinned."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        return self._map_tensors(Tensor.pin_memory)

    def _map_tensors(self, function) -> "MicroBatch":
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        mapped = {name: function(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **mapped, pixels={name: function(value) for name, value in self.pixels.items()})


def chunk_sequences(micro_batch: MicroBatch, size: int) -> MicroBatch:
    """As `micro_batch`, with a border every `size` tokens of a sequence, for attention that does not look across."""
    lengths = [min(size, length - start) for length in micro_batch.seq_lengths for start in range(0, length, size)]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    cu_seqlens = cu_seqlens.to(micro_batch.cu_seqlens.device, non_blocking=True)
    return replace(micro_batch, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), seq_lengths=lengths)


def make_idle_sample() -> Sample:
    """What a rank without work trains on: two tokens, no target, so that it takes part in every collective."""
    return np.zeros(2, dtype=np.int64), np.full(2, IGNORED), None


def pack_samples(samples: Sequence[Sample], *, sources: np.ndarray | None = None, num_sources: int = 1) -> MicroBatch:
    """Packs samples into one row; either all have weights or none. `sources`: of each, which data set it is from.

    Where no sample has more than one token, an idle one joins them: torch.compile takes 0 and 1 for constants, and
    would compile such a row by itself, whenever it comes.
    """
    if max(len(input_ids) for input_ids, _, _ in samples) == 1:
        ids, labels, _ = make_idle_sample()
        samples = [*samples, (ids, labels, None if samples[0][2] is None else np.zeros(len(ids), dtype=np.float32))]
    lengths = [len(input_ids) for input_ids, _, _ in samples]
    cu_seqlens = np.cumsum([0, *lengths])
    targets = np.full(cu_seqlens[-1], IGNORED, dtype=np.int64)
    target_weights = None if samples[0][2] is None else np.zeros(cu_seqlens[-1], dtype=np.float32)
    for start, (_, labels, weights) in zip(cu_seqlens, samples, strict=False):
        predicting = slice(start, start + len(labels) - 1)  # a sequence's last token predicts nothing
        targets[predicting] = labels[1:]
        if target_weights is not None:
            target_weights[predicting] = weights[1:]
    trained_index = np.flatnonzero(targets != IGNORED)
    if sources is not None:
        sequence_of = np.searchsorted(cu_seqlens, trained_index, side="right") - 1  # an idle one has no targets
        sources = torch.from_numpy(sources[sequence_of])
    input_ids = np.concatenate([input_ids for input_ids, _, _ in samples]).astype(np.int64)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids)[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        targets=torch.from_numpy(targets),
        trained_index=torch.from_numpy(trained_index),
        target_weights=None if target_weights is None else torch.from_numpy(target_weights),
        max_seqlen=max(lengths),
        seq_lengths=lengths,
        sources=sources,
        num_sources=num_sources,
    )
