"""Learning from preferences: DPO and its relatives on pairs of a chosen and a rejected answer.

The losses are functions of a pair's few numbers; beta scales rewards, that is log-ratios of the model to its reference.
KTO and reward models share what is here of whole answers: the summed log-probability of each, and means over samples.
T tokens in a packed row, N trained tokens among them, S answers or samples, P pairs, H hidden size, V vocabulary size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, sigmoid

from mini_trainer.data.columns.base import (
    IGNORED,
    LENGTHS_COLUMN,
    PREFERENCE,
    CountLabels,
    DataTask,
    Sample,
    list_sequences,
)
from mini_trainer.data.columns.preference_columns import MARGIN_COLUMN, PAIR_WEIGHT_COLUMN, REFERENCE_COLUMN
from mini_trainer.distributed.devices import memory_kind
from mini_trainer.distributed.world import RowGroup, sum_parts
from mini_trainer.objectives import next_tokens
from mini_trainer.objectives.families.family import Family, MicroBatch, ReferenceForward, Row
from mini_trainer.objectives.families.text import TextFamily, TextRowModel
from mini_trainer.objectives.objective import TARGETS, LossSums, ObjectiveSettings, Reference, Scores

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


def gather_reference(samples: Sequence[Sample]) -> Tensor | None:  # (S, 2) fp32
    return gather_numbers(samples, REFERENCE_COLUMN, np.zeros(2)) if REFERENCE_COLUMN in samples[0] else None


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
    tokens: next_tokens.TrainedTokens,
    places: Tensor,  # (N,) int64: the sum that each token belongs to
    num_sums: int,
    *,
    chunk_bytes: int = next_tokens.CHUNK_BYTES,
    compiled: bool = False,
) -> Tensor:  # (S,) fp32
    """Each sum of its tokens' log-probabilities, with gradients. The hidden states' gradients are computed with the
    forward pass, as if each sum's derivative were 1, and scaled in the backward pass, when it is known: the body of the
    model runs once. Only a head that trains is multiplied again."""
    return _SumLogps.apply(tokens.hidden, tokens.weight, tokens.bias, tokens, places, num_sums, chunk_bytes, compiled)


class _SumLogps(torch.autograd.Function):
    @staticmethod
    @memory_kind("loss")
    def forward(ctx, hidden, weight, bias, tokens, places, num_sums, chunk_bytes, compiled):
        needs_hidden = ctx.needs_input_grad[0]
        sums = torch.zeros(num_sums, dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        ctx.tokens, ctx.compiled = tokens, compiled
        ctx.chunks = next_tokens.iterate_chunks(len(hidden), len(weight), chunk_bytes=chunk_bytes)
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
    d_weight = next_tokens.make_total(weight, hidden) if needs_weight else None
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
    for chunk in ctx.chunks:
        _, d_logits, d_bias_part = measure_chunk(hidden, weight, bias, ctx, chunk, scale=scale[chunk, None])
        if needs_weight:
            next_tokens.add_product(d_weight, d_logits.T, hidden[chunk], is_first=chunk.start == 0)
        if needs_bias:
            d_bias += d_bias_part
        del d_logits
    return None if d_weight is None else d_weight.to(weight.dtype), None if d_bias is None else d_bias.to(bias.dtype)


def measure_chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ctx, chunk: slice, *, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`sum_chunk_loss` of the chunk's tokens, each weighted by `scale`."""
    logits = torch.nn.functional.linear(hidden[chunk], weight, bias)  # (rows, V)
    measure = next_tokens.fuse_chunk_loss() if ctx.compiled and len(logits) > 1 else next_tokens.sum_chunk_loss
    tokens, needs_bias = ctx.tokens, ctx.needs_input_grad[2]
    return measure(logits, tokens.targets[chunk, None], scale, tokens.softcap, 0.0, needs_bias)


@dataclass(kw_only=True)
class AnswerTargets(next_tokens.NextTokens):
    """The next tokens of answers; samples have one or several."""

    places: Tensor  # (N,) int64: the answer that each token is of
    lengths: Tensor  # (samples, answers of each) fp32: trained tokens
    numbers: SampleNumbers
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
class AnswerLoss(next_tokens.TokenLoss):
    """A loss of answers' summed log-probabilities."""

    def sum_logps(self, tokens: next_tokens.TrainedTokens, micro_batch: MicroBatch) -> Tensor:  # (S,) fp32
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


@dataclass(frozen=True)
class Pairs:
    """Summed log-probabilities of the answers' trained tokens; columns: chosen, rejected."""

    logps: Tensor  # (P, 2) fp32, with gradients
    reference: Tensor  # (P, 2), the reference model's; zeros where the loss has none
    lengths: Tensor  # (P, 2) trained tokens
    margins: Tensor  # (P,)

    @property
    def ratios(self) -> Tensor:  # (P, 2)
        return self.logps - self.reference

    @property
    def difference(self) -> Tensor:  # (P,)
        return self.ratios[:, 0] - self.ratios[:, 1]

    @property
    def mean_logps(self) -> Tensor:  # (P, 2)
        return self.logps / self.lengths.clamp(min=1)


@dataclass(frozen=True)
class Strength:
    """The numbers of a loss that options set."""

    beta: float
    smoothing: float = 0.0  # assumed share of pairs whose answers are swapped
    gamma: float = 0.0  # SimPO's target margin of rewards


def dpo(pairs: Pairs, strength: Strength) -> Tensor:
    """DPO (arXiv 2305.18290, eq. 7); smoothing: conservative DPO (Mitchell 2023); margins: ODPO (arXiv 2402.10571)."""
    logits = strength.beta * pairs.difference - pairs.margins
    return -(1 - strength.smoothing) * logsigmoid(logits) - strength.smoothing * logsigmoid(-logits)


def ipo(pairs: Pairs, strength: Strength) -> Tensor:
    """IPO (arXiv 2310.12036, eq. 17) on log-ratios per token, as its authors advised TRL."""
    ratios = pairs.ratios / pairs.lengths.clamp(min=1)
    return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * strength.beta)).square()


def apo_zero(pairs: Pairs, strength: Strength) -> Tensor:
    """APO-zero (arXiv 2408.06266): raises chosen answers and lowers rejected ones."""
    chosen, rejected = (strength.beta * pairs.ratios).unbind(1)
    return 1 - sigmoid(chosen) + sigmoid(rejected)


def simpo(pairs: Pairs, strength: Strength) -> Tensor:
    """SimPO (arXiv 2405.14734, eq. 6): rewards per token, without a reference."""
    means = pairs.mean_logps
    return -logsigmoid(strength.beta * (means[:, 0] - means[:, 1]) - strength.gamma - pairs.margins)


def orpo(pairs: Pairs, strength: Strength) -> Tensor:
    """ORPO's odds ratio (arXiv 2403.07691, eq. 6), weighted by beta; the whole loss adds the chosen answers' NLL."""
    means = pairs.mean_logps
    odds = means - torch.log1p(-means.exp().clamp(max=1 - 1e-7))
    return -strength.beta * logsigmoid(odds[:, 0] - odds[:, 1])


@dataclass(frozen=True)
class LossKind:
    """A loss, its requirements and its defaults."""

    measure: Callable[[Pairs, Strength], Tensor]  # (P,)
    has_reference: bool = True
    takes_margins: bool = False
    beta: float = 0.1
    gamma: float | None = None
    nll_weight: float = 0.0


LOSSES = {
    "dpo": LossKind(dpo, takes_margins=True),
    "ipo": LossKind(ipo),
    "apo-zero": LossKind(apo_zero),
    "simpo": LossKind(simpo, has_reference=False, takes_margins=True, beta=2.0, gamma=0.5),
    "orpo": LossKind(orpo, has_reference=False, nll_weight=1.0),
}


DEFAULT_STRENGTH = Strength(LOSSES["dpo"].beta)
CHOSEN_TOKENS = "chosen_tokens"  # divisor of the chosen answers' NLL
# Sums over pairs, by their columns in `Scores.sums`.
SUMS = ("loss", "rewards/accuracies", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
        "pairs", "nll", CHOSEN_TOKENS)  # fmt: skip


@dataclass(frozen=True)
class PreferenceLoss(AnswerLoss):
    """A loss of pairs, and with a weight the negative log-likelihood of the chosen answers."""

    kind: LossKind = LOSSES["dpo"]
    strength: Strength = DEFAULT_STRENGTH
    nll_weight: float = 0.0

    def find_pairs(self, tokens: next_tokens.TrainedTokens, micro_batch: MicroBatch) -> Pairs:
        return self.make_pairs(self.sum_logps(tokens, micro_batch).view(-1, 2), micro_batch.targets)

    def make_pairs(self, logps: Tensor, targets: AnswerTargets) -> Pairs:
        reference = torch.zeros_like(logps) if targets.reference is None else targets.reference
        return Pairs(logps, reference * self.kind.has_reference, targets.lengths, targets.numbers.margins)

    def measure(self, pairs: Pairs, targets: AnswerTargets) -> Tensor:  # (P, len(SUMS))
        """Sums over pairs; `loss` with gradients."""
        weights, beta = targets.numbers.weights, self.strength.beta
        rewards = beta * (pairs.ratios if self.kind.has_reference else pairs.mean_logps).detach()
        logps = pairs.logps.detach()
        columns = [
            weights * self.kind.measure(pairs, self.strength),
            weights * (rewards[:, 0] > rewards[:, 1]),
            *(weights[:, None] * rewards).unbind(1),
            *(weights[:, None] * logps).unbind(1),
            weights,
            -logps[:, 0],
            targets.lengths[:, 0],
        ]
        return torch.stack(columns, dim=1)

    def sum(
        self, predicted: next_tokens.TrainedTokens, micro_batch: MicroBatch, *, shared: Tensor | None = None
    ) -> LossSums:
        targets, row_group = micro_batch.targets, micro_batch.row.row_group
        assert targets.reference is not None or not self.kind.has_reference, "the reference was not computed"
        pairs = self.find_pairs(predicted, micro_batch)
        sums = self.measure(pairs, targets)
        loss = sums[:, 0].sum()
        nll = -pairs.logps[:, 0].sum()
        if row_group is not None:  # all ranks that share the row know the whole loss, which counts once
            sums, loss, nll = sums / row_group.size, count_once(loss, row_group.size), count_once(nll, row_group.size)
        sums = sums.detach()
        reports = {"pair_sums": sums.sum(0)}
        if targets.num_sources > 1:
            by_source = sum_by_source(sums, targets.numbers, targets.num_sources)
            reports["source_losses"] = by_source[:, SUMS.index("loss")]
            reports["source_divisors"] = by_source[:, SUMS.index("pairs")]
        return LossSums(loss, {CHOSEN_TOKENS: self.nll_weight * nll} if self.nll_weight else {}, reports)

    def score(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Scores:
        pairs = self.find_pairs(self.read(row_model, micro_batch), micro_batch)
        sums = self.measure(pairs, micro_batch.targets).double()
        if micro_batch.row.row_group is not None:
            sums = sums / micro_batch.row.row_group.size
        return Scores(sum_by_source(sums, micro_batch.targets.numbers, micro_batch.targets.num_sources))

    def sum_own(self, own: ReferenceForward, targets: AnswerTargets) -> Tensor:
        log_probs = own.logits[0].float().log_softmax(-1)[targets.index, targets.labels[targets.index]]
        logps = log_probs.new_zeros(2).index_add(0, torch.zeros_like(targets.index), log_probs).view(1, 2)
        pairs = self.make_pairs(logps, targets)
        return self.measure(pairs, targets)[0, 0] - self.nll_weight * logps[0, 0]


def read_reference(sums: np.ndarray) -> np.ndarray:  # (rows, len(SUMS)) -> (rows, 2) fp32
    columns = [SUMS.index("logps/chosen"), SUMS.index("logps/rejected")]
    return (sums[:, columns] / sums[:, [SUMS.index("pairs")]]).astype(np.float32)


@dataclass(frozen=True)
class Preferences(next_tokens.CausalLM):
    """Preferences between two answers of a language model."""

    family: Family = field(default_factory=TextFamily)
    kind: LossKind = LOSSES["dpo"]
    strength: Strength = DEFAULT_STRENGTH
    nll_weight: float = 0.0

    name = PREFERENCE
    metrics = {"loss": False, "nll_loss": False, "rewards/accuracies": True, "rewards/margins": True}  # noqa: RUF012

    @classmethod
    def make(cls, settings: ObjectiveSettings, family: Family, task: DataTask, count: CountLabels | None) -> Self:
        """Problems with the options are found before."""
        o = settings.preference
        kind = LOSSES[o.preference_loss]
        strength = Strength(
            kind.beta if o.preference_beta is None else o.preference_beta,
            settings.classification.label_smoothing,
            (kind.gamma or 0.0) if o.preference_gamma is None else o.preference_gamma,
        )
        nll_weight = kind.nll_weight if o.preference_nll_weight is None else o.preference_nll_weight
        return cls(family, kind=kind, strength=strength, nll_weight=nll_weight)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.kind.measure.__name__.replace('_', '-')}, beta {self.strength.beta:g})"

    @property
    def reference(self) -> Reference | None:
        return Reference(REFERENCE_COLUMN, read_reference) if self.kind.has_reference else None

    def with_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        """A short sample is one sequence: a chosen answer alone; of longer ones each half is an answer."""
        sample = super().with_targets(sample, trainable, num_trained=num_trained)
        weight = np.array([0 if num_trained == 0 else 1], np.float32)
        return sample | {PAIR_WEIGHT_COLUMN: weight, REFERENCE_COLUMN: np.zeros(2, np.float32)}

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> AnswerTargets:
        """Pairs of which one answer is missing, as in checks, have a log-probability of 0 for it."""
        if not self.kind.takes_margins and any(sample.get(MARGIN_COLUMN, ZERO)[0] for sample in samples):
            raise ValueError(
                "the data has margins, which this --preference-loss does not use: give dpo or simpo, or leave the"
                " column out (process_data.py --ignore-columns margin)"
            )
        targets = super().pack_targets(samples, row)
        sides = [2 * pair + side for pair, sample in enumerate(samples) for side in range(len(list_sequences(sample)))]
        places = np.array(sides)[targets.find_sequences(row).numpy()]
        return AnswerTargets(
            **vars(targets),
            places=torch.from_numpy(places),
            lengths=torch.from_numpy(np.bincount(places, minlength=2 * len(samples)).astype(np.float32).reshape(-1, 2)),
            numbers=gather_sample_numbers(samples),
            reference=gather_reference(samples),
        )

    def weigh(self, num_targets: int, num_tokens: int, samples: Iterable[Sample]) -> dict[str, float]:
        samples = list(samples)
        chosen = [sample["labels"][: sample[LENGTHS_COLUMN][0]] for sample in samples]  # the first answers
        num_chosen = sum(int(np.count_nonzero(labels != IGNORED)) for labels in chosen)
        own = {TARGETS: weigh_samples(samples), CHOSEN_TOKENS: num_chosen}
        return super().weigh(num_targets, num_tokens, ()) | own

    def make_loss(self, *, is_fused: bool = False) -> PreferenceLoss:
        return PreferenceLoss(is_fused=is_fused, kind=self.kind, strength=self.strength, nll_weight=self.nll_weight)

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, float]:
        described = describe_sums(reports["pair_sums"])
        del described["loss"]  # the step's own
        return described

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        return describe_sums(sums.numpy())


def describe_sums(sums: np.ndarray) -> dict[str, float]:
    """Means over pairs, and over the chosen answers' tokens."""
    means = describe_means(SUMS, sums)
    nll, num_tokens = means.pop("nll"), means.pop(CHOSEN_TOKENS)
    return means | {"nll_loss": nll / (num_tokens or 1)}
