"""Converts a chunk's rows to tokenized samples, and unusable rows with their reasons; runs in workers."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from mini_trainer.data.chat.conversation import ASSISTANT, Document, Remark, TokenizedChat
from mini_trainer.data.columns.base import DataTask
from mini_trainer.data.rows.column_names import Fields, RefusedColumn
from mini_trainer.data.rows.files import Chunk, Folder, Sections, Source, check_folder, iterate_rows, read_chunks
from mini_trainer.data.rows.formats import FieldPaths, check_paths, detect_format
from mini_trainer.data.rows.labelled_tokens import TokenizedText
from mini_trainer.data.rows.lines import parse_row
from mini_trainer.data.rows.report import LOST_NULLS, MISSING_CELL, SHOWN_SAMPLES_SEED, Totals
from mini_trainer.data.rows.split import SIDES, SideResult, falls_into_validation, mark_place
from mini_trainer.data.rows.writer import TokenizedSample, encode_samples
from mini_trainer.data.stores.json_lines import NUM_BYTES_SHOWN, BadRow, RawRow, TooLong
from mini_trainer.distributed.messages import one_line

ExampleT = TypeVar("ExampleT")
# A row's examples, most often one. Counts unread columns; raises ValueError for an unusable row, and RefusedColumn for
# an unread column that changes what is learned.
ReadValues = Callable[[Fields, Chunk, Counter[str]], Sequence[ExampleT]]

NUM_REASONS_SHOWN = 10
PRINTED_AS_MISSING = {"nan", "NaN", "None", "NaT", "<NA>"}  # missing values of pandas and Python, printed


@dataclass(frozen=True)
class Preparation(Generic[ExampleT]):
    """How rows become samples of a task."""

    task: DataTask
    read: ReadValues[ExampleT]
    tokenize: Callable[[Sequence[ExampleT]], list[TokenizedChat | TokenizedText | ValueError]]
    stop_token_ids: frozenset[int] | None = None  # tokens that end turns; None: not counted


def read_rows(
    chunk: Chunk, read: ReadValues[ExampleT], tally: Counter[str]
) -> Iterator[tuple[RawRow, ExampleT | ValueError | None]]:
    """Yields the chunk's rows, each with its example, the error that makes it unusable, or None for a blank line; a row
    with several examples once with each. RefusedColumn names the row."""
    for row in iterate_rows(chunk):
        try:
            values = parse_row(row.value, chunk.encoding)
            examples = [None] if values is None else read(values, chunk, tally)
        except RefusedColumn as error:
            raise RefusedColumn(f"{chunk.file}:{row.place}: {error}") from None
        except ValueError as error:
            examples = [error]
        for example in examples:
            yield row, example


@dataclass
class Side:
    """Samples and totals so far of a chunk's rows on one side."""

    name: str
    totals: Totals
    samples: list[TokenizedSample] = field(default_factory=list)


@dataclass(frozen=True)
class ChunkResult:
    """A worker's result for a chunk."""

    sides: list[SideResult]  # in the order of SIDES; only training if rows are not split
    rejected: bytes  # unusable rows with their reasons, as JSON lines
    reasons: list[tuple[str, str]]  # the first of them, each after its row's place
    num_bytes: int  # bytes of the file that were read for the chunk


def read_formatted_chunks(sources: Sequence[Source], data_format: str | None, paths: FieldPaths) -> Iterator[Chunk]:
    """Yields the chunks of all sources' sections, with the given format or that of the file's first row. ValueError if
    files of a folder differ in it."""
    firsts: dict[Folder, Source] = {}
    for source in sources:
        source.format, is_beginning = data_format, source.sections.start == 0
        if not is_beginning:  # the rows before its sections have decided
            before = replace(source, sections=Sections(0, source.sections.start))
            chunks = read_formatted_chunks([before], data_format, paths)
            source.format = next((chunk.format for chunk in chunks if chunk.format is not None), data_format)
        for i, chunk in enumerate(read_chunks(source)):
            if i == 0 and is_beginning and paths.given:
                check_paths(chunk, paths)
            if source.format is None:
                source.format = detect_format(chunk, paths)
            check_folder(source, firsts)
            yield replace(chunk, format=source.format)


def process_chunk(
    chunk: Chunk,
    *,
    preparation: Preparation,
    ending: str,
    num_shown: int,
    max_sample_num_tokens: int | None,
    cuts_blocks: bool,
    validation_share: float | None,
) -> ChunkResult:
    """Reads, tokenizes and masks the rows of a chunk. Raises ValueError for problems that affect more than a row."""
    rejected: dict[int, str] = {}
    sides = [Side(name, Totals(num_shown)) for name in (SIDES[:1] if validation_share is None else SIDES)]
    training = sides[0]
    # Rows become examples, or are refused.
    rows, examples = [], []
    for row, example in read_rows(chunk, preparation.read, training.totals.columns):
        if cuts_blocks and not isinstance(example, Document | ValueError | None):
            example = ValueError("not a document: --block-size cuts only documents")
        if isinstance(example, ValueError):
            rejected[row.number] = one_line(example)
        elif example is None:
            training.totals.rows["blank_lines"] += 1
        else:
            rows.append(row)
            examples.append(example)
    # Examples become samples of a side, or are refused or dropped.
    draw = random.Random(f"{SHOWN_SAMPLES_SEED} {chunk.file} {chunk.first_row}").random
    for row, example, tokens in zip(rows, examples, preparation.tokenize(examples), strict=True):
        if isinstance(tokens, ValueError):
            rejected[row.number] = one_line(tokens)
            continue
        is_validation = validation_share is not None and falls_into_validation(example, validation_share)
        side = sides[is_validation]
        side.totals.rows["in"] += 1
        if max_sample_num_tokens is not None and len(tokens.input_ids) > max_sample_num_tokens:
            side.totals.rows["too_long"] += 1
        elif tokens.num_loss_counted_tokens == 0:
            side.totals.rows["nothing_trained"] += 1
        else:
            sample = TokenizedSample(mark_place(f"{chunk.file}:{row.place}", side.name), tokens)
            side.samples.append(sample)
            count_kept(side.totals, sample)
            # What a row of a table may have lost: nulls of its own, and missing values that became text.
            remarks = [Remark(LOST_NULLS, place) for place in row.lost]
            if chunk.encoding == "table":
                cells = [cell for cell in row.value.items() if cell[0] not in training.totals.columns]
                remarks += [Remark(MISSING_CELL, name, cell) for name, cell in cells if cell in PRINTED_AS_MISSING]
            side.totals.add_remarks(remarks, sample.place)
            if preparation.stop_token_ids is not None:
                count_stops(side.totals, tokens, preparation.stop_token_ids)
            if not cuts_blocks:
                side.totals.add_sample(sample, draw())
    training.totals.rows["in"] += len(rejected)
    training.totals.rows["invalid"] += len(rejected)
    for reason in rejected.values():
        training.totals.add_invalid(reason)
    # Samples are written as they are; documents to be cut need only their tokens.
    encode = concatenate_ids if cuts_blocks else partial(encode_samples, ending=ending, task=preparation.task)
    results = [SideResult(encode(side.samples), side.totals) for side in sides]
    return ChunkResult(results, *describe_rejected(chunk, rejected), chunk.num_bytes)


def concatenate_ids(samples: Sequence[TokenizedSample]) -> np.ndarray:  # (tokens,) int32
    return np.array([token for sample in samples for token in sample.tokens.input_ids], np.int32)


def count_kept(totals: Totals, sample: TokenizedSample) -> None:
    """Counts a kept row, its trained tokens by role, and its labels or remarks."""
    totals.rows["kept"] += 1
    if isinstance(sample.tokens, TokenizedText):
        totals.rows["truncated"] += sample.tokens.is_truncated
        totals.labels.update(sample.tokens.label_counts)
    else:
        totals.add_remarks(sample.tokens.remarks, sample.place)
    for span in sample.tokens.spans:
        totals.trained_by_role[span.role] += span.num_targets


def count_stops(totals: Totals, tokens: TokenizedChat, stop_token_ids: frozenset[int]) -> None:
    """Counts a kept row, and whether it trains a stop token: the assistant's, in a chat that trains the assistant."""
    roles = {span.role for span in tokens.spans}
    spans = [span for span in tokens.spans if span.role == ASSISTANT or ASSISTANT not in roles]
    trained = (token for span in spans for token in tokens.input_ids[max(span.start, 1) : span.end])
    totals.stops["rows"] += 1
    totals.stops["trained"] += not stop_token_ids.isdisjoint(trained)
    totals.stops["appended"] += tokens.is_stop_appended


def describe_rejected(chunk: Chunk, rejected: dict[int, str]) -> tuple[bytes, list[tuple[str, str]]]:
    """The rejected rows with their reasons as JSON lines, and the first reasons with their places."""
    rows = [row for row in iterate_rows(chunk) if row.number in rejected] if rejected else []
    entries = [
        {"file": chunk.file, "line": row.line, "reason": rejected[row.number], "row": show_row(row)} for row in rows
    ]
    reasons = [(f"{chunk.file}:{row.place}", rejected[row.number]) for row in rows[:NUM_REASONS_SHOWN]]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode(), reasons


def show_row(row: RawRow) -> str:
    """The row as text; the beginning of a skipped one."""
    if isinstance(row.value, dict):
        return json.dumps(row.value, default=repr)
    raw = row.value
    if isinstance(raw, TooLong | BadRow):
        raw = raw.beginning.rstrip(b"\r\n") + b"..." * (len(raw.beginning) == NUM_BYTES_SHOWN)
    return raw.decode(errors="backslashreplace").rstrip("\r\n")
