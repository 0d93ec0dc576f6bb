"""Tokenized samples -> .arrow, .parquet or .jsonl, written aside and renamed when whole."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chat.labels import IGNORED
from chat.masking import TokenizedChat, TrainedSpan

SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int32()),
        "len": pa.int32(),
        "num_loss_counted_tokens": pa.int32(),
    }
)
LOSS_WEIGHTS = pa.field("loss_weights", pa.list_(pa.float32()))

Payload = pa.RecordBatch | bytes  # samples in the output's format; of JSON lines the text


@dataclass(frozen=True)
class Sample:
    """What becomes of a row, or of a block of documents."""

    place: str  # where it comes from, as messages say it: file:line
    tokens: TokenizedChat


def encode_samples(samples: Sequence[Sample], ending: str, *, has_weights: bool) -> Payload:
    """The samples as SCHEMA says, with a column `loss_weights` if any row has some."""
    if ending == ".jsonl":
        return "".join(
            json.dumps(make_json_row(sample.tokens, has_weights=has_weights)) + "\n" for sample in samples
        ).encode()
    bounds = np.cumsum([0, *(len(sample.tokens.input_ids) for sample in samples)], dtype=np.int32)
    input_ids = np.fromiter(chain.from_iterable(sample.tokens.input_ids for sample in samples), np.int32)
    labels, weights = np.full_like(input_ids, IGNORED), np.zeros(len(input_ids), np.float32)
    for start, sample in zip(bounds.tolist(), samples, strict=False):
        for span in sample.tokens.spans:
            trained = slice(start + span.start, start + span.end)
            labels[trained], weights[trained] = input_ids[trained], span.weight
    lists = [input_ids, labels, weights] if has_weights else [input_ids, labels]
    input_ids, labels, *weights = (pa.ListArray.from_arrays(bounds, values) for values in lists)
    num_targets = pa.array([sample.tokens.num_loss_counted_tokens for sample in samples], pa.int32())
    columns = [input_ids, labels, pa.array(np.diff(bounds)), num_targets, *weights]
    return pa.RecordBatch.from_arrays(columns, schema=schema_for(has_weights=has_weights))


def make_json_row(tokens: TokenizedChat, *, has_weights: bool) -> dict[str, Any]:
    labels = tokens.labels
    row = {
        "input_ids": tokens.input_ids,
        "labels": labels,
        "len": len(labels),
        "num_loss_counted_tokens": tokens.num_loss_counted_tokens,
    }
    return row | {"loss_weights": tokens.loss_weights or default_weights(labels)} if has_weights else row


def schema_for(*, has_weights: bool) -> pa.Schema:
    return SCHEMA.append(LOSS_WEIGHTS) if has_weights else SCHEMA


def default_weights(labels: Sequence[int]) -> list[float]:
    """What a sample without weights has where others have some."""
    return [float(label != IGNORED) for label in labels]


def add_default_weights(payload: Payload) -> Payload:
    """The same samples with the column `loss_weights`."""
    if isinstance(payload, bytes):
        rows = [json.loads(line) for line in payload.splitlines()]
        weighted = (row | {"loss_weights": default_weights(row["labels"])} for row in rows)
        return "".join(json.dumps(row) + "\n" for row in weighted).encode()
    labels = payload.column("labels")
    weights = (labels.flatten().to_numpy() != IGNORED).astype(np.float32)
    lengths = np.concatenate([[0], payload.column("len").to_numpy()])
    column = pa.ListArray.from_arrays(pa.array(np.cumsum(lengths), pa.int32()), pa.array(weights))
    return pa.RecordBatch.from_arrays([*payload.columns, column], schema=schema_for(has_weights=True))


class SampleWriter:
    """Appends payloads to a file. Invariant: all samples in it have the same columns.

    Whether any row has weights is known at the end of the input only, so at the first one the file is written anew,
    with their default for the samples so far.
    """

    def __init__(self, path: Path, ending: str) -> None:
        self.path, self.ending, self.has_weights = path, ending, False
        self.append, self.close = open_output(path, ending, schema_for(has_weights=False))

    def write(self, payload: Payload, *, has_weights: bool) -> None:
        if has_weights and not self.has_weights:
            self.add_weights()
        self.append(add_default_weights(payload) if self.has_weights > has_weights else payload)

    def add_weights(self) -> None:
        self.close()
        with open_payloads(self.path, self.ending) as payloads:
            self.path.unlink()  # what is open stays readable
            self.append, self.close = open_output(self.path, self.ending, schema_for(has_weights=True))
            self.has_weights = True
            for payload in payloads:
                self.append(add_default_weights(payload))


def open_output(path: Path, ending: str, schema: pa.Schema) -> tuple[Callable[[Any], Any], Callable[[], None]]:
    """Functions that append a payload to a new file, and that finish it."""
    stack = ExitStack()
    if ending == ".jsonl":
        return stack.enter_context(open(path, "wb")).write, stack.close
    if ending == ".arrow":
        file = stack.enter_context(pa.OSFile(str(path), "wb"))
        return stack.enter_context(pa.ipc.new_file(file, schema)).write_batch, stack.close
    return stack.enter_context(pq.ParquetWriter(path, schema)).write_batch, stack.close


@contextmanager
def open_payloads(path: Path, ending: str) -> Iterator[Iterable[Payload]]:
    """What was appended to a file, in the same pieces but for JSON lines, which come one by one."""
    if ending == ".jsonl":
        with open(path, "rb") as lines:
            yield lines
    elif ending == ".arrow":
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            yield (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        with pq.ParquetFile(path) as reader:
            groups = (reader.read_row_group(i).combine_chunks().to_batches() for i in range(reader.num_row_groups))
            yield (batch for batches in groups for batch in batches)


@dataclass(frozen=True)
class Outputs:
    """What is written: the data set, files beside it, and the page to look at."""

    data: Path
    page: Path | None

    @property
    def sidecar(self) -> Path:
        return self.data.with_name(f"{self.data.name}.meta.json")

    @property
    def rejected(self) -> Path:
        return self.data.with_name(f"{self.data.name}.rejected.jsonl")

    @property
    def tokenizer(self) -> Path:
        return self.data.with_name(f"{self.data.name}.tokenizer")

    @property
    def in_order(self) -> list[Path]:
        """As they take their places: the data set when all that belongs to it is there."""
        pages = [] if self.page is None else [self.page]
        return [*pages, self.rejected, self.tokenizer, self.sidecar, self.data]

    def check(self, inputs: Sequence[Path]) -> None:
        """Raises ValueError for what would fail or destroy something after the work."""
        for flag, path in (("--output-file", self.data), ("--preview-html", self.page)):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{flag} {path}: there is no directory {path.parent}; create it first")
            if path is not None and not os.access(path.parent, os.W_OK):
                raise ValueError(f"{flag} {path}: no permission to write in {path.parent}")
        for path in self.in_order:
            if path.is_dir() and path != self.tokenizer:
                raise ValueError(f"{path}, which is to be written, is a directory; choose another name")
            if any(path.exists() and path.samefile(source) for source in inputs):
                raise ValueError(f"{path}, which is to be written, would overwrite the input; choose another name")
        if self.tokenizer.exists() and not (self.tokenizer / "tokenizer_config.json").exists():
            raise ValueError(f"{self.tokenizer} would be replaced, and is no tokenizer directory; rename it")
        if len({path.resolve() for path in self.in_order}) < len(self.in_order):
            raise ValueError(f"--preview-html {self.page}: is written for another purpose; choose another name")


class BlockCutter:
    """Cuts the stream of documents into blocks. Invariant: `rest`, not cut yet, is no longer than a block.

    A block has `block_size` tokens, one fewer where the next one would begin with an end-of-text token: a sequence's
    first token is never a target, and every document's end shall be one. The stream ends with one, so the remainder,
    which is kept, has at least two tokens.
    """

    def __init__(self, block_size: int, eos_token_id: int | None) -> None:
        self.block_size, self.eos_token_id = block_size, eos_token_id
        self.rest = np.empty(0, np.int32)
        self.num_blocks = 0

    def cut(self, ids: np.ndarray, *, is_last: bool = False) -> list[Sample]:
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

    def make_sample(self, ids: list[int]) -> Sample:
        self.num_blocks += 1
        return Sample(f"block {self.num_blocks:,}", TokenizedChat(ids, [TrainedSpan(0, len(ids), "document")]))
