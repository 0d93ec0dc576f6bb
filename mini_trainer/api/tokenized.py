"""InstructLab's second stage: training on the data set in `data_output_dir` that an earlier call has tokenized."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mini_trainer.api.arguments import NOTHING, TrainingArgs
from mini_trainer.api.errors import make_bad_input
from mini_trainer.data.stores.disk import hash_file, read_object
from mini_trainer.options.urls import is_url

DATA_FILE = "data.arrow"  # in InstructLab's directory for tokenized data
ENDING = ".meta.json"  # of the file next to a data set that records its sources
TOKENS_COLUMN = "input_ids"
ADVICE = "tokenize again (process_data=True), or leave data_path out to train on that data set"


def find_data_file(args: TrainingArgs) -> Path:
    if args.data_output_dir is None:
        raise make_bad_input("data_output_dir is missing: give a directory for the tokenized data")
    if is_url(str(args.data_output_dir)):
        raise make_bad_input(f"data_output_dir {args.data_output_dir}: must be a local directory")
    return Path(args.data_output_dir) / DATA_FILE


def choose_tokenized(args: TrainingArgs) -> tuple[str, ...]:
    """The data sets to train on without tokenizing: those of `data_path`, or the data set made from its chats.

    `data_path` may still name the chats from which an earlier call made `data_output_dir`/data.arrow. BadInputError if
    that data set is not theirs: training would use other rows than those that are given.
    """
    file, given = find_data_file(args), list_given(args.data_path)
    if not given:
        return (str(file),)
    if all(map(is_tokenized, given)) or not file.exists():  # other files are refused by train.py
        return tuple(given)
    found = f"data_path {' '.join(given)}: the data set {file}"
    sidecar = read_sidecar(file, found)
    recorded = [source.get("sha256") for source in sidecar.get("sources", [])]
    hashes = hash_sources(given, found, names=[str(source.get("file")) for source in sidecar.get("sources", [])])
    if not recorded or None in recorded or not set(recorded) <= set(hashes) or len(recorded) != len(hashes):
        names = ", ".join(str(source.get("file")) for source in sidecar.get("sources", []))
        raise make_bad_input(f"{found} was made from other rows ({names}), or the file has changed since: {ADVICE}")
    check_options(args, sidecar, found)
    return (str(file),)


def list_given(value: Any) -> list[str]:
    """The paths of an option that takes one or several."""
    if value is NOTHING or value is None:
        return []
    return list(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]


def names_tokenized(args: TrainingArgs) -> bool:
    """Whether `data_path` names data sets, not chats; BadInputError if it names both."""
    given = list_given(args.data_path)
    tokenized = list(filter(is_tokenized, given))
    if tokenized and len(tokenized) < len(given):
        raise make_bad_input(f"data_path: {', '.join(tokenized)}: already tokenized, but other files are not")
    return bool(given) and tokenized == given


def is_tokenized(path: str) -> bool:
    """Whether a path names a data set: by its sidecar, an ending that files of chats do not have, or its columns."""
    if path.endswith(".arrow") or (not is_url(path) and Path(f"{path}{ENDING}").exists()):
        return True
    return not is_url(path) and Path(path).is_file() and TOKENS_COLUMN in list_columns(Path(path))


def list_columns(path: Path) -> Collection[str]:
    """Names of the columns of a Parquet file, or of the first row of JSON lines; none for other files."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_schema(path).names
        with path.open(encoding="utf-8") as file:
            row = json.loads(next((line for line in file if line.strip()), "{}"))
    except (OSError, ValueError):
        return ()
    return row if isinstance(row, dict) else ()


def read_sidecar(file: Path, found: str) -> dict[str, Any]:
    try:
        return read_object(Path(f"{file}{ENDING}"))
    except (OSError, ValueError) as error:
        raise make_bad_input(f"{found} does not record its sources ({error}): {ADVICE}") from None


def hash_sources(given: list[str], found: str, *, names: list[str]) -> list[str]:
    """SHA-256 of the files of chats; in directories, of all files with the endings of `names`."""
    files: list[Path] = []
    for path in map(Path, given):
        inside = sorted(path.rglob("*")) if path.is_dir() else ()
        files += [file for file in inside if is_source(file, names)] if path.is_dir() else [path]
    try:
        return [hash_file(file)["sha256"] for file in files]
    except OSError as error:
        raise make_bad_input(f"{found} cannot be compared with it ({error}): {ADVICE}") from None


def is_source(file: Path, names: list[str]) -> bool:
    """Whether a file in a directory has an ending of `names`, and is neither hidden nor of process_data.py."""
    is_ours = file.name.endswith((ENDING, ".rejected.jsonl")) or file.parent.suffix == ".tokenizer"
    has_ending = file.suffix in {Path(name).suffix for name in names}
    return file.is_file() and has_ending and not is_ours and not file.name.startswith(".")


def check_options(args: TrainingArgs, sidecar: dict[str, Any], found: str) -> None:
    """BadInputError if the data was tokenized with another length limit or template than `args` has."""
    known = sidecar.get("options", {})
    template = None if args.chat_tmpl_path is None else Path(args.chat_tmpl_path).name
    for name, given, made_with in (
        ("max_seq_len", args.max_seq_len, known.get("max_sample_num_tokens")),
        ("chat_tmpl_path", template, known.get("chat_template")),
    ):
        if given is not None and given != made_with:
            raise make_bad_input(f"{found} was made with {name}={made_with!r}, and now {given!r} is given: {ADVICE}")
