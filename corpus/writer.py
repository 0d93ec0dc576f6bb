"""Tokenized samples -> .arrow, .parquet or .jsonl, written aside and renamed when whole."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chat.labels import IGNORED
from chat.masking import TokenizedChat, TrainedSpan
from corpus.labelled_tokens import TokenizedText
from objectives.columns import IMAGES_COLUMN, SCHEMA, TARGET_COLUMN, TYPES_COLUMN, VISION, WEIGHTS_COLUMN, Task

EncodedSamples = pa.RecordBatch | bytes  # in the output's format; of JSON lines the text


@dataclass(frozen=True)
class TokenizedSample:
    """What becomes of a row, or of a block of documents."""

    place: str  # where it comes from, as messages say it: file:line
    tokens: TokenizedChat | TokenizedText


def encode_samples(samples: Sequence[TokenizedSample], ending: str, task: Task) -> EncodedSamples:
    """The samples with the columns of their task; as JSON lines, the optional one only where a sample has it."""
    if ending == ".jsonl":
        make_row = (
            make_pictured_row if task.objective == VISION else make_json_row if task.is_language else make_labelled_row
        )
        return "".join(json.dumps(make_row(sample.tokens)) + "\n" for sample in samples).encode()
    if task.objective == VISION:
        return pa.RecordBatch.from_pylist([make_pictured_row(sample.tokens) for sample in samples], schema=task.schema)
    if not task.is_language:
        rows = [make_labelled_row(sample.tokens) for sample in samples]
        return pa.RecordBatch.from_pylist(rows, schema=task.schema)
    lengths = np.array([len(sample.tokens.input_ids) for sample in samples], np.int32)
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    input_ids = np.fromiter(chain.from_iterable(sample.tokens.input_ids for sample in samples), np.int32)
    labels, weights = np.full_like(input_ids, IGNORED), np.zeros(len(input_ids), np.float32)
    for start, sample in zip(bounds.tolist(), samples, strict=False):
        for span in sample.tokens.spans:
            trained = slice(start + span.start, start + span.end)
            labels[trained], weights[trained] = input_ids[trained], span.weight
    num_targets = [sample.tokens.num_loss_counted_tokens for sample in samples]
    is_weighted = np.array([sample.tokens.is_weighted for sample in samples], bool)
    weight_bounds = np.cumsum([0, *np.where(is_weighted, lengths, 0)], dtype=np.int32)  # a null takes no room
    columns = [
        pa.ListArray.from_arrays(bounds, input_ids),
        pa.ListArray.from_arrays(bounds, labels),
        pa.array(lengths),
        pa.array(num_targets, pa.int32()),
        pa.ListArray.from_arrays(weight_bounds, weights[np.repeat(is_weighted, lengths)], mask=pa.array(~is_weighted)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def make_json_row(tokens: TokenizedChat) -> dict[str, Any]:
    labels = tokens.labels
    row = {
        "input_ids": tokens.input_ids,
        "labels": labels,
        "len": len(labels),
        "num_loss_counted_tokens": tokens.num_loss_counted_tokens,
    }
    return row | {WEIGHTS_COLUMN: tokens.loss_weights} if tokens.is_weighted else row


def make_pictured_row(tokens: TokenizedChat) -> dict[str, Any]:
    """Of a row without images its last column is null."""
    row, pictures = make_json_row(tokens), tokens.pictures
    return row | {
        "num_image_tokens": 0 if pictures is None else pictures.num_tokens,
        "image_sizes": [] if pictures is None else [number for size in pictures.sizes for number in size],
        IMAGES_COLUMN: None if pictures is None else list(pictures.references),
    }


def make_labelled_row(tokens: TokenizedText) -> dict[str, Any]:
    row = {
        "input_ids": tokens.input_ids,
        TARGET_COLUMN if tokens.is_sequence else "labels": tokens.target,
        "len": len(tokens.input_ids),
        "num_loss_counted_tokens": tokens.num_loss_counted_tokens,
    }
    return row if tokens.type_ids is None else row | {TYPES_COLUMN: tokens.type_ids}


@contextmanager
def open_output(path: Path, ending: str, task: Task) -> Iterator[Callable[[EncodedSamples], Any]]:
    """A function that appends samples to a new file, which is finished when the block ends."""
    if ending == ".jsonl":
        with open(path, "wb") as file:
            yield file.write
    elif ending == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, task.schema) as writer:
            yield writer.write_batch
    else:
        with pq.ParquetWriter(path, task.schema) as writer:
            yield writer.write_batch


class BlockCutter:
    """Cuts the stream of documents into blocks. Invariant: `rest`, not cut yet, is no longer than a block.

    A block has `block_size` tokens, one fewer where the next one would begin with an end-of-text token: a sequence's
    first token is never a target, and every document's end shall be one. The stream ends with one, so the remainder,
    which is kept, has at least two tokens.
    """

    def __init__(self, block_size: int, eos_token_id: int | None, *, name: str = "block {:,}") -> None:
        self.block_size, self.eos_token_id, self.name = block_size, eos_token_id, name
        self.rest = np.empty(0, np.int32)
        self.num_blocks = 0

    def cut(self, ids: np.ndarray, *, is_last: bool = False) -> list[TokenizedSample]:
        """The blocks that are full now that `ids` follow; with `is_last` also the remainder."""
        stream, start, blocks = np.concatenate([self.rest, ids]), 0, []
        while len(stream) - start > self.block_size:  # one more token shows whether it may begin a block
            end = start + self.block_size
            end -= stream[end] == self.eos_token_id
            blocks.append(stream[start:end])
            start = end
        self.rest = stream[start:]
        if is_last and len(self.rest):
            blocks.append(self.rest)
            self.rest = stream[:0]
        return [self.make_sample(block.tolist()) for block in blocks]

    def make_sample(self, ids: list[int]) -> TokenizedSample:
        self.num_blocks += 1
        return TokenizedSample(
            self.name.format(self.num_blocks), TokenizedChat(ids, [TrainedSpan(0, len(ids), "document")])
        )
