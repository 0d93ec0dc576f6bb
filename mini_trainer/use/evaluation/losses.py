"""Losses of language models on tokenized sets, by sample."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mini_trainer.model.scoring.data_scores import DataScores
from mini_trainer.objectives.next_tokens import MAX_EXPONENT
from mini_trainer.objectives.objective import Objective
from mini_trainer.use.evaluation.comparison import SampleScores
from mini_trainer.use.evaluation.results import Measured, read_lines

SUMS = ("loss_sum", "num_right", "num_targets")  # keys of a sample in files
FILE = "losses.jsonl"


def describe_scores(found: DataScores, objective: Objective) -> list[dict[str, float]]:
    """The lines of a file."""
    return [dict(zip(("index", *SUMS), (i, *row), strict=True)) for i, row in enumerate(found.sums.tolist())]


def read_scores(path: Path) -> np.ndarray:  # (samples, 3)
    lines = read_lines(path, dict.fromkeys(SUMS, int | float))
    return np.array([[line[name] for name in SUMS] for line in lines])


def collect(name: str, objective: Objective, tables: Sequence[np.ndarray], show: Callable[[int], str]) -> Measured:
    """All models' sums side by side, without samples that have no trained tokens. `show` returns a row's text."""
    together = np.stack(tables)  # (models, samples, 3)
    kept = np.flatnonzero(together[0, :, 2] > 0)
    losses, right, targets = together[:, kept, 0], together[:, kept, 1], together[0, kept, 2]
    scores = [
        SampleScores("loss", losses, targets, higher_is_better=False),
        SampleScores("token_accuracy", right, targets),
    ]
    samples = [
        [{"scores": {"loss": loss, "token_accuracy": share}} for loss, share in zip(*rows, strict=True)]
        for rows in zip((losses / targets).tolist(), (right / targets).tolist(), strict=True)
    ]
    shown = [{"place": f"sample {i}", "prompt": show(i), "references": []} for i in kept.tolist()]
    extras = [
        {"perplexity": math.exp(min(mean, MAX_EXPONENT)), "num_loss_counted_tokens": int(targets.sum())}
        for mean in (losses.sum(1) / targets.sum()).tolist()
    ]
    return Measured(name, "losses", shown, samples, scores, extras)
