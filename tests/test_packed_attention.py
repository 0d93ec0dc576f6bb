"""What the kernels for CUDA are asked for is what SDPA computes one sequence at a time.

The kernels do not run here: in their place stands their documentation, written out, behind their own signatures.
"""

import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hand_made import pack_samples
from torch.nn.attention import varlen

from model.attention import Rule, attend_eager, attend_flash_attn, attend_sdpa, attend_varlen, choose_backend

LENGTHS = (7, 1, 12, 3)
NUM_HEADS, NUM_KEY_VALUE_HEADS, HEAD_SIZE = 4, 2, 8


def attend_as_documented(query, key, value, cu_seqlens, *, scale, left, right, softcap=0.0):
    """(T, heads, D): query i of each sequence sees its keys i - left to i + right; a negative number is no limit."""
    outputs = []
    repeats = query.shape[1] // key.shape[1]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q, k, v = (t[start:end].transpose(0, 1) for t in (query, key, value))
        k, v = (t.repeat_interleave(repeats, dim=0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)  # back from the query
        is_seen = torch.ones_like(distance, dtype=torch.bool)
        is_seen &= distance <= left if left >= 0 else True
        is_seen &= -distance <= right if right >= 0 else True
        outputs.append((scores.masked_fill(~is_seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


SIGNATURE = inspect.signature(varlen.varlen_attn)


def varlen_attn(*args, **kwargs):
    given = SIGNATURE.bind(*args, **kwargs).arguments
    query, key = given["query"], given["key"]
    assert query.shape[1] == key.shape[1] or given["enable_gqa"]
    assert given["cu_seq_q"] is given["cu_seq_k"] and given["cu_seq_q"].dtype == torch.int32
    assert given["max_q"] == given["max_k"] == max(LENGTHS)
    left, right = given["window_size"]
    return attend_as_documented(
        query, key, given["value"], given["cu_seq_q"], scale=given["scale"], left=left, right=right
    )


varlen_attn.__signature__ = SIGNATURE  # which differs between versions of torch


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k == max(LENGTHS) and dropout_p == 0.0
    left, right = window_size[0], 0 if causal else window_size[1]
    return attend_as_documented(q, k, v, cu_seqlens_q, scale=softmax_scale, left=left, right=right, softcap=softcap)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(
    ("attend", "reference", "extras"),
    [
        (attend_varlen, attend_sdpa, {}),
        (attend_flash_attn, attend_sdpa, {}),
        (attend_flash_attn, attend_eager, dict(softcap=1.5)),
    ],
)
def test_kernels_are_asked_for_what_sdpa_computes(attend, reference, extras, window, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    samples = [(np.arange(length), np.arange(length), None) for length in LENGTHS]
    row = pack_samples(samples).row
    torch.manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), HEAD_SIZE) for heads in (NUM_HEADS, NUM_KEY_VALUE_HEADS, NUM_KEY_VALUE_HEADS)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    results = []
    for function in (attend, reference):
        output = function(*tensors, row, Rule(scaling=0.3, window=window, **extras))
        assert output.shape == (1, sum(LENGTHS), NUM_HEADS, HEAD_SIZE)
        results.append((output, *torch.autograd.grad(output.square().sum(), tensors)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("head_size", "expected"), [(64, "varlen"), (20, "sdpa"), (512, "sdpa")])
def test_heads_that_the_kernel_does_not_know_go_to_sdpa(head_size, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = SimpleNamespace(head_dim=head_size, num_attention_heads=4)
    backend = choose_backend(
        "auto", model=torch.nn.Linear(2, 2), config=config, device=torch.device("cuda"), dtype=torch.bfloat16
    )
    assert backend == expected
