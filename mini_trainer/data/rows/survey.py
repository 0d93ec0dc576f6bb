"""First pass over labelled rows: finds the labels and repeated texts.

Keeps 24 bytes per row: hashes of its text and label, and its line.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.files import Chunk, Source, read_chunks
from mini_trainer.data.rows.labelled import Labelled, TextPair, Words, is_ignored, read_labelled
from mini_trainer.data.rows.labels import (
    LabelCounts,
    Labels,
    decide_labels,
    find_declared_names,
    name_label,
    read_known_labels,
)
from mini_trainer.data.rows.preparation import read_rows
from mini_trainer.data.rows.split import HASH_BYTES, hash_example
from mini_trainer.data.rows.worker_pool import run_in_order
from mini_trainer.options import RowOptions


@dataclass
class ChunkSurvey:
    """Labels of a chunk's readable rows, and hashes of their texts and labels."""

    counts: LabelCounts
    first: Labelled | None
    has_pairs: bool
    lines: np.ndarray  # (rows,) int64
    texts: np.ndarray  # (rows,) uint64
    labels: np.ndarray  # (rows,) uint64


@dataclass(frozen=True)
class Repeats:
    """Repeated texts, with the places of an example of each kind."""

    num_rows: int  # rows with the same text and label as an earlier one
    num_conflicting: int  # texts with several labels
    repeat: tuple[str, str] | None
    conflict: tuple[str, str] | None


@dataclass(frozen=True)
class Survey:
    """Result of the first pass."""

    labels: Labels
    repeats: Repeats
    has_pairs: bool


def survey_rows(sources: Sequence[Source], rows: RowOptions, *, num_workers: int) -> Survey:
    """Reads all rows. Raises ValueError if the meaning of the labels is ambiguous."""
    known = None if rows.labels_from is None else read_known_labels(rows.labels_from)
    declared = () if known is not None or rows.label_names else find_declared_names(sources, rows.column("label"))
    counts, first, has_pairs = LabelCounts(), None, False
    names, lines, texts, labels = [], [], [], []
    read = (chunk for source in sources for chunk in read_chunks(source))
    process = partial(survey_chunk, rows=rows)
    with closing(run_in_order(process, read, num_workers=num_workers)) as results:
        for chunk, found in results:
            counts.add(found.counts)
            first, has_pairs = first or found.first, has_pairs or found.has_pairs
            for column, part in ((lines, found.lines), (texts, found.texts), (labels, found.labels)):
                column.append(part)
            names.append(chunk.file)
    if first is None and known is None:
        return Survey(Labels.empty(), Repeats(0, 0, None, None), has_pairs=False)  # every row is refused, with reasons
    decided = decide_labels(
        counts,
        first=first,
        label_type=rows.label_type,
        label_names=rows.label_names or declared,
        known=known,
    )
    return Survey(decided, find_repeats(names, lines, texts, labels), has_pairs)


def survey_chunk(chunk: Chunk, *, rows: RowOptions) -> ChunkSurvey:
    """A worker's result for a chunk. Unreadable rows are refused in the second pass."""
    counts, first, has_pairs = LabelCounts(), None, False
    lines, texts, labels = [], [], []
    for row, found in read_rows(chunk, partial(read_labelled, options=rows), Counter()):
        if not isinstance(found, Labelled):
            continue
        counts.add_row(found, f"{chunk.file}:{row.place}")
        first, has_pairs = first or found, has_pairs or isinstance(found.content, TextPair)
        lines.append(row.line)
        texts.append(hash_example(found))
        labels.append(hash_label(found))
    return ChunkSurvey(
        counts, first, has_pairs, np.array(lines, np.int64), np.array(texts, np.uint64), np.array(labels, np.uint64)
    )


def hash_label(row: Labelled) -> int:
    """A hash that is the same for equal labels: the order of several labels does not count, that of words does."""
    labels = row.label if isinstance(row.label, list) else [row.label]
    names = [str(IGNORED) if is_ignored(label) else name_label(label) for label in labels]
    names = names if isinstance(row.content, Words) else sorted(names)
    return int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:HASH_BYTES], "big")


def find_repeats(
    names: Sequence[str], lines: list[np.ndarray], texts: list[np.ndarray], labels: list[np.ndarray]
) -> Repeats:
    """Rows with the same texts. `names`: the file of each chunk."""
    bounds = np.cumsum([0, *map(len, lines)])
    line_of, text_of, label_of = (np.concatenate(parts or [np.empty(0)]) for parts in (lines, texts, labels))
    order = np.lexsort((np.arange(len(text_of)), text_of))  # groups same texts, in the input's order
    text_of, label_of = text_of[order], label_of[order]
    is_first = np.ones(len(text_of), bool)  # first row with its text
    is_first[1:] = text_of[1:] != text_of[:-1]
    firsts = np.flatnonzero(is_first)
    group = np.cumsum(is_first) - 1
    differs = label_of != label_of[firsts[group]]
    is_repeat = ~is_first & ~differs
    conflicting = np.unique(group[differs])

    def name(position: int) -> str:
        row = int(order[position])
        return f"{names[int(np.searchsorted(bounds, row, side='right')) - 1]}:{line_of[row]}"

    def find_example(mask: np.ndarray) -> tuple[str, str] | None:
        """The places of the first example in the input."""
        found = np.flatnonzero(mask)
        if not len(found):
            return None
        position = found[np.argmin(order[found])]
        return name(firsts[group[position]]), name(position)

    return Repeats(int(is_repeat.sum()), len(conflicting), find_example(is_repeat), find_example(differs))


def describe_repeats(repeats: Repeats) -> list[str]:
    """Notes on repeated texts for the report."""
    notes = []
    if repeats.conflict is not None:
        first, second = repeats.conflict
        texts = "text has" if repeats.num_conflicting == 1 else "texts have"
        notes.append(f"{repeats.num_conflicting:,} {texts} several labels, the first of them at {first} and {second}")
    if repeats.repeat is not None:
        first, second = repeats.repeat
        rows = "row repeats" if repeats.num_rows == 1 else "rows repeat"
        notes.append(
            f"{repeats.num_rows:,} {rows} an earlier text with its label, the first of them {second} that of {first}"
        )
    return notes
