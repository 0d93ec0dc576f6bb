"""Losses of whole answers: the summed log-probability of each, and means over samples.

T tokens in a packed row, N trained tokens among them, S answers or samples, H hidden size, V vocabulary size. The head
never holds all logits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mini_trainer.data.columns.base import Sample
from mini_trainer.data.columns.preference_columns import MARGIN_COLUMN, PAIR_WEIGHT_COLUMN
from mini_trainer.distributed.devices import memory_kind
from mini_trainer.distributed.world import RowGroup, sum_parts
from mini_trainer.objectives.families.micro_batch import MicroBatch
from mini_trainer.objectives.next_tokens import NextTokens, TokenLoss
from mini_trainer.objectives.token_loss import (
    CHUNK_BYTES,
    TrainedTokens,
    add_product,
    fuse_chunk_loss,
    iterate_chunks,
    make_total,
    sum_chunk_loss,
)

ZERO, ONE = np.zeros(1, np.float32), np.ones(1, np.float32)


@dataclass
class SampleNumbers:
    """The numbers of each sample."""

    margins: Tensor  # (S,) fp32
    weights: Tensor  # (S,) fp32
    sources: Tensor | None = None  # (S,) int64: the data set of each; None: all of the first

    def with_sources(self, sources: np.ndarray) -> "SampleNumbers":
        """`sources` (samples,); an idle sample, which comes last, is of the first."""
        return replace(self, sources=torch.from_numpy(np.pad(sources, (0, len(self.margins) - len(sources)))))


def gather_sample_numbers(samples: Sequence[Sample]) -> SampleNumbers:
    return SampleNumbers(
        gather_numbers(samples, MARGIN_COLUMN, ZERO)[:, 0], gather_numbers(samples, PAIR_WEIGHT_COLUMN, ONE)[:, 0]
    )


def gather_numbers(samples: Sequence[Sample], name: str, default: np.ndarray) -> Tensor:  # (S, ...) fp32
    """An optional column of a fixed number of values for each sample."""
    return torch.from_numpy(np.array([sample.get(name, default) for sample in samples], np.float32))


def weigh_samples(samples: Iterable[Sample]) -> float:
    """The divisor of the sum over samples."""
    return sum(float(sample.get(PAIR_WEIGHT_COLUMN, ONE)[0]) for sample in samples)


def sum_by_source(sums: Tensor, numbers: SampleNumbers, num_sources: int) -> Tensor:  # (S, ...) -> (num_sources, ...)
    sources = numbers.sources
    if sources is None:
        sources = torch.zeros(len(sums), dtype=torch.long, device=sums.device)
    return sums.new_zeros(num_sources, sums.shape[1]).index_add(0, sources, sums)


def describe_means(names: Sequence[str], sums: np.ndarray) -> dict[str, float]:
    """Means over pairs, of one data set or step, under the names that TRL gives them; `pairs` is their divisor."""
    by_name = dict(zip(names, sums.tolist(), strict=True))
    num_pairs = by_name.pop("pairs") or 1
    means = {name: total / num_pairs for name, total in by_name.items()}
    return means | {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}


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


@dataclass
class AnswerTargets(NextTokens):
    """The next tokens of answers; samples have one or several."""

    places: Tensor = None  # (N,) int64: the answer that each token is of
    lengths: Tensor = None  # (samples, answers of each) fp32: trained tokens
    numbers: SampleNumbers = None
    reference: Tensor | None = None  # (samples, 2) fp32: log-probabilities by the reference model; None: not known

    def with_sample_sources(self, sources: np.ndarray) -> "AnswerTargets":
        return replace(self, numbers=self.numbers.with_sources(sources))

    def take_part(self, part: slice) -> "AnswerTargets":
        first, end = np.searchsorted(self.index.numpy(), [part.start, part.stop])
        return replace(self, **vars(super().take_part(part)), places=self.places[first:end].contiguous())

    def gather(self, row_group: RowGroup, *, num_tokens: int) -> "AnswerTargets":
        own = super().gather(row_group, num_tokens=num_tokens)
        return replace(self, index=own.index, labels=own.labels, places=torch.zeros_like(own.index))


@dataclass(frozen=True)
class AnswerLoss(TokenLoss):
    """A loss of answers' summed log-probabilities."""

    def sum_logps(self, tokens: TrainedTokens, micro_batch: MicroBatch) -> Tensor:  # (S,) fp32
        """The summed log-probabilities of the micro-batch's answers, with gradients."""
        targets, row_group = micro_batch.targets, micro_batch.row.row_group
        logps = sum_logps(tokens, targets.places, targets.lengths.numel(), compiled=self.is_fused)
        if row_group is None:
            return logps
        # Each rank has summed up its part of the row, and has gradients for that alone.
        return logps + (sum_parts(logps, row_group) - logps.detach())


def count_once(loss: Tensor, num_ranks: int) -> Tensor:
    """A loss that several ranks have computed: its unchanged gradient, and each rank's share of its value."""
    return loss + (loss / num_ranks - loss).detach()
