"""Scores of models on tokenized sets, as files keep them and as results have them side by side.

N targets in n samples, C classes (or values), K numbers per target.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mini_trainer.data.columns.base import CAUSAL_LM, PREFERENCE, DataTask
from mini_trainer.model.scoring.data_scores import DataScores
from mini_trainer.objectives import preferences, rewards
from mini_trainer.objectives.classes import Classification, describe_prediction, predict_classes, summarize_classes
from mini_trainer.objectives.next_tokens import MAX_EXPONENT
from mini_trainer.objectives.objective import Objective
from mini_trainer.use.evaluation.comparison import SampleScores, list_scores
from mini_trainer.use.evaluation.results import Measured, read_lines, write_made

Tables = Sequence[np.ndarray]  # a file's rows, of each model
Show = Callable[[int], str]  # returns a row's text
Collect = Callable[[str, Any, Tables, Show], Measured]


@dataclass(frozen=True)
class Kept:
    """One kind of scores."""

    file: str  # after the set's name in that of a file
    collect: Collect  # of all models
    sums: Mapping[str, str] | None = None  # of a line: its keys, and the objective's sums under them; None: predictions

    def write(self, path: Path, found: DataScores, objective: Objective, made_by: dict[str, Any]) -> None:
        lines = describe_predictions(found, objective) if self.sums is None else self.describe_sums(found, objective)
        write_made(path, "".join(json.dumps(line) + "\n" for line in lines), made_by)

    def describe_sums(self, found: DataScores, objective: Objective) -> list[dict[str, float]]:
        columns = [COLUMNS[objective.name].index(column) for column in self.sums.values()]
        rows = found.sums[:, columns].tolist()
        return [{"index": i} | dict(zip(self.sums, row, strict=True)) for i, row in enumerate(rows)]

    def read(self, path: Path) -> np.ndarray:  # (n, sums), or (N, 2 + K + C) predictions
        """A file's lines as rows."""
        if self.sums is None:
            return read_predictions(path)
        lines = read_lines(path, dict.fromkeys(self.sums, int | float))
        return np.array([[line[name] for name in self.sums] for line in lines])


# Keys of a sample and of a pair in files, and the columns of an objective's sums, which a pair's weight has multiplied.
LOSS_SUMS = {name: name for name in ("loss_sum", "num_right", "num_targets")}
PAIR_SUMS = {"accuracy": "rewards/accuracies", "chosen": "rewards/chosen", "rejected": "rewards/rejected",
             "loss": "loss", "weight": "pairs"}  # fmt: skip
COLUMNS = {CAUSAL_LM: tuple(LOSS_SUMS), PREFERENCE: preferences.SUMS, rewards.REWARD: rewards.SUMS}


# Losses of language models, by sample.


def collect_losses(name: str, objective: Objective, tables: Tables, show: Show) -> Measured:
    """All models' sums side by side, without samples that have no trained tokens. `show` returns a row's text."""
    together = np.stack(tables)  # (models, samples, 3)
    kept = np.flatnonzero(together[0, :, 2] > 0)
    losses, right, targets = together[:, kept, 0], together[:, kept, 1], together[0, kept, 2]
    loss = SampleScores("loss", losses, targets, higher_is_better=False)
    scores = [loss, SampleScores("token_accuracy", right, targets)]
    shown = [{"place": f"sample {i}", "prompt": show(i), "references": []} for i in kept.tolist()]
    means, num_targets = (losses.sum(1) / targets.sum()).tolist(), int(targets.sum())
    perplexities = [math.exp(min(mean, MAX_EXPONENT)) for mean in means]
    extras = [{"perplexity": one, "num_loss_counted_tokens": num_targets} for one in perplexities]
    return Measured(name, "losses", shown, list_scores(scores), scores, extras)


LOSSES = Kept("losses.jsonl", collect_losses, LOSS_SUMS)


# Pairs of a chosen and a rejected answer: how often a model prefers the chosen one. Of an answer a reward model has its
# reward, a language model the mean log-probability of its tokens.


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


PAIRS = Kept("pairs.jsonl", collect_pairs, PAIR_SUMS)


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


def collect_classes(name: str, objective: Classification, tables: Tables, show: Show) -> Measured:
    """All models' predictions side by side; `show` returns a row's text."""
    rows, sample_of, counts = np.unique(tables[0][:, 0].astype(int), return_inverse=True, return_counts=True)
    targets, _ = objective.split_predictions(tables[0][:, 2:])  # (N, K)
    logits = [objective.split_predictions(own[:, 2:])[1] for own in tables]  # (N, C) of each model
    by_target = [measure_targets(objective, targets, own) for own in logits]
    sums = {name: np.array([np.bincount(sample_of, own[name]) for own in by_target]) for name in by_target[0]}
    divisors = counts.astype(float)
    scores = [SampleScores(name, own, divisors, higher_is_better=name == "accuracy") for name, own in sums.items()]
    task = objective.task
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


def measure_targets(objective: Classification, targets: np.ndarray, logits: np.ndarray) -> dict[str, np.ndarray]:
    """A model's scores of each target, (N,): accuracy and loss; for regression, loss and mean absolute error."""
    losses = objective.loss.measure(torch.from_numpy(logits), torch.from_numpy(targets)).numpy()
    if objective.task.label_type == "regression":
        return {"loss": losses, "mae": np.abs(logits - targets).mean(1)}
    return {"accuracy": (predict_classes(objective.task, logits) == targets).all(1), "loss": losses}


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


CLASSES = Kept("predictions.jsonl", collect_classes)
