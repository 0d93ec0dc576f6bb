"""Summed log-probabilities of sequences by a language model's head that never holds all logits.

N trained tokens, S sums, H hidden size, V vocabulary size.
"""

import torch
from torch import Tensor

from mini_trainer.distributed.memory import memory_kind
from mini_trainer.objectives.token_loss import (
    CHUNK_BYTES,
    TrainedTokens,
    add_product,
    fuse_chunk_loss,
    iterate_chunks,
    make_total,
    sum_chunk_loss,
)


def sum_logps(
    tokens: TrainedTokens,
    places: Tensor,  # (N,) int64: the sum that each token belongs to
    num_sums: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    compiled: bool = False,
) -> Tensor:  # (S,) fp32
    """Each sum of its tokens' log-probabilities, with gradients.

    The hidden states' gradients are computed with the forward pass, as if each sum's derivative were 1, and scaled in
    the backward pass, when it is known: the body of the model runs once. Only a head that trains is multiplied again.
    """
    return _SumLogps.apply(tokens.hidden, tokens.weight, tokens.bias, tokens, places, num_sums, chunk_bytes, compiled)


class _SumLogps(torch.autograd.Function):
    @staticmethod
    @memory_kind("loss")
    def forward(ctx, hidden, weight, bias, tokens, places, num_sums, chunk_bytes, compiled):
        needs_hidden = ctx.needs_input_grad[0]
        sums = torch.zeros(num_sums, dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        ctx.tokens, ctx.compiled = tokens, compiled
        ctx.chunks = iterate_chunks(len(hidden), len(weight), chunk_bytes=chunk_bytes)
        for chunk in ctx.chunks:
            losses, d_logits, _ = measure_chunk(hidden, weight, bias, ctx, chunk, scale=None)
            sums.index_add_(0, places[chunk], losses[:, 0].neg_())
            if needs_hidden:
                torch.mm(d_logits, weight, out=d_hidden[chunk])
            del d_logits  # before the next chunk's are made
        trains_head = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(d_hidden, places, *((hidden, weight, bias) if trains_head else ()))
        return sums

    @staticmethod
    @memory_kind("loss")
    def backward(ctx, d_sums):
        d_hidden, places, *head = ctx.saved_tensors
        scale = -d_sums[places]  # (N,): the losses are the negative log-probabilities
        if d_hidden is not None:
            d_hidden = (d_hidden.float() * scale[:, None]).to(d_hidden.dtype)
        d_weight, d_bias = differentiate_head(*head, ctx, scale) if head else (None, None)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def differentiate_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ctx, scale: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the head's weight (V, H) and bias (V,), summed in fp32."""
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    d_weight = make_total(weight, hidden) if needs_weight else None
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
    for chunk in ctx.chunks:
        _, d_logits, d_bias_part = measure_chunk(hidden, weight, bias, ctx, chunk, scale=scale[chunk, None])
        if needs_weight:
            add_product(d_weight, d_logits.T, hidden[chunk], is_first=chunk.start == 0)
        if needs_bias:
            d_bias += d_bias_part
        del d_logits
    return None if d_weight is None else d_weight.to(weight.dtype), None if d_bias is None else d_bias.to(bias.dtype)


def measure_chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ctx, chunk: slice, *, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`sum_chunk_loss` of the chunk's tokens, each weighted by `scale`."""
    logits = torch.nn.functional.linear(hidden[chunk], weight, bias)  # (rows, V)
    measure = fuse_chunk_loss() if ctx.compiled and len(logits) > 1 else sum_chunk_loss
    tokens, needs_bias = ctx.tokens, ctx.needs_input_grad[2]
    return measure(logits, tokens.targets[chunk, None], scale, tokens.softcap, 0.0, needs_bias)
