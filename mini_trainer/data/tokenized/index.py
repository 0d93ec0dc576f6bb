"""The index of a data set: all facts about its rows except their tokens, in a mapped file next to a large data set.

    {data set}.index    a line of JSON, with a hash of all the rest, then from the next multiple of 4,096 on: lengths
                        (rows,) int32, num_loss_counted_tokens (rows,) int32, first row of each record batch
                        (batches + 1,) int64, and where rows have several sequences the first of each row (rows + 1,)
                        int64, and the length of each sequence (sequences,) int32

All processes of a machine that map it share its pages. It is made from the data set, by the first process that opens it
without one, and again if a file of the data set has another size or time of change.
"""

import contextlib
import hashlib
import io
import json
import mmap
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from mini_trainer.data.columns.base import LENGTHS_COLUMN
from mini_trainer.data.stores.disk import locked, written_aside
from mini_trainer.options.reading import map_file, open_own

VERSION = 3
KEPT_FROM = 1 << 22  # rows from which the index is kept in a file; for fewer it is made quickly
PAGE = 4096
KEY, HASHED_BYTES = "sha256", 1 << 24  # the hash in the first line, and bytes hashed at once
BATCHES_BETWEEN_RELEASES = 1024
SPOOLED_BYTES = 1 << 25  # of a column, held in memory while the index is written


class ArrowFile:
    """An Arrow file, in the file or the stream format, mapped into memory; record batches are read on demand."""

    def __init__(self, path: Path):
        self.path, stat = path, path.stat()
        self.identity = [stat.st_size, stat.st_mtime_ns]
        self.map = map_file(path)
        buffer = pa.py_buffer(self.map)
        if self.map[:6] == b"ARROW1":
            reader = pa.ipc.open_file(buffer)
            self.schema, self.num_batches, self.read = reader.schema, reader.num_record_batches, reader.get_batch
            return
        source = pa.BufferReader(buffer)
        reader, offsets = pa.ipc.open_stream(source), []
        self.schema = reader.schema
        while True:
            offset = source.tell()
            try:
                reader.read_next_batch()
            except StopIteration:
                break
            offsets.append(offset)
        self.num_batches = len(offsets)
        self.read = lambda i: pa.ipc.read_record_batch(pa.ipc.read_message(buffer[offsets[i] :]), self.schema)


@dataclass(frozen=True)
class Index:
    """Facts about every row but its tokens."""

    lengths: np.ndarray  # (rows,) int32
    num_loss_tokens: np.ndarray  # (rows,) int32
    first_rows: np.ndarray  # (batches + 1,) int64: of each record batch
    num_nulls: dict[str, int]  # by column
    null_within: list[str]  # columns whose lists hold null
    first_sequences: np.ndarray | None = None  # (rows + 1,) int64; None: each row is one sequence
    sequence_lengths: np.ndarray | None = None  # (sequences,) int32
    map: mmap.mmap | None = None  # of the arrays, if they are in a file


def open_index(path: Path, rows: ArrowFile, *, sha256: str | None) -> Index:
    """The index of the data set at `path`, whose `rows` may be in a copy: its file's, which is made if it does not fit.
    `sha256`: the data set's, as its sidecar records it."""
    target, identity = path.with_name(f"{path.name}.index"), [VERSION, sha256, rows.identity]
    if (index := read_index(target, identity)) is not None:
        return index
    if guess_rows(rows) < KEPT_FROM:
        file = io.BytesIO()
        write_index(file, rows, identity)
        return parse_index(file.getvalue(), identity)
    with locked(path, flags=os.O_RDONLY):
        if (index := read_index(target, identity)) is not None:  # another process has made it meanwhile
            return index
        try:
            with written_aside(target) as (aside,), open_own(aside, "wb") as file:
                write_index(file, rows, identity)
            return read_index(target, identity)
        except OSError:  # nobody may write there: a file of this process, which has no name
            with tempfile.TemporaryFile() as file:
                write_index(file, rows, identity)
                return parse_index(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), identity)


def keep_index(path: Path, *, sha256: str | None) -> None:
    """Makes the index of a large data set that was just written, so that training need not."""
    if path.suffix == ".arrow" and guess_rows(rows := ArrowFile(path)) >= KEPT_FROM:
        open_index(path, rows, sha256=sha256)


def guess_rows(rows: ArrowFile) -> int:
    """About the number of rows, without a look at each record batch: only the last is usually smaller."""
    return rows.read(0).num_rows * rows.num_batches if rows.num_batches else 0


def write_index(file: BinaryIO, rows: ArrowFile, identity: list[Any]) -> None:
    """Writes the index in one pass over the record batches, in constant memory."""
    first_rows, null_within, num_sequences = [0], set(), 0
    num_nulls = Counter(dict.fromkeys(rows.schema.names, 0))
    kind = rows.schema.field(LENGTHS_COLUMN).type if LENGTHS_COLUMN in num_nulls else pa.null()
    has_sequences = pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)  # another type is refused later
    with contextlib.ExitStack() as stack:
        spools = [stack.enter_context(tempfile.SpooledTemporaryFile(SPOOLED_BYTES)) for _ in range(4)]
        lengths, counts, first_sequences, sequence_lengths = spools
        first_sequences.write(np.zeros(int(has_sequences), np.int64).tobytes())
        for batch in iterate_batches(rows):
            first_rows.append(first_rows[-1] + batch.num_rows)
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                num_nulls[name] += column.null_count
                if pa.types.is_list(column.type) and column.values.null_count:
                    null_within.add(name)
            for name, part in (("len", lengths), ("num_loss_counted_tokens", counts)):
                part.write(read_numbers(batch, name).tobytes())
            if has_sequences and batch.num_rows:
                offsets, values = list_views(batch.column(LENGTHS_COLUMN))
                first_sequences.write((offsets[1:] - offsets[0] + np.int64(num_sequences)).tobytes())
                sequence_lengths.write(values[offsets[0] : offsets[-1]].astype(np.int32).tobytes())
                num_sequences += int(offsets[-1] - offsets[0])
        facts = {"identity": identity, "num_rows": first_rows[-1], "num_batches": len(first_rows) - 1}
        facts |= {"num_nulls": num_nulls, "null_within": sorted(null_within)}
        facts["num_sequences"] = num_sequences if has_sequences else None
        batches = io.BytesIO(np.array(first_rows, np.int64).tobytes())
        parts, digest = (lengths, counts, batches, first_sequences, sequence_lengths), begin_digest(facts)
        for part in parts:
            part.seek(0)
            while block := part.read(HASHED_BYTES):
                digest.update(block)
            part.seek(0)
        header = json.dumps(facts | {KEY: digest.hexdigest()}).encode() + b"\n"
        file.write(header + bytes(-len(header) % PAGE))
        for part in parts:
            shutil.copyfileobj(part, file, HASHED_BYTES)
        file.flush()


def begin_digest(facts: dict[str, Any]) -> "hashlib._Hash":
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode())


def iterate_batches(file: ArrowFile) -> Iterator[pa.RecordBatch]:
    """Yields the record batches; pages that were read do not stay in this process's memory."""
    for i in range(file.num_batches):
        yield file.read(i)
        if i % BATCHES_BETWEEN_RELEASES == 0:
            file.map.madvise(mmap.MADV_DONTNEED)


def list_views(chunk: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, values) of a list column's chunk as views into the mapped file, not read yet."""
    return view(chunk.offsets), view(chunk.values)


def view(array: pa.Array) -> np.ndarray:
    """The array's numbers without a copy; `to_numpy` would import pandas, half a second of every start."""
    return np.from_dlpack(array.fill_null(0) if array.null_count else array)


def read_numbers(batch: pa.RecordBatch, name: str) -> np.ndarray:  # (rows,) int32
    """A column of numbers; zeros for any other column, which is refused later."""
    column = batch.column(name)
    if column.null_count or not pa.types.is_integer(column.type):
        return np.zeros(batch.num_rows, np.int32)
    return view(column).astype(np.int32)


def read_index(path: Path, identity: list[Any]) -> Index | None:
    """The index in a file; None if there is none, or one of other files."""
    try:
        return parse_index(map_file(path, follows=False), identity)
    except (OSError, ValueError, KeyError, TypeError):  # also an empty file, and JSON that is none
        return None


def parse_index(content: bytes | mmap.mmap, identity: list[Any]) -> Index:
    """ValueError for the index of other files, or one that is not whole."""
    header_bytes = content.find(b"\n") + 1
    facts = json.loads(content[:header_bytes])
    num_rows, num_sequences, end = facts["num_rows"], facts["num_sequences"], header_bytes + -header_bytes % PAGE
    sizes = [(np.int32, num_rows), (np.int32, num_rows), (np.int64, facts["num_batches"] + 1)]
    if num_sequences is not None:
        sizes += [(np.int64, num_rows + 1), (np.int32, num_sequences)]
    places = []
    for dtype, size in sizes:
        places.append(end)
        end += np.dtype(dtype).itemsize * size
    if facts["identity"] != identity or len(content) != end:
        raise ValueError(f"an index of {facts['identity']} with {len(content)} bytes, not of {identity}, {end}")
    sha256, digest = facts.pop(KEY), begin_digest(facts)
    for start in range(places[0], end, HASHED_BYTES):
        digest.update(content[start : start + HASHED_BYTES])
    if digest.hexdigest() != sha256:
        raise ValueError("damaged")
    arrays = [np.frombuffer(content, *kind, place) for kind, place in zip(sizes, places, strict=True)]
    return Index(
        lengths=arrays[0],
        num_loss_tokens=arrays[1],
        first_rows=arrays[2].copy(),  # each row that is read looks for its batch here
        num_nulls=facts["num_nulls"],
        null_within=facts["null_within"],
        first_sequences=None if num_sequences is None else arrays[3],
        sequence_lengths=None if num_sequences is None else arrays[4],
        map=content if isinstance(content, mmap.mmap) else None,
    )
