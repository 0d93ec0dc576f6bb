"""First pass over labelled rows, which finds the labels."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from mini_trainer.data.rows.files import Chunk, Source, read_chunks
from mini_trainer.data.rows.labelled import Labelled, TextPair, read_labelled
from mini_trainer.data.rows.labels import (
    LabelCounts,
    Labels,
    decide_labels,
    find_declared_names,
    read_known_labels,
)
from mini_trainer.data.rows.preparation import read_rows
from mini_trainer.data.rows.worker_pool import run_in_order
from mini_trainer.options import RowOptions


@dataclass
class ChunkSurvey:
    """Labels of a chunk's readable rows."""

    counts: LabelCounts
    first: Labelled | None
    has_pairs: bool


@dataclass(frozen=True)
class Survey:
    """Result of the first pass."""

    labels: Labels
    has_pairs: bool


def survey_rows(sources: Sequence[Source], rows: RowOptions, *, num_workers: int) -> Survey:
    """Reads all rows. Raises ValueError if the meaning of the labels is ambiguous."""
    known = None if rows.labels_from is None else read_known_labels(rows.labels_from)
    declared = () if known is not None or rows.label_names else find_declared_names(sources, rows.column("label"))
    counts, first, has_pairs = LabelCounts(), None, False
    read = (chunk for source in sources for chunk in read_chunks(source))
    process = partial(survey_chunk, rows=rows)
    with closing(run_in_order(process, read, num_workers=num_workers)) as results:
        for _, found in results:
            counts.add(found.counts)
            first, has_pairs = first or found.first, has_pairs or found.has_pairs
    if first is None and known is None:
        return Survey(Labels.empty(), has_pairs=False)  # every row is refused, with reasons
    decided = decide_labels(
        counts,
        first=first,
        label_type=rows.label_type,
        label_names=rows.label_names or declared,
        known=known,
    )
    return Survey(decided, has_pairs)


def survey_chunk(chunk: Chunk, *, rows: RowOptions) -> ChunkSurvey:
    """A worker's result for a chunk. Unreadable rows are refused in the second pass."""
    counts, first, has_pairs = LabelCounts(), None, False
    for row, found in read_rows(chunk, partial(read_labelled, options=rows), Counter()):
        if not isinstance(found, Labelled):
            continue
        counts.add_row(found, f"{chunk.file}:{row.place}")
        first, has_pairs = first or found, has_pairs or isinstance(found.content, TextPair)
    return ChunkSurvey(counts, first, has_pairs)
