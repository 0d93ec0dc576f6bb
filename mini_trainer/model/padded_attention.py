"""Attention in a model's own code that needs a padded batch (DeBERTa): sequences are padded for attention only.

The rest of a block sees the packed row. Sequences of similar length are padded together, so that less than half of a
batch is padding. T tokens in the packed row, n sequences of at most L tokens in a bucket, H hidden size.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mini_trainer.objectives.families.micro_batch import MicroBatch


@dataclass
class Bucket:
    """Sequences that are padded together."""

    index: Tensor  # (n, L): each token's index in the row; arbitrary for padding
    mask: Tensor  # (n, 1, 1, L) bool: False for padding
    positions: Tensor | None  # relative positions, as the model computes them


@dataclass
class BucketedRow:
    """The model's last row; without buckets for an ordinary batch."""

    micro_batch: MicroBatch | None = None
    buckets: list[Bucket] = field(default_factory=list)
    order: Tensor | None = None  # (T,): index of each token of the row among all buckets' tokens


def pad_attention(model: PreTrainedModel) -> None:
    """Makes attention of this kind run on buckets."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    row, base = BucketedRow(), model.base_model
    base.forward = functools.partial(hold_row, base.forward, row)
    encoder = base.encoder
    encoder.get_attention_mask = functools.partial(skip_mask, encoder.get_attention_mask, row)
    encoder.get_rel_pos = functools.partial(fill_buckets, encoder.get_rel_pos, row)
    for module in model.modules():
        if isinstance(module, DisentangledSelfAttention):
            module.forward = functools.partial(attend_in_buckets, module.forward, row)


def hold_row(forward: Callable, row: BucketedRow, *args: Any, micro_batch: MicroBatch | None = None, **kwargs: Any):
    row.micro_batch, row.buckets = micro_batch, []
    return forward(*args, **kwargs)


def skip_mask(make_mask: Callable, row: BucketedRow, attention_mask: Tensor) -> Tensor:
    """Skips the (T, T) mask for a packed row, which does not use it."""
    return make_mask(attention_mask) if row.micro_batch is None else attention_mask


def fill_buckets(
    find_positions: Callable, row: BucketedRow, hidden: Tensor, query_states: Any = None, relative_pos: Any = None
) -> Tensor | None:
    """Makes the buckets, once per forward pass before the first block; skips (T, T) positions for a packed row."""
    if row.micro_batch is None:
        return find_positions(hidden, query_states, relative_pos)
    places, lengths = [], row.micro_batch.row.seq_lengths
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        by_size.setdefault(length.bit_length(), []).append((start, length))
    for sequences in by_size.values():
        first, counts = (torch.tensor(column, device=hidden.device) for column in zip(*sequences, strict=True))
        longest = max(length for _, length in sequences)
        steps = torch.arange(longest, device=hidden.device)
        mask = steps < counts[:, None]  # (n, L)
        index = torch.where(mask, first[:, None] + steps, first[:, None])
        row.buckets.append(Bucket(index, mask[:, None, None], find_positions(hidden[:, :longest])))
        places.append(index[mask])
    row.order = torch.argsort(torch.cat(places))
    return None


@torch.compiler.disable  # buckets differ in every micro-batch and would cause recompilation
def attend_in_buckets(
    forward: Callable, row: BucketedRow, hidden: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:  # (1, T, H)
    """Attention output for the packed row, computed bucket by bucket."""
    if row.micro_batch is None:  # the model's own forward pass
        return forward(hidden, attention_mask, *args, **kwargs)
    outputs = []
    for bucket in row.buckets:
        padded, _ = forward(
            hidden[0, bucket.index],
            bucket.mask,
            relative_pos=bucket.positions,
            rel_embeddings=kwargs["rel_embeddings"],
        )  # (n, L, H)
        outputs.append(padded[bucket.mask[:, 0, 0]])
    return torch.cat(outputs)[row.order][None], None
