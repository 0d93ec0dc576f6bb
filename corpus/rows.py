"""A chunk's rows -> tokenized samples, and the rows that cannot be used with their reasons. This is what workers do."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from chat.masking import ChatMasker, Document
from corpus.files import Chunk, Row, Source, TooLong, iterate_rows, read_chunks
from corpus.formats import detect_format, one_line, read_examples
from corpus.report import Totals
from corpus.writer import EncodedSamples, TokenizedSample, encode_samples

SHOWN_SAMPLES_SEED = 42

FormattedChunk = tuple[Chunk, str | None]  # the format is None as long as no row of the file has shown it


@dataclass(frozen=True)
class ChunkResult:
    """What a worker makes of a chunk."""

    samples: EncodedSamples | np.ndarray  # token ids, if documents are cut into blocks, which is done later
    totals: Totals
    rejected: dict[int, str]  # number of the row -> reason


def read_formatted_chunks(sources: Sequence[Source], data_format: str | None) -> Iterator[FormattedChunk]:
    """The chunks of all files, with the format that was given, or that the file's first row shows."""
    for source in sources:
        source.format = data_format
        for chunk in read_chunks(source):
            if source.format is None:
                source.format = detect_format(chunk)
            yield chunk, source.format


def process_chunk(
    formatted_chunk: FormattedChunk,
    *,
    masker: ChatMasker,
    ending: str,
    num_shown: int,
    format_is_given: bool,
    max_sample_num_tokens: int | None,
    cuts_blocks: bool,
) -> ChunkResult:
    """Reads, tokenizes and masks the rows of a chunk. Raises ValueError for what is wrong with more than a row."""
    (chunk, data_format), totals, rejected = formatted_chunk, Totals(num_shown), {}
    # Rows become examples, or are refused.
    rows, examples = [], []
    for row, example in read_examples(chunk, data_format, is_given=format_is_given):
        totals.rows["blank_lines" if example is None else "in"] += 1
        if cuts_blocks and not isinstance(example, Document | ValueError | None):
            example = ValueError("no document: --block-size cuts documents, and nothing else")
        if isinstance(example, ValueError):
            rejected[row.number] = one_line(example)
        elif example is not None:
            rows.append(row)
            examples.append(example)
    # Examples become samples, or are refused or dropped.
    samples = []
    for row, tokens in zip(rows, masker.mask(examples), strict=True):
        if isinstance(tokens, ValueError):
            rejected[row.number] = one_line(tokens)
        elif max_sample_num_tokens is not None and len(tokens.input_ids) > max_sample_num_tokens:
            totals.rows["too_long"] += 1
        elif tokens.num_loss_counted_tokens == 0:
            totals.rows["nothing_trained"] += 1
        else:
            samples.append(TokenizedSample(f"{chunk.file}:{row.place}", tokens))
    count_rows(totals, samples, rejected)
    # Samples are written as they are; of documents that are to be cut, only the tokens are needed.
    if cuts_blocks:
        ids = np.array([token for sample in samples for token in sample.tokens.input_ids], np.int32)
        return ChunkResult(ids, totals, rejected)
    draw = random.Random(f"{SHOWN_SAMPLES_SEED} {chunk.file} {chunk.first_row}").random
    for sample in samples:
        totals.add_sample(sample, draw())
    return ChunkResult(encode_samples(samples, ending), totals, rejected)


def count_rows(totals: Totals, samples: Sequence[TokenizedSample], rejected: dict[int, str]) -> None:
    """Counts the rows that are kept, whose tokens are trained in them, and the rows that cannot be used."""
    totals.rows["kept"] += len(samples)
    totals.rows["invalid"] += len(rejected)
    for sample in samples:
        for run in sample.tokens.runs:
            totals.trained_by_role[run.role] += run.num_targets
    for reason in rejected.values():
        totals.add_invalid(reason)


def count_blocks(totals: Totals, blocks: Sequence[TokenizedSample]) -> None:
    """Counts blocks of documents, which are the samples where documents are cut."""
    for block in blocks:
        totals.add_sample(block, random.Random(f"{SHOWN_SAMPLES_SEED} {block.place}").random())


def write_rejected(chunk: Chunk, rejected: dict[int, str], *, file: BinaryIO) -> list[str]:
    """Writes the rows with their reasons, and returns these with their places."""
    rows = [row for row in iterate_rows(chunk) if row.number in rejected] if rejected else []
    for row in rows:
        entry = {"file": chunk.file, "line": row.line, "reason": rejected[row.number], "row": show_row(row)}
        file.write(json.dumps(entry).encode() + b"\n")
    return [f"{chunk.file}:{row.place}: {rejected[row.number]}" for row in rows]


def show_row(row: Row) -> str:
    """The row as text; of one that was passed over, the beginning."""
    if isinstance(row.value, dict):
        return json.dumps(row.value, default=repr)
    raw = row.value.beginning + b"..." if isinstance(row.value, TooLong) else row.value
    return raw.decode(errors="backslashreplace").rstrip("\r\n")
