"""Classification of sequences and of tokens, and regression, on encoders and decoders.

T tokens in a packed row, n sequences in it, N targets, C classes, K numbers of a target.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from mini_trainer.data.columns.base import IGNORED, SEQUENCES, TOKENS, CountLabels, DataTask, Sample
from mini_trainer.data.columns.label_columns import TARGET_COLUMN
from mini_trainer.objectives.families.classifier import ClassifierFamily, ClassifierRowModel, Labels
from mini_trainer.objectives.families.family import MicroBatch, ReferenceForward, Row, Targets
from mini_trainer.objectives.objective import TARGETS, Loss, LossSums, Objective, ObjectiveSettings, Scores


@dataclass(frozen=True)
class ClassLoss:
    """torch's own losses: summed over a micro-batch and divided by what `weigh` sums up, they are torch's means."""

    label_type: str  # single: cross-entropy; multi: binary cross-entropy of each class; regression: squared error
    weights: tuple[float, ...] | None = None  # of the classes
    smoothing: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is the loss that transformers' models compute by themselves."""
        return self.weights is None and self.smoothing == 0

    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:  # (N, C) fp32 and (N, K) -> (N,)
        """The loss of each target: a class's number (K = 1), C zeros and ones, or C values."""
        weights = None if self.weights is None else make_weights(self.weights, logits.device)
        match self.label_type:
            case "single":
                return cross_entropy(
                    logits, targets[:, 0].long(), weight=weights, label_smoothing=self.smoothing, reduction="none"
                )
            case "multi":
                return binary_cross_entropy_with_logits(
                    logits, targets.to(logits.dtype), pos_weight=weights, reduction="none"
                ).mean(1)
            case "regression":
                return mse_loss(logits, targets.to(logits.dtype), reduction="none").mean(1)
        raise ValueError(f"--label-type {self.label_type}: has no loss")

    def weigh(self, targets: Tensor) -> Tensor:  # (N, K) -> (N,) fp32
        """Each target's weight in the mean: its class's for cross-entropy, as in torch, else 1."""
        if self.label_type != "single" or self.weights is None:
            return torch.ones(len(targets), device=targets.device)
        return make_weights(self.weights, targets.device)[targets[:, 0].long()]


def make_weights(weights: tuple[float, ...], device: torch.device) -> Tensor:  # (C,) fp32
    return torch.tensor(weights, dtype=torch.float32).to(device, non_blocking=True)


def choose_class_weights(given: tuple[str, ...], task: DataTask, count_labels: CountLabels) -> tuple[float, ...] | None:
    """The classes' weights by --class-weights: none, balanced, or a number for each class. ValueError for others.
    balanced: targets / (classes x targets of the class), as in scikit-learn; where a target has several classes, the
    targets without the class / those with it."""
    if not given:
        return None
    flag = f"--class-weights {' '.join(given)}"
    if task.label_type == "regression":
        raise ValueError(f"{flag}: this data has numbers to predict, and no classes: leave it out")
    counts, num_targets = count_labels()
    counts = counts.tolist()
    if given == ("balanced",):
        absent = [name for name, count in zip(task.label_names, counts, strict=True) if count == 0]
        if absent:
            raise ValueError(f"{flag}: the data has no target of {', '.join(absent)}; give a number for each class")
        if task.label_type == "multi":
            return tuple((num_targets - count) / count for count in counts)
        return tuple(sum(counts) / (len(counts) * count) for count in counts)
    try:
        weights = tuple(map(float, given))
    except ValueError:
        weights = ()
    if len(weights) != task.num_labels or not all(0 <= weight < float("inf") for weight in weights):
        raise ValueError(
            f"{flag}: give balanced, or a number of at least 0 for each of the {task.num_labels} classes, in the order"
            f" {', '.join(task.label_names)}"
        )
    if task.label_type == "single" and not any(n * weight for n, weight in zip(counts, weights, strict=True)):
        raise ValueError(f"{flag}: every class in the data has weight 0, so there is nothing to train on")
    return weights


# Of every metric that can choose the best model, whether more of it is better; those of each kind of labels.
OF_CLASSES = {
    "loss": False, "accuracy": True, "precision": True, "recall": True, "f1": True, "f1_weighted": True,
}  # fmt: skip
METRICS = {
    "single": OF_CLASSES | {"matthews": True},
    "multi": OF_CLASSES | {"f1_micro": True},
    "regression": {"loss": False, "mse": False, "mae": False, "pearson": True, "spearman": True},
}


def summarize_classes(task: DataTask, targets: np.ndarray, logits: np.ndarray) -> dict[str, Any]:
    """Every metric of the labels' kind but the loss, of targets (N, K) and logits (N, C)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a class that nothing has, or values that are all the same
        if task.label_type == "regression":
            return score_values(targets, logits)
        targets, predicted = targets.astype(int), predict_classes(task, logits)
        if task.label_type == "single":
            targets, predicted = targets[:, 0], predicted[:, 0]
        return score_classes(task, targets, predicted)


def predict_classes(task: DataTask, logits: np.ndarray) -> np.ndarray:  # (N, C) -> (N, K)
    """The logits' predictions in the form of targets: a class, a zero or one for each class, or values."""
    if task.label_type == "regression":
        return logits
    return (logits > 0).astype(int) if task.label_type == "multi" else logits.argmax(1)[:, None]


def score_classes(task: DataTask, targets: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    """scikit-learn's scores of classes (N,), or of zeros and ones for each class (N, C). Means of one label each are
    over classes that are a target or were predicted; the accuracy of several is the share of exactly right targets."""
    from sklearn import metrics

    labels = list(range(task.num_labels))
    if targets.shape[1:] == (1,):  # scikit-learn would take a column for two classes, both of which count
        targets, predicted, labels = targets[:, 0], predicted[:, 0], [1]
    averaged = labels if task.label_type == "multi" else None  # None: those that are there

    def score(average: str | None, labels: list[int] | None) -> list[Any]:
        chosen = dict(labels=labels, average=average, zero_division=0)
        return metrics.precision_recall_fscore_support(targets, predicted, **chosen)

    if task.label_type == "multi":
        matrix = metrics.multilabel_confusion_matrix(targets, predicted, labels=labels)
        own = {"f1_micro": float(score("micro", averaged)[2])}
    else:
        matrix = metrics.confusion_matrix(targets, predicted, labels=labels)
        own = {"matthews": float(metrics.matthews_corrcoef(targets, predicted))}
    names = ("precision", "recall", "f1")
    by_class = zip(task.label_names, zip(*score(None, labels), strict=True), strict=True)
    return {
        "accuracy": float(metrics.accuracy_score(targets, predicted)),
        **dict(zip(names, map(float, score("macro", averaged)[:3]), strict=True)),
        "f1_weighted": float(score("weighted", averaged)[2]),
        **own,
        "confusion_matrix": matrix.tolist(),
        "classes": {
            name: dict(zip(names, map(float, of_class[:3]), strict=True)) | {"num_targets": int(of_class[3])}
            for name, of_class in by_class
        },
        "num_targets": len(targets),
    }


def score_values(targets: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:  # (N, C) each
    """Correlations are the mean over values; null where values are all the same."""
    from scipy import stats
    from sklearn import metrics

    columns = list(zip(targets.T, predicted.T, strict=True))

    def correlate(function: Any) -> float | None:
        mean = float(np.mean([function(*column).statistic for column in columns])) if len(targets) > 1 else math.nan
        return mean if math.isfinite(mean) else None

    return {
        "mse": float(metrics.mean_squared_error(targets, predicted)),
        "mae": float(metrics.mean_absolute_error(targets, predicted)),
        "pearson": correlate(stats.pearsonr),
        "spearman": correlate(stats.spearmanr),
        "num_targets": len(targets),
    }


def describe_prediction(task: DataTask, target: np.ndarray, logits: np.ndarray) -> dict[str, Any]:
    """One prediction by names: the label, the predicted label and its probabilities; for regression, the values."""
    if task.label_type == "regression":
        return {"label": target.tolist(), "predicted": logits.tolist()}
    names = np.array(task.label_names)
    if task.label_type == "multi":
        shares = 1 / (1 + np.exp(-logits))
        label, predicted = names[target > 0].tolist(), names[logits > 0].tolist()
    else:
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        label, predicted = str(names[int(target[0])]), str(names[int(logits.argmax())])
    return {"label": label, "predicted": predicted, "scores": dict(zip(task.label_names, shares.tolist(), strict=True))}


PROBLEM_TYPES = {  # as transformers' configs call them
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}


@dataclass(kw_only=True)
class SequenceTargets(Targets):
    """A target of each sequence, but for idle ones; `index` is of sequences."""

    values: Tensor  # (n, K) fp32

    def find_sequences(self, row: Row) -> Tensor:
        return self.index

    def list_values(self) -> Tensor:  # (N, K)
        return self.values[self.index]

    def list_places(self, row: Row) -> Tensor:  # (N, 2)
        """The sequence of each target and its position there: 0, since the target belongs to the whole sequence."""
        return torch.stack([self.index, torch.zeros_like(self.index)], dim=1)


@dataclass(kw_only=True)
class TokenClasses(Targets):
    """Each token's own class."""

    labels: Tensor  # (T,) int64; IGNORED where there is none

    def list_values(self) -> Tensor:  # (N, 1)
        return self.labels[self.index, None]


@dataclass(frozen=True)
class HeadLoss(Loss):
    """The loss of a head's logits."""

    of_target: ClassLoss

    def predict(self, row_model: ClassifierRowModel, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:  # (N, C)
        return row_model.classify(hidden, micro_batch.row, micro_batch.targets.index)

    def sum(self, predicted: Tensor, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        values = micro_batch.targets.list_values()
        losses, weights = self.of_target.measure(predicted, values), self.of_target.weigh(values)
        return LossSums(losses.sum(), reports=micro_batch.targets.report_sources(losses, weights))

    def score(self, row_model: ClassifierRowModel, micro_batch: MicroBatch) -> Scores:
        """Summed loss and divisor of each data set; place, value and logits of each target."""
        targets = micro_batch.targets
        logits, values = self.read(row_model, micro_batch), targets.list_values()
        scores = torch.stack([self.of_target.measure(logits, values), self.of_target.weigh(values)], dim=1).double()
        rows = torch.cat([targets.list_places(micro_batch.row).double(), values.double(), logits.double()], dim=1)
        return Scores(targets.sum_by_source(scores), rows)

    def sum_own(self, own: ReferenceForward, targets: SequenceTargets | TokenClasses) -> Tensor:
        logits = own.logits.reshape(-1, own.logits.shape[-1]).float()
        return self.of_target.measure(logits[targets.index], targets.list_values()).sum()


@dataclass(frozen=True, kw_only=True)
class Classification(Objective):
    """Classes or numbers of sequences."""

    task: DataTask
    loss: ClassLoss

    name = SEQUENCES
    pipeline_tag = "text-classification"
    of_tokens = False

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> ClassifierFamily:
        return ClassifierFamily(of_tokens=cls.of_tokens, seed=settings.head_seed)

    @classmethod
    def make(
        cls, settings: ObjectiveSettings, family: ClassifierFamily, task: DataTask, count: CountLabels | None
    ) -> "Classification":
        o = settings.classification
        if o.label_smoothing and task.label_type != "single":
            raise ValueError(
                f"--label-smoothing {o.label_smoothing} has no effect on this data: its targets are not one class of"
                f" several each ({task.label_type}): leave it out"
            )
        weights = choose_class_weights(o.class_weights, task, count)
        loss = ClassLoss(task.label_type, weights, o.label_smoothing)
        return cls(family=replace(family, labels=make_labels(task)), task=task, loss=loss)

    @classmethod
    def list_metrics(cls) -> dict[str, bool]:
        return {name: is_better for metrics in METRICS.values() for name, is_better in metrics.items()}

    @property
    def metrics(self) -> dict[str, bool]:
        return METRICS[self.task.label_type]

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

    name = TOKENS
    pipeline_tag = "token-classification"
    of_tokens = True


def make_labels(task: DataTask) -> Labels:
    names = task.label_names or tuple(f"LABEL_{i}" for i in range(task.num_labels))
    return Labels(names, PROBLEM_TYPES[task.label_type] if task.objective == SEQUENCES else None)
