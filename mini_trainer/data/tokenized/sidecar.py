"""What a data set depends on: its sidecar OUTPUT.meta.json, with sources, options and tokenizer, and its place in the
cache, by a key made of the rows' content, the options and the tokenizer.

    {--data-cache-dir}/{key}/{name}.arrow, next to the other files that process_data.py writes with every data set

A data set is renamed to its name after its other files, so one that exists is complete.
"""

import hashlib
import io
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mini_trainer.data.columns.base import COLUMNS, DataTask
from mini_trainer.data.rows.files import Source, find_sources
from mini_trainer.data.rows.hub_rows import find_revision, list_files
from mini_trainer.data.rows.report import DROPPED, Totals
from mini_trainer.data.stores import disk
from mini_trainer.data.stores.contents import hash_once
from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.stores.tokenizers import (
    fingerprint_chat_template,
    fingerprint_tokenizer,
    load_stop_token_ids,
    load_tokenizer,
)
from mini_trainer.data.tokenized.outputs import Outputs
from mini_trainer.distributed.messages import hide_in
from mini_trainer.options import RowOptions
from mini_trainer.options.reading import hash_file, read_object
from mini_trainer.options.tools import ContentOptions
from mini_trainer.options.urls import is_url


def describe_data_set(
    totals: Totals,
    task: DataTask,
    *,
    made_with: dict[str, Any],
    model_name_or_path: str,
    sources: Sequence[Source],
    stop_token_id: int | None,
    added_tokens: dict[str, int],
) -> dict[str, Any]:
    """The sidecar's content; docs/reference/data.md explains each key. Independent of --num-proc. `made_with`: from
    `describe_dependencies`."""
    columns, model = COLUMNS[task.objective], Path(model_name_or_path)
    row_keys = ("blank_lines", "in", "kept", *DROPPED, *(("truncated",) if columns.has_labels else ()))
    return {
        **hide_in(made_with),
        "model_name_or_path": model.resolve().name if model.is_dir() else model_name_or_path,
        "stop_token_id": stop_token_id,
        "max_token_id": totals.max_token_id,
        "num_samples": totals.num_samples,
        "num_tokens": totals.num_tokens,
        "num_loss_counted_tokens": totals.num_loss_counted_tokens,
        "num_trained_by_role": dict(sorted(totals.trained_by_role.items())),
        "max_len": max(totals.lengths),
        "longest": totals.longest[1],
        "rows": {key: totals.rows[key] for key in row_keys},
        "sources": [{"file": one.name, "format": one.format, "sha256": one.sha256} | find_mark(one) for one in sources],
        "has_loss_weights": totals.has_weights,
        "added_special_tokens": added_tokens,
        "stop_tokens": {"rows_that_train_one": totals.stops["trained"], "appended": totals.stops["appended"]},
        **columns.describe_data(totals, task),
    }


def is_made_of(data: Path, path: Path, sources: Sequence[Source], made_with: dict[str, Any]) -> bool:
    """Whether the sidecar at `path` says that the data set is the result of these files with these dependencies, begun
    on any day; reads local files for their hashes. False if it cannot show that: for remote files without version."""
    try:
        sidecar = read_object(path)
    except ValueError:
        return False
    entries = sidecar.get("sources", [])
    return (
        sidecar.get("file", {}).get("size") == data.stat().st_size
        and len(entries) == len(sources)
        and all(source.read is None for source in sources)
        and all(sidecar.get(name) == value for name, value in hide_in(made_with).items() if name != "date")
        and all(is_source(entry, source) for entry, source in zip(entries, sources, strict=True))
    )


def find_mark(source: Source) -> dict[str, Any]:
    """Size and version of a remote file, as its store describes it; empty for a local one."""
    return {} if source.remote is None else {"size": source.num_bytes, "version": source.remote.version}


def is_source(entry: dict[str, Any], source: Source) -> bool:
    """Whether a sidecar's entry describes this file as it is now."""
    found = {"file": source.name} | (find_mark(source) or {"sha256": hash_once(source.path)})
    return found.items() <= entry.items() and None not in found.values()


def describe_dependencies(
    options: RowOptions, contents: ContentOptions, *, tokenizer: Any, model_dir: str, date: str | None
) -> dict[str, Any]:
    """All that a data set depends on besides its rows, for its sidecar, its parts and its place in the cache, as JSON.
    `date`: the one that the chat template writes."""
    values = {name: value for name, value in asdict(options).items() if name not in HOW_ONLY} | asdict(contents)
    if options.input_dataset is not None and Path(options.input_dataset).exists():
        del values["input_dataset"]
    files = {}
    for name in ("chat_template", "labels_from"):
        given = [] if values[name] is None else [Path(f"{values[name]}.meta.json"), Path(values[name])]
        if file := next((path for path in given if path.is_file()), None):
            files[name], values[name] = hash_file(file), given[1].name
    found = {
        "format_version": FORMAT_VERSION,
        "options": values,
        "files": files,
        "tokenizer_fingerprint": fingerprint_tokenizer(tokenizer),
        "chat_template_fingerprint": fingerprint_chat_template(tokenizer),
        "special_tokens": [tokenizer.all_special_tokens, load_stop_token_ids(model_dir)],
        "images": identify_images(options, model_dir),
        "date": date,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }
    return json.loads(json.dumps(found))  # as it is read back


PACKAGES = ("transformers", "tokenizers")  # whose versions are recorded
FORMAT_VERSION = 3  # of tokenized data sets
KEY_LENGTH = 16  # digits of the hash
HOW_ONLY = ("input_file", "num_proc")  # options that do not affect the content of a data set


def find_outputs(options: RowOptions, model_dir: str, *, cache_dir: Path, trust_remote_code: bool) -> Outputs:
    """Paths of the tokenized rows, existing or not. Reads all files of rows; ValueError if that fails."""
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code)
    # Without a date: a data set keeps the one on which it was made.
    made_with = describe_dependencies(options, ContentOptions(), tokenizer=tokenizer, model_dir=model_dir, date=None)
    key = hash_json([identify_rows(options), made_with])
    data = cache_dir / key[:KEY_LENGTH] / f"{name_rows(options)}.arrow"
    return Outputs(data, page=None, is_split=options.validation_share is not None)


def identify_rows(options: RowOptions) -> Any:
    """An identifier of the rows' content."""
    if options.mock_data is not None:
        return None  # the options identify the rows
    if options.input_dataset is None:
        return [[source.name, identify_source(source)] for source in find_sources(options.input_file)]
    folder = Path(options.input_dataset)
    if folder.exists():
        return [[str(path.relative_to(folder)), hash_file(path)] for path in list_files(folder)]
    return find_revision(options)


def identify_source(source: Source) -> Any:
    """The hash of a file; of a remote one its store's mark, if that changes with the content."""
    if source.remote is None:
        return hash_file(source.path)
    if source.remote.version is not None:
        return [str(source), source.num_bytes, source.remote.version]
    with source.open() as file:
        return hashlib.file_digest(io.BufferedReader(file), "sha256").hexdigest()


def identify_images(options: RowOptions, model_dir: str) -> Any:
    """Further identifiers of rows with images: the directories of their files, and the processor's configuration."""
    if not options.images:
        return None
    directories = [str(source.path.resolve().parent) for source in find_sources(options.input_file)]
    prepares = [Path(model_dir, name) for name in ("preprocessor_config.json", "processor_config.json")]
    return hash_json(directories), [hash_file(path) for path in prepares if path.is_file()]


def name_rows(options: RowOptions) -> str:
    """The data set's name in a run's log: that of the file or folder of its rows, if there is only one."""
    given = [options.input_dataset] if options.input_dataset is not None else list(options.input_file)
    if len(given) != 1:
        return "data"
    path = Path(given[0].rstrip("/").rpartition("/")[2]) if is_url(given[0]) else Path(given[0].partition(":")[0])
    return path.resolve().name.split(".")[0].strip("*[]") or "data"


@contextmanager
def locked(outputs: Outputs) -> Iterator[None]:
    """Lets one process at a time make a data set, if the file system has locks; removes leftovers of killed ones."""
    folder = outputs.data.parent
    folder.mkdir(parents=True, exist_ok=True)
    with disk.locked(folder / ".lock") as is_alone:
        if is_alone:  # without locks two processes may do the same work; each data set still appears as a whole
            for leftover in folder.glob(".*.part"):
                disk.remove(leftover)
        yield
