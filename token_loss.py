"""Summed token cross-entropy of a language model's head that never holds all logits.

N trained tokens, H hidden size, V vocabulary size.
"""

import torch
from torch import Tensor

# Bytes of one chunk's fp32 logits. Large enough to fill a GPU's matrix units at any vocabulary size, small
# beside a block's activations.
CHUNK_BYTES = 2**29


def sum_token_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (N,) int64
    *,
    bias: Tensor | None = None,  # (V,)
    token_weights: Tensor | None = None,  # (N,) fp32
    softcap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Sum over N of token_weights * cross_entropy(hidden @ weight.T + bias, targets), in fp32.

    `softcap`: the logits z become softcap * tanh(z / softcap) (Gemma 2, arXiv 2408.00118, section 2). Works with
    N = 0: the loss is 0 and every gradient is zeros. Gradients come with the forward pass, chunk by chunk, so
    the peak memory is one chunk of logits plus the gradients themselves, whatever N is.
    """
    return _SumTokenLoss.apply(hidden, weight, targets, bias, token_weights, softcap, chunk_bytes)


class _SumTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, bias, token_weights, softcap, chunk_bytes):
        needs_hidden, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.zeros_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        num_rows = max(1, chunk_bytes // (4 * weight.shape[0]))
        for start in range(0, hidden.shape[0], num_rows):
            chunk = slice(start, start + num_rows)
            logits = torch.nn.functional.linear(hidden[chunk], weight, bias)  # (rows, V)
            if softcap is not None:
                logits = logits.float().div_(softcap).tanh_().mul_(softcap)
            target = targets[chunk, None]
            log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # one kernel, casts on the way
            losses = -log_probs.gather(1, target)  # (rows, 1)
            loss_sum += (losses if token_weights is None else losses * token_weights[chunk, None]).sum()
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            slope = None if softcap is None else 1 - (logits / softcap).square_()  # tanh' of the capped logits
            d_logits = log_probs.exp_()
            d_logits.scatter_add_(1, target, d_logits.new_full((), -1.0).expand_as(target))
            if slope is not None:
                d_logits.mul_(slope)
            if token_weights is not None:
                d_logits.mul_(token_weights[chunk, None])
            if needs_bias:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(hidden.dtype)
            if needs_hidden:
                d_hidden[chunk] = d_logits @ weight
            if needs_weight:
                if d_logits.dtype == d_weight.dtype:
                    d_weight.addmm_(d_logits.T, hidden[chunk])
                else:
                    d_weight += d_logits.T @ hidden[chunk]
            del logits, log_probs, d_logits, slope  # before the next chunk's are made
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return loss_sum

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        if d_hidden is not None:
            d_hidden = (d_hidden.float() * d_loss).to(d_hidden.dtype)  # d_loss in bf16 would bend every gradient
        if d_weight is not None:
            d_weight = d_weight.mul_(d_loss).to(weight_dtype)
        if d_bias is not None:
            d_bias = d_bias.mul_(d_loss).to(bias_dtype)
        return d_hidden, d_weight, None, d_bias, None, None, None
