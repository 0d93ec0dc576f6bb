"""Learning from a teacher: cross-entropy and a divergence from the teacher's next-token distributions.

(1 - w) * cross-entropy + w * T^2 * D(q, p), with w --teacher-weight and p and q at temperature T (arXiv 1503.02531).
q is read from a file of the teacher's most probable tokens, or computed by a teacher that reads the same row.
N trained tokens, K tokens that a file names of each, V vocabulary size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mini_trainer.data.columns.base import IGNORED, CountLabels, DataTask, Sample
from mini_trainer.data.stores.model_files import name_model
from mini_trainer.distributed.world import RowGroup
from mini_trainer.objectives import next_tokens, soft_targets
from mini_trainer.objectives.families.family import Family, MicroBatch, ReferenceForward, Row
from mini_trainer.objectives.families.text import TextRowModel
from mini_trainer.objectives.next_tokens import CHUNK_BYTES, CausalLM, NextTokens, TokenLoss, TrainedTokens
from mini_trainer.objectives.objective import TARGETS, LossSums, ObjectiveSettings, Scores
from mini_trainer.objectives.soft_targets import SOFT_COLUMN, Divergence, SoftTargets, diverge_from_top, read_records
from mini_trainer.options.doors import DIVERGENCES

DIVERGE = dict(DIVERGENCES)  # looked up in compiled code, which cannot import
DEFAULT_TOP_K = 32
VALUES = ("loss", "cross_entropy", "teacher_kl", "teacher_tail", "teacher_agreement")  # of a token
NUM_VALUES = len(VALUES) + 1  # and 1 if the token has a teacher, which the last three are means over


@dataclass(frozen=True)
class Terms:
    """The weights of the loss's two terms."""

    weight: float  # of the divergence; the cross-entropy has the rest
    divergence: str  # a key of DIVERGENCES; of files forward-kl
    temperature: float = 1.0


@dataclass
class TaughtTargets(NextTokens):
    """Next tokens, and the teacher's distributions for them."""

    soft: SoftTargets | None = None  # from a file
    teacher: TrainedTokens | None = None  # for a teacher that reads: the inputs of its logits

    def take_part(self, part: slice) -> Self:
        first, end = np.searchsorted(self.index.numpy(), [part.start, part.stop])
        soft = None if self.soft is None else self.soft.slice(slice(first, end))
        return replace(super().take_part(part), soft=soft)

    def gather(self, row_group: RowGroup, *, num_tokens: int) -> Self:
        """The targets of a check's row, in which the teacher says the same of all tokens."""
        own = super().gather(row_group, num_tokens=num_tokens)
        if own.soft is not None:
            own.soft = read_records([soft_targets.make_even_records(len(own.index), own.soft.ids.shape[1])])
        return own


def measure_taught_chunk(
    logits: Tensor,  # (rows, V)
    target: Tensor,  # (rows, 1)
    token_weights: Tensor | None,  # (rows, 1)
    softcap: float | None,
    teacher: SoftTargets | Tensor,  # of a file, or logits (rows, V')
    terms: Terms,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """VALUES and 1 with a teacher (rows, NUM_VALUES), the loss's derivatives by the logits (rows, V) in their type, and
    by the bias (V,). Computes in fp32, or in fp64 for logits in fp64. Vocabularies that differ in padding are compared
    on their common part."""
    dtype, weight, temperature = logits.dtype, terms.weight, terms.temperature
    logits = logits.to(torch.float64 if dtype == torch.float64 else torch.float32)
    if softcap is not None:
        logits = (logits / softcap).tanh_().mul_(softcap)
    shares_softmax = temperature == 1 and isinstance(teacher, SoftTargets)
    divergence = None if shares_softmax else compare(logits, teacher, terms)  # frees its copies first
    log_probs = logits.log_softmax(dim=1)
    cross_entropy, (tail, agrees) = -log_probs.gather(1, target), describe_teacher(teacher, log_probs)
    if shares_softmax:
        divergence = diverge_from_top(log_probs, teacher, share=1 - weight, scale=weight)
        d_logits = divergence.d_logits
    else:
        d_logits = log_probs.exp_().mul_(1 - weight)
        compared = d_logits[:, : divergence.d_logits.shape[1]]
        compared.add_(divergence.d_logits, alpha=weight * temperature)
    d_logits.scatter_add_(1, target, d_logits.new_full((), weight - 1).expand_as(target))
    if softcap is not None:
        d_logits.mul_(1 - (logits / softcap).square_())  # tanh' of the capped logits
    losses = (1 - weight) * cross_entropy + weight * temperature**2 * divergence.values
    values = torch.cat([losses, cross_entropy, divergence.values], dim=1)
    if token_weights is not None:
        values, d_logits = values * token_weights, d_logits.mul_(token_weights)
    said = tail, agrees, torch.ones_like(agrees)
    values = torch.cat([values, *(part.to(values.dtype) for part in said)], dim=1)
    return values, d_logits.to(dtype), d_logits.sum(0) if needs_bias else None


def compare(logits: Tensor, teacher: SoftTargets | Tensor, terms: Terms) -> Divergence:
    """The divergence at the terms' temperature."""
    if isinstance(teacher, SoftTargets):
        return diverge_from_top(temper(logits, terms).log_softmax(dim=1), teacher)
    width = min(logits.shape[1], teacher.shape[1])
    teacher = temper(teacher[:, :width].to(logits.dtype), terms)
    return DIVERGE[terms.divergence](temper(logits[:, :width], terms), teacher)


def temper(logits: Tensor, terms: Terms) -> Tensor:
    return logits if terms.temperature == 1 else logits / terms.temperature


def describe_teacher(teacher: SoftTargets | Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:  # -> (rows, 1) each
    """The teacher's probability of tokens that a file does not name, and whether its likeliest token is the model's."""
    if isinstance(teacher, SoftTargets):
        tail, best = teacher.log_q[:, -1:].exp(), teacher.ids[:, :1]
    else:
        best = teacher[:, : log_probs.shape[1]].argmax(dim=1, keepdim=True)
        tail = torch.zeros_like(best)
    return tail, log_probs.gather(1, best) == log_probs.amax(dim=1, keepdim=True)


@dataclass(frozen=True)
class TaughtChunk:
    """The loss of a chunk's tokens: a `MeasureChunk` whose values are `measure_taught_chunk`'s."""

    tokens: TrainedTokens
    targets: TaughtTargets
    terms: Terms
    is_fused: bool = False

    num_values, chunk_bytes = NUM_VALUES, CHUNK_BYTES // 2

    def __call__(self, logits: Tensor, chunk: slice, needs_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens, soft = self.tokens, self.targets.soft
        teacher = next_tokens.compute_logits(self.targets.teacher, chunk) if soft is None else soft.slice(chunk)
        is_fused = self.is_fused and len(logits) > 1
        measure = next_tokens.fuse(measure_taught_chunk) if is_fused else measure_taught_chunk
        weights = None if tokens.token_weights is None else tokens.token_weights[chunk, None]
        return measure(logits, tokens.targets[chunk, None], weights, tokens.softcap, teacher, self.terms, needs_bias)


@dataclass(frozen=True)
class TaughtLoss(TokenLoss):
    """Cross-entropy and divergence; in the start check, without a teacher that reads the row, the former's share."""

    terms: Terms | None = None
    is_online: bool = False

    def prepare(self, row_model: TextRowModel, micro_batch: MicroBatch) -> MicroBatch:
        if not self.is_online:
            return micro_batch
        tokens = row_model.teacher.read(micro_batch, self.read)
        targets = replace(micro_batch.targets, teacher=tokens)  # pyrefly: ignore[unexpected-keyword]
        return micro_batch.replace(targets=targets)

    def sum(self, predicted: TrainedTokens, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        targets = micro_batch.targets
        if targets.soft is None and targets.teacher is None:
            sums = super().sum(predicted, micro_batch, shared=shared)
            return sums._replace(loss=(1 - self.terms.weight) * sums.loss)
        return next_tokens.sum_values(targets, TaughtChunk(predicted, targets, self.terms, self.is_fused))

    def score(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Scores:
        """The scores of a language model, VALUES, and the number of targets that have a teacher."""
        tokens, targets = self.read(row_model, micro_batch), micro_batch.targets
        scores = targets.sum_by_source(next_tokens.score_tokens(tokens))
        taught = scores.new_zeros(len(scores), NUM_VALUES)
        if targets.soft is not None or targets.teacher is not None:
            sums = next_tokens.sum_values(targets, TaughtChunk(tokens, targets, self.terms, self.is_fused))
            taught = sums.reports["source_values"].double()
        return Scores(torch.cat([scores, taught], dim=1))

    def sum_own(self, own: ReferenceForward, targets: TaughtTargets) -> Tensor:
        cross_entropy = (1 - self.terms.weight) * super().sum_own(own, targets)
        if targets.soft is None:
            return cross_entropy
        divergence = compare(own.logits[0, targets.index].float(), targets.soft, self.terms)
        return cross_entropy + self.terms.weight * self.terms.temperature**2 * divergence.values.sum()


@dataclass(frozen=True)
class Taught(CausalLM):
    """Language modelling with a teacher."""

    terms: Terms = field(default_factory=lambda: Terms(0.5, "forward-kl"))
    top_k: int | None = None  # tokens that the files name of each; None: the teacher reads the row
    teacher_scores: str | None = None
    teacher_title: str = "a teacher"

    metrics = CausalLM.metrics | {"teacher_kl": False}

    @classmethod
    def make(cls, settings: ObjectiveSettings, family: Family, task: DataTask, count: CountLabels | None) -> Self:
        o = settings.teacher
        terms = Terms(o.teacher_weight, o.teacher_divergence, o.teacher_temperature)
        if o.teacher_model is None:
            return cls(family, terms=terms, top_k=DEFAULT_TOP_K, teacher_scores=o.teacher_scores)
        return cls(family, terms=terms, teacher_title=f"teacher {name_model(o.teacher_model)}")

    @property
    def title(self) -> str:
        divergence, weight, temperature = self.terms.divergence, self.terms.weight, self.terms.temperature
        return f"{self.name} with {self.teacher_title} ({divergence}, weight {weight:g}, temperature {temperature:g})"

    def with_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        sample = super().with_targets(sample, trainable, num_trained=num_trained)
        return sample if self.top_k is None else sample | {SOFT_COLUMN: self.make_even_records(sample["labels"])}

    def make_even_records(self, labels: np.ndarray) -> np.ndarray:
        return soft_targets.make_even_records(int(np.count_nonzero(labels[1:] != IGNORED)), self.top_k)

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> TaughtTargets:
        """Validation data need not have records."""
        targets, soft = super().pack_targets(samples, row), None
        if self.top_k is not None and SOFT_COLUMN in samples[0]:
            soft = read_records([sample[SOFT_COLUMN] for sample in samples])
            assert len(soft.ids) == len(targets.index), (len(soft.ids), len(targets.index))
        return TaughtTargets(**vars(targets), soft=soft)

    def with_scores(self, sidecars: Sequence[Mapping[str, Any]]) -> "Taught":
        for name, wanted in (("temperature", self.terms.temperature), ("top_k", sidecars[0]["top_k"])):
            found = sorted({sidecar[name] for sidecar in sidecars} | {wanted})
            if len(found) > 1:
                raise ValueError(
                    f"--teacher-scores {self.teacher_scores}: made with other {name.replace('_', ' ')}s"
                    f" ({', '.join(map(str, found))}): all files, and --teacher-temperature, need the same"
                )
        names = ", ".join(sorted({sidecar["teacher_name"] for sidecar in sidecars}))
        return replace(self, top_k=sidecars[0]["top_k"], teacher_title=f"teacher {names}")

    def make_loss(self, *, is_fused: bool = False) -> TaughtLoss:
        return TaughtLoss(is_fused=is_fused, terms=self.terms, is_online=self.top_k is None)

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, float]:
        return describe_values(reports["source_values"].sum(0), divisors[TARGETS])

    def describe_source(self, reports: Mapping[str, np.ndarray], source: int, divisor: float) -> dict[str, Any]:
        return describe_values(reports["source_values"][source], divisor)

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        """`loss` is the cross-entropy, as in other runs; without a teacher its metrics are None."""
        own, values = sums[:3], sums[3:].tolist()
        found = describe_values(values, values[-1])
        del found["cross_entropy"]
        return super().summarize(own, None) | found


def describe_values(values: Sequence[float], num_targets: float) -> dict[str, float | None]:
    """The means of sums (NUM_VALUES,), without the loss: over targets, or over those that have a teacher."""
    _, cross_entropy, *said, num_taught = map(float, values)
    found = {"cross_entropy": cross_entropy / num_targets if num_targets else None}
    return found | {n: value / num_taught if num_taught else None for n, value in zip(VALUES[2:], said, strict=True)}
