"""Classifiers on tokenized sets: N targets in n samples, C classes (or values), K numbers of a target."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evaluation.comparison import Folded, Scores
from evaluation.results import Measured, Sample
from lifecycle.validation import gather_rows
from objectives.class_scores import describe_prediction, predict_classes, summarize_classes
from objectives.classification import Classification
from objectives.columns import Task
from objectives.objective import Scores as BatchScores
from ranks.world import World

FILE = "predictions.jsonl"


def gather_predictions(
    parts: Iterable[tuple[np.ndarray, BatchScores]], world: World
) -> np.ndarray | None:  # (N, 2 + K + C) fp64
    """Of each target its row, the token there, what it is, and its logits; of all ranks, on rank 0 only."""
    found = []
    for rows, scores in parts:
        predictions = scores.predictions.cpu()
        if len(rows):
            predictions[:, 0] = torch.from_numpy(rows)[predictions[:, 0].long()]
        found.append(predictions)
    return gather_rows(torch.cat(found), world)


def describe_predictions(predictions: np.ndarray, objective: Classification) -> list[dict[str, Any]]:
    """The lines of a file."""
    targets, logits = objective.split_predictions(predictions[:, 2:])
    return [
        {"index": int(row), "token": int(token), **describe_prediction(objective.task, target, own),
         "target": target.tolist(), "logits": own.tolist()}
        for (row, token), target, own in zip(predictions[:, :2], targets, logits, strict=True)
    ]  # fmt: skip


def read_predictions(path: Path) -> np.ndarray:  # (N, 2 + K + C)
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return np.array([[line["index"], line["token"], *line["target"], *line["logits"]] for line in lines])


def collect_classes(
    name: str, objective: Classification, predictions: Sequence[np.ndarray], show: Callable[[int], str]
) -> Measured:
    """All models' predictions, side by side; `show` gives a row's text."""
    task = objective.task
    # Which sample each target is of: the same for all models, as the targets are.
    rows, sample_of, counts = np.unique(predictions[0][:, 0].astype(int), return_inverse=True, return_counts=True)
    targets, _ = objective.split_predictions(predictions[0][:, 2:])
    logits = [objective.split_predictions(own[:, 2:])[1] for own in predictions]

    def add_up(values: np.ndarray) -> np.ndarray:  # of targets (N,) -> of samples (n,)
        return np.bincount(sample_of, values, minlength=len(rows))

    sums = {"loss": [add_up(measure_losses(objective, targets, own)) for own in logits]}
    if task.label_type == "regression":
        sums["mae"] = [add_up(np.abs(own - targets).mean(1)) for own in logits]
    else:
        right = [(predict_classes(task, own) == targets).all(1) for own in logits]
        sums = {"accuracy": list(map(add_up, right))} | sums
    scores = [
        Scores(kind, np.array(own), counts.astype(float), higher_is_better=kind == "accuracy")
        for kind, own in sums.items()
    ]
    if task.label_type != "regression":
        outcomes = [count_outcomes(task, sample_of, targets, own) for own in logits]
        folded = Folded(outcomes, lambda values: average_f1(values, of_all=task.label_type == "multi"))
        scores.insert(0, Scores("f1", np.array(sums["accuracy"]), counts.astype(float), folded=folded))
        sums = {"f1": sums["accuracy"]} | sums  # what there is to say of one sample
    samples = [
        describe_samples(task, sample_of, own, {kind: of_models[i] / counts for kind, of_models in sums.items()})
        for i, own in enumerate(logits)
    ]
    right_answers = join_labels(task, sample_of, targets)
    shown = [
        {"place": f"sample {row}", "prompt": show(row), "references": [label]}
        for row, label in zip(rows.tolist(), right_answers, strict=True)
    ]
    extras = [{"classification": summarize_classes(task, targets, own)} for own in logits]
    return Measured(name, "classes", shown, samples, scores, extras)


def measure_losses(objective: Classification, targets: np.ndarray, logits: np.ndarray) -> np.ndarray:  # (N,)
    return objective.loss.measure(torch.from_numpy(logits), torch.from_numpy(targets)).numpy()


def describe_samples(
    task: Task, sample_of: np.ndarray, logits: np.ndarray, scores: dict[str, np.ndarray]
) -> list[Sample]:
    """Of each sample what a model says, and its scores."""
    predicted = join_labels(task, sample_of, predict_classes(task, logits))
    rows = zip(*(values.tolist() for values in scores.values()), strict=True)
    return [
        {"answer": answer, "scores": dict(zip(scores, values, strict=True))}
        for answer, values in zip(predicted, rows, strict=True)
    ]


def join_labels(task: Task, sample_of: np.ndarray, targets: np.ndarray) -> list[str]:
    """What each sample's targets (N, K) are called: one of each token with a label, with a space between."""
    labels: list[list[str]] = [[] for _ in range(sample_of.max() + 1)]
    for sample, target in zip(sample_of.tolist(), targets, strict=True):
        labels[sample].append(name_target(task, target))
    return [" ".join(own) for own in labels]


def name_target(task: Task, target: np.ndarray) -> str:  # (K,)
    if task.label_type == "regression":
        return ", ".join(f"{value:.4g}" for value in target)
    if task.label_type == "multi":
        return ", ".join(np.array(task.label_names)[target > 0]) or "(none)"
    return task.label_names[int(target[0])]


def count_outcomes(task: Task, sample_of: np.ndarray, targets: np.ndarray, logits: np.ndarray) -> Any:
    """Of each sample, by class: the targets that were found, those that were missed, and those found where none is.

    scipy's sparse array (n, 3C), of which all but a few numbers are zero.
    """
    from scipy.sparse import csr_array

    predicted = predict_classes(task, logits)
    if task.label_type == "single":
        eye = np.eye(task.num_labels, dtype=bool)
        wanted, said = eye[targets[:, 0].astype(int)], eye[predicted[:, 0]]
    else:
        wanted, said = targets > 0, predicted > 0
    outcomes = np.concatenate([wanted & said, wanted & ~said, said & ~wanted], axis=1)
    at, column = np.nonzero(outcomes)
    shape = (sample_of.max() + 1, outcomes.shape[1])
    return csr_array((np.ones(len(at)), (sample_of[at], column)), shape=shape)


def average_f1(outcomes: np.ndarray, *, of_all: bool) -> np.ndarray:  # (..., 3C) -> (...)
    """scikit-learn's macro F1: the mean over classes, or over those that are a target's or were predicted."""
    found, missed, false = np.split(outcomes, 3, axis=-1)
    seen = 2 * found + missed + false
    f1 = 2 * found / np.maximum(seen, 1)
    return f1.mean(-1) if of_all else f1.sum(-1) / np.maximum((seen > 0).sum(-1), 1)
