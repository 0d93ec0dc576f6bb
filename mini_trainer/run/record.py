"""Whose an output directory is: a run's record in it, training_params.json, and the files beside it that are no other
run's. Imports nothing heavy, so that a start can ask first.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import is_part, write_text
from mini_trainer.distributed.ending import EXIT_FILE
from mini_trainer.distributed.lock import OWN_FILES
from mini_trainer.options import list_defaults
from mini_trainer.options.places import expand
from mini_trainer.options.reading import open_own, parse_metrics, read_fields
from mini_trainer.options.urls import is_url
from mini_trainer.run.file_names import METRICS_FILE, NOTES_FILE, PARAMS_FILE, VALIDATION_FILE

# Parts of a run's identity that are not options.
OF_METHOD, REFERENCE, TEACHER, ORIGIN = "data of the method", "reference model", "teacher", "continue-from"
KEPT = "samples of --keep"
ORDER = "order of the samples"
MOST_SHOWN = 3  # files that a message names
MOST_BYTES_OF_LINE = 1_000_000  # of a metrics file


def find_owner(output_dir: Path, resume: str, own_paths: Sequence[str]) -> dict[str, Any] | None:
    """The record of the run in this directory; None if it holds none. ValueError for files that are no run's, and for
    a run that --resume none would write over. The run's own data and cache, `own_paths`, may be there."""
    own = list_own_entries(output_dir, own_paths)
    entries = [
        entry
        for entry in (sorted(output_dir.iterdir()) if output_dir.exists() else ())
        if not is_own_file(entry) and not any(entry.name == name or entry.name.startswith(f"{name}.") for name in own)
    ]
    names = [entry.name for entry in entries if entry.is_file() or any(entry.iterdir())]
    if not names:
        return None
    if not (output_dir / PARAMS_FILE).exists():
        shown = ", ".join(names[:MOST_SHOWN]) + (f" and {len(names) - MOST_SHOWN} more" if names[MOST_SHOWN:] else "")
        raise ValueError(
            f"--output-dir {output_dir} has other files than a run's ({shown}): give the run a directory of its own,"
            f" such as {output_dir / 'run'}"
        )
    try:
        params = read_params(output_dir)
    except ValueError as error:
        raise ValueError(f"--output-dir {output_dir} holds no run that can be read: {error}") from None
    if resume == "none":
        raise ValueError(f"--output-dir {output_dir} holds a run, which --resume none does not resume: name a new one")
    return params


def check_unused(output_dir: Path, resume: str, identity: dict[str, Any], own_paths: Sequence[str]) -> None:
    """ValueError if a run of this `identity` that resumes from no checkpoint in the directory would write into another
    run's. A start of this run that ended before its first checkpoint does not count as another one."""
    params = find_owner(output_dir, resume, own_paths)
    if params is None:
        return
    if params["finished"]:
        raise ValueError(describe_finished(output_dir, params))
    if changes := find_changes(params["identity"], identity):
        raise ValueError(
            f"--output-dir {output_dir} holds a run without a checkpoint, and other {', '.join(changes.values())}: give"
            " the same ones, or name a new directory"
        )


def describe_finished(output_dir: Path, params: dict[str, Any]) -> str:
    return (
        f"--output-dir {output_dir} holds a finished run, of {params['finished']}, and its options, data or exports are"
        " no longer the same: name a new directory"
    )


def read_params(output_dir: Path) -> dict[str, Any]:
    """Content of training_params.json; ValueError naming the file if train.py has not written it so."""
    kinds = {"options": dict, "identity": dict, "starts": list, "versions": dict, "finished": str | None}
    return read_fields(output_dir / PARAMS_FILE, kinds, written_by="train.py")


def write_params(output_dir: Path, params: dict[str, Any]) -> None:
    path = output_dir / PARAMS_FILE
    try:
        write_text(path, json.dumps(params, indent=2) + "\n")
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from None


def record_end(output_dir: Path) -> None:
    """Records in training_params.json that the run is finished."""
    write_params(output_dir, read_params(output_dir) | {"finished": timestamp()})


def timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def describe_losses(output_dir: Path, step: int) -> list[str]:
    """The losses of the run's first and last step, and of its first validation and that after `step`, if any."""
    first, last = read_ends(output_dir / METRICS_FILE)
    before, validation = read_ends(output_dir / VALIDATION_FILE)
    losses = [f"loss {first['loss']:.4f} -> {last['loss']:.4f}"] if first and last else []
    if validation and validation["step"] == step and validation["loss"] is not None:
        start = f"{before['loss']:.4f} -> " if before.get("step", step) < step and before["loss"] is not None else ""
        losses.append(f"validation {start}{validation['loss']:.4f}")
    return losses


def read_ends(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last line of a metrics file; empty if there is none, or if it is damaged."""
    if not path.is_file():
        return {}, {}
    with open_own(path, "rb") as file:
        first = file.readline()
        file.seek(max(0, path.stat().st_size - MOST_BYTES_OF_LINE))
        last = (file.read().splitlines() or [first])[-1]
    return parse_metrics(first) or {}, parse_metrics(last) or {}


def list_own_entries(output_dir: Path, own_paths: Sequence[str]) -> set[str]:
    """Names of entries of `output_dir` that are the run's data sets and OSFT's cache, or directories that hold them.
    Other files of a data set begin with its name: the sidecar, the index, the tokenizer."""
    root = output_dir.absolute()
    inside = [expand(path).absolute() for path in own_paths if not is_url(path)]
    cached = [path.name for path in root.glob(f"{'[0-9a-f]' * 64}.safetensors")] if root in inside else []
    return {*cached, *(path.relative_to(root).parts[0] for path in inside if root in path.parents)}


def is_own_file(path: Path) -> bool:
    """Whether a start that ended before it wrote its options, or a killed write, may have left this file; or it is the
    user's notes."""
    is_beside = path.name.startswith((f".{EXIT_FILE}.", f".{PARAMS_FILE}"))
    return is_beside or is_part(path) or path.name in (*OWN_FILES, NOTES_FILE)


def find_changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Changed parts of a run's identity, described by name. An option that was not recorded had its default; of other
    parts only those that were recorded are compared."""
    known = {name_in_identity(name): to_json(value) for name, value in list_defaults().items()} | before
    changes = {}
    for name in sorted((before.keys() | now.keys()) & known.keys()):
        if (old := known[name]) != (new := now.get(name)):
            is_digest = name in (OF_METHOD, ORIGIN) or (isinstance(old, str) and len(old) == 64)
            changes[name] = name if is_digest else f"{name} ({old} before, now {new})"
    return changes


def name_in_identity(option: str) -> str:
    return option.replace("_", "-")


def to_json(value: Any) -> Any:
    """The value as JSON returns it."""
    return list(value) if isinstance(value, tuple) else value
