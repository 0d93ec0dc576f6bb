"""Two data sets with corresponding rows: one to train on, and one that a teacher reads in its place."""

import numpy as np

from mini_trainer.data.columns.base import IGNORED, Sample
from mini_trainer.data.tokenized.by_row import join_values
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData


def check_rows(ours: TokenizedData, theirs: TokenizedData) -> None:
    """ValueError unless both have the same number of rows, and each row as many trained tokens."""
    if len(ours.lengths) != len(theirs.lengths):
        raise ValueError(f"{theirs.path}: has {len(theirs.lengths):,} rows, {ours.path} {len(ours.lengths):,}")
    differs = np.flatnonzero(ours.num_loss_tokens != theirs.num_loss_tokens)
    if len(differs):
        raise_other_tokens(ours, theirs, int(differs[0]))


def mark_trained(labels: np.ndarray) -> np.ndarray:  # (L,) bool
    """Mask of the trained tokens: never the first, which nothing predicts."""
    return (labels != IGNORED) & (np.arange(len(labels)) > 0)


def read_pair(ours: TokenizedData, theirs: TokenizedData, row: int) -> Sample:
    """The row of `theirs`; ValueError if it trains other tokens than that of `ours`."""
    own, other = ours.read(row)["labels"], theirs.read(row)
    if not np.array_equal(own[mark_trained(own)], other["labels"][mark_trained(other["labels"])]):
        raise_other_tokens(ours, theirs, row)
    return other


def raise_other_tokens(ours: TokenizedData, theirs: TokenizedData, row: int) -> None:
    raise ValueError(f"{theirs.path}: row {row + 1}: trains other tokens than the row of {ours.path}")


class PairedRows:
    """The rows of the second mixture by those of the first: tokens and labels alone."""

    def __init__(self, data: Mixture, seen: Mixture):
        self.data, self.seen = data, seen

    def __getitem__(self, row: int) -> Sample:
        """ValueError for a row that trains other tokens."""
        source, own_row = self.data.numbers.find(row)
        sample = read_pair(self.data.sources[source], self.seen.sources[source], own_row)
        return {name: sample[name] for name in ("input_ids", "labels")}


def pair(data: Mixture, seen: Mixture, *, column: str) -> None:
    """Gives each sample of `data` the row of `seen` as a column; its tokens count in micro-batches.

    ValueError unless both have the same rows, each with as many trained tokens.
    """
    for ours, theirs in zip(data.sources, seen.sources, strict=True):
        check_rows(ours, theirs)
        ours.sizes = ours.lengths + theirs.lengths
    data.sizes, data.seen = join_values([source.sizes for source in data.sources]), seen
    data.add_column(column, PairedRows(data, seen))
