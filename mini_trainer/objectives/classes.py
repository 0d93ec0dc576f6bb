"""Classification of sequences and of tokens, and regression, on encoders and decoders.

T tokens in a packed row, n sequences in it, N targets, C classes, K numbers of a target.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mini_trainer.data.columns.base import IGNORED, SEQUENCES, CountLabels, DataTask, Sample
from mini_trainer.data.columns.label_columns import TARGET_COLUMN
from mini_trainer.objectives.class_scores import (
    METRICS,
    ClassLoss,
    choose_class_weights,
    summarize_classes,
)
from mini_trainer.objectives.families.classifier import ClassifierFamily, ClassifierReader, Labels
from mini_trainer.objectives.families.family import ReferenceForward
from mini_trainer.objectives.families.micro_batch import MicroBatch, Row, Targets
from mini_trainer.objectives.objective import (
    TARGETS,
    Loss,
    LossSums,
    Objective,
    ObjectiveSettings,
    Scores,
)

PROBLEM_TYPES = {  # as transformers' configs call them
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}


@dataclass
class SequenceTargets(Targets):
    """A target of each sequence, but for idle ones; `index` is of sequences."""

    values: Tensor = None  # (n, K) fp32

    def find_sequences(self, row: Row) -> Tensor:
        return self.index

    def list_values(self) -> Tensor:  # (N, K)
        return self.values[self.index]

    def list_places(self, row: Row) -> Tensor:  # (N, 2)
        """The sequence of each target and its position there: 0, since the target belongs to the whole sequence."""
        return torch.stack([self.index, torch.zeros_like(self.index)], dim=1)


@dataclass
class TokenClasses(Targets):
    """Each token's own class."""

    labels: Tensor = None  # (T,) int64; IGNORED where there is none

    def list_values(self) -> Tensor:  # (N, 1)
        return self.labels[self.index, None]

    def list_places(self, row: Row) -> Tensor:  # (N, 2)
        return torch.stack([self.find_sequences(row), row.position_ids[0, self.index]], dim=1)


@dataclass(frozen=True)
class HeadLoss(Loss):
    """The loss of a head's logits."""

    of_target: ClassLoss

    def predict(self, reader: ClassifierReader, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:  # (N, C)
        return reader.classify(hidden, micro_batch.row, micro_batch.targets.index)

    def sum(self, predicted: Tensor, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        targets, reports = micro_batch.targets, {}
        values = targets.list_values()
        losses = self.of_target.measure(predicted, values)
        if targets.num_sources > 1:
            of_targets = torch.stack([losses.detach(), self.of_target.weigh(values)], dim=1)  # (N, 2)
            sums = of_targets.new_zeros(targets.num_sources, 2)
            if targets.sources is not None:
                sums.index_add_(0, targets.sources, of_targets)
            reports["source_losses"], reports["source_divisors"] = sums.unbind(1)
        return LossSums(losses.sum(), reports=reports)

    def score(self, reader: ClassifierReader, micro_batch: MicroBatch) -> Scores:
        """Summed loss and divisor of each data set; place, value and logits of each target."""
        targets = micro_batch.targets
        logits, values = self.read(reader, micro_batch), targets.list_values()
        scores = torch.stack([self.of_target.measure(logits, values), self.of_target.weigh(values)], dim=1).double()
        sums, sources = scores.new_zeros(targets.num_sources, scores.shape[1]), targets.sources
        sources = torch.zeros(len(scores), dtype=torch.long, device=sums.device) if sources is None else sources
        rows = torch.cat([targets.list_places(micro_batch.row).double(), values.double(), logits.double()], dim=1)
        return Scores(sums.index_add_(0, sources, scores), rows)

    def sum_own(self, own: ReferenceForward, targets: SequenceTargets | TokenClasses) -> Tensor:
        logits = own.logits.reshape(-1, own.logits.shape[-1]).float()
        return self.of_target.measure(logits[targets.index], targets.list_values()).sum()


@dataclass(frozen=True, kw_only=True)
class Classification(Objective):
    """Classes of sequences or of tokens, or numbers of sequences."""

    task: DataTask
    loss: ClassLoss

    gives_predictions = True

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> ClassifierFamily:
        return ClassifierFamily(of_tokens=False, seed=settings.head_seed)

    @classmethod
    def make(
        cls, settings: ObjectiveSettings, family: ClassifierFamily, task: DataTask, count_labels: CountLabels | None
    ) -> "Classification":
        o = settings.classification
        if o.label_smoothing and task.label_type != "single":
            raise ValueError(
                f"--label-smoothing {o.label_smoothing} has no effect on this data: its targets are not one class of"
                f" several each ({task.label_type}): leave it out"
            )
        weights = choose_class_weights(o.class_weights, task, count_labels)
        loss = ClassLoss(task.label_type, weights, o.label_smoothing)
        return cls(family=replace(family, labels=make_labels(task)), noise=settings.noise, task=task, loss=loss)

    @classmethod
    def list_metrics(cls) -> dict[str, bool]:
        return {name: is_better for metrics in METRICS.values() for name, is_better in metrics.items()}

    @property
    def name(self) -> str:
        return self.task.objective

    @property
    def pipeline_tag(self) -> str:
        return "token-classification" if self.of_tokens else "text-classification"

    @property
    def metrics(self) -> dict[str, bool]:
        return METRICS[self.task.label_type]

    @property
    def of_tokens(self) -> bool:
        return self.family.of_tokens

    def with_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        """The first `num_trained` tokens get a class; a sequence gets a target unless that is 0."""
        token_ids, num_labels = sample["input_ids"], self.task.num_labels
        if self.of_tokens:
            labels = token_ids % num_labels
            labels[len(labels) if num_trained is None else num_trained :] = IGNORED
            return sample | {"labels": labels}
        target = (np.arange(num_labels) + token_ids[0]).astype(np.float32) % 2
        if self.task.label_type == "single":
            target = np.array([token_ids[0] % num_labels], dtype=np.float32)
        return sample | {TARGET_COLUMN: target[:0] if num_trained == 0 else target}

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> SequenceTargets | TokenClasses:
        if self.of_tokens:
            labels = np.concatenate([sample["labels"] for sample in samples]).astype(np.int64)
            return TokenClasses(torch.from_numpy(np.flatnonzero(labels != IGNORED)), labels=torch.from_numpy(labels))
        values = np.zeros((len(samples), 1 if self.task.label_type == "single" else self.task.num_labels), np.float32)
        index = np.flatnonzero([len(sample[TARGET_COLUMN]) > 0 for sample in samples])
        for i in index:
            values[i] = samples[i][TARGET_COLUMN]
        return SequenceTargets(torch.from_numpy(index), values=torch.from_numpy(values))

    def weigh(self, num_targets: int, num_tokens: int, samples: Iterable[Sample]) -> dict[str, float]:
        divisors = super().weigh(num_targets, num_tokens, samples)
        if self.loss.label_type != "single" or self.loss.weights is None:
            return divisors
        weights, column = np.array(self.loss.weights), "labels" if self.of_tokens else TARGET_COLUMN
        classes = np.concatenate([sample[column] for sample in samples]).astype(np.int64)
        return divisors | {TARGETS: float(weights[classes[classes != IGNORED]].sum())}

    def make_loss(self, *, is_fused: bool = False) -> HeadLoss:
        return HeadLoss(self.loss)

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        loss_sum, divisor = sums.tolist()
        targets, logits = self.split_predictions(predictions)
        return {"loss": loss_sum / divisor} | summarize_classes(self.task, targets, logits)

    def split_predictions(self, rows: Any) -> tuple[np.ndarray, np.ndarray]:  # (N, K), (N, C)
        """Targets and logits, from what `HeadLoss.score` gives of each target."""
        num_labels = self.task.num_labels
        return np.asarray(rows)[:, :-num_labels], np.asarray(rows)[:, -num_labels:]


@dataclass(frozen=True, kw_only=True)
class TokenClassification(Classification):
    """Classes of tokens."""

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> ClassifierFamily:
        return ClassifierFamily(of_tokens=True, seed=settings.head_seed)


def make_labels(task: DataTask) -> Labels:
    names = task.label_names or tuple(f"LABEL_{i}" for i in range(task.num_labels))
    return Labels(names, PROBLEM_TYPES[task.label_type] if task.objective == SEQUENCES else None)
