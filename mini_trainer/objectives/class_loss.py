"""Losses of classifiers: N targets, C classes (or values, for regression)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from mini_trainer.data.columns.columns import CountLabels, Task


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
        """What each target counts in the mean: its class's weight for cross-entropy, as in torch, else 1."""
        if self.label_type != "single" or self.weights is None:
            return torch.ones(len(targets), device=targets.device)
        return make_weights(self.weights, targets.device)[targets[:, 0].long()]


def make_weights(weights: tuple[float, ...], device: torch.device) -> Tensor:  # (C,) fp32
    return torch.tensor(weights, dtype=torch.float32).to(device, non_blocking=True)


def choose_class_weights(given: tuple[str, ...], task: Task, count_labels: CountLabels) -> tuple[float, ...] | None:
    """The classes' weights by --class-weights: none, balanced, or a number for each class. ValueError for others.

    balanced: targets / (classes x targets of the class), as in scikit-learn; where a target has several classes, the
    targets without the class / those with it.
    """
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
        raise ValueError(f"{flag}: every class that the data has counts 0, so nothing is trained")
    return weights
