"""Reward models: one number for each of two answers, the chosen one's the larger (Bradley-Terry).

n sequences in a packed row, N of them with a target, P pairs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mini_trainer.data.columns.base import CountLabels, DataTask, Sample, list_sequences
from mini_trainer.data.columns.preference_columns import PAIR_WEIGHT_COLUMN
from mini_trainer.objectives import preferences
from mini_trainer.objectives.families.classifier import ClassifierFamily, ClassifierRowModel, Labels
from mini_trainer.objectives.families.family import MicroBatch, ReferenceForward, Row
from mini_trainer.objectives.objective import TARGETS, Loss, LossSums, Objective, ObjectiveSettings, Scores

REWARD = "reward"
# The problem type has transformers' pipeline and vLLM give the number itself and not its sigmoid.
LABELS = Labels((REWARD,), "regression")
SUMS = ("loss", "rewards/accuracies", "rewards/chosen", "rewards/rejected", "pairs")  # columns of `Scores.sums`


@dataclass(kw_only=True)
class RewardTargets(preferences.SampleTargets):
    """The answers of each pair; `index` is of sequences."""

    places: Tensor  # (N,) int64: twice the sequence's pair, and 1 more for the rejected answer

    def find_sequences(self, row: Row) -> Tensor:
        return self.index


@dataclass(frozen=True)
class RewardLoss(Loss):
    """-log sigmoid(chosen - rejected - margin) (arXiv 2203.02155, eq. 1; margins: arXiv 2307.09288, section 3.2.2), and
    `centering` times (chosen + rejected)^2, which keeps their mean near 0 (arXiv 2312.09244)."""

    centering: float = 0.0

    def measure(self, rewards: Tensor, targets: RewardTargets) -> Tensor:  # (N,) -> (P, len(SUMS))
        by_place = rewards.new_zeros(2 * len(targets.margins)).index_add(0, targets.places, rewards)
        chosen, rejected = by_place.view(-1, 2).unbind(1)
        losses = -logsigmoid(chosen - rejected - targets.margins) + self.centering * (chosen + rejected).square()
        ones = torch.ones_like(losses)
        columns = torch.stack([losses, (chosen > rejected).float(), chosen, rejected, ones], dim=1)
        return targets.sample_weights[:, None] * columns

    def predict(self, row_model: ClassifierRowModel, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:  # (N,)
        return row_model.classify(hidden, micro_batch.row, micro_batch.targets.index)[:, 0]

    def sum(self, predicted: Tensor, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        targets = micro_batch.targets
        sums = self.measure(predicted, targets)
        loss, sums = sums[:, 0].sum(), sums.detach()
        return LossSums(loss, reports={"pair_sums": sums.sum(0)} | targets.report_sources(sums[:, 0], sums[:, -1]))

    def score(self, row_model: ClassifierRowModel, micro_batch: MicroBatch) -> Scores:
        targets = micro_batch.targets
        return Scores(targets.sum_by_source(self.measure(self.read(row_model, micro_batch), targets).double()))

    def sum_own(self, own: ReferenceForward, targets: RewardTargets) -> Tensor:
        return self.measure(own.logits[0].float(), targets)[0, 0]


@dataclass(frozen=True)
class Rewards(Objective):
    """A reward model: a classifier of sequences with one output."""

    family: ClassifierFamily
    centering: float = 0.0

    name = REWARD
    pipeline_tag = "text-classification"
    metrics = {"loss": False, "rewards/accuracies": True, "rewards/margins": True}  # noqa: RUF012

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> ClassifierFamily:
        return ClassifierFamily(of_tokens=False, seed=settings.head_seed, labels=LABELS)

    @classmethod
    def make(
        cls, settings: ObjectiveSettings, family: ClassifierFamily, task: DataTask, count: CountLabels | None
    ) -> "Rewards":
        return cls(family, centering=settings.preference.reward_centering)

    def with_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        """One sequence: a chosen answer alone."""
        return sample | {PAIR_WEIGHT_COLUMN: np.array([0 if num_trained == 0 else 1], np.float32)}

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> RewardTargets:
        """Pairs of which one answer is missing, as in checks, have a reward of 0 for it."""
        places = [2 * pair + side for pair, sample in enumerate(samples) for side in range(len(list_sequences(sample)))]
        numbers = preferences.gather_sample_numbers(samples)
        return RewardTargets(torch.arange(len(places)), places=torch.tensor(places), **numbers)

    def weigh(self, num_targets: int, num_tokens: int, samples: Iterable[Sample]) -> dict[str, float]:
        return super().weigh(num_targets, num_tokens, ()) | {TARGETS: preferences.weigh_samples(samples)}

    def make_loss(self, *, is_fused: bool = False) -> RewardLoss:
        return RewardLoss(self.centering)

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, float]:
        described = preferences.describe_means(SUMS, reports["pair_sums"])
        del described["loss"]  # the step's own
        return described

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        return preferences.describe_means(SUMS, sums.numpy())
