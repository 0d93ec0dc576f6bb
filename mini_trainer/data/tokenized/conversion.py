"""Conversion of .parquet and .jsonl data sets to Arrow files, once."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from mini_trainer.data.columns.base import IGNORED, Columns
from mini_trainer.data.columns.token_columns import TEXTS
from mini_trainer.data.stores.json_lines import MAX_ROW_BYTES
from mini_trainer.data.stores.parquet import check_groups, choose_batch_rows
from mini_trainer.distributed.messages import shows_progress

if TYPE_CHECKING:
    import datasets

CONVERTED_ROWS = 1 << 16  # most rows of a Parquet file converted at once
INFERRED_BYTES = 10 << 20  # bytes of JSON lines read to infer the columns and their types


def convert_to_arrow(path: Path, kind: Columns) -> list[Path]:
    """Converts a .parquet or .jsonl file to Arrow files in the cache of `datasets`, once."""
    import datasets

    if not shows_progress():
        datasets.disable_progress_bars()
    try:
        if path.suffix == ".parquet":
            metadata = pq.read_metadata(path)
            check_groups(metadata, path.name)
            num_rows = choose_batch_rows(metadata, most_rows=CONVERTED_ROWS, most_bytes=MAX_ROW_BYTES)
            data = datasets.Dataset.from_parquet(str(path), batch_size=num_rows)
        else:
            data = datasets.Dataset.from_json(
                str(path), features=datasets.Features.from_arrow_schema(infer_schema(path, kind))
            )
        data = add_counts(data, kind)
        return [Path(file["filename"]) for file in data.cache_files]
    except (datasets.exceptions.DatasetGenerationError, pa.ArrowException, ValueError) as error:
        raise OSError(str(error.__cause__ or error)) from None


def add_counts(data: "datasets.Dataset", kind: Columns) -> "datasets.Dataset":
    """Adds the numbers of tokens and of trained tokens to rows of texts that have tokens and labels alone."""
    missing = {"len", "num_loss_counted_tokens"} - set(data.column_names)
    if kind is not TEXTS or not missing or not {"input_ids", "labels"} <= set(data.column_names):
        return data
    return data.with_format("arrow").map(count_tokens, batched=True, desc="Counting trained tokens")


def count_tokens(rows: pa.Table) -> pa.Table:
    labels = [() if row.values is None else row.values.to_numpy(zero_copy_only=False) for row in rows["labels"]]
    counts = {
        "len": [len(row) for row in labels],
        "num_loss_counted_tokens": [np.count_nonzero(np.asarray(row[1:]) != IGNORED) for row in labels],
    }
    for name in counts.keys() - set(rows.column_names):
        rows = rows.append_column(name, pa.array(counts[name], pa.int32()))
    return rows


def infer_schema(path: Path, kind: Columns) -> pa.Schema:
    """The columns of JSON lines, inferred from the first lines, and the optional ones, which may come later."""
    with open(path, "rb") as file:
        lines = file.read(INFERRED_BYTES) + file.readline(MAX_ROW_BYTES + 1)
    if len(lines) > INFERRED_BYTES + MAX_ROW_BYTES:
        raise OSError(f"a line at its beginning is longer than {MAX_ROW_BYTES:,} bytes")
    read_options = pa.json.ReadOptions(block_size=max(len(lines), 1))
    table = pa.json.read_json(io.BytesIO(lines), read_options=read_options)
    optional = [field for field in kind.schema if field.name in kind.optional]
    return pa.schema([*(field for field in table.schema if field.name not in kind.optional), *optional])
