"""One or several tokenized data sets as one: their rows are numbered consecutively, in the order of the sets."""

import copy
import functools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mini_trainer.batch_packer import SampleLoad
from mini_trainer.data.columns.base import Sample, describe_task
from mini_trainer.data.tokenized import by_row
from mini_trainer.data.tokenized.reader import Sequences, TokenizedData
from mini_trainer.options.doors import WEIGHED_BY

if TYPE_CHECKING:
    from mini_trainer.data.tokenized.image_sizes import SampleImages


class ByRow(Protocol):
    """A column's values by the mixture's rows: an array (rows, ...), or a reader of files."""

    def __getitem__(self, row: int) -> np.ndarray: ...


class Mixture:
    """Tokenized data sets from which samples are drawn by their `shares`. `lengths`, `num_loss_tokens` and `kept`
    are indexed like their concatenations, by the row's number in `numbers`."""

    def __init__(self, sources: Sequence[TokenizedData], *, weights: Sequence[float] = (), by: str = "samples"):
        """`weights` are relative shares of the drawn samples or, with `by` "tokens", of their tokens. Without weights
        each set counts by its size, so an epoch has every sample once. ValueError for a set given twice, or sets for
        different tasks."""
        self.sources = list(sources)
        self.task = sources[0].task
        for source in sources:
            if source.task != self.task:
                raise ValueError(
                    f"{sources[0].path} is for {describe_task(self.task)}, but {source.path} for"
                    f" {describe_task(source.task)}: data sets of one run must have the same labels in the same order;"
                    " tokenize one of them again with --labels-from the other"
                )
        self.names = name_sources([source.path for source in sources])
        assert by in WEIGHED_BY, by
        self.weights, self.by = weights, by
        self.numbers = by_row.RowNumbers(len(source.lengths) for source in sources)
        self.lengths: by_row.Values = by_row.join_values([source.lengths for source in sources])
        self.has_sequences = sources[0].sequences is not None  # as all have, which are for one task
        self.num_loss_tokens = by_row.join_values([source.num_loss_tokens for source in sources])
        self.images: SampleImages | None = None  # set by run.start.count_set_images
        self.computed: dict[str, ByRow] = {}  # columns that the data sets do not have; set by `add_column`
        self._find_kept()

    def _find_kept(self) -> None:
        first_rows = self.numbers.firsts.tolist()
        self.kept_of = [source.kept + first for source, first in zip(self.sources, first_rows, strict=False)]
        self.kept = by_row.join_rows(self.kept_of)  # the stream draws from these rows
        sizes = np.array([len(kept) for kept in self.kept_of], dtype=np.float64)
        shares = sizes if not self.weights else np.array(self.weights, dtype=np.float64)
        if self.weights and self.by == "tokens":
            shares = shares / [by_row.sum_values(one.lengths, one.kept) / len(one.kept) for one in self.sources]
        self.shares = shares / shares.sum()  # (sources,) of the samples that are drawn

    @property
    def longest(self) -> int:
        """Number of tokens of the longest kept sample."""
        return int(self.lengths[by_row.find_top_row(self.lengths, self.kept)])

    @property
    def longest_sequence(self) -> int:
        """Number of tokens of the longest sequence of a kept sample."""
        if not self.has_sequences:
            return int(self.lengths[by_row.find_top_row(self.lengths, self.kept)])
        if not isinstance(self.kept, by_row.RowRange):
            return max(int(self.list_sequences(rows).lengths.max()) for rows in by_row.iterate_chunks(self.kept))
        parts = zip(self.sources, self.numbers.firsts, strict=False)
        return max(one.sequences.find_longest(self.kept.within(int(first), len(one.lengths))) for one, first in parts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the kept samples."""
        return by_row.sum_values(self.lengths, self.kept)

    @property
    def has_images(self) -> bool:
        return self.sources[0].image_sizes is not None

    @property
    def vocab_size(self) -> float:
        return self.sources[0].vocab_size

    @vocab_size.setter
    def vocab_size(self, vocab_size: float) -> None:
        for source in self.sources:
            source.vocab_size = vocab_size

    def fit_to(self, max_tokens_per_gpu: int, *, num_sharing: int = 1, drop_overlong: bool) -> int:
        """`TokenizedData.fit_to` for all sets."""
        num_dropped = sum(
            one.fit_to(max_tokens_per_gpu, num_sharing=num_sharing, drop_overlong=drop_overlong) for one in self.sources
        )
        self._find_kept()
        return num_dropped

    def keep_where(self, is_kept: np.ndarray) -> None:
        """Keeps, of the kept rows, those of `is_kept`, (rows,) bool."""
        for source, first in zip(self.sources, self.numbers.firsts.tolist(), strict=False):
            source.kept = source.kept[is_kept[source.kept + first]]
        self._find_kept()

    def load_of(self, rows: np.ndarray) -> SampleLoad | None:
        """The packer's load of some rows in addition to their tokens; None where each is one sequence of text."""
        load, images = SampleLoad(), self.images
        if images is not None:
            load = SampleLoad(images.patches[rows], images.costs[rows], images.cap)
        if self.has_sequences:
            sequences = self.list_sequences(rows)
            load = load._replace(squares=sequences.sum_by_row(sequences.lengths.astype(float) ** 2))
        return None if images is None and not self.has_sequences else load

    def list_sequences(self, rows: np.ndarray) -> Sequences:
        """The sequences of some rows."""
        if not self.has_sequences:
            return Sequences(np.ones(len(rows), np.int64), self.lengths[rows])
        if len(self.sources) == 1:
            return self.sources[0].sequences.of(rows)
        counts, parts = np.empty(len(rows), np.int64), []
        for source, (is_own, own_rows) in zip(self.sources, self.numbers.divide(rows), strict=True):
            part = source.sequences.of(own_rows)
            counts[is_own] = part.counts
            parts.append((is_own, part))
        lengths = np.empty(counts.sum(), np.int32)
        for is_own, part in parts:
            lengths[np.repeat(is_own, counts)] = part.lengths
        return Sequences(counts, lengths)

    def take_subset(self, subset: int | float, *, seed: int) -> None:
        """Keeps a random subset of each set's kept samples: this number, or this share of them, at least one."""
        for i, source in enumerate(self.sources):
            number = subset if isinstance(subset, int) else max(1, round(subset * len(source.kept)))
            order, places = by_row.draw_permutation(len(source.kept), [seed, i]), by_row.RowRange(0, number)
            chosen = [source.kept[order[part[0] : part[-1] + 1]] for part in by_row.iterate_chunks(places)]
            source.kept = np.sort(np.concatenate(chosen))
        self._find_kept()

    def check_trained(self, option: str) -> None:
        """ValueError for a set without trained tokens in its kept samples; `option` is shown in the message."""
        for source in self.sources:
            if not any(source.num_loss_tokens[rows].any() for rows in by_row.iterate_chunks(source.kept)):
                kept = f" {len(source.kept):,} kept" if len(source.kept) < len(source.lengths) else ""
                raise ValueError(f"{option} {source.path}: its{kept} samples have no trained tokens, so it has no loss")

    def count_labels(self) -> tuple[np.ndarray, float]:  # (classes,) float64
        """Number of targets of each class, and in total, in an epoch of samples drawn by the sets' shares."""
        drawn = self.shares * len(self.kept) if self.weights else np.array([len(kept) for kept in self.kept_of])
        counts, num_targets = np.zeros(self.task.num_labels), 0.0
        for source, num_drawn in zip(self.sources, drawn, strict=True):
            times = num_drawn / len(source.kept)  # draws of each of the set's samples
            counts += times * source.count_labels()
            num_targets += times * by_row.sum_values(source.num_loss_tokens, source.kept)
        return counts, num_targets

    def read(self, row: int) -> Sample:
        """A row's columns, including the optional columns of any set: samples packed into one row must agree."""
        number, own_row = self.numbers.find(row)
        source = self.sources[number]
        sample = source.read(own_row)
        return (
            sample
            | {name: source.kind.fill(name, len(sample["input_ids"])) for name in self.columns if name not in sample}
            | {name: values[row] for name, values in self.computed.items()}
        )

    def add_column(self, name: str, values: ByRow) -> None:
        """Gives each row's sample one value more."""
        self.computed[name] = values

    def restricted_to(self, rows: by_row.Rows) -> "Mixture":
        """The same data, of which only `rows` are kept."""
        part = copy.copy(self)
        part.kept = rows
        return part

    @functools.cached_property
    def columns(self) -> frozenset[str]:
        """The columns of its samples."""
        return frozenset().union(*(source.columns for source in self.sources))

    def release_pages(self) -> None:
        for source in self.sources:
            source.release_pages()

    def find_tokens(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """The first row in the stream with one of these token ids, and that id; None if there is none."""
        for source, first in zip(self.sources, self.numbers.firsts.tolist(), strict=False):
            if (found := source.find_tokens(token_ids)) is not None:
                return first + found[0], found[1]
        return None

    def locate(self, row: int) -> tuple[Path, int]:
        """A row's file, and its number there, from 1."""
        source, own_row = self.numbers.find(row)
        return self.sources[source].path, own_row + 1

    def name_rows(self, rows: Sequence[int], *, most: int = 20) -> str:
        """Rows as shown in messages: by file, numbered from 1, the first `most` of each."""
        numbers: dict[Path, list[int]] = {}
        for path, number in map(self.locate, sorted(map(int, rows))):
            numbers.setdefault(path, []).append(number)
        return "; ".join(
            f"{path}: {', '.join(map(str, found[:most]))}"
            + (f" and {len(found) - most} more" if len(found) > most else "")
            for path, found in numbers.items()
        )


def name_sources(paths: Sequence[Path]) -> list[str]:
    """A name for each file: its own without the ending, or its whole path if two have the same."""
    twice = [str(path) for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise ValueError(f"given twice: {', '.join(twice)}; to make a data set count more, raise its --data-weights")
    stems = Counter(path.stem for path in paths)
    return [path.stem if stems[path.stem] == 1 else str(path) for path in paths]


def interleave(shares: np.ndarray, *, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The source of each of the positions [start, start + count), and the number drawn from each source before. Sample
    k of a source with share s is due at (k + 1/2) / s, and samples are drawn in the order in which they are due. So at
    every position each source has its share to within a sample or two, and any position can be computed directly."""
    slack = len(shares) + 1  # bounds the difference between the number of samples due and the time
    firsts = [max(0, math.floor(share * (start - slack)) - 1) for share in shares]
    ends = [math.ceil(share * (start + count + slack)) + 1 for share in shares]
    due = [(np.arange(first, end) + 0.5) / share for first, end, share in zip(firsts, ends, shares, strict=True)]
    sources = np.repeat(np.arange(len(shares)), [len(times) for times in due])
    order = sources[np.lexsort((sources, np.concatenate(due)))]
    num_earlier = start - sum(firsts)
    before = np.array(firsts) + np.bincount(order[:num_earlier], minlength=len(shares))
    return order[num_earlier : num_earlier + count], before
