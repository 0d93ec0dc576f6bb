"""What predictions of classes are worth, by scikit-learn: N targets, C classes, K numbers of a target."""

import math
import warnings
from typing import Any

import numpy as np

from mini_trainer.data.columns.columns import Task

# Of every metric that can choose the best model, whether more of it is better; those of each kind of labels.
OF_CLASSES = {
    "loss": False, "accuracy": True, "precision": True, "recall": True, "f1": True, "f1_weighted": True,
}  # fmt: skip
METRICS = {
    "single": OF_CLASSES | {"matthews": True},
    "multi": OF_CLASSES | {"f1_micro": True},
    "regression": {"loss": False, "mse": False, "mae": False, "pearson": True, "spearman": True},
}


def summarize_classes(task: Task, targets: np.ndarray, logits: np.ndarray) -> dict[str, Any]:
    """Every metric of the labels' kind but the loss, of targets (N, K) and logits (N, C)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a class that nothing has, or values that are all the same
        if task.label_type == "regression":
            return score_values(targets, logits)
        targets, predicted = targets.astype(int), predict_classes(task, logits)
        if task.label_type == "multi":
            return score_many(task, targets, predicted)
        return score_classes(task, targets[:, 0], predicted[:, 0])


def predict_classes(task: Task, logits: np.ndarray) -> np.ndarray:  # (N, C) -> (N, K)
    """What the logits say, as targets are: a class, a zero or one for each class, or values."""
    if task.label_type == "regression":
        return logits
    return (logits > 0).astype(int) if task.label_type == "multi" else logits.argmax(1)[:, None]


def score_classes(task: Task, targets: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:  # (N,) each
    """scikit-learn's scores; means over classes are over those that are a target or were predicted."""
    from sklearn import metrics

    labels = range(task.num_labels)
    return {
        "accuracy": float(metrics.accuracy_score(targets, predicted)),
        **average_scores(targets, predicted, "macro"),
        "f1_weighted": average_scores(targets, predicted, "weighted")["f1"],
        "matthews": float(metrics.matthews_corrcoef(targets, predicted)),
        "confusion_matrix": metrics.confusion_matrix(targets, predicted, labels=labels).tolist(),
        "classes": describe_classes(task, targets, predicted),
        "num_targets": len(targets),
    }


def score_many(task: Task, targets: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:  # (N, C) zeros and ones
    """Where a target has any number of classes; accuracy is the share of targets with exactly the right ones."""
    from sklearn import metrics

    return {
        "accuracy": float(metrics.accuracy_score(targets, predicted)),
        **average_scores(targets, predicted, "macro"),
        "f1_weighted": average_scores(targets, predicted, "weighted")["f1"],
        "f1_micro": average_scores(targets, predicted, "micro")["f1"],
        "confusion_matrix": metrics.multilabel_confusion_matrix(targets, predicted).tolist(),
        "classes": describe_classes(task, targets, predicted),
        "num_targets": len(targets),
    }


def average_scores(targets: np.ndarray, predicted: np.ndarray, average: str) -> dict[str, float]:
    from sklearn.metrics import precision_recall_fscore_support

    scores = precision_recall_fscore_support(targets, predicted, average=average, zero_division=0)
    return dict(zip(("precision", "recall", "f1"), map(float, scores[:3]), strict=True))


def describe_classes(task: Task, targets: np.ndarray, predicted: np.ndarray) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 and the number of targets of each class, by its name."""
    from sklearn.metrics import precision_recall_fscore_support

    labels = range(task.num_labels)
    scores = precision_recall_fscore_support(targets, predicted, labels=labels, average=None, zero_division=0)
    names = ("precision", "recall", "f1", "num_targets")
    return {
        label: dict(zip(names, (*map(float, of_label[:3]), int(of_label[3])), strict=True))
        for label, of_label in zip(task.label_names, zip(*scores, strict=True), strict=True)
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


def describe_prediction(task: Task, target: np.ndarray, logits: np.ndarray) -> dict[str, Any]:
    """One prediction by names: the label, what was predicted, and its probabilities; of values the values."""
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
