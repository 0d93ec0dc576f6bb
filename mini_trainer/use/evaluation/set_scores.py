"""Scores of models on tokenized sets, as files keep them and as results have them side by side.

N targets in n samples, C classes (or values), K numbers per target.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mini_trainer.data.columns.base import PREFERENCE, DataTask
from mini_trainer.model.scoring.data_scores import DataScores
from mini_trainer.objectives import preferences, rewards
from mini_trainer.objectives.classes import Classification, describe_prediction, predict_classes, summarize_classes
from mini_trainer.objectives.next_tokens import MAX_EXPONENT
from mini_trainer.objectives.objective import Objective
from mini_trainer.use.evaluation.comparison import SampleScores, list_scores
from mini_trainer.use.evaluation.results import Measured, read_lines

Tables = Sequence[np.ndarray]  # a file's rows, of each model
Show = Callable[[int], str]  # returns a row's text


@dataclass(frozen=True)
class Kept:
    """One kind of scores."""

    file: str  # after the set's name in that of a file
    describe: Callable[[DataScores, Any], list[dict[str, Any]]]  # the lines of a file, by an objective
    read: Callable[[Path], np.ndarray]  # a file's lines as rows
    collect: Callable[[str, Any, Tables, Show], Measured]  # of all models


def read_columns(path: Path, names: Iterable[str]) -> np.ndarray:  # (n, names)
    lines = read_lines(path, dict.fromkeys(names, int | float))
    return np.array([[line[name] for name in names] for line in lines])


# Losses of language models, by sample.

LOSS_SUMS = ("loss_sum", "num_right", "num_targets")  # keys of a sample in files


def describe_losses(found: DataScores, objective: Objective) -> list[dict[str, float]]:
    """The lines of a file."""
    return [dict(zip(("index", *LOSS_SUMS), (i, *row), strict=True)) for i, row in enumerate(found.sums.tolist())]


def collect_losses(name: str, objective: Objective, tables: Tables, show: Show) -> Measured:
    """All models' sums side by side, without samples that have no trained tokens. `show` returns a row's text."""
    together = np.stack(tables)  # (models, samples, 3)
    kept = np.flatnonzero(together[0, :, 2] > 0)
    losses, right, targets = together[:, kept, 0], together[:, kept, 1], together[0, kept, 2]
    scores = [
        SampleScores("loss", losses, targets, higher_is_better=False),
        SampleScores("token_accuracy", right, targets),
    ]
    shown = [{"place": f"sample {i}", "prompt": show(i), "references": []} for i in kept.tolist()]
    extras = [
        {"perplexity": math.exp(min(mean, MAX_EXPONENT)), "num_loss_counted_tokens": int(targets.sum())}
        for mean in (losses.sum(1) / targets.sum()).tolist()
    ]
    return Measured(name, "losses", shown, list_scores(scores), scores, extras)


LOSSES = Kept("losses.jsonl", describe_losses, functools.partial(read_columns, names=LOSS_SUMS), collect_losses)


# Pairs of a chosen and a rejected answer: how often a model prefers the chosen one. Of an answer a reward model has its
# reward, a language model the mean log-probability of its tokens.

# Keys of a pair in files, and the columns of an objective's sums.
PAIR_SUMS = {"accuracy": "rewards/accuracies", "chosen": "rewards/chosen", "rejected": "rewards/rejected",
             "loss": "loss", "weight": "pairs"}  # fmt: skip
COLUMNS = {PREFERENCE: preferences.SUMS, rewards.REWARD: rewards.SUMS}


def describe_pairs(found: DataScores, objective: Objective) -> list[dict[str, float]]:
    """The lines of a file: a pair's values, each multiplied by the pair's weight, and the weight."""
    sums = found.sums.numpy()[:, [COLUMNS[objective.name].index(name) for name in PAIR_SUMS.values()]]
    return [{"index": i} | dict(zip(PAIR_SUMS, row, strict=True)) for i, row in enumerate(sums.tolist())]


def collect_pairs(name: str, objective: Objective, tables: Tables, show: Show) -> Measured:
    """All models' rewards side by side, each weighted as its pair. `show` returns a pair's text."""
    together = np.stack(tables)  # (models, pairs, 5)
    kept = np.flatnonzero(together[0, :, 4] > 0)
    right, chosen, rejected, losses, weights = np.moveaxis(together[:, kept], 2, 0)
    scores = [
        SampleScores("accuracy", right, weights[0]),
        SampleScores("margin", chosen - rejected, weights[0]),
        SampleScores("loss", losses, weights[0], higher_is_better=False),
    ]
    shown = [{"place": f"sample {i}", "prompt": show(i), "references": []} for i in kept.tolist()]
    return Measured(name, "pairs", shown, list_scores(scores), scores, [{} for _ in tables])


PAIRS = Kept("pairs.jsonl", describe_pairs, functools.partial(read_columns, names=PAIR_SUMS), collect_pairs)


# Classifiers' predictions.


def describe_predictions(found: DataScores, objective: Classification) -> list[dict[str, Any]]:
    """The lines of a file."""
    predictions = found.predictions
    targets, logits = objective.split_predictions(predictions[:, 2:])
    return [
        {"index": int(row), "token": int(token), **describe_prediction(objective.task, target, own),
         "target": target.tolist(), "logits": own.tolist()}
        for (row, token), target, own in zip(predictions[:, :2], targets, logits, strict=True)
    ]  # fmt: skip


def read_predictions(path: Path) -> np.ndarray:  # (N, 2 + K + C)
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


def collect_classes(name: str, objective: Classification, tables: Tables, show: Show) -> Measured:
    """All models' predictions side by side; `show` returns a row's text."""
    rows, sample_of, counts = np.unique(tables[0][:, 0].astype(int), return_inverse=True, return_counts=True)
    targets, _ = objective.split_predictions(tables[0][:, 2:])
    logits = [objective.split_predictions(own[:, 2:])[1] for own in tables]
    task = objective.task
    predicted = Predicted(task, sample_of, counts.astype(float), targets, logits)
    scores = measure_scores(predicted, objective)
    shown = [
        {"place": f"sample {row}", "prompt": show(row), "references": [label]}
        for row, label in zip(rows.tolist(), join_labels(task, sample_of, targets), strict=True)
    ]
    told = [join_labels(task, sample_of, predict_classes(task, own)) for own in logits]
    samples = [
        [{"answer": answer} | sample for answer, sample in zip(answers, own, strict=True)]
        for answers, own in zip(told, list_scores(scores), strict=True)
    ]
    extras = [{"classification": summarize_classes(task, targets, own)} for own in logits]
    return Measured(name, "classes", shown, samples, scores, extras)


def measure_scores(predicted: Predicted, objective: Classification) -> list[SampleScores]:
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


CLASSES = Kept("predictions.jsonl", describe_predictions, read_predictions, collect_classes)
