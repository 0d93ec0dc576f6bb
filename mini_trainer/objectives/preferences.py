"""Learning from preferences: DPO and its relatives on pairs of a chosen and a rejected answer.

The losses are functions of a pair's few numbers; beta scales rewards, that is log-ratios of the model to its reference.
KTO and reward models share what is here of whole answers: the summed log-probability of each, and means over samples.
T tokens in a packed row, N trained tokens among them, S answers or samples, P pairs, H hidden size, V vocabulary size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from mini_trainer.objectives.families.family import Family, MicroBatch, ReferenceForward, Row, Targets
from mini_trainer.objectives.families.text import TextRowModel
from mini_trainer.objectives.objective import TARGETS, LossSums, ObjectiveSettings, Reference, Scores

ZERO, ONE = np.zeros(1, np.float32), np.ones(1, np.float32)


@dataclass(kw_only=True)
class SampleTargets(Targets):
    """Targets whose losses are of whole samples; `sources` are of these."""

    margins: Tensor  # (S,) fp32
    sample_weights: Tensor  # (S,) fp32

    def with_sources(self, sources: np.ndarray, sample_of: np.ndarray) -> Self:
        """An idle sample, which comes last, is of the first data set."""
        return replace(self, sources=torch.from_numpy(np.pad(sources, (0, len(self.margins) - len(sources)))))

    def find_sources(self) -> Tensor:  # (S,) int64
        return torch.zeros_like(self.margins, dtype=torch.int64) if self.sources is None else self.sources


def gather_sample_numbers(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The fields of `SampleTargets`."""
    columns = {"margins": (MARGIN_COLUMN, ZERO), "sample_weights": (PAIR_WEIGHT_COLUMN, ONE)}
    return {name: gather_numbers(samples, *column)[:, 0] for name, column in columns.items()}


def gather_reference(samples: Sequence[Sample]) -> Tensor | None:  # (S, 2) fp32
    return gather_numbers(samples, REFERENCE_COLUMN, np.zeros(2)) if REFERENCE_COLUMN in samples[0] else None


def gather_numbers(samples: Sequence[Sample], name: str, default: np.ndarray) -> Tensor:  # (S, ...) fp32
    """An optional column of a fixed number of values for each sample."""
    return torch.from_numpy(np.array([sample.get(name, default) for sample in samples], np.float32))


def weigh_samples(samples: Iterable[Sample]) -> float:
    """The divisor of the sum over samples."""
    return sum(float(sample.get(PAIR_WEIGHT_COLUMN, ONE)[0]) for sample in samples)


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
        needs_hidden, *needs_head = ctx.needs_input_grad[:3]
        nll = torch.zeros(num_sums, 1, dtype=torch.float32, device=hidden.device)
        measure = next_tokens.CrossEntropy(replace(tokens, token_weights=None), is_fused=compiled)
        options = dict(needs=(needs_hidden, False, False), chunk_bytes=chunk_bytes, by_source=(places, nll))
        _, (d_hidden, *_) = next_tokens.sum_chunks(hidden, weight, bias, measure, **options)
        ctx.measure, ctx.chunk_bytes = measure, chunk_bytes
        ctx.save_for_backward(d_hidden, places, *((hidden, weight, bias) if any(needs_head) else ()))
        return 0 - nll[:, 0]  # 0 and not -0 for an answer without tokens

    @staticmethod
    @memory_kind("loss")
    def backward(ctx, d_sums):
        d_hidden, places, *head = ctx.saved_tensors
        scale = -d_sums[places]  # (N,): the losses are the negative log-probabilities
        if d_hidden is not None:
            d_hidden = (d_hidden.float() * scale[:, None]).to(d_hidden.dtype)
        d_head = None, None
        if head:
            measure = replace(ctx.measure, tokens=replace(ctx.measure.tokens, token_weights=scale))
            needs = (False, *ctx.needs_input_grad[1:3])
            _, (_, *d_head) = next_tokens.sum_chunks(*head, measure, needs=needs, chunk_bytes=ctx.chunk_bytes)
            d_head = [None if own is None else own.to(part.dtype) for own, part in zip(d_head, head[1:], strict=True)]
        return d_hidden, *d_head, None, None, None, None, None


@dataclass(kw_only=True)
class AnswerTargets(SampleTargets, next_tokens.NextTokens):
    """The next tokens of answers; samples have one or several."""

    places: Tensor  # (N,) int64: the answer that each token is of
    lengths: Tensor  # (samples, answers of each) fp32: trained tokens
    reference: Tensor | None = None  # (samples, 2) fp32: log-probabilities by the reference model; None: not known

    def take_part(self, part: slice) -> Self:
        first, end = np.searchsorted(self.index.numpy(), [part.start, part.stop])
        places = self.places[first:end].contiguous()
        return replace(super().take_part(part), places=places, sources=self.sources)

    def gather(self, row_group: RowGroup, *, num_tokens: int) -> Self:
        own = super().gather(row_group, num_tokens=num_tokens)
        return replace(own, places=torch.zeros_like(own.index))


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
        return Pairs(logps, reference * self.kind.has_reference, targets.lengths, targets.margins)

    def measure(self, pairs: Pairs, targets: AnswerTargets) -> Tensor:  # (P, len(SUMS))
        """Sums over pairs; `loss` with gradients."""
        weights, beta = targets.sample_weights, self.strength.beta
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
        reports |= targets.report_sources(sums[:, SUMS.index("loss")], sums[:, SUMS.index("pairs")])
        return LossSums(loss, {CHOSEN_TOKENS: self.nll_weight * nll} if self.nll_weight else {}, reports)

    def score(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Scores:
        pairs = self.find_pairs(self.read(row_model, micro_batch), micro_batch)
        sums = self.measure(pairs, micro_batch.targets).double()
        if micro_batch.row.row_group is not None:
            sums = sums / micro_batch.row.row_group.size
        return Scores(micro_batch.targets.sum_by_source(sums))

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
            **gather_sample_numbers(samples),
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
