"""Stand-ins for kernels of attention: their documentation, written out, behind the signatures of each release."""

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from recorded import find_signature, stand_in
from torch import Tensor
from torch.nn.attention import varlen

VARLEN = "torch.nn.attention.varlen.varlen_attn"
FLASH = "flash_attn.flash_attn_interface.flash_attn_varlen_func"


def iterate_sequences(cu_seqlens: Tensor) -> Iterator[slice]:
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        yield slice(start, end)


def find_seen(length: int, left: int, right: int) -> Tensor:
    """(length, length): query i sees keys i - left to i + right; a negative number is no limit."""
    distance = torch.arange(length)[:, None] - torch.arange(length)  # back from the query
    is_seen = torch.ones_like(distance, dtype=torch.bool)
    is_seen &= distance <= left if left >= 0 else True
    is_seen &= -distance <= right if right >= 0 else True
    return is_seen


def attend_as_documented(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, scale: float, left: int, right: int,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """(T, heads, D): a group of query heads shares each head of keys and values."""
    outputs = []
    repeats = query.shape[1] // key.shape[1]
    for part in iterate_sequences(cu_seqlens):
        q, k, v = (t[part].transpose(0, 1).float() for t in (query, key, value))
        k, v = (t.repeat_interleave(repeats, dim=0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        probabilities = scores.masked_fill(~find_seen(q.shape[1], left, right), float("-inf")).softmax(-1)
        outputs.append((probabilities @ v).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def check_inputs(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: tuple[Tensor, Tensor], longest: tuple) -> None:
    """What the kernels of FlashAttention require, and check on a GPU only in part."""
    tokens, num_heads, head_size = query.shape
    assert key.shape == value.shape == (tokens, key.shape[1], head_size), "keys and values (T, heads, D)"
    assert num_heads % key.shape[1] == 0, "whole groups of heads"
    assert head_size <= 256 and head_size % 8 == 0
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1, "contiguous in the last dimension"
    for each in cu_seqlens:
        assert each.dtype == torch.int32 and each.is_contiguous() and each.dim() == 1, "borders as int32"
        assert each[0] == 0 and each[-1] == tokens and (each.diff() > 0).all()
    assert all(type(each) is int for each in longest)
    assert longest == (cu_seqlens[0].diff().max(), cu_seqlens[1].diff().max()), "the longest sequence"


class Kernels:
    """The functions for packed rows of one release; counts their calls."""

    def __init__(self, package: str, release: str):
        self.package, self.release, self.num_calls = package, release, 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.package == "torch":
            monkeypatch.setattr(varlen, "varlen_attn", stand_in("torch", VARLEN, self.release, self.attend_varlen))
        else:
            module = ModuleType("flash_attn")
            module.__spec__ = ModuleSpec("flash_attn", None)
            module.flash_attn_varlen_func = stand_in("flash-attn", FLASH, self.release, self.attend_flash)
            monkeypatch.setitem(sys.modules, "flash_attn", module)

    def attend_varlen(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        return_aux: None, scale: float, window_size: tuple[int, int], enable_gqa: bool | None = None, **unused: Any,
    ) -> Tensor:  # fmt: skip
        self.num_calls += 1
        check_inputs(query, key, value, (cu_seq_q, cu_seq_k), (max_q, max_k))
        assert return_aux is None and all(each is None for each in unused.values())
        assert enable_gqa is not False or query.shape[1] == key.shape[1]  # torch's own check where it takes the option
        left, right = window_size
        return attend_as_documented(query, key, value, cu_seq_q, scale=scale, left=left, right=right)

    def attend_flash(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size: tuple[int, int],
        softcap: float, **unused: Any,
    ) -> Tensor:  # fmt: skip
        self.num_calls += 1
        check_inputs(q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
        defaults = find_signature("flash-attn", FLASH, self.release).parameters
        assert dropout_p == 0.0 and all(each is defaults[name].default for name, each in unused.items())
        left, right = window_size[0], 0 if causal else window_size[1]
        return attend_as_documented(q, k, v, cu_seqlens_q, scale=softmax_scale, left=left, right=right, softcap=softcap)


class FlashOperators:
    """CPU implementations of the operators under torch's own varlen_attn; counts their calls."""

    def __init__(self) -> None:
        self.num_forward = self.num_backward = 0

    def register(self, library: torch.library.Library) -> None:
        library.impl("_flash_attention_forward", self.run_forward, "CPU")
        library.impl("_flash_attention_backward", self.run_backward, "CPU")

    def run_forward(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int,
        window_size_right: int, **unused: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.num_forward += 1
        check_inputs(query, key, value, (cum_seq_q, cum_seq_k), (max_q, max_k))
        assert dropout_p == 0.0 and not return_debug_mask and all(each is None for each in unused.values())
        assert is_causal == ((window_size_left, window_size_right) == (-1, 0))
        output = attend_as_documented(
            query, key, value, cum_seq_q, scale=scale, left=window_size_left, right=window_size_right
        )
        state = torch.zeros(2, dtype=torch.uint64)
        return output, query.new_zeros(query.shape[1], len(query), dtype=torch.float32), state, state, state

    def run_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        rng_state: Tensor, unused: Tensor, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.num_backward += 1
        check_inputs(query, key, value, (cum_seq_q, cum_seq_k), (max_q, max_k))
        assert grad_out.shape == out.shape == query.shape and grad_out.dtype == query.dtype
        repeats = query.shape[1] // key.shape[1]
        gradients: list[list[Tensor]] = [[], [], []]
        for part in iterate_sequences(cum_seq_q):
            q, k, v, d_out = (t[part].transpose(0, 1).float() for t in (query, key, value, grad_out))
            k, v = (t.repeat_interleave(repeats, dim=0) for t in (k, v))
            seen = find_seen(q.shape[1], window_size_left, window_size_right)
            p = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")).softmax(-1)
            d_p = d_out @ v.transpose(1, 2)
            d_scores = p * (d_p - (d_p * p).sum(-1, keepdim=True)) * scale
            whole = d_scores @ k, d_scores.transpose(1, 2) @ q, p.transpose(1, 2) @ d_out
            for i, each in enumerate(whole):
                grouped = each if i == 0 else each.unflatten(0, (-1, repeats)).sum(1)
                gradients[i].append(grouped.transpose(0, 1))
        return tuple(torch.cat(each).to(query.dtype) for each in gradients)
