"""Losses of language models on tokenized sets, a sample at a time."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from corpus.mixture import Mixture
from evaluation.comparison import Scores
from evaluation.kept import read_lines
from evaluation.results import Measured
from objectives.next_tokens import MAX_EXPONENT
from objectives.objective import Scores as BatchScores
from ranks.world import World

SUMS = ("loss_sum", "num_right", "num_targets")  # of a sample, as files name them
FILE = "losses.jsonl"


def gather_losses(
    parts: Iterable[tuple[np.ndarray, BatchScores]], data: Mixture, world: World
) -> np.ndarray:  # (samples, 3) fp64
    """Each sample's summed loss, targets that were likeliest, and targets, of all ranks."""
    sums = torch.zeros(len(data.lengths), len(SUMS), dtype=torch.float64)
    for rows, scores in parts:
        if len(rows):
            sums[rows] = scores.sums.cpu()
    sums = sums.to(world.device)
    dist.all_reduce(sums)
    return sums.cpu().numpy()


def describe_losses(sums: np.ndarray) -> list[dict[str, float]]:
    """The lines of a file."""
    return [dict(zip(("index", *SUMS), (i, *row), strict=True)) for i, row in enumerate(sums.tolist())]


def read_losses(path: Path) -> np.ndarray:  # (samples, 3)
    return np.array([[line[name] for name in SUMS] for line in read_lines(path)])


def collect_losses(name: str, sums: Sequence[np.ndarray], show: Callable[[int], str]) -> Measured:
    """All models' sums, side by side; samples of which nothing is trained are left out. `show` gives a row's text."""
    together = np.stack(sums)  # (models, samples, 3)
    kept = np.flatnonzero(together[0, :, 2] > 0)
    losses, right, targets = together[:, kept, 0], together[:, kept, 1], together[0, kept, 2]
    scores = [Scores("loss", losses, targets, higher_is_better=False), Scores("token_accuracy", right, targets)]
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
