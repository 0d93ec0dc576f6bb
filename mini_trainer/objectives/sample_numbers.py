"""Numbers of samples of answers in a micro-batch: margins and weights, and means over samples.

S samples in a micro-batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mini_trainer.data.columns.preference_columns import MARGIN_COLUMN, PAIR_WEIGHT_COLUMN
from mini_trainer.data.columns.sample import Sample

ZERO, ONE = np.zeros(1, np.float32), np.ones(1, np.float32)


@dataclass
class SampleNumbers:
    """The numbers of each sample."""

    margins: Tensor  # (S,) fp32
    weights: Tensor  # (S,) fp32
    sources: Tensor | None = None  # (S,) int64: the data set of each; None: all of the first

    def with_sources(self, sources: np.ndarray) -> "SampleNumbers":
        """`sources` (samples,); an idle sample, which comes last, is of the first."""
        return replace(self, sources=torch.from_numpy(np.pad(sources, (0, len(self.margins) - len(sources)))))


def gather_sample_numbers(samples: Sequence[Sample]) -> SampleNumbers:
    return SampleNumbers(
        gather_numbers(samples, MARGIN_COLUMN, ZERO)[:, 0], gather_numbers(samples, PAIR_WEIGHT_COLUMN, ONE)[:, 0]
    )


def gather_numbers(samples: Sequence[Sample], name: str, default: np.ndarray) -> Tensor:  # (S, ...) fp32
    """An optional column of a fixed number of values for each sample."""
    return torch.from_numpy(np.array([sample.get(name, default) for sample in samples], np.float32))


def weigh_samples(samples: Iterable[Sample]) -> float:
    """What the sum over samples is divided by."""
    return sum(float(sample.get(PAIR_WEIGHT_COLUMN, ONE)[0]) for sample in samples)


def sum_by_source(sums: Tensor, numbers: SampleNumbers, num_sources: int) -> Tensor:  # (S, ...) -> (num_sources, ...)
    sources = numbers.sources
    if sources is None:
        sources = torch.zeros(len(sums), dtype=torch.long, device=sums.device)
    return sums.new_zeros(num_sources, sums.shape[1]).index_add(0, sources, sums)


def describe_means(names: Sequence[str], sums: np.ndarray) -> dict[str, float]:
    """Means over pairs, of one data set or step, under the names that TRL gives them; `pairs` is their divisor."""
    by_name = dict(zip(names, sums.tolist(), strict=True))
    num_pairs = by_name.pop("pairs") or 1
    means = {name: total / num_pairs for name, total in by_name.items()}
    return means | {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}
