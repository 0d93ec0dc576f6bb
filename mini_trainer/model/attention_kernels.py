"""Attention over packed sequences by CUDA kernels that take the sequences' borders: FlashAttention 2 and 3.

T tokens in the row, Hq query heads, Hkv key/value heads, D head size.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from mini_trainer.model.attention import Rule
from mini_trainer.objectives.families.micro_batch import Row

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
    """Whether torch's varlen_attn takes groups of query heads only with an option.

    torch 2.11's does not: it passes any heads on, and its kernel takes groups. If not, the start-up check would fail.
    """
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in list_parameters(varlen_attn)


@functools.cache  # each layer asks in each forward pass
def list_parameters(function: Callable[..., Tensor]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def activate_kernels(backend: str) -> None:
    """Makes torch's varlen compute with the kernels of FlashAttention 3 for varlen_fa3, otherwise with torch's own.

    cuDNN's attention, which torch prefers on Hopper, is off: it makes a plan for each length of a sequence.
    """
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
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
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
