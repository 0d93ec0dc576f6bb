"""Attention over packed sequences by CUDA kernels that take the sequences' borders, FlashAttention 2 and 3, and in a
model's own code that needs a padded batch (DeBERTa): there sequences are padded for attention only.

Sequences of similar length are padded together, so that less than half of a batch is padding. T tokens in the row, n
sequences of at most L tokens in a bucket, H hidden size, Hq query heads, Hkv key/value heads, D head size.
"""

import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mini_trainer.model.attention import Rule
from mini_trainer.objectives.families.family import MicroBatch, Row

MAX_HEAD_SIZE = 256  # largest head size that FlashAttention's kernels support


def attend_flash_attn(query: Tensor, key: Tensor, value: Tensor, row: Row, rule: Rule) -> Tensor:  # (1, T, Hq, D)
    """FlashAttention-2's variable-length kernel (package flash-attn)."""
    from flash_attn import flash_attn_varlen_func

    cu_seqlens, longest = row.cu_seqlens, row.max_seqlen
    query, key, value = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # (T, heads, D)
    return flash_attn_varlen_func(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest,
        softmax_scale=rule.scaling, causal=not rule.is_two_sided, window_size=rule.reach,
        dropout_p=rule.dropout, softcap=rule.softcap or 0.0,
    )[None]  # fmt: skip


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, row: Row, rule: Rule) -> Tensor:  # (1, T, Hq, D)
    """torch's own variable-length FlashAttention, torch.nn.attention.varlen."""
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, longest = row.cu_seqlens, row.max_seqlen
    grouped = {"enable_gqa": True} if has_group_option() else {}
    query, key, value = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # (T, heads, D)
    return varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest,
        scale=rule.scaling, window_size=rule.reach, **grouped,
    )[None]  # fmt: skip


@torch.compiler.assume_constant_result
def has_group_option() -> bool:
    """Whether torch's varlen_attn takes groups of query heads only with an option. torch 2.11's does not: it passes any
    heads on, and its kernel takes groups. If not, the start-up check would fail."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in list_parameters(varlen_attn)


@functools.cache  # each layer asks in each forward pass
def list_parameters(function: Callable[..., Tensor]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def activate_kernels(backend: str) -> None:
    """Makes torch's varlen compute with the kernels of FlashAttention 3 for varlen_fa3, otherwise with torch's own.
    cuDNN's attention, which torch prefers on Hopper, is off: it makes a plan for each length of a sequence."""
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        restore_flash_attention_impl,
    )

    torch.backends.cuda.enable_cudnn_sdp(False)
    if backend == "varlen_fa3":
        activate_flash_attention_impl("FA3")
    elif current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def find_kernel_obstacle(
    name: str, *, config: PreTrainedConfig, head_sizes: list[int], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why the kernels of backend `name` cannot be used; None if they can."""
    if dtype != torch.bfloat16:
        return f"needs --compute-dtype bfloat16, not {str(dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"needs an Ampere GPU or newer, not {torch.cuda.get_device_name(device)}"
    if name == "varlen_fa3" and capability[0] != 9:
        return f"FlashAttention 3 needs a Hopper GPU, not {torch.cuda.get_device_name(device)}"
    if getattr(config, "v_head_dim", None) is not None:
        return "needs the same head size for queries, keys and values"
    if (largest := max([*head_sizes, getattr(config, "global_head_dim", None) or 0])) > MAX_HEAD_SIZE:
        return f"needs a head size of at most {MAX_HEAD_SIZE}, this model has {largest}"
    if name != "flash_attn" and any(size % 8 != 0 for size in head_sizes):
        return f"needs head sizes that are multiples of 8, this model has {', '.join(map(str, head_sizes))}"
    if name == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if name == "varlen_fa3" and importlib.util.find_spec("flash_attn_interface") is None:
        return (
            "the module flash_attn_interface, FlashAttention 3 from the folder hopper of flash-attention's repository,"
            " is not installed"
        )
    return None


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
            hidden[0, bucket.index], bucket.mask, relative_pos=bucket.positions, rel_embeddings=kwargs["rel_embeddings"]
        )  # (n, L, H)
        outputs.append(padded[bucket.mask[:, 0, 0]])
    return torch.cat(outputs)[row.order][None], None
