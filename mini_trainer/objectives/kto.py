"""KTO: learning from answers that are good or bad (arXiv 2402.01306).

The loss of an answer is 1 - sigmoid(beta (r - z)) if it is good, and 1 - sigmoid(beta (z - r)) if it is bad, where r is
its log-ratio to the reference model. The point of reference z is the mean log-ratio of unrelated answers to the prompts
of the *global* batch, at least 0; it has no gradient. S samples in a micro-batch, N trained tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mini_trainer.data.columns.base import IGNORED, LENGTHS_COLUMN, CountLabels, DataTask, Sample
from mini_trainer.data.columns.preference_columns import GOOD_COLUMN, PAIR_WEIGHT_COLUMN, REFERENCE_COLUMN
from mini_trainer.objectives import preferences
from mini_trainer.objectives.families.family import Family, MicroBatch, ReferenceForward, Row
from mini_trainer.objectives.families.text import TextRowModel
from mini_trainer.objectives.next_tokens import CausalLM, TrainedTokens
from mini_trainer.objectives.objective import TARGETS, LossSums, ObjectiveSettings, Reference, Scores

KTO = "kto"
BETA = 0.1


@dataclass(kw_only=True)
class FeedbackTargets(preferences.AnswerTargets):
    """One answer of each sample; `reference` is of the answer and of the unrelated one."""

    good: Tensor  # (S,) fp32: 1 or 0
    ahead: MicroBatch | None = None  # the prompts with unrelated answers; without targets for samples that have none


@dataclass(frozen=True)
class KTOLoss(preferences.AnswerLoss):
    """The loss of good and bad answers, each with its weight."""

    beta: float = BETA
    weight_ratio: float = 1.0

    looks_ahead = True

    def look_ahead(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Tensor:  # (2,) fp64
        """Summed log-ratios of the unrelated answers, and their number."""
        ratios, is_there = self.read_unrelated(row_model, micro_batch)
        return torch.stack([ratios.sum(), is_there.sum()])

    def read_unrelated(self, row_model: TextRowModel, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:  # (S,) each
        """The log-ratio of each sample's unrelated answer, 0 if it has none, and whether it has one (0, 1), in fp64."""
        targets = micro_batch.targets
        logps = self.sum_logps(self.read(row_model, targets.ahead), targets.ahead).double()
        is_there = (targets.ahead.targets.lengths[:, 0] > 0).double()
        reference = 0 if targets.reference is None else targets.reference[:, 1].double()
        return (logps - reference) * is_there, is_there

    def sum_kinds(self, good: Tensor, weights: Tensor, ratios: Tensor, logps: Tensor) -> Tensor:  # (S,) each -> (2, 3)
        """Summed weights, rewards and log-probabilities of good and of bad answers."""
        sums = torch.stack([weights, weights * self.beta * ratios, weights * logps])
        return torch.stack([good, 1 - good]) @ sums.T

    def measure(self, ratios: Tensor, *, point: Tensor | float, good: Tensor, weights: Tensor) -> Tensor:  # (S,)
        signs, weights = 2 * good - 1, weights * torch.where(good > 0, self.weight_ratio, 1.0)
        return weights * (1 - torch.sigmoid(self.beta * signs * (ratios - point)))

    def sum(self, predicted: TrainedTokens, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        """`shared`: None in the start check, where the point of reference is 0."""
        targets, row_group = micro_batch.targets, micro_batch.row.row_group
        assert targets.reference is not None, "the reference was not computed"
        point = 0.0 if shared is None else (shared[0] / shared[1].clamp(min=1)).clamp(min=0).float()
        logps = self.sum_logps(predicted, micro_batch)
        ratios = logps - targets.reference[:, 0]
        good, weights = targets.good, targets.sample_weights
        losses = self.measure(ratios, point=point, good=good, weights=weights)
        num_ranks = 1 if row_group is None else row_group.size
        kinds = self.sum_kinds(good, weights, ratios.detach(), logps.detach())
        reports = {"feedback_sums": kinds / num_ranks, "feedback_point": weights.sum() * point / num_ranks}
        reports |= targets.report_sources(losses / num_ranks, weights / num_ranks)
        loss = losses.sum() if row_group is None else preferences.count_once(losses.sum(), num_ranks)
        return LossSums(loss, reports=reports)

    def score(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Scores:
        """Sums: both log-probabilities, and 1. Predictions: whether an answer is good, its weight, its log-ratio and
        log-probability, the unrelated answer's log-ratio and whether there is one."""
        targets, row_group = micro_batch.targets, micro_batch.row.row_group
        logps = self.sum_logps(self.read(row_model, micro_batch), micro_batch).double()
        unrelated, is_there = self.read_unrelated(row_model, micro_batch)
        reference = torch.zeros(len(logps), 2, device=logps.device) if targets.reference is None else targets.reference
        own, weights = logps - reference[:, 0], targets.sample_weights
        sums = torch.stack([logps, unrelated + reference[:, 1] * is_there, torch.ones_like(logps)], dim=1)
        samples = torch.nonzero(weights > 0)[:, 0] if row_group is None or row_group.rank == 0 else weights[:0].long()
        numbers = [samples, samples * 0, targets.good, weights, own, logps, unrelated, is_there]
        rows = [column if len(column) == len(samples) else column[samples] for column in numbers]
        rows = torch.stack([column.double() for column in rows], dim=1)
        num_ranks = 1 if row_group is None else row_group.size
        return Scores(targets.sum_by_source(sums / num_ranks), rows)

    def sum_own(self, own: ReferenceForward, targets: FeedbackTargets) -> Tensor:
        log_probs = own.logits[0].float().log_softmax(-1)[targets.index, targets.labels[targets.index]]
        ratios, weights = log_probs.sum()[None] - targets.reference[:, 0], targets.sample_weights
        return self.measure(ratios, point=0.0, good=targets.good, weights=weights)[0]


def read_reference(sums: np.ndarray) -> np.ndarray:  # (samples, 3) -> (samples, 2) fp32
    return (sums[:, :2] / sums[:, 2:]).astype(np.float32)


@dataclass(frozen=True)
class Feedback(CausalLM):
    """Answers of a language model that are good or bad."""

    beta: float = BETA
    weight_ratio: float = 1.0

    name = KTO
    metrics = {"loss": False, "rewards/margins": True}  # noqa: RUF012
    num_trained_sequences = 1

    @classmethod
    def make(cls, settings: ObjectiveSettings, family: Family, task: DataTask, count: CountLabels | None) -> Self:
        o = settings.preference
        beta = BETA if o.preference_beta is None else o.preference_beta
        return cls(family, beta=beta, weight_ratio=o.kto_weight_ratio)

    @property
    def reference(self) -> Reference:
        return Reference(REFERENCE_COLUMN, read_reference)

    def with_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        """A good answer alone."""
        sample = super().with_targets(sample, trainable, num_trained=num_trained)
        weight, reference = np.array([0 if num_trained == 0 else 1], np.float32), np.zeros(2, np.float32)
        return sample | {GOOD_COLUMN: preferences.ONE, PAIR_WEIGHT_COLUMN: weight, REFERENCE_COLUMN: reference}

    def pack(self, samples: Sequence[Sample], **options: Any) -> MicroBatch:
        """The answers in one row, and the unrelated ones in another, which only the pass ahead of the step reads."""
        unrelated = [take_sequence(sample, 1) for sample in samples]
        ahead = super().pack(
            [self.make_idle_sample() if sample is None else sample for sample in unrelated],
            row_group=options.get("row_group"),
        )
        micro_batch = super().pack([take_sequence(sample, 0) for sample in samples], **options)
        micro_batch.targets.ahead = ahead
        return micro_batch

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> FeedbackTargets:
        targets = super().pack_targets(samples, row)
        places = targets.find_sequences(row)
        return FeedbackTargets(
            **vars(targets),
            places=places,
            lengths=torch.bincount(places, minlength=len(samples))[:, None].float(),
            good=preferences.gather_numbers(samples, GOOD_COLUMN, preferences.ONE)[:, 0],
            **preferences.gather_sample_numbers(samples),
            reference=preferences.gather_reference(samples),
        )

    def weigh(self, num_targets: int, num_tokens: int, samples: Iterable[Sample]) -> dict[str, float]:
        samples = list(samples)
        num_tokens -= sum(map(count_unrelated_tokens, samples))  # which are no part of what trains
        return super().weigh(num_targets, num_tokens, ()) | {TARGETS: preferences.weigh_samples(samples)}

    def make_loss(self, *, is_fused: bool = False) -> KTOLoss:
        return KTOLoss(is_fused=is_fused, beta=self.beta, weight_ratio=self.weight_ratio)

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, Any]:
        point = float(reports["feedback_point"]) / (divisors[TARGETS] or 1)
        return describe_kinds(*reports["feedback_sums"], point)

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        """The point of reference is that of all the data that is summarized."""
        good, weights, ratios, logps, unrelated, is_there = torch.from_numpy(predictions).unbind(1)
        point = max(0.0, float(unrelated.sum() / is_there.sum().clamp(min=1)))
        kto = self.make_loss()
        loss = kto.measure(ratios, point=point, good=good, weights=weights).sum() / weights.sum()
        return {"loss": float(loss)} | describe_kinds(*kto.sum_kinds(good, weights, ratios, logps).numpy(), point)


def take_sequence(sample: Sample, number: int) -> Sample | None:
    """One of a sample's sequences with its labels; None if there are not as many."""
    lengths = sample.get(LENGTHS_COLUMN)
    if lengths is None:
        return sample if number == 0 else None
    if number >= len(lengths):
        return None
    start = int(lengths[:number].sum())
    part = slice(start, start + int(lengths[number]))
    rest = {name: value for name, value in sample.items() if name != LENGTHS_COLUMN}
    return rest | {"input_ids": sample["input_ids"][part], "labels": sample["labels"][part]}


def count_unrelated_tokens(sample: Sample) -> int:
    """Tokens after the answer; 0 if the answer has no targets."""
    labels = take_sequence(sample, 0)["labels"]
    return len(sample["labels"]) - len(labels) if (labels[1:] != IGNORED).any() else 0


def describe_kinds(good: np.ndarray, bad: np.ndarray, point: float) -> dict[str, Any]:
    """Means over good (`chosen`) and bad (`rejected`) answers, as TRL calls them; None for a kind that is missing."""
    means = {}
    for name, sums in (("chosen", good), ("rejected", bad)):
        weight, rewards, logps = sums.tolist()
        means[f"rewards/{name}"] = rewards / weight if weight else None
        means[f"logps/{name}"] = logps / weight if weight else None
    chosen, rejected = means["rewards/chosen"], means["rewards/rejected"]
    return means | {"rewards/margins": None if chosen is None or rejected is None else chosen - rejected, "kl": point}
