"""The index of a data set: all facts about its rows except their tokens, in a mapped file next to a large data set.

    {data set}.index    a line of JSON, then from the next multiple of 4,096 on: lengths (rows,) int32,
                        num_loss_counted_tokens (rows,) int32, first row of each record batch (batches + 1,) int64,
                        and where rows have several sequences the first of each row (rows + 1,) int64, and the length of
                        each sequence (sequences,) int32

All processes of a machine that map it share its pages. It is made from the data set, by the first process that opens it
without one, and again if a file of the data set has another size or time of change.
"""

import contextlib
import io
import itertools
import json
import mmap
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from mini_trainer.data.columns.base import LENGTHS_COLUMN
from mini_trainer.data.stores.disk import locked, written_aside

VERSION = 2
KEPT_FROM = 1 << 22  # rows from which the index is kept in a file; for fewer it is made quickly
PAGE = 4096
BATCHES_BETWEEN_RELEASES = 1024
SPOOLED_BYTES = 1 << 25  # of a column, held in memory while the index is written
INDEXED = ("len", "num_loss_counted_tokens")  # columns

CountPatches = Callable[[int, int], tuple[int, int]]  # height, width -> tiles, and patches in each


class ArrowFile:
    """An Arrow file, in the file or the stream format, mapped into memory; record batches are read on demand."""

    def __init__(self, path: Path):
        self.path, stat = path, path.stat()
        self.identity = [stat.st_size, stat.st_mtime_ns]
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
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
    first_rows: np.ndarray  # (batches + 1,) int64: of each record batch, those of several files in their order
    num_nulls: dict[str, int]  # by column
    null_within: list[str]  # columns whose lists hold null
    first_sequences: np.ndarray | None = None  # (rows + 1,) int64; None: each row is one sequence
    sequence_lengths: np.ndarray | None = None  # (sequences,) int32
    map: mmap.mmap | None = None  # of the arrays, if they are in a file


def open_index(path: Path, files: Sequence[ArrowFile]) -> Index:
    """The index of the data set at `path`, whose rows are in `files`: its file's, which is made if it does not fit."""
    target, identity = path.with_name(f"{path.name}.index"), [VERSION, *(file.identity for file in files)]
    if (index := read_index(target, identity)) is not None:
        return index
    if guess_rows(files) < KEPT_FROM:
        file = io.BytesIO()
        write_index(file, files, identity)
        return parse_index(file.getvalue(), identity)
    with locked(path, flags=os.O_RDONLY):
        if (index := read_index(target, identity)) is not None:  # another process has made it meanwhile
            return index
        try:
            with written_aside(target) as (aside,), open(aside, "wb") as file:
                write_index(file, files, identity)
            return read_index(target, identity)
        except OSError:  # nobody may write there: a file of this process, which has no name
            with tempfile.TemporaryFile() as file:
                write_index(file, files, identity)
                return parse_index(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), identity)


def keep_index(path: Path) -> None:
    """Makes the index of a large data set that was just written, so that training need not."""
    if path.suffix == ".arrow" and guess_rows([file := ArrowFile(path)]) >= KEPT_FROM:
        open_index(path, [file])


def guess_rows(files: Sequence[ArrowFile]) -> int:
    """About the number of rows, without a look at each record batch: only the last of a file is usually smaller."""
    return sum(file.read(0).num_rows * file.num_batches for file in files if file.num_batches)


def write_index(file: BinaryIO, files: Sequence[ArrowFile], identity: list[Any]) -> None:
    """Writes the index in one pass over the record batches, in constant memory."""
    first_rows, null_within, num_sequences = [0], set(), 0
    num_nulls, has_sequences = Counter(dict.fromkeys(files[0].schema.names, 0)), has_lists(files, LENGTHS_COLUMN)
    with contextlib.ExitStack() as stack:
        spools = [stack.enter_context(tempfile.SpooledTemporaryFile(SPOOLED_BYTES)) for _ in range(4)]
        lengths, counts, first_sequences, sequence_lengths = spools
        first_sequences.write(np.zeros(int(has_sequences), np.int64).tobytes())
        for batch in itertools.chain.from_iterable(map(iterate_batches, files)):
            first_rows.append(first_rows[-1] + batch.num_rows)
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                num_nulls[name] += column.null_count
                if pa.types.is_list(column.type) and column.values.null_count:
                    null_within.add(name)
            for name, part in zip(INDEXED, (lengths, counts), strict=True):
                part.write(read_numbers(batch, name).tobytes())
            if has_sequences and batch.num_rows:
                offsets, values = list_views(batch.column(LENGTHS_COLUMN))
                first_sequences.write((offsets[1:] - offsets[0] + np.int64(num_sequences)).tobytes())
                sequence_lengths.write(values[offsets[0] : offsets[-1]].astype(np.int32).tobytes())
                num_sequences += int(offsets[-1] - offsets[0])
        facts = {"identity": identity, "num_rows": first_rows[-1], "num_batches": len(first_rows) - 1}
        facts |= {"num_nulls": num_nulls, "null_within": sorted(null_within)}
        facts["num_sequences"] = num_sequences if has_sequences else None
        header = json.dumps(facts).encode() + b"\n"
        file.write(header + bytes(-len(header) % PAGE))
        batches = io.BytesIO(np.array(first_rows, np.int64).tobytes())
        for part in (lengths, counts, batches, first_sequences, sequence_lengths):
            part.seek(0)
            shutil.copyfileobj(part, file, 1 << 24)
        file.flush()


def iterate_batches(file: ArrowFile) -> Iterator[pa.RecordBatch]:
    """Yields the record batches; pages that were read do not stay in this process's memory."""
    for i in range(file.num_batches):
        yield file.read(i)
        if i % BATCHES_BETWEEN_RELEASES == 0:
            file.map.madvise(mmap.MADV_DONTNEED)


def has_lists(files: Sequence[ArrowFile], name: str) -> bool:
    """Whether all files have the column `name` of lists of integers; another type is refused later."""
    found = [file.schema.field(name).type if name in file.schema.names else None for file in files]
    return all(kind is not None and pa.types.is_list(kind) and pa.types.is_integer(kind.value_type) for kind in found)


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
        with open(path, "rb") as file:
            return parse_index(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), identity)
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


@dataclass(frozen=True)
class ImageSizes:
    """The images of all rows, concatenated."""

    row_of: np.ndarray  # (images,) int64
    sizes: np.ndarray  # (images, 2) int32: height and width
    num_tokens: np.ndarray  # (rows,) int32: tokens of the language model for all images of a row


def read_image_sizes(batches: Sequence[pa.RecordBatch]) -> ImageSizes:
    views = [list_views(batch.column("image_sizes")) for batch in batches]
    counts = np.concatenate([np.diff(offsets) for offsets, _ in views]) // 2
    numbers = np.concatenate([values[offsets[0] : offsets[-1]] for offsets, values in views])
    row_of = np.repeat(np.arange(len(counts)), counts)
    num_tokens = np.concatenate([read_numbers(batch, "num_image_tokens") for batch in batches])
    return ImageSizes(row_of, numbers.reshape(-1, 2), num_tokens)


@dataclass(frozen=True)
class SampleImages:
    """The load of each row's images on the vision tower."""

    tokens: np.ndarray  # (rows,) tokens of the language model
    patches: np.ndarray  # (rows,) int64, patches that enter the tower
    pairs: np.ndarray  # (rows,) float64, pairs of patches within a tile
    costs: np.ndarray  # (rows,) float64, in the packer's unit; 0 until the model is known
    cap: int | None  # most patches of a micro-batch

    def of(self, rows: np.ndarray) -> "SampleImages":
        return SampleImages(self.tokens[rows], self.patches[rows], self.pairs[rows], self.costs[rows], self.cap)


def count_row_images(images: ImageSizes, count_patches: CountPatches) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, patches and pairs of patches of each row; `count_patches` is called once per image size."""
    num_rows = len(images.num_tokens)
    sizes, size_of = np.unique(images.sizes, axis=0, return_inverse=True)
    found = np.array([count_patches(*size) for size in sizes.tolist()], dtype=np.int64).reshape(-1, 2)
    tiles, in_tile = found[size_of.reshape(-1)].T
    patches = np.bincount(images.row_of, tiles * in_tile, minlength=num_rows).astype(np.int64)
    pairs = np.bincount(images.row_of, tiles * in_tile**2, minlength=num_rows)
    return images.num_tokens, patches, pairs
