"""Reads a tokenized data set from disk: mapped into memory, checked row by row as it is read."""

import functools
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mini_trainer.data.columns.base import COLUMNS, LENGTHS_COLUMN, Columns, RowFacts, Sample, check_sample, read_task
from mini_trainer.data.columns.token_columns import IMAGES_COLUMN
from mini_trainer.data.stores.contents import check_recorded, warn_of_edited
from mini_trainer.data.tokenized.by_row import RowRange, Rows, find_top_row, iterate_chunks
from mini_trainer.data.tokenized.index import ArrowFile, Index, iterate_batches, list_views, open_index
from mini_trainer.distributed.ending import log
from mini_trainer.options.data import DATA_CACHE_DIR
from mini_trainer.options.places import expand
from mini_trainer.options.reading import list_wrong, read_fields, read_object
from mini_trainer.options.urls import is_url

if TYPE_CHECKING:
    from mini_trainer.data.tokenized.image_sizes import ImageSizes

SEARCHED_TOKENS = 1 << 22  # tokens searched at once
NUM_OPEN_BATCHES = 4096  # record batches whose columns are held, some kilobytes each
# Advice on rows given in place of a tokenized data set, by option.
TOKENIZE = "Tokenize rows with mini-trainer process-data"
FOR_ROWS = {
    "--data-path": f"{TOKENIZE}, or give them to train with --input-file",
    "--validation-data-path": f"{TOKENIZE}, or have train hold out rows of --input-file with --validation-share",
}
# Types of the sidecar's entries that training reads.
SIDECAR_TYPES = {"num_samples": int, "tokenizer_fingerprint": str, "tokenizer_dir": str,
                 "stop_token_id": int, "sources": list, "file": dict}  # fmt: skip


class TokenizedData:
    """A tokenized data set, memory-mapped: of a large one no array of all rows is held (`data.tokenized.index`)."""

    def __init__(self, path: str | Path, *, option: str = "--data-path", cache_dir: str = DATA_CACHE_DIR):
        """`option`: the path's option, shown in messages; `cache_dir`: for an Arrow copy of JSON lines or Parquet."""
        if is_url(str(path)):
            raise ValueError(f"{option} {path}: must be a local path here: copy the data set, with its .meta.json")
        self.path = Path(path)
        recorded = read_sidecar(path)
        self.task = read_task(recorded, named=f"{path}.meta.json")
        self.kind = COLUMNS[self.task.objective]
        if self.path.is_file():
            size = self.path.stat().st_size
            if (said := find_recorded_file(recorded).get("size", size)) != size:
                raise ValueError(
                    f"{path}: {size:,} bytes, but {path}.meta.json says {said:,}: it was changed later, or copied only"
                    " in part; copy both again, or tokenize the data again with process_data.py"
                )
        self._file, index = open_rows(self.path, self.kind, option=option, sidecar=recorded, cache_dir=cache_dir)
        self._maps = [self._file.map] + ([] if index.map is None else [index.map])
        self.lengths = index.lengths
        self.num_loss_tokens = index.num_loss_tokens
        self.kept: Rows = RowRange(0, len(self.lengths))  # the stream draws from these rows
        self.vocab_size: float = math.inf  # the model's, once known; larger token ids are refused
        num_nulls, num_rows = index.num_nulls, len(self.lengths)
        if num_rows == 0:
            raise ValueError(f"{path}: holds no samples")
        # The columns of a sample: its lists that do not describe it. One that is missing or null in all rows is none.
        lists = {field.name for field in self.kind.schema if pa.types.is_list(field.type)} - {*self.kind.facts}
        self.columns = frozenset(name for name in lists if num_nulls.get(name, num_rows) < num_rows)
        self._starts = index.first_rows
        self._open_batch = functools.lru_cache(maxsize=NUM_OPEN_BATCHES)(self._read_batch)
        has_images, has_sequences = IMAGES_COLUMN in self.kind.optional, LENGTHS_COLUMN in self.kind.schema.names
        self.image_sizes: ImageSizes | None = None
        if has_images:
            from mini_trainer.data.tokenized.image_sizes import read_image_sizes

            self.image_sizes = read_image_sizes(list(iterate_batches(self._file)))
        self.sequences = RowSequences(index.first_sequences, index.sequence_lengths) if has_sequences else None
        if self.lengths.min() < 1:
            row = int(np.argmin(self.lengths))
            raise ValueError(
                f"{path}: row {row + 1}: len is {self.lengths[row]}, but a sample has at least one token; leave the"
                " row out, or tokenize the data again with process_data.py"
            )
        self.sidecar = recorded
        if recorded is not None and (num_samples := recorded.get("num_samples", num_rows)) != num_rows:
            raise ValueError(
                f"{path}.meta.json belongs to another data set: it says {num_samples:,} samples, but {path} has"
                f" {num_rows:,}; tokenize the data again with process_data.py"
            )
        self.release_pages()

    def _read_batch(self, number: int) -> dict[str, "ColumnChunk"]:
        """The columns of a record batch, by name."""
        batch = self._file.read(number)
        return {name: ColumnChunk(batch.column(name)) for name in self.columns}

    def _mark_kept(self) -> np.ndarray:  # (rows,) bool
        is_kept = np.zeros(len(self.lengths), bool)
        for part in iterate_chunks(self.kept):
            is_kept[part] = True
        return is_kept

    @property
    def longest(self) -> int:
        """Number of tokens of the longest kept sample."""
        return int(self.lengths[find_top_row(self.lengths, self.kept)])

    def release_pages(self) -> None:
        """Unmaps pages read so far: they stay in the system's cache, but no longer count as this process's memory."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def read(self, row: int) -> Sample:
        """A row's columns; ValueError naming the row if they break the contract of its objective."""
        batch = int(np.searchsorted(self._starts, row, side="right")) - 1
        i, length = row - int(self._starts[batch]), int(self.lengths[row])
        sample = {}
        for name, column in self._open_batch(batch).items():
            if (value := column.read(i)) is None:
                value = self.kind.fill(name, length)
            elif isinstance(value, list):  # URLs, or paths relative to the data set's directory
                value = tuple(text if ":" in text else str(self.path.parent / text) for text in value)
            sample[name] = value
        where, num_counted = f"{self.path}: row {row + 1}", int(self.num_loss_tokens[row])
        check_sample(self.kind, sample, RowFacts(self.task, length, num_counted, self.vocab_size, where))
        return sample

    def find_tokens(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """The first row of the stream with one of these token ids, and that id; None if there is none."""
        is_kept = self._mark_kept()
        for number, first_row in enumerate(self._starts[:-1].tolist()):
            offsets, values = self._read_batch(number)["input_ids"].views
            for start in range(int(offsets[0]), int(offsets[-1]), SEARCHED_TOKENS):
                part = values[start : min(start + SEARCHED_TOKENS, int(offsets[-1]))]
                for place in np.flatnonzero(np.isin(part, token_ids)).tolist():
                    row = first_row + int(np.searchsorted(offsets, start + place, side="right")) - 1
                    if is_kept[row]:
                        return row, int(part[place])
        self.release_pages()
        return None

    def count_labels(self) -> np.ndarray:  # (classes,) int64
        """Number of targets of each class in the kept rows of a classifier's data set."""
        num_labels = self.task.num_labels
        is_kept, counts = self._mark_kept(), np.zeros(num_labels, np.int64)
        for number, first_row in enumerate(self._starts[:-1].tolist()):
            offsets, values = self._read_batch(number)[self.kind.target].views
            lengths = np.diff(offsets)
            chosen = np.repeat(is_kept[first_row : first_row + len(lengths)], lengths)
            targets = values[offsets[0] : offsets[-1]]
            if self.task.label_type == "multi":  # a 0 or 1 for each class
                classes = (np.arange(len(targets)) - np.repeat(offsets[:-1] - offsets[0], lengths))[targets == 1]
                chosen = chosen[targets == 1]
            else:
                classes = targets.astype(np.int64)
            # `read` refuses classes that do not exist.
            counts += np.bincount(classes[chosen & (classes >= 0) & (classes < num_labels)], minlength=num_labels)
        self.release_pages()
        return counts

    def fit_to(self, max_tokens_per_gpu: int, *, num_sharing: int = 1, drop_overlong: bool) -> int:
        """Drops samples longer than `max_tokens_per_gpu` on each of the `num_sharing` ranks that share one, and returns
        their number. ValueError for such samples unless `drop_overlong`."""
        most, cap = max_tokens_per_gpu * num_sharing, f"{max_tokens_per_gpu}"
        cap += f" x --context-parallel {num_sharing}" if num_sharing > 1 else ""
        num_rows, longest = len(self.lengths), int(self.lengths.max())
        if longest <= most:
            self.kept = RowRange(0, num_rows)
            self.release_pages()
            return 0
        fitting = [rows[self.lengths[rows] <= most] for rows in iterate_chunks(RowRange(0, num_rows))]
        num_overlong = num_rows - sum(map(len, fitting))
        if not drop_overlong:
            where = (self.sidecar or {}).get("longest") or f"row {int(np.argmax(self.lengths)) + 1}"
            raise ValueError(
                f"{self.path}: {num_overlong:,} of {num_rows:,} samples are longer than --max-tokens-per-gpu"
                f" {cap}; the longest, {where}, has {longest:,} tokens. Raise"
                " --max-tokens-per-gpu to at least that, or drop these samples with --drop-overlong"
            )
        if num_overlong == num_rows:
            raise ValueError(f"{self.path}: every sample is longer than --max-tokens-per-gpu {cap}")
        self.kept = np.concatenate(fitting)
        self.release_pages()
        return num_overlong


class ColumnChunk:
    """A chunk of a list column; for numbers, views into the mapped file, not read yet."""

    def __init__(self, chunk: pa.ListArray):
        self.chunk, self.has_nulls = chunk, chunk.null_count > 0
        self.views = None if pa.types.is_string(chunk.type.value_type) else list_views(chunk)

    def read(self, i: int) -> np.ndarray | list[str] | None:
        """The i-th list; None for null."""
        if self.has_nulls and not self.chunk[i].is_valid:
            return None
        if self.views is None:
            return self.chunk[i].as_py()
        offsets, values = self.views
        return values[offsets[i] : offsets[i + 1]]


@dataclass(frozen=True)
class Sequences:
    """The sequences of some rows, one row's after another's."""

    counts: np.ndarray  # (rows,) int64: sequences of each
    lengths: np.ndarray  # (sequences,) int32: tokens of each

    @property
    def places(self) -> np.ndarray:  # (sequences,)
        """The place of each sequence in its row; 0 for the first."""
        return np.arange(self.counts.sum()) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)

    def sum_by_row(self, values: np.ndarray) -> np.ndarray:  # (sequences,) -> (rows,) float64
        return np.bincount(np.repeat(np.arange(len(self.counts)), self.counts), values, minlength=len(self.counts))


@dataclass(frozen=True)
class RowSequences:
    """The sequences of all rows of a data set, in its index: read for some rows at a time."""

    firsts: np.ndarray  # (rows + 1,) int64: the first sequence of each row
    lengths: np.ndarray  # (sequences,) int32: tokens of each

    def of(self, rows: np.ndarray) -> Sequences:
        firsts = self.firsts[rows]
        counts = self.firsts[rows + 1] - firsts
        chosen = np.arange(counts.sum()) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        return Sequences(counts, self.lengths[chosen])

    def find_longest(self, rows: slice) -> int:
        """Number of tokens of the longest sequence of consecutive rows; 0 of none."""
        return int(self.lengths[self.firsts[rows.start] : self.firsts[rows.stop]].max(initial=0))


def open_rows(
    path: Path, kind: Columns, *, option: str, sidecar: dict[str, Any] | None, cache_dir: str
) -> tuple[ArrowFile, Index]:
    """The file of a data set and its index; .parquet and .jsonl are first converted to Arrow, once. Messages begin with
    the `option` and the path."""
    named, advice = f"{option} {path}", FOR_ROWS.get(option, TOKENIZE)
    if path.suffix not in (".arrow", ".parquet", ".jsonl"):
        raise ValueError(f"{named}: a tokenized data set ends in .arrow, .parquet or .jsonl. {advice}")
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{named}: not a regular file")
        if not path.stat().st_size:
            raise ValueError(f"{named}: holds no samples")
        copy = path
        if path.suffix != ".arrow":
            from mini_trainer.data.tokenized.converted import convert_to_arrow

            copy = convert_to_arrow(path, kind, cache_dir=expand(cache_dir))
        file = ArrowFile(copy)
        schema = file.schema
        check_names(schema, kind, named=named, advice=advice)
        index = open_index(path, file, sha256=find_recorded_file(sidecar).get("sha256"))
    except FileNotFoundError:
        raise ValueError(f"{named}: there is no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{named}: cannot be read as a tokenized data set: {error}. {advice}") from None
    for field in kind.schema:
        if field.name in schema.names:
            found = schema.field(field.name).type
            check_column(found, field, index, is_optional=field.name in kind.optional, named=named)
    return file, index


def check_names(schema: pa.Schema, kind: Columns, *, named: str, advice: str) -> None:
    """Raises ValueError for a missing column."""
    if missing := [name for name in kind.schema.names if name not in (*kind.optional, *schema.names)]:
        if missing == ["num_loss_counted_tokens"]:
            advice = "Add it: the number of each row's targets, which is 1 where the row has one for all its tokens"
        found = [name for name in schema.names if name not in kind.optional]  # reading JSON lines adds those
        raise ValueError(f"{named}: no column {', '.join(missing)}; found {', '.join(found)}. {advice}")


def check_column(found: pa.DataType, expected: pa.Field, index: Index, *, is_optional: bool, named: str) -> None:
    """Raises ValueError for an unexpected type, ignoring the width of numbers, or misplaced nulls."""
    name, wants_list, num_nulls = expected.name, pa.types.is_list(expected.type), index.num_nulls[expected.name]
    is_list = wants_list and pa.types.is_list(found)
    kind = found.value_type if is_list else found
    wanted_kind = expected.type.value_type if wants_list else expected.type
    if pa.types.is_string(wanted_kind):
        has_type, wanted = is_list and pa.types.is_string(kind), ", expected a list of texts"
    elif pa.types.is_floating(wanted_kind):
        has_type, wanted = is_list and pa.types.is_floating(kind), ", expected a list of floats"
    else:
        has_type, wanted = is_list == wants_list and pa.types.is_integer(kind), ""
    if not has_type or (num_nulls and not is_optional):
        nulls = "" if is_optional else f" with {num_nulls} nulls"
        raise ValueError(f"{named}: column {name} is {found}{nulls}{wanted}")
    if is_list and name in index.null_within:
        raise ValueError(f"{named}: column {name} has lists with null, expected numbers")


def read_sidecar(data_path: str | Path) -> dict[str, Any] | None:
    """The sidecar that process_data.py wrote next to a data set; None if there is no such file."""
    path = Path(f"{data_path}.meta.json")
    if not path.exists():
        return None
    sidecar = read_object(path)
    for key, kind in SIDECAR_TYPES.items():
        if not isinstance(sidecar.get(key), kind | None):
            raise ValueError(
                f"{path}: {key} is {sidecar[key]!r:.80}, which process_data.py does not write: tokenize the data again"
            )
    if not all(isinstance(made, dict) and {"file", "sha256"} <= made.keys() for made in sidecar.get("sources") or []):
        raise ValueError(f"{path}: sources does not list files with their sha256: tokenize the data again")
    recorded = find_recorded_file(sidecar)
    if recorded and list_wrong(recorded, {"size": int, "sha256": str}):
        raise ValueError(f"{path}: file does not record the data set's size and sha256: tokenize the data again")
    return sidecar


def verify_data(data: TokenizedData) -> None:
    """Checks the data set's file against the hash in its sidecar; the log says if there is none."""
    recorded = find_recorded_file(data.sidecar)
    if not recorded:
        log.debug(f"{data.path}: no {data.path.name}.meta.json records its hash: it is used unverified")
        return
    check_recorded(data.path, recorded, record=f"{data.path}.meta.json")
    warn_of_edited(f"{data.path}.meta.json", data.sidecar)


def find_recorded_file(sidecar: dict[str, Any] | None) -> dict[str, Any]:
    """Size and SHA-256 of the data set's file according to its sidecar; empty for one made by hand."""
    return (sidecar or {}).get("file") or {}


FOLDER, SOURCE_FILE = "fetched", "source.json"  # of copies of data sets at URLs (data.tokenized.fetched)


def name_source(path: str) -> str:
    """The URL that a data set was copied from; its path if it was not."""
    folder = Path(path).parent
    if folder.parent.name != FOLDER or not (folder / SOURCE_FILE).is_file():
        return path
    found = read_fields(folder / SOURCE_FILE, {"url": str}, written_by="mini-trainer", advice=f"; remove {folder}")
    return found["url"]
