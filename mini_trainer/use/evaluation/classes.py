"""Classifiers on tokenized sets. N targets in n samples, C classes (or values), K numbers per target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mini_trainer.data.columns.base import DataTask
from mini_trainer.model.scoring.data_scores import DataScores
from mini_trainer.objectives.classes import Classification, describe_prediction, predict_classes, summarize_classes
from mini_trainer.use.evaluation.comparison import SampleScores
from mini_trainer.use.evaluation.results import AnswerRecord, Measured, read_lines

FILE = "predictions.jsonl"


def describe_scores(found: DataScores, objective: Classification) -> list[dict[str, Any]]:
    """The lines of a file."""
    predictions = found.predictions
    targets, logits = objective.split_predictions(predictions[:, 2:])
    return [
        {"index": int(row), "token": int(token), **describe_prediction(objective.task, target, own),
         "target": target.tolist(), "logits": own.tolist()}
        for (row, token), target, own in zip(predictions[:, :2], targets, logits, strict=True)
    ]  # fmt: skip


def read_scores(path: Path) -> np.ndarray:  # (N, 2 + K + C)
    lines = read_lines(path, {"index": int, "token": int, "target": list, "logits": list})
    return np.array([[line["index"], line["token"], *line["target"], *line["logits"]] for line in lines])


@dataclass(frozen=True)
class Predicted:
    """All models' predictions of the same targets."""

    task: DataTask
    sample_of: np.ndarray  # (N,): index of each target's sample
    counts: np.ndarray  # (n,) fp64: number of targets of each sample
    targets: np.ndarray  # (N, K)
    logits: list[np.ndarray]  # (N, C) of each model

    def add_up(self, values: np.ndarray) -> np.ndarray:  # (N,) -> (n,)
        return np.bincount(self.sample_of, values, minlength=len(self.counts))


def collect(name: str, objective: Classification, tables: Sequence[np.ndarray], show: Callable[[int], str]) -> Measured:
    """All models' predictions side by side; `show` returns a row's text."""
    rows, sample_of, counts = np.unique(tables[0][:, 0].astype(int), return_inverse=True, return_counts=True)
    targets, _ = objective.split_predictions(tables[0][:, 2:])
    logits = [objective.split_predictions(own[:, 2:])[1] for own in tables]
    task = objective.task
    predicted = Predicted(task, sample_of, counts.astype(float), targets, logits)
    scores = list_scores(predicted, objective)
    shown = [
        {"place": f"sample {row}", "prompt": show(row), "references": [label]}
        for row, label in zip(rows.tolist(), join_labels(task, sample_of, targets), strict=True)
    ]
    samples = [describe_samples(predicted, model, scores) for model in range(len(logits))]
    extras = [{"classification": summarize_classes(task, targets, own)} for own in logits]
    return Measured(name, "classes", shown, samples, scores, extras)


def list_scores(predicted: Predicted, objective: Classification) -> list[SampleScores]:
    """Accuracy and loss; for regression, loss and mean absolute error."""
    task, targets, counts = predicted.task, predicted.targets, predicted.counts
    losses = [
        objective.loss.measure(torch.from_numpy(own), torch.from_numpy(targets)).numpy() for own in predicted.logits
    ]
    loss = SampleScores("loss", np.array(list(map(predicted.add_up, losses))), counts, higher_is_better=False)
    if task.label_type == "regression":
        errors = np.array([predicted.add_up(np.abs(own - targets).mean(1)) for own in predicted.logits])
        return [loss, SampleScores("mae", errors, counts, higher_is_better=False)]
    right = [(predict_classes(task, own) == targets).all(1) for own in predicted.logits]
    return [SampleScores("accuracy", np.array(list(map(predicted.add_up, right))), counts), loss]


def describe_samples(predicted: Predicted, model: int, scores: Sequence[SampleScores]) -> list[AnswerRecord]:
    """A model's answer and scores for each sample."""
    task, sample_of = predicted.task, predicted.sample_of
    answers = join_labels(task, sample_of, predict_classes(task, predicted.logits[model]))
    means = np.stack([one.sums[model] / one.divisors for one in scores], axis=1)  # (n, scores)
    names = [one.name for one in scores]
    return [
        {"answer": answer, "scores": dict(zip(names, own, strict=True))}
        for answer, own in zip(answers, means.tolist(), strict=True)
    ]


def join_labels(task: DataTask, sample_of: np.ndarray, targets: np.ndarray) -> list[str]:
    """The names of each sample's targets (N, K), joined by spaces."""
    labels: list[list[str]] = [[] for _ in range(sample_of.max() + 1)]
    for sample, target in zip(sample_of.tolist(), targets, strict=True):
        labels[sample].append(name_target(task, target))
    return [" ".join(own) for own in labels]


def name_target(task: DataTask, target: np.ndarray) -> str:  # (K,)
    if task.label_type == "regression":
        return ", ".join(f"{value:.4g}" for value in target)
    if task.label_type == "multi":
        return ", ".join(np.array(task.label_names)[target > 0]) or "(none)"
    return task.label_names[int(target[0])]
