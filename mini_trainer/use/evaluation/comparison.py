"""Intervals of means, and paired tests of models on the same samples.

A share of samples has Wilson's score interval (Wilson 1927), since a bootstrap gives [1, 1] where all 20 of 20 are
right; other means, and differences, have percentile bootstrap intervals.

A measure is a ratio of sums over samples, of scores and their divisors (1 for an answer, the number of targets for a
loss). n samples, m models, R resamples.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

LEVEL = 0.95  # confidence level of every interval
MAX_DRAWN = 4_000_000  # indices held at once


@dataclass(frozen=True)
class SampleScores:
    """A measure of all models on all samples."""

    name: str
    sums: np.ndarray  # (m, n) fp64
    divisors: np.ndarray  # (n,) fp64
    higher_is_better: bool = True

    @property
    def means(self) -> np.ndarray:  # (m,)
        return self.sums.sum(1) / self.divisors.sum()

    @property
    def is_binary(self) -> bool:
        return bool(np.isin(self.sums, (0.0, 1.0)).all() and (self.divisors == 1).all())


def list_scores(scores: Sequence[SampleScores]) -> list[list[dict[str, Any]]]:
    """Each model's samples with their scores, by name: a loss per target, and the like."""
    names = [one.name for one in scores]
    means = np.stack([one.sums / one.divisors for one in scores], axis=2)  # (m, n, scores)
    return [[{"scores": dict(zip(names, own, strict=True))} for own in model] for model in means.tolist()]


def gather_scores(samples: Sequence[Sequence[dict[str, Any]]], names: Iterable[str]) -> list[SampleScores]:
    """The scores of all models' samples, of equal weight."""
    ones = np.ones(len(samples[0]))
    return [
        SampleScores(name, np.array([[sample["scores"][name] for sample in own] for own in samples]), ones)
        for name in names
    ]


def compare(scores: SampleScores, *, seed: int, num_resamples: int) -> dict[str, Any]:
    """The means with their intervals, and the comparison of every pair of models, as JSON."""
    from scipy import stats

    drawn = np.concatenate(list(draw_means(scores, seed=seed, num_resamples=num_resamples)))  # (R, m)
    num_models, num_samples = scores.sums.shape
    intervals = find_interval(drawn).T
    if scores.is_binary:
        tests = [stats.binomtest(int(own.sum()), num_samples) for own in scores.sums]
        intervals = [test.proportion_ci(LEVEL, method="wilson") for test in tests]
    values = [
        {"mean": float(mean), "low": float(low), "high": float(high)}
        for mean, (low, high) in zip(scores.means, intervals, strict=True)
    ]
    pairs = [compare_pair(scores, a, b, drawn=drawn, seed=seed) for a, b in combinations(range(num_models), 2)]
    for pair, adjusted in zip(pairs, adjust_by_holm([pair["p"] for pair in pairs]), strict=True):
        pair["p_holm"] = adjusted
    return {
        "name": scores.name, "higher_is_better": scores.higher_is_better, "is_right_or_wrong": scores.is_binary,
        "num_samples": num_samples, "values": values, "pairs": pairs,
    }  # fmt: skip


def draw_means(scores: SampleScores, *, seed: int, num_resamples: int) -> Iterator[np.ndarray]:  # of (r, m)
    """Yields every model's mean over samples drawn with replacement, the same samples for all models."""
    random, num_samples = np.random.default_rng(seed), len(scores.divisors)
    for num_drawn in cut(num_resamples, num_samples):
        rows = random.integers(num_samples, size=(num_drawn, num_samples))
        divisors = scores.divisors[rows].sum(1)
        yield np.stack([sums[rows].sum(1) / divisors for sums in scores.sums], axis=1)


def count_draws(rows: np.ndarray) -> np.ndarray:  # (r, n) -> (r, n)
    """How often each of n samples was drawn in each resample."""
    num_drawn, num_samples = rows.shape
    places = rows + num_samples * np.arange(num_drawn)[:, None]
    return np.bincount(places.ravel(), minlength=rows.size).reshape(rows.shape)


def cut(num_resamples: int, num_samples: int) -> Iterator[int]:
    """Yields the sizes of batches of resamples."""
    at_once = max(1, MAX_DRAWN // num_samples)
    yield from (min(at_once, num_resamples - start) for start in range(0, num_resamples, at_once))


def find_interval(drawn: np.ndarray) -> np.ndarray:  # (R, ...) -> (2, ...)
    """Percentile bootstrap interval."""
    return np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)


def compare_pair(scores: SampleScores, a: int, b: int, *, drawn: np.ndarray, seed: int) -> dict[str, Any]:
    """b against a: difference of the means with its interval, number of samples where b is better or worse, and the
    two-sided p value of a paired test."""
    from scipy import stats

    low, high = find_interval(drawn[:, b] - drawn[:, a])
    changes = scores.sums[b] - scores.sums[a]  # (n,)
    gains = changes if scores.higher_is_better else -changes
    better, worse = int((gains > 0).sum()), int((gains < 0).sum())
    if scores.is_binary:
        test, p = "McNemar, exact", stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    else:
        test, p = "sign permutation", permute_signs(changes, seed=seed, num_resamples=len(drawn))
    return {
        "a": a, "b": b, "difference": float(scores.means[b] - scores.means[a]), "low": float(low), "high": float(high),
        "num_better": better, "num_worse": worse, "test": test, "p": float(p),
    }  # fmt: skip


def permute_signs(changes: np.ndarray, *, seed: int, num_resamples: int) -> float:
    """The two-sided p value of a sign permutation test."""
    from scipy import stats

    batch, rng = max(1, MAX_DRAWN // len(changes)), np.random.default_rng(seed)
    given = dict(permutation_type="samples", vectorized=True, n_resamples=num_resamples, batch=batch, rng=rng)
    return stats.permutation_test((changes,), np.sum, **given).pvalue


def adjust_by_holm(values: list[float]) -> list[float]:
    """p values of one measure's pairs, adjusted for multiple comparisons (Holm 1979)."""
    order = np.argsort(values)
    scaled = np.sort(values) * np.arange(len(values), 0, -1)
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted.tolist()
