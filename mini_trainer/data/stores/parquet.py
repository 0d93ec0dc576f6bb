"""Parquet files: a limit on their row groups, and batches of rows of a bounded size."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from mini_trainer.data.stores.json_lines import MAX_ROW_BYTES, TooLong

MAX_GROUP_BYTES = 4 << 30  # uncompressed bytes of a row group

RowBatch = pa.RecordBatch | TooLong  # some rows, or one that is too long


def check_groups(metadata: pq.FileMetaData, name: str) -> None:
    """ValueError if a row group of the file `name` is too large uncompressed."""
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        if group.total_byte_size > MAX_GROUP_BYTES:
            num_rows = max(1, group.num_rows * MAX_GROUP_BYTES // group.total_byte_size // 2)
            raise ValueError(
                f"{name}: row group {i + 1} has {group.total_byte_size:,} bytes uncompressed, allowed:"
                f" {MAX_GROUP_BYTES:,}: rewrite the file with smaller row groups"
                f" (pyarrow.parquet.write_table(..., row_group_size={num_rows}))"
            )


def choose_batch_rows(metadata: pq.FileMetaData, *, most_rows: int, most_bytes: int) -> int:
    """Rows to read at once."""
    num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return min(most_rows, 1 + most_bytes * metadata.num_rows // max(num_bytes, 1))


def cut_batch(batch: pa.RecordBatch, *, most_bytes: int) -> Iterator[RowBatch]:
    """Yields the rows, columns without dictionaries, in batches of at most `most_bytes` unless one row has more."""
    if any(map(pa.types.is_dictionary, batch.schema.types)):
        types = [field.type.value_type if pa.types.is_dictionary(field.type) else field.type for field in batch.schema]
        batch = batch.cast(pa.schema(zip(batch.schema.names, types, strict=True), batch.schema.metadata))
    if batch.num_rows > 1 and batch.nbytes > most_bytes:
        half = batch.num_rows // 2
        yield from cut_batch(batch.slice(0, half), most_bytes=most_bytes)
        yield from cut_batch(batch.slice(half), most_bytes=most_bytes)
    elif batch.num_rows > 0:
        yield TooLong(b"", batch.nbytes) if batch.nbytes > MAX_ROW_BYTES else batch


def count_rows(batch: RowBatch) -> int:
    return 1 if isinstance(batch, TooLong) else batch.num_rows
