"""Output paths: one or two data sets, the files that belong to each, and the order in which they appear. Data sets in
.parquet and .jsonl files are converted to Arrow files, once.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from mini_trainer.data.columns.base import IGNORED, Columns
from mini_trainer.data.columns.token_columns import TEXTS
from mini_trainer.data.stores.disk import check_place
from mini_trainer.data.stores.json_lines import MAX_ROW_BYTES
from mini_trainer.data.stores.parquet import check_groups, choose_batch_rows
from mini_trainer.data.tokenized.index import keep_index
from mini_trainer.distributed.messages import shows_progress


@dataclass(frozen=True)
class DataSetFiles:
    """A data set and its other files, all named after it, so that it can be moved and used by itself."""

    data: Path

    @property
    def sidecar(self) -> Path:
        return self.data.with_name(f"{self.data.name}.meta.json")

    @property
    def tokenizer(self) -> Path:
        return self.data.with_name(f"{self.data.name}.tokenizer")

    @property
    def in_order(self) -> list[Path]:
        """The paths in the order in which they appear: the data set after its other files."""
        return [self.tokenizer, self.sidecar, self.data]

    def is_other_side_of(self, data: Path) -> bool:
        """Whether, according to its sidecar, the run that wrote `data` also wrote this data set."""
        try:
            split = json.loads(self.sidecar.read_bytes())["split"]
            return split["other_side"] == data.name
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False


@dataclass(frozen=True)
class Outputs:
    """Output paths: the data set, its validation side if rows are split, and the preview page.

    Unusable rows have no side; their file is next to the training data.
    """

    data: Path
    page: Path | None
    is_split: bool

    @property
    def training(self) -> DataSetFiles:
        return DataSetFiles(self.data)

    @property
    def validation(self) -> DataSetFiles:
        return DataSetFiles(self.data.with_name(f"{self.data.stem}.validation{self.data.suffix}"))

    @property
    def data_sets(self) -> list[DataSetFiles]:
        """The data sets to write, in the order of SIDES."""
        return [self.training, self.validation] if self.is_split else [self.training]

    @property
    def rejected(self) -> Path:
        return self.data.with_name(f"{self.data.name}.rejected.jsonl")

    @cached_property
    def has_stale_validation(self) -> bool:
        """Whether an earlier run left a validation side that would seem to belong to this output."""
        return not self.is_split and self.validation.is_other_side_of(self.data)

    @cached_property
    def in_order(self) -> list[Path]:
        """The paths in the order in which they appear or are removed: a written data set after its other files; a stale
        one before them, its sidecar, which identifies it, last."""
        pages = [] if self.page is None else [self.page]
        files = self.validation
        stale = [files.data, files.tokenizer, files.sidecar] if self.has_stale_validation else []
        written = [path for files in reversed(self.data_sets) for path in files.in_order]
        return [*stale, *pages, self.rejected, *written]

    def finish(self) -> None:
        """Completes outputs that are in their places: makes the indexes of large data sets."""
        for files in self.data_sets:
            keep_index(files.data)

    def check(self, inputs: Sequence[Path]) -> None:
        """Raises ValueError for paths that could not be written later, or would overwrite something: one of the
        `inputs`."""
        for flag, path in (("--output-file", self.data), ("--preview-html", self.page)):
            if path is not None:
                check_place(path.parent, named=f"{flag} {path}")
        tokenizers = [self.training.tokenizer, self.validation.tokenizer]
        for path in self.in_order:
            if path.is_dir() and path not in tokenizers:
                raise ValueError(f"the output {path} is a directory; choose another name")
            if any(path.exists() and path.samefile(source) for source in inputs):
                raise ValueError(f"the output {path} would overwrite the input; choose another name")
            if path in tokenizers and path.exists() and not (path / "tokenizer_config.json").exists():
                raise ValueError(f"{path} would be replaced, but is not a tokenizer directory; rename it")
        if len({path.resolve() for path in self.in_order}) < len(self.in_order):
            raise ValueError(f"--preview-html {self.page}: is also another output; choose another name")
        validation = self.validation
        if self.is_split and validation.data.exists() and not validation.is_other_side_of(self.data):
            raise ValueError(
                f"--validation-share would overwrite {validation.data}, which was not split off"
                f" {self.data.name}; rename it, or choose another --output-file"
            )


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
        columns = set(data.column_names)
        if kind is TEXTS and {"input_ids", "labels"} <= columns and not {"len", "num_loss_counted_tokens"} <= columns:
            data = data.with_format("arrow").map(count_tokens, batched=True, desc="Counting trained tokens")
        return [Path(file["filename"]) for file in data.cache_files]
    except (datasets.exceptions.DatasetGenerationError, pa.ArrowException, ValueError) as error:
        raise OSError(str(error.__cause__ or error)) from None


def count_tokens(rows: pa.Table) -> pa.Table:
    """The rows with their numbers of tokens and of trained tokens, which those that are made by hand may lack."""
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
