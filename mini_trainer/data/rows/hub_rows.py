"""Splits a data set of the `datasets` library into chunks of raw rows: streamed from the hub, or from a local folder.

The library and its dependencies are imported only here, and only when such rows are used.
"""

import hashlib
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mini_trainer.data.rows.files import CHUNK_BYTES, CHUNK_ROWS, Chunk, Source, make_chunk
from mini_trainer.data.stores.parquet import check_groups, count_rows, cut_batch
from mini_trainer.data.stores.remote import make_error
from mini_trainer.options import RowOptions
from mini_trainer.options.reading import open_regular
from mini_trainer.options.urls import list_http_errors

FLAG = "--input-dataset"


def find_dataset(options: RowOptions) -> Source:
    """The source named by `--input-dataset`; ValueError if the data set, revision or split does not exist."""
    given, split = options.input_dataset, options.split or "train"
    folder = Path(given)
    if folder.exists():
        if options.revision is not None:
            raise ValueError(f"--revision {options.revision}: {FLAG} {given} is a local folder, which has no revisions")
        files = list_files(folder)
        for path in (path for path in files if path.suffix.lower() == ".parquet"):
            try:
                with open_regular(path) as file:
                    check_groups(pq.read_metadata(file), f"{FLAG} {path}")
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{FLAG} {path}: cannot be read: {error}") from None
        num_bytes = sum(path.stat().st_size for path in files)
        return Source(folder, f"{folder.resolve().name} {split}", num_bytes, read=open_rows(given, split, None))
    revision = find_revision(options)
    return Source(Path(given), f"{given}@{revision[:12]} {split}", 0, read=open_rows(given, split, revision))


def list_files(folder: Path) -> list[Path]:
    """The files of a local folder, by name, without hidden ones, which are caches."""
    if not folder.is_dir():
        raise ValueError(f"{FLAG} {folder}: is a file: pass it with --input-file, or name a folder")
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [folder / name for name in names if not any(part.startswith(".") for part in name.parts)]


def find_revision(options: RowOptions) -> str | None:
    """The commit at which a data set of the hub is read, so that its name identifies its content."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    name = options.input_dataset.partition(":")[0]
    given = f"{FLAG} {options.input_dataset}"
    try:
        return HfApi().dataset_info(name, revision=options.revision).sha
    except RevisionNotFoundError:
        raise ValueError(f"{given}: the hub has no --revision {options.revision} of it") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(f"{given}: no such folder, nor data set on the hub; a private one needs HF_TOKEN") from None
    except (HfHubHTTPError, *list_http_errors(), OSError) as error:
        raise make_error(error, f"{given}: no such folder, and the hub cannot be reached: {error}") from None


def open_rows(given: str, split: str, revision: str | None) -> Any:
    """A function that reads the rows, from the beginning each time; the split and the files are looked up now."""
    import datasets

    folder, where = Path(given), f"{FLAG} {given}"
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():  # from `save_to_disk`
            data = choose_rows(datasets.load_from_disk(given), split)
        else:
            name, _, config = (given, "", "") if revision is None else given.partition(":")
            is_slice = any(sign in split for sign in "[+")  # such as train[:10%], which cannot be streamed
            data = datasets.load_dataset(name, config or None, split=split, revision=revision, streaming=not is_slice)
    except (ValueError, *list_http_errors(), OSError) as error:
        raise ValueError(f"{where}: {error}") if revision is None else make_error(error, f"{where}: {error}") from None
    return partial(read_dataset, data)


def choose_rows(saved: Any, split: str) -> Any:
    """A split of what `save_to_disk` wrote, slices of it, or of several: train, train[:10%], train+test[:100].
    ValueError if there is no such split."""
    import datasets

    has_splits = isinstance(saved, datasets.DatasetDict)
    splits = saved if has_splits else {"train": saved}
    instruction = datasets.ReadInstruction.from_spec(split)
    try:
        parts = instruction.to_absolute({name: data.num_rows for name, data in splits.items()})
    except ValueError as error:
        if not has_splits:
            raise ValueError(f"has no splits: leave out --split {split}, or give a slice of train") from None
        if split.isidentifier():
            raise ValueError(f"has no split {split}: there are {', '.join(splits)}") from None
        raise ValueError(f"--split {split}: {error}") from None
    slices = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return slices[0] if len(slices) == 1 else datasets.concatenate_datasets(slices)


def read_dataset(data: Any, source: Source) -> Iterator[Chunk]:
    """Yields the rows; RunError if they cannot be read. Sets `source.sha256`, of the rows' content, at the end."""
    digest, first_row = hashlib.sha256(), 1
    try:
        for table in data.with_format("arrow").iter(batch_size=CHUNK_ROWS):
            contiguous = table.combine_chunks().to_batches()
            for batch in chain.from_iterable(cut_batch(part, most_bytes=2 * CHUNK_BYTES) for part in contiguous):
                chunk = make_chunk(source.name, first_row, batch)
                digest.update(chunk.table or repr(batch).encode())
                yield chunk
                first_row += count_rows(batch)
    except (*list_http_errors(), OSError, pa.ArrowException) as error:
        message = f"{FLAG} {source.path}: its rows cannot be read: {error}"
        raise ValueError(message) if source.path.exists() else make_error(error, message, had_access=True) from None
    source.sha256 = digest.hexdigest()
