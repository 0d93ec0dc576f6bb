"""Keeping what a model knows: the divergence from its start on old samples, beside the loss of the new ones.

Cross-entropy of the new samples / their trained tokens + w * KL(start || model) of the old ones / theirs, over the
global batch: learning without forgetting (arXiv 1606.09282) on samples of what the model knows. Old samples fill
micro-batches of their own. N trained tokens, K tokens that a record names of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mini_trainer.data.columns.base import CountLabels, DataTask, Sample
from mini_trainer.objectives.families.family import Family, MicroBatch, Row
from mini_trainer.objectives.families.text import TextRowModel
from mini_trainer.objectives.next_tokens import CausalLM, NextTokens, TokenLoss, TrainedTokens, sum_values
from mini_trainer.objectives.objective import LossSums, ObjectiveSettings, Scores
from mini_trainer.objectives.soft_targets import (
    SINGLE,
    SOFT_COLUMN,
    TopTokenLoss,
    make_even_records,
    read_records,
    read_top,
)
from mini_trainer.objectives.teachers import VALUES, TaughtChunk, TaughtTargets, Terms

TOP_K = 32  # tokens of the start that are compared one by one; all others are one bucket
OLD = "old"  # divisor of the divergence, and name of what it reports
METRICS = ("kept_kl", "kept_tail", "kept_agreement", "num_kept_tokens")  # of a step
DIVERGENCE = Terms(weight=1.0, divergence="forward-kl")  # of a loss that has no cross-entropy


@dataclass(frozen=True)
class KeepingLoss(TokenLoss):
    """The cross-entropy of new samples, or the weighted divergence of old ones, whose targets are `TaughtTargets`;
    without the start's distributions these are scored."""

    weight: float = 1.0
    top_k: int = TOP_K

    def sum(self, predicted: TrainedTokens, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        """The divergence is a term by itself, beside a loss of 0, which is not finite if the divergence is not."""
        targets = micro_batch.targets
        if not isinstance(targets, TaughtTargets):
            return super().sum(predicted, micro_batch, shared=shared)
        sums = sum_values(targets, TaughtChunk(predicted, targets, DIVERGENCE, self.is_fused))
        extra = self.weight * sums.loss
        return LossSums(0 * extra.detach(), {OLD: extra}, {OLD: sums.reports["source_values"].sum(0)})

    def score(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Scores:
        """Scores new samples as any language model does, and finds the most probable tokens of old ones."""
        if isinstance(micro_batch.targets, TaughtTargets):
            return TopTokenLoss(top_k=self.top_k, num_ids=None).score(row_model, micro_batch)
        return super().score(row_model, micro_batch)


@dataclass(frozen=True)
class Keeping(CausalLM):
    """Language modelling that keeps what the model knows of old samples."""

    weight: float = 1.0
    share: float = 0.0
    top_k: int = TOP_K
    reads_old: bool = False  # packs old samples

    @classmethod
    def make(cls, settings: ObjectiveSettings, family: Family, task: DataTask, count: CountLabels | None) -> Self:
        made, o = super().make(settings, family, task, count), settings.keep
        return replace(made, weight=o.keep_weight, share=o.keep_share)

    @property
    def title(self) -> str:
        return f"{self.name}, keeping the start on old samples (share {self.share:g}, weight {self.weight:g})"

    @property
    def of_old(self) -> "Keeping":
        """The same objective, which packs old samples."""
        return replace(self, reads_old=True)

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> NextTokens:
        targets = super().pack_targets(samples, row)
        if not self.reads_old:
            return targets
        soft = None
        if any(SOFT_COLUMN in sample for sample in samples):
            none = make_even_records(0, self.top_k)  # of an idle sample
            soft = read_records([sample.get(SOFT_COLUMN, none) for sample in samples])
            assert len(soft.ids) == len(targets.index), (len(soft.ids), len(targets.index))
        return TaughtTargets(**vars(targets), soft=soft)

    def pack(self, samples: Sequence[Sample], **options: Any) -> MicroBatch:
        """The load-balancing loss of experts is of the new samples alone."""
        micro_batch = super().pack(samples, **options)
        if not self.reads_old:
            return micro_batch
        row = micro_batch.row
        return micro_batch.replace(row=replace(row, has_targets=torch.zeros_like(row.has_targets)))

    def make_loss(self, *, is_fused: bool = False) -> KeepingLoss:
        return KeepingLoss(self.label_smoothing, is_fused, self.weighting, weight=self.weight, top_k=self.top_k)

    def read_predictions(self, predictions: np.ndarray) -> np.ndarray:  # (N, 2 + 2K + 2) -> (N,)
        """Records of the old samples' trained tokens, from `Scores.predictions` of all ranks."""
        return read_top(predictions, self.top_k, number=SINGLE)

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, float]:
        """Means over the step's old tokens: the divergence, the start's probability of tokens that are not compared one
        by one, and whether its likeliest token is the model's."""
        num_tokens = int(divisors[OLD])
        _, _, *kept = reports[OLD][: len(VALUES)] / (num_tokens or 1)
        own = dict(zip(METRICS, [*map(float, kept), num_tokens], strict=True))
        return super().describe_step(reports, divisors) | own
