"""Compiled blocks: what they compute, and that compilation ends with the first micro-batch."""

import functools

import pytest
import torch
from breadth import wide
from small_runs import LENGTHS, make_micro_batch
from tiny_models import FAMILIES, VOCAB_SIZE, build, check, compile_by, save_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention

from model import attention as packed_attention
from model.build import find_blocks
from objectives.token_loss import CrossEntropy, TrainedTokens, sum_token_loss

pytestmark = pytest.mark.slow

FIRST = (13, 1, 22, 7)


def attend_traceable(query, key, value, row, rule):
    """What the kernels for CUDA take: cumulative lengths and the longest one; it can be compiled anywhere."""
    position = torch.arange(query.shape[2])
    sequence = torch.bucketize(position, row.cu_seqlens, right=True)
    distance = position[:, None] - position
    mask = (sequence[:, None] == sequence) & (distance >= 0) & (distance < row.max_seqlen)
    if rule.window is not None:
        mask = mask & (distance < rule.window)
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rule.scaling, enable_gqa=True)
    return output.transpose(1, 2)


def deepen(family: str, num_layers: int):
    kinds = ["sliding_attention", "full_attention"] * (num_layers // 2)
    changes = dict(num_hidden_layers=num_layers) | (dict(layer_types=kinds) if family == "gemma3" else {})
    return type(FAMILIES[family]).from_dict(FAMILIES[family].to_dict() | changes)


@pytest.mark.parametrize(
    ("family", "checkpointing", "is_traceable", "backend"),
    [
        wide("llama", "none", False, "eager"),
        ("gemma3", "selective", True, "aot_eager"),
    ],
)
def test_no_micro_batch_after_the_first_compiles_again(
    family, checkpointing, is_traceable, backend, world, tmp_path, monkeypatch
):
    if is_traceable:
        monkeypatch.setattr(packed_attention, "attend_sdpa", attend_traceable)
        monkeypatch.setattr(packed_attention, "UNCOMPILED", frozenset())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compile_by(counter, monkeypatch)
    in_chunks = functools.partial(sum_token_loss, chunk_bytes=16 * 4 * VOCAB_SIZE)  # of 16 rows
    monkeypatch.setattr("objectives.next_tokens.sum_token_loss", in_chunks)
    path = save_model(deepen(family, 10), tmp_path)
    model = build(path, world, activation_checkpointing=checkpointing, compile=True)
    reference = build(path, world)
    check(model, world)
    assert counter.frame_count == 0
    counts = []
    for seed, lengths in enumerate((FIRST, *LENGTHS)):
        micro_batch = make_micro_batch(lengths, seed=seed)
        losses = []
        for one in (reference, model):
            one.zero_grad()
            losses.append(one(micro_batch))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        for param, other in zip(reference.parameters(), model.parameters(), strict=True):
            expected = param.grad.to_local()
            torch.testing.assert_close(
                other.grad.to_local(), expected, rtol=1e-4, atol=1e-5 + 1e-4 * expected.abs().max().item()
            )
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * len(counts)
    assert 0 < counts[0] < len(find_blocks(model.model))  # blocks of a kind share their code


def test_selective_checkpointing_of_attention_that_cannot_be_compiled_is_refused(world, tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path)
    with pytest.raises(ValueError, match="needs --attention flash_attn or varlen, not sdpa"):
        build(path, world, activation_checkpointing="selective", compile=True)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_plain", [True, False])
def test_the_fused_loss_is_the_same(is_plain, dtype):
    torch._dynamo.reset()
    hidden, weight = torch.randn(37, 16), torch.randn(50, 16)
    bias, weights, softcap = (None, None, None) if is_plain else (torch.randn(50).to(dtype), torch.rand(37), 2.0)
    targets = torch.randint(50, (37,))
    results = []
    for compiled in (False, True):
        inputs = [t.to(dtype).requires_grad_() for t in (hidden, weight, *([] if is_plain else [bias]))]
        tokens = TrainedTokens(*inputs[:2], targets, *inputs[2:], token_weights=weights, softcap=softcap)
        measure = CrossEntropy(tokens, 0.0 if is_plain else 0.1, compiled)
        loss = sum_token_loss(tokens, measure, chunk_bytes=12 * 4 * 50)
        loss.backward()
        results.append((loss, *(t.grad for t in inputs)))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, expected in zip(*reversed(results), strict=True):
        assert (ours - expected).norm() <= tolerance * expected.norm()
