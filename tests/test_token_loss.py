"""The chunked loss is the naive one, whatever the chunk."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from token_loss import sum_token_loss

N, H, V = 13, 8, 29


def make_inputs(*, bias: bool, num_rows: int = N) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_rows, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    return [hidden, weight, torch.randint(V, (num_rows,)), torch.randn(V, requires_grad=True) if bias else None]


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_are_those_of_all_logits_at_once(rows_per_chunk, softcap, bias, weighted):
    ours, naive = make_inputs(bias=bias), make_inputs(bias=bias)
    weights = torch.rand(N) if weighted else None
    loss = sum_token_loss(
        *ours[:3], bias=ours[3], token_weights=weights, softcap=softcap, chunk_bytes=rows_per_chunk * 4 * V
    )
    logits = linear(naive[0], naive[1], naive[3])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = cross_entropy(logits, naive[2], reduction="none") @ (weights if weighted else torch.ones(N))
    (loss / 7).backward()
    (expected / 7).backward()
    torch.testing.assert_close(loss, expected)
    for tensor, reference in zip(ours, naive, strict=True):
        if tensor is not None and tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, reference.grad)


def test_without_trained_tokens_the_loss_and_every_gradient_are_zero():
    hidden, weight, targets, bias = make_inputs(bias=True, num_rows=0)
    sum_token_loss(hidden, weight, targets, bias=bias).backward()
    assert hidden.grad.shape == (0, H)
    assert weight.grad.shape == (V, H) and not weight.grad.any()
    assert bias.grad.shape == (V,) and not bias.grad.any()


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_still_do():
    hidden, weight, targets, _ = make_inputs(bias=False)
    sum_token_loss(hidden, weight.detach(), targets).backward()
    reference = make_inputs(bias=False)
    cross_entropy(linear(reference[0], reference[1]), reference[2], reduction="sum").backward()
    torch.testing.assert_close(hidden.grad, reference[0].grad)


def test_bf16_inputs_give_an_fp32_loss_summed_in_fp32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4000, H).bfloat16(), torch.randn(V, H).bfloat16()
    targets = torch.randint(V, (4000,))
    loss = sum_token_loss(hidden, weight, targets, chunk_bytes=100 * 4 * V)
    expected = cross_entropy(linear(hidden, weight).double(), targets, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
