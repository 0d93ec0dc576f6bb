"""Language modelling: the summed cross-entropy of each next token, with or without images in the text, by a head that
never holds all logits.

T tokens in a packed row, N trained tokens among them, L tokens of one sequence, H hidden size, V vocabulary size.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from mini_trainer.data.columns.base import CAUSAL_LM, IGNORED, VISION, CountLabels, DataTask, Sample
from mini_trainer.data.columns.token_columns import WEIGHTS_COLUMN
from mini_trainer.distributed.devices import memory_kind
from mini_trainer.distributed.world import RowGroup
from mini_trainer.objectives.families.family import Family, MicroBatch, ReferenceForward, Row, Targets
from mini_trainer.objectives.families.text import Projection, TextFamily, TextRowModel
from mini_trainer.objectives.objective import TARGETS, Loss, LossSums, Objective, ObjectiveSettings, Scores
from mini_trainer.options.doors import WEIGHTINGS

# Of a chunk: fp32 logits at most, and tokens at most. Each chunk reads and writes the sum of the head's gradient; with
# fewer rows its product would wait for memory, more gain nothing (benchmarks/results/head_bytes.txt).
CHUNK_BYTES, CHUNK_ROWS = 2**30, 2048


@dataclass(frozen=True, kw_only=True)
class TrainedTokens(Projection):
    """N tokens: what their logits come from, and the right ones."""

    targets: Tensor  # (N,) int64
    token_weights: Tensor | None = None  # (N,) fp32, of their losses


# Maps a chunk's logits (rows, V) to the tokens' values (rows, m), the first of which is the loss, to its derivatives by
# the logits (rows, V) in their type and, where asked for, by the bias (V,) in fp32.
MeasureChunk = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy of a chunk's tokens: a `MeasureChunk`. `smoothing`: this share of each target is spread over
    the whole vocabulary (transformers' LabelSmoother). `is_fused`: everything between the matrix products is fused by
    torch.compile. `weighting`: see `sum_chunk_loss`."""

    tokens: TrainedTokens
    smoothing: float = 0.0
    is_fused: bool = False
    weighting: str | None = None

    chunk_bytes = CHUNK_BYTES

    @property
    def num_values(self) -> int:
        return 1 if self.weighting is None else 2

    def __call__(self, logits: Tensor, chunk: slice, needs_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens = self.tokens
        is_fused = self.is_fused and len(logits) > 1  # a dimension of 1 would be compiled separately
        token_weights = None if tokens.token_weights is None else tokens.token_weights[chunk, None]
        return (fuse(sum_chunk_loss) if is_fused else sum_chunk_loss)(
            logits, tokens.targets[chunk, None], token_weights, tokens.softcap, self.smoothing, needs_bias,
            self.weighting,
        )  # fmt: skip


def sum_token_loss(
    tokens: TrainedTokens,
    measure: MeasureChunk | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    by_source: tuple[Tensor, Tensor] | None = None,  # (N,) int64 and (sources, m) fp32
) -> Tensor:
    """Sum over N of what `measure` computes, by default of token_weights * cross_entropy(logits, targets), in fp32.

    Works with N = 0: the loss is 0 and every gradient is zeros. Gradients come with the forward pass, chunk by chunk,
    so the peak memory is one chunk of logits plus the gradients themselves, for any N. `by_source`: each token's
    source, and sums of their values, to which they are added.
    """
    measure = CrossEntropy(tokens) if measure is None else measure
    return _SumTokenLoss.apply(tokens.hidden, tokens.weight, tokens.bias, measure, chunk_bytes, by_source)


class _SumTokenLoss(torch.autograd.Function):
    @staticmethod
    @memory_kind("loss")
    def forward(ctx, hidden, weight, bias, measure, chunk_bytes, by_source):
        needs = ctx.needs_input_grad[:3]
        loss_sum, gradients = sum_chunks(
            hidden, weight, bias, measure, needs=needs, chunk_bytes=chunk_bytes, by_source=by_source
        )
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*gradients)
        return loss_sum

    @staticmethod
    @memory_kind("loss")
    def backward(ctx, d_loss):
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        if d_hidden is not None:
            d_hidden = (d_hidden.float() * d_loss).to(d_hidden.dtype)  # d_loss in bf16 would bend every gradient
        if d_weight is not None:
            d_weight = torch.mul(d_weight, d_loss, out=d_weight.new_empty(d_weight.shape, dtype=weight_dtype))
        if d_bias is not None:
            d_bias = d_bias.mul_(d_loss).to(bias_dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def sum_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    measure: MeasureChunk,
    *,
    needs: Sequence[bool],
    chunk_bytes: int,
    by_source: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The summed loss, and its derivatives by hidden, weight and bias, as far as `needs` names them; those of the head
    are in fp32. `by_source`: see `sum_token_loss`."""
    needs_hidden, needs_weight, needs_bias = needs
    loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if needs_hidden else None
    d_weight = None
    if needs_weight:  # zeros only if no product will be written there
        d_weight = (torch.empty_like if len(hidden) else torch.zeros_like)(weight, dtype=torch.float32)
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
    for chunk in iterate_chunks(len(hidden), len(weight), chunk_bytes=chunk_bytes):
        logits = torch.nn.functional.linear(hidden[chunk], weight, bias)  # (rows, V)
        values, d_logits, d_bias_part = measure(logits, chunk, needs_bias)
        loss_sum += values[:, 0].contiguous().sum()  # as a vector, in the same order for any m
        if by_source is not None:
            by_source[1].index_add_(0, by_source[0][chunk], values)
        if needs_bias:
            d_bias += d_bias_part
        if needs_hidden:
            torch.mm(d_logits, weight, out=d_hidden[chunk])
        if needs_weight:
            add_product(d_weight, d_logits.T, hidden[chunk], is_first=chunk.start == 0)
        del logits, d_logits  # before the next chunk's are made
    return loss_sum, (d_hidden, d_weight, d_bias)


def sum_chunk_loss(
    logits: Tensor,  # (rows, V)
    target: Tensor,  # (rows, 1)
    token_weights: Tensor | None,  # (rows, 1)
    softcap: float | None,
    smoothing: float,
    needs_bias: bool,
    weighting: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The losses (rows, 1), their derivatives by the logits (rows, V) in their type, by the bias (V,) in fp32. With a
    `weighting` each loss is weighted by a function of the model's own probabilities, taken as a constant, and the
    values are (rows, 2): the weighted loss and the cross-entropy."""
    dtype = logits.dtype
    if softcap is not None:
        logits = logits.float().div_(softcap).tanh_().mul_(softcap)
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    losses = -log_probs.gather(1, target)
    own_weights = None if weighting is None else WEIGHED[weighting](log_probs, target)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * log_probs.mean(dim=1, keepdim=True)
    slope = None if softcap is None else 1 - (logits / softcap).square_()  # tanh' of the capped logits
    d_logits = log_probs.exp_()
    if smoothing:
        d_logits.sub_(smoothing / logits.shape[1])
    d_logits.scatter_add_(1, target, d_logits.new_full((), smoothing - 1).expand_as(target))
    if slope is not None:
        d_logits.mul_(slope)
    if own_weights is not None:
        losses, d_logits = torch.cat([losses * own_weights, losses], dim=1), d_logits.mul_(own_weights)
    if token_weights is not None:
        losses, d_logits = losses * token_weights, d_logits.mul_(token_weights)
    return losses, d_logits.to(dtype), d_logits.sum(0) if needs_bias else None


def weigh_by_probability(log_probs: Tensor, target: Tensor) -> Tensor:  # (rows, V), (rows, 1) -> (rows, 1)
    """The probability of the target: dynamic fine-tuning, arXiv 2508.05629, equation 9."""
    return log_probs.gather(1, target).exp()


def weigh_by_entropy(log_probs: Tensor, target: Tensor) -> Tensor:  # (rows, V), (rows, 1) -> (rows, 1)
    """The entropy among the 20 most probable tokens, from 0 to 1: entropy-adaptive fine-tuning, arXiv 2601.02151."""
    top = log_probs.topk(min(20, log_probs.shape[1]), dim=1).values.log_softmax(dim=1)
    return -(top.exp() * top).sum(dim=1, keepdim=True) / math.log(top.shape[1])


WEIGHED = dict(WEIGHTINGS)  # looked up in compiled code, which cannot import


@torch.no_grad()
def score_tokens(tokens: TrainedTokens) -> Tensor:  # (N, 3) fp64
    """(Weighted) cross-entropy of each token, whether its target was the most likely one, and 1."""
    targets = tokens.targets
    scores = torch.ones(len(targets), 3, dtype=torch.float64, device=targets.device)
    for chunk in iterate_chunks(len(targets), len(tokens.weight)):
        logits = compute_logits(tokens, chunk).float()
        scores[chunk, 0] = torch.nn.functional.cross_entropy(logits, targets[chunk], reduction="none").double()
        scores[chunk, 1] = (logits.argmax(-1) == targets[chunk]).double()
    if tokens.token_weights is not None:
        scores[:, 0] *= tokens.token_weights
    return scores


def iterate_chunks(num_tokens: int, vocab_size: int, *, chunk_bytes: int = CHUNK_BYTES) -> list[slice]:
    """Parts of at most CHUNK_ROWS tokens whose fp32 logits have at most this many bytes, if those of one have."""
    num_rows = min(max(1, chunk_bytes // (4 * vocab_size)), CHUNK_ROWS)
    return [slice(start, start + num_rows) for start in range(0, num_tokens, num_rows)]


def compute_logits(tokens: Projection, chunk: slice) -> Tensor:  # (rows, V)
    logits = torch.nn.functional.linear(tokens.hidden[chunk], tokens.weight, tokens.bias)
    return logits if tokens.softcap is None else logits.float().div_(tokens.softcap).tanh_().mul_(tokens.softcap)


@functools.cache
def fuse(measure: Callable[..., Any]) -> Callable[..., Any]:
    from mini_trainer.distributed.compilation import Compiled

    return Compiled(measure, "the loss")


def add_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """total += left @ right, or total = left @ right if `is_first`.
    Factors in bf16 give a product that is not rounded to bf16 before it is added."""
    beta = 0 if is_first else 1
    if left.dtype != total.dtype and left.is_cuda:
        torch.addmm(total, left, right, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta)


MAX_EXPONENT = 700.0  # of a perplexity, which is a number and not infinity


@dataclass(kw_only=True)
class NextTokens(Targets):
    """Each token's successor, if it is trained."""

    labels: Tensor  # (T,) int64; IGNORED where nothing is trained or the sequence ends
    weights: Tensor | None = None  # (T,) fp32, of each label's loss; None: all are 1

    def take_part(self, part: slice) -> Self:
        first, end = np.searchsorted(self.index.numpy(), [part.start, part.stop])
        return replace(
            self,
            index=self.index[first:end] - part.start,
            sources=None if self.sources is None else self.sources[first:end].contiguous(),
            labels=pad_to(self.labels, part.stop, IGNORED)[part].contiguous(),
            weights=None if self.weights is None else pad_to(self.weights, part.stop, 0)[part].contiguous(),
        )

    def gather(self, row_group: RowGroup, *, num_tokens: int) -> Self:
        labels = row_group.gather(self.labels, dim=0)[:num_tokens]
        return replace(self, index=torch.nonzero(labels != IGNORED)[:, 0], labels=labels)


def sum_values(targets: NextTokens, measure: Any) -> LossSums:
    """The summed loss; reports the sums of the tokens' values for each data set. `measure`: a `MeasureChunk` with the
    tokens, the number of their values and the bytes of a chunk."""
    sums = torch.zeros(targets.num_sources, measure.num_values, device=targets.labels.device)
    by_source = targets.find_sources(), sums
    loss = sum_token_loss(measure.tokens, measure, chunk_bytes=measure.chunk_bytes, by_source=by_source)
    return LossSums(loss, reports={"source_losses": sums[:, 0], "source_values": sums})


def pad_to(tensor: Tensor, length: int, value: int) -> Tensor:
    return nn.functional.pad(tensor, (0, max(0, length - len(tensor))), value=value)


@dataclass(frozen=True)
class TokenLoss(Loss):
    """Cross-entropy of next tokens. Label smoothing applies to training; validations measure without it."""

    smoothing: float = 0.0
    is_fused: bool = False
    weighting: str | None = None  # of each token's loss by the model's own probabilities

    def predict(self, row_model: TextRowModel, hidden: Tensor, micro_batch: MicroBatch) -> TrainedTokens:
        """The inputs of the loss of the micro-batch's trained tokens."""
        targets = micro_batch.targets
        return TrainedTokens(
            **vars(row_model.project(hidden[0, targets.index])),  # (N, H)
            targets=targets.labels[targets.index],
            token_weights=None if targets.weights is None else targets.weights[targets.index],
        )

    def sum(self, predicted: TrainedTokens, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        targets = micro_batch.targets
        measure = CrossEntropy(predicted, self.smoothing, self.is_fused, self.weighting)
        if self.weighting is None and targets.num_sources == 1:
            return LossSums(sum_token_loss(predicted, measure))
        return sum_values(targets, measure)

    def score(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Scores:
        """Summed loss, number of correct top-1 predictions, and number of targets of each data set."""
        return Scores(micro_batch.targets.sum_by_source(score_tokens(self.read(row_model, micro_batch))))

    def sum_own(self, own: ReferenceForward, targets: NextTokens) -> Tensor:
        logits, labels = own.logits[0, targets.index].float(), targets.labels[targets.index]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=self.smoothing)
        if self.weighting is not None:
            losses = losses * WEIGHED[self.weighting](logits.log_softmax(dim=1), labels[:, None])[:, 0]
        return losses.sum()


@dataclass(frozen=True)
class CausalLM(Objective):
    """Language modelling on chats, completions and documents."""

    family: Family = field(default_factory=TextFamily)
    label_smoothing: float = 0.0
    weighting: str | None = None  # of each token's loss by the model's own probabilities

    name = CAUSAL_LM
    metrics = {"loss": False, "perplexity": False, "token_accuracy": True}  # noqa: RUF012

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> Family:
        return TextFamily(settings.router_aux_loss, settings.router_loss_over)

    @classmethod
    def make(cls, settings: ObjectiveSettings, family: Family, task: DataTask, count: CountLabels | None) -> Self:
        o = settings.classification
        return cls(family, label_smoothing=o.label_smoothing, weighting=o.loss_weighting)

    def with_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        labels = np.where(trainable, sample["input_ids"], IGNORED)
        if num_trained is not None:
            labels[:] = IGNORED
            labels[1 : 1 + num_trained] = 1
        return sample | {"labels": labels}

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> NextTokens:
        """Either all samples have weights or none, but for an idle one."""
        labels = shift(np.concatenate([sample["labels"] for sample in samples]), row, last=IGNORED).astype(np.int64)
        weights = None
        if WEIGHTS_COLUMN in samples[0]:
            given = [sample.get(WEIGHTS_COLUMN, np.zeros(len(sample["labels"]))) for sample in samples]
            weights = torch.from_numpy(shift(np.concatenate(given), row, last=0).astype(np.float32))
        index = torch.from_numpy(np.flatnonzero(labels != IGNORED))
        return NextTokens(index, labels=torch.from_numpy(labels), weights=weights)

    def make_loss(self, *, is_fused: bool = False) -> TokenLoss:
        return TokenLoss(self.label_smoothing, is_fused, self.weighting)

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, float]:
        if self.weighting is None:
            return {}
        return {"cross_entropy": float(reports["source_values"][:, 1].sum()) / (divisors[TARGETS] or 1)}

    def describe_source(self, reports: Mapping[str, np.ndarray], source: int, divisor: float) -> dict[str, Any]:
        if self.weighting is None:
            return {}
        cross_entropy = float(reports["source_values"][source, 1])
        return {"cross_entropy": cross_entropy / divisor if divisor else None}

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        loss_sum, num_right, num_targets = sums.tolist()
        loss = loss_sum / num_targets
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, MAX_EXPONENT)),
            "token_accuracy": num_right / num_targets,
            "num_loss_counted_tokens": int(num_targets),
        }


def shift(values: np.ndarray, row: Row, *, last: int) -> np.ndarray:  # (T,)
    """Each token's successor's value; a sequence's last token, which predicts nothing, has `last`."""
    shifted = np.append(values[1:], last)
    shifted[row.cu_seqlens.numpy()[1:] - 1] = last
    return shifted


@dataclass(frozen=True)
class VisionLanguage(CausalLM):
    """The next tokens of texts with images."""

    name = VISION

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> Family:
        from mini_trainer.objectives.families.vision import VisionLanguageFamily

        vision, text_family = settings.vision, super().make_family(settings)
        return VisionLanguageFamily(text_family, tuple(vision.freeze), max_patches=vision.max_image_tokens_per_gpu)
