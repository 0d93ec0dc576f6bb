"""The chunked loss is the naive one, whatever the chunk."""

import pytest
import torch
from op_recording import OpRecorder
from torch.nn.functional import cross_entropy, linear
from transformers.trainer_pt_utils import LabelSmoother

from mini_trainer.objectives.next_tokens import CrossEntropy, TrainedTokens, sum_token_loss

N, H, V = 13, 8, 29


def make_inputs(*, bias: bool, num_rows: int = N) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_rows, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    return [hidden, weight, torch.randint(V, (num_rows,)), torch.randn(V, requires_grad=True) if bias else None]


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_transformers_of_all_logits_at_once(rows_per_chunk, softcap, bias, weighted, smoothing):
    ours, naive = make_inputs(bias=bias), make_inputs(bias=bias)
    weights = torch.rand(N) if weighted else None
    tokens = TrainedTokens(*ours[:2], ours[3], targets=ours[2], token_weights=weights, softcap=softcap)
    measure = CrossEntropy(tokens, smoothing) if smoothing else None
    loss = sum_token_loss(tokens, measure, chunk_bytes=rows_per_chunk * 4 * V)
    logits = linear(naive[0], naive[1], naive[3])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    smoother = LabelSmoother(epsilon=smoothing)
    losses = [smoother({"logits": logits[i : i + 1]}, naive[2][i : i + 1]) for i in range(N)]
    expected = torch.stack(losses) @ (weights if weighted else torch.ones(N))
    (loss / 7).backward()
    (expected / 7).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for tensor, reference in zip(ours, naive, strict=True):
        if tensor is not None and tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, reference.grad, rtol=1e-5, atol=1e-6)


def test_what_memory_held_before_does_not_enter_the_gradients(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # now empty memory holds NaN
    try:
        assert torch.empty(1).isnan()
        hidden, weight, targets, _ = make_inputs(bias=False)
        sum_token_loss(TrainedTokens(hidden, weight, targets=targets), chunk_bytes=4 * 4 * V).backward()
        assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_trained_tokens_the_loss_and_every_gradient_are_zero():
    hidden, weight, targets, bias = make_inputs(bias=True, num_rows=0)
    sum_token_loss(TrainedTokens(hidden, weight, bias, targets=targets)).backward()
    assert hidden.grad.shape == (0, H)
    assert weight.grad.shape == (V, H) and not weight.grad.any()
    assert bias.grad.shape == (V,) and not bias.grad.any()


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_still_do():
    hidden, weight, targets, _ = make_inputs(bias=False)
    sum_token_loss(TrainedTokens(hidden, weight.detach(), targets=targets)).backward()
    reference = make_inputs(bias=False)
    cross_entropy(linear(reference[0], reference[1]), reference[2], reduction="sum").backward()
    torch.testing.assert_close(hidden.grad, reference[0].grad)


def test_bf16_inputs_give_an_fp32_loss_summed_in_fp32_whose_share_is_not_rounded():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4000, H).bfloat16().requires_grad_(), torch.randn(V, H).bfloat16()
    targets = torch.randint(V, (4000,))
    loss = sum_token_loss(TrainedTokens(hidden, weight, targets=targets), chunk_bytes=100 * 4 * V)
    expected = cross_entropy(linear(hidden, weight).double(), targets, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    (own,), (exact,) = (torch.autograd.grad(of / 1000, hidden) for of in (loss, expected))
    assert (own.double() * exact.double()).sum() == pytest.approx(exact.double().square().sum().item(), rel=2e-4)


@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, 1.5)])
def test_beyond_the_gradients_memory_does_not_grow_with_the_tokens(bias, softcap):
    num_rows = 16  # of a chunk
    extras = {}
    for factor in (1, 8):
        hidden, weight, targets, bias_vector = make_inputs(bias=bias, num_rows=num_rows * factor)
        with OpRecorder() as recorder:
            tokens = TrainedTokens(hidden, weight, bias_vector, targets=targets, softcap=softcap)
            loss = sum_token_loss(tokens, chunk_bytes=num_rows * 4 * V)
        gradients = sum(tensor.nbytes for tensor in (hidden, weight, *([bias_vector] if bias else [])))
        assert recorder.live_bytes() == gradients + loss.nbytes
        assert recorder.largest == max(num_rows * 4 * V, hidden.nbytes)  # one chunk's logits, or d_hidden
        extras[factor] = recorder.peak - gradients
    assert extras[8] <= 1.1 * extras[1]


def test_the_budget_of_a_chunk_is_honoured_for_any_vocabulary():
    for vocab_size in (V, 50 * V):
        hidden, weight = torch.randn(40, H), torch.randn(vocab_size, H)
        with OpRecorder() as recorder:
            tokens = TrainedTokens(hidden, weight, targets=torch.zeros(40, dtype=torch.long))
            sum_token_loss(tokens, chunk_bytes=10 * 4 * V * 50)
        assert recorder.largest <= 10 * 4 * V * 50
