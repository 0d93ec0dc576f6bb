"""Reads Parquet files in bounded memory, although a few kilobytes of one can unpack to gigabytes.

The headers of a row group's pages say what they unpack to, and their dictionaries how long texts are that may repeat.
Where such texts could take much memory they are left in dictionaries until rows are cut into batches of a bounded size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mini_trainer.data.stores.json_lines import MAX_ROW_BYTES, TooLong

MAX_UNPACKED_BYTES = 512 << 20  # of the largest page of each column, together: pages are unpacked whole
BYTES_PER_VALUE = 8  # in memory, besides the value itself: its place in lists, and where it is null
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
CODECS = ("SNAPPY", "GZIP", "ZSTD", "BROTLI")  # of dictionaries that are read here
# Headers of pages (parquet.thrift): a type, which is this one for dictionaries; the fields of the parts of the header,
# whose first is the number of values; the field of their encoding in two of these; and encodings by a dictionary, and
# by the beginnings that texts have in common.
DICTIONARY_PAGE, PARTS, ENCODING_IN, BY_DICTIONARY, BY_PREFIX = 2, (5, 7, 8), {5: 2, 8: 4}, (2, 8), 7
HEADER_BYTES = (1 << 10, 1 << 16, 1 << 24)  # to read for a header, which can hold its page's smallest and largest value

Batch = pa.RecordBatch | TooLong  # some rows, or one that is too long


class UnpacksToTooMuch(OSError):
    """Rows that need more memory than allowed."""


@dataclass(frozen=True)
class Page:
    """A page of a column, as its header describes it."""

    is_dictionary: bool
    position: int  # in the file, behind the header
    num_packed: int  # bytes in the file
    num_bytes: int
    num_values: int
    encoding: int | None  # of data


def choose_batch_rows(metadata: pq.FileMetaData, *, most_rows: int, most_bytes: int) -> int:
    """Rows to read at once."""
    num_bytes = sum(estimate_group(metadata, i) for i in range(metadata.num_row_groups))
    return min(most_rows, 1 + most_bytes * metadata.num_rows // max(num_bytes, 1))


def estimate_group(metadata: pq.FileMetaData, group: int) -> int:
    """Bytes in memory of a row group, besides texts that repeat."""
    chunks = map(metadata.row_group(group).column, range(metadata.num_columns))
    columns = map(metadata.schema.column, range(metadata.num_columns))
    return sum(
        max(chunk.total_uncompressed_size, chunk.num_values * WIDTHS.get(column.physical_type, column.length))
        for chunk, column in zip(chunks, columns, strict=True)
    )


def read_batches(
    file: BinaryIO, metadata: pq.FileMetaData, groups: Iterable[int], *, most_rows: int, most_bytes: int
) -> Iterator[Batch]:
    """Yields the rows of these row groups, in batches of at most `most_rows`, and about `most_bytes` unless a row has
    more. UnpacksToTooMuch if a row group does."""
    for group in groups:
        repeating, allowed_rows = check_group(file, metadata, group)
        table = pq.ParquetFile(file, metadata=metadata, read_dictionary=repeating, pre_buffer=False)
        for batch in table.iter_batches(batch_size=min(most_rows, allowed_rows), row_groups=[group]):
            yield from cut_batch(batch, most_bytes=most_bytes)


def check_file(path: Path) -> pq.FileMetaData:
    """The metadata of a file that a library reads, row groups as wholes. UnpacksToTooMuch if a row group does."""
    with open(path, "rb") as file:
        metadata = pq.read_metadata(file)
        for group in range(metadata.num_row_groups):
            check_group(file, metadata, group)
    return metadata


def check_group(file: BinaryIO, metadata: pq.FileMetaData, group: int) -> tuple[list[str], int]:
    """Reads the headers of a row group's pages. UnpacksToTooMuch if its rows need more memory than allowed. Returns the
    columns whose texts, which repeat, have to stay in dictionaries, and the most rows to read at once."""
    num_rows, needed, repeating = max(metadata.row_group(group).num_rows, 1), 0, []
    most_rows, schema = num_rows, metadata.schema.to_arrow_schema()
    extended = [field.name for field in schema if "extension<" in str(field.type)]  # not read as dictionaries
    for i in range(metadata.num_columns):
        column, chunk = metadata.schema.column(i), metadata.row_group(group).column(i)
        pages = list(read_pages(file, chunk))
        per_value = BYTES_PER_VALUE if column.max_repetition_level else 0
        sizes = [page.num_bytes + page.num_values * per_value for page in pages]
        needed += max([*sizes, chunk.num_values * per_value // num_rows])
        longest, num_repeated = find_longest(file, chunk, pages) if column.physical_type == "BYTE_ARRAY" else (0, 0)
        if longest * num_repeated <= MAX_UNPACKED_BYTES:
            continue
        if column.path.partition(".")[0] in extended or any(page.encoding == BY_PREFIX for page in pages):
            most_rows = min(most_rows, MAX_UNPACKED_BYTES * num_rows // (longest * chunk.num_values))
        else:
            repeating.append(column.path)
    if needed > MAX_UNPACKED_BYTES:
        first = 1 + sum(metadata.row_group(i).num_rows for i in range(group))
        raise UnpacksToTooMuch(
            f"rows {first:,} to {first + num_rows - 1:,} (row group {group + 1}) unpack to {needed:,} bytes at once,"
            f" allowed: {MAX_UNPACKED_BYTES:,}, and {MAX_ROW_BYTES:,} for one row: remove rows that are longer, or"
            " write the file with smaller pages"
        )
    return repeating, max(most_rows, 1)


def find_longest(file: BinaryIO, chunk: pq.ColumnChunkMetaData, pages: list[Page]) -> tuple[int, int]:
    """The most bytes that one of the column's texts can have that are stored once for several values, and the number of
    these values. Reads a dictionary only if its size leaves this open."""
    shared = [page for page in pages if page.encoding == BY_PREFIX]
    longest, num_values = max([page.num_bytes for page in shared], default=0), sum(page.num_values for page in shared)
    dictionary = next((page for page in pages if page.is_dictionary), None)
    num_looked_up = sum(page.num_values for page in pages if page.encoding in BY_DICTIONARY)
    if dictionary is None:
        return longest, num_values
    size = dictionary.num_bytes
    can_read = chunk.compression in (*CODECS, "UNCOMPRESSED")
    if can_read and size <= MAX_UNPACKED_BYTES < size * num_looked_up:
        size = max(measure_dictionary(file, chunk.compression, dictionary), default=0)
    return max(longest, size), num_values + num_looked_up


def measure_dictionary(file: BinaryIO, compression: str, page: Page) -> Iterator[int]:
    """Yields the length of each text in a dictionary."""
    file.seek(page.position)
    content = file.read(page.num_packed)
    if compression in CODECS:
        content = pa.Codec(compression.lower()).decompress(content, page.num_bytes)
    view, at = memoryview(content), 0
    while at < len(view):
        length = int.from_bytes(view[at : at + 4], "little")
        yield length
        at += 4 + length


def read_pages(file: BinaryIO, chunk: pq.ColumnChunkMetaData) -> Iterator[Page]:
    """Yields the pages of a column in a row group. OSError if a header is damaged."""
    starts = [chunk.data_page_offset, *([chunk.dictionary_page_offset] if chunk.has_dictionary_page else [])]
    position, num_left = min(starts), chunk.num_values
    while num_left > 0:
        try:
            header, num_bytes = read_header(file, position)
            part = next((i for i in PARTS if i in header), None)
            kind, unpacked, packed, num_values = header[1], header[2], header[3], header[part][1] if part else 0
            encoding = header[part][ENCODING_IN[part]] if part in ENCODING_IN else None
        except (IndexError, KeyError, TypeError, RecursionError):
            raise OSError(f"the column {chunk.path_in_schema!r} has a damaged page") from None
        yield Page(kind == DICTIONARY_PAGE, position + num_bytes, packed, unpacked, num_values, encoding)
        position += num_bytes + packed
        num_left -= 0 if kind == DICTIONARY_PAGE else num_values


def read_header(file: BinaryIO, position: int) -> tuple[dict[int, Any], int]:
    """A page's header and its length. IndexError if it has no end."""
    for most in HEADER_BYTES:
        file.seek(position)
        data = file.read(most)
        try:
            return read_struct(data, 0)
        except IndexError:
            if len(data) < most:
                raise
    raise IndexError


def read_struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """A struct of Thrift's compact protocol at byte `at`, by its fields' numbers, and where it ends. Holds integers and
    structs, and None for other values."""
    fields, number = {}, 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = read_integer(data, at)
        fields[number], at = read_value(data, at, head & 15)
    return fields, at + 1


def read_value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2:  # true, false
            return None, at
        case 3:  # a byte
            return None, at + 1
        case 4 | 5 | 6:
            return read_integer(data, at)
        case 7:  # a double
            return None, at + 8
        case 8:  # bytes
            length, at = read_varint(data, at)
            return None, at + length
        case 12:
            return read_struct(data, at)
    raise IndexError  # lists and maps, which headers do not have


def read_integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = read_varint(data, at)
    return value >> 1 ^ -(value & 1), at


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def cut_batch(batch: pa.RecordBatch, *, most_bytes: int) -> Iterator[Batch]:
    """Yields the rows, without dictionaries, in batches of at most twice `most_bytes` unless one row has more."""
    schema = pa.schema([field.with_type(unpack_type(field.type)) for field in batch.schema], batch.schema.metadata)
    if schema == batch.schema and batch.nbytes <= 2 * most_bytes:
        yield batch
        return
    ends = np.cumsum(measure_rows(batch.to_struct_array()))
    start, num_before = 0, 0
    while start < batch.num_rows:
        most = most_bytes if ends[-1] - num_before > 2 * most_bytes else 2 * most_bytes
        end = max(start + 1, int(np.searchsorted(ends, num_before + most, side="right")))
        num_bytes = int(ends[end - 1] - num_before)
        yield TooLong(b"", num_bytes) if num_bytes > MAX_ROW_BYTES else batch.slice(start, end - start).cast(schema)
        start, num_before = end, ends[end - 1]


def count_rows(batch: Batch) -> int:
    return 1 if isinstance(batch, TooLong) else batch.num_rows


def measure_rows(array: pa.Array) -> np.ndarray:
    """Bytes of each row without dictionaries, (rows,) int64."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return measure_rows(array.storage)
    if pa.types.is_dictionary(kind):
        indices = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return measure_rows(array.dictionary)[indices] if len(array.dictionary) else np.zeros(len(array), np.int64)
    if pa.types.is_struct(kind):
        return sum((measure_rows(field) for field in array.flatten()), np.zeros(len(array), np.int64))
    if pa.types.is_map(kind):
        array = pa.ListArray.from_arrays(array.offsets, array.values)  # of which the lists below are known
    if pa.types.is_nested(kind):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths, dtype=np.int64)
        sums = np.append(0, np.cumsum(measure_rows(pc.list_flatten(array))))
        return sums[ends] - sums[ends - lengths]
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return measure_rows(array.cast(pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()))
    if is_text(kind):
        lengths = pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        return lengths.astype(np.int64) + BYTES_PER_VALUE
    return np.full(len(array), 1 if pa.types.is_null(kind) else -(-kind.bit_width // 8), np.int64)


def is_text(kind: pa.DataType) -> bool:
    names = ("string", "large_string", "binary", "large_binary", "fixed_size_binary")
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def unpack_type(kind: pa.DataType) -> pa.DataType:
    """The type without dictionaries."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if isinstance(kind, pa.BaseExtensionType) or not pa.types.is_nested(kind):
        return kind
    fields = [kind.field(i).with_type(unpack_type(kind.field(i).type)) for i in range(kind.num_fields)]
    match kind:
        case pa.StructType():
            return pa.struct(fields)
        case pa.MapType():
            return pa.map_(unpack_type(kind.key_type), kind.item_field.with_type(unpack_type(kind.item_type)))
        case pa.FixedSizeListType():
            return pa.list_(fields[0], kind.list_size)
        case pa.LargeListType():
            return pa.large_list(fields[0])
        case pa.ListType():
            return pa.list_(fields[0])
    return kind
