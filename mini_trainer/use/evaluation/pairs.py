"""Pairs of a chosen and a rejected answer: how often a model prefers the chosen one.

A reward model's number for an answer is its reward, a language model's the mean log-probability of the answer's tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.data.columns.base import PREFERENCE
from mini_trainer.model.scoring.data_scores import DataScores
from mini_trainer.objectives import preferences, rewards
from mini_trainer.objectives.objective import Objective
from mini_trainer.use.evaluation.comparison import SampleScores
from mini_trainer.use.evaluation.results import Measured, read_lines

FILE = "pairs.jsonl"
# Keys of a pair in files, and the columns of an objective's sums.
SUMS = {"accuracy": "rewards/accuracies", "chosen": "rewards/chosen", "rejected": "rewards/rejected", "loss": "loss",
        "weight": "pairs"}  # fmt: skip
COLUMNS = {PREFERENCE: preferences.SUMS, rewards.REWARD: rewards.SUMS}


def describe_scores(found: DataScores, objective: Objective) -> list[dict[str, float]]:
    """The lines of a file: a pair's values, each multiplied by the pair's weight, and the weight."""
    sums = found.sums.numpy()[:, [COLUMNS[objective.name].index(name) for name in SUMS.values()]]
    return [{"index": i} | dict(zip(SUMS, row, strict=True)) for i, row in enumerate(sums.tolist())]


def read_scores(path: Path) -> np.ndarray:  # (pairs, 5)
    lines = read_lines(path, dict.fromkeys(SUMS, int | float))
    return np.array([[line[name] for name in SUMS] for line in lines])


def collect(name: str, objective: Objective, tables: Sequence[np.ndarray], show: Callable[[int], str]) -> Measured:
    """All models' rewards side by side, each weighted as its pair. `show` returns a pair's text."""
    together = np.stack(tables)  # (models, pairs, 5)
    kept = np.flatnonzero(together[0, :, 4] > 0)
    right, chosen, rejected, losses, weights = np.moveaxis(together[:, kept], 2, 0)
    scores = [
        SampleScores("accuracy", right, weights[0]),
        SampleScores("margin", chosen - rejected, weights[0]),
        SampleScores("loss", losses, weights[0], higher_is_better=False),
    ]
    means = np.stack([one.sums / weights for one in scores], axis=2)  # (models, pairs, scores)
    samples = [[describe_sample(scores, own) for own in model] for model in means.tolist()]
    shown = [{"place": f"sample {i}", "prompt": show(i), "references": []} for i in kept.tolist()]
    return Measured(name, "pairs", shown, samples, scores, [{} for _ in tables])


def describe_sample(scores: Sequence[SampleScores], means: Sequence[float]) -> dict[str, Any]:
    return {"scores": {score.name: mean for score, mean in zip(scores, means, strict=True)}}
