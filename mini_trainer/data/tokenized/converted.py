"""Arrow copies of tokenized data sets in .jsonl and .parquet files, made once of each content.

    {--data-cache-dir}/converted/{key}/{name}.arrow, next to made.json, which records the copy's hash

The key is a hash of the file's content and of the columns that are read. A copy that has changed is made again.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from mini_trainer.data.columns.base import IGNORED, Columns
from mini_trainer.data.columns.token_columns import TEXTS
from mini_trainer.data.stores.contents import hash_once
from mini_trainer.data.stores.disk import hash_json, locked, written_aside
from mini_trainer.data.stores.json_lines import MAX_ROW_BYTES
from mini_trainer.data.stores.made import MADE, is_as_made, record_made
from mini_trainer.data.stores.parquet import check_groups, choose_batch_rows
from mini_trainer.distributed.ending import log
from mini_trainer.options.reading import open_regular

FOLDER, VERSION = "converted", 1
KEY_LENGTH = 32  # digits of the hash
CONVERTED_ROWS = 1 << 16  # most rows of a Parquet file converted at once
BLOCK_BYTES = 10 << 20  # of JSON lines converted at once; the first block shows the columns and their types


def convert_to_arrow(path: Path, kind: Columns, *, cache_dir: Path) -> Path:
    """The copy of a data set. OSError, in pyarrow's words, if it cannot be read or copied."""
    key = hash_json([hash_once(path), path.stem, str(kind.schema), VERSION])
    folder = cache_dir / FOLDER / key[:KEY_LENGTH]
    copy, record = folder / f"{path.stem}.arrow", folder / MADE
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        if not is_as_made(record, key):
            log.info(f"data: converting {path} to {copy}, once")
            with written_aside(copy) as (aside,):
                try:
                    write_arrow(aside, iterate_batches(path, kind), has_texts=kind is TEXTS)
                except (pa.ArrowException, ValueError) as error:
                    raise OSError(str(error)) from None
            record_made(record, key, [copy])
    return copy


def write_arrow(path: Path, batches: Iterator[pa.RecordBatch], *, has_texts: bool) -> None:
    """Writes rows to an Arrow file; of texts with their numbers of tokens, which sets made by hand may lack."""
    writer = None
    with pa.OSFile(str(path), "wb") as file:
        for batch in batches:
            if has_texts and {"input_ids", "labels"} <= set(batch.schema.names):
                batch = count_tokens(batch)
            writer = writer or pa.ipc.new_file(file, batch.schema)
            writer.write_batch(batch)
        if writer is None:
            raise ValueError("holds no samples")
        writer.close()


def iterate_batches(path: Path, kind: Columns) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a Parquet file or of JSON lines, in constant memory."""
    if path.suffix == ".parquet":
        with open_regular(path) as file:
            metadata = pq.read_metadata(file)
            check_groups(metadata, path.name)
            num_rows = choose_batch_rows(metadata, most_rows=CONVERTED_ROWS, most_bytes=MAX_ROW_BYTES)
            for batch in pq.ParquetFile(file).iter_batches(num_rows):
                yield batch.replace_schema_metadata(None)
        return
    schema, num_rows = None, 0
    for block in iterate_lines(path):
        if schema is None:  # of the first lines, and the optional columns, which may come later
            found = [field for field in read_lines(block, None).schema if field.name not in kind.optional]
            schema = pa.schema([*found, *(field for field in kind.schema if field.name in kind.optional)])
        try:
            batches = read_lines(block, schema).to_batches()
        except pa.ArrowInvalid as error:
            raise ValueError(f"{error}, counted after the first {num_rows:,}") from None
        num_rows += sum(batch.num_rows for batch in batches)
        yield from batches


def iterate_lines(path: Path) -> Iterator[bytes]:
    """Yields blocks of whole lines. ValueError for a line that is too long."""
    with open_regular(path) as file:
        while block := file.read(BLOCK_BYTES) + file.readline(MAX_ROW_BYTES + 1):
            if len(block) > BLOCK_BYTES + MAX_ROW_BYTES:
                raise ValueError(f"a line is longer than {MAX_ROW_BYTES:,} bytes")
            yield block


def read_lines(block: bytes, schema: pa.Schema | None) -> pa.Table:
    """The rows of JSON lines; columns that are not in the schema, if there is one, are refused."""
    return pa.json.read_json(
        io.BytesIO(block),
        pa.json.ReadOptions(block_size=len(block)),
        None if schema is None else pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
    )


def count_tokens(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with their numbers of tokens and of trained tokens."""
    missing = [name for name in ("len", "num_loss_counted_tokens") if name not in rows.schema.names]
    if missing:
        labels = [() if row.values is None else row.values.to_numpy(zero_copy_only=False) for row in rows["labels"]]
        trained = [np.count_nonzero(np.asarray(row[1:]) != IGNORED) for row in labels]
        counts = {"len": list(map(len, labels)), "num_loss_counted_tokens": trained}
        for name in missing:
            rows = rows.append_column(name, pa.array(counts[name], pa.int32()))
    return rows
