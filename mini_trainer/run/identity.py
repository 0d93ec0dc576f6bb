"""A run's identity, a hash or the value of everything that affects its numbers, and its start-up record, kept next to
its checkpoints: they tell whose directory this is.
"""

import functools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import hash_json, is_part, write_text
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer
from mini_trainer.data.tokenized.by_row import PERMUTATION, name_rule
from mini_trainer.data.tokenized.reader import name_source
from mini_trainer.distributed.devices import describe_device
from mini_trainer.distributed.ending import EXIT_FILE, log
from mini_trainer.distributed.lock import OWN_FILES
from mini_trainer.distributed.messages import hide_in
from mini_trainer.distributed.world import World
from mini_trainer.model.fingerprints import fingerprint_data, fingerprint_model
from mini_trainer.options import (
    OptimizationOptions,
    TrainOptions,
    flatten_options,
    iterate_fields,
    list_data_sets,
    list_deciding_options,
    list_defaults,
    list_identifying_options,
)
from mini_trainer.options.places import expand
from mini_trainer.options.reading import read_fields
from mini_trainer.options.urls import is_url
from mini_trainer.run.checkpointing import Checkpoint
from mini_trainer.run.file_names import NOTES_FILE, PARAMS_FILE
from mini_trainer.run.inputs import RunInputs

# In a run's identity.
OF_METHOD, REFERENCE, TEACHER, ORIGIN = "data of the method", "reference model", "teacher", "continue-from"
ORDER = "order of the samples"


def to_json(value: Any) -> Any:
    """The value as JSON returns it."""
    return list(value) if isinstance(value, tuple) else value


def check_unused(output_dir: Path, resume: str, identity: dict[str, Any], own_paths: Sequence[str]) -> None:
    """ValueError if a new run would write into another run's directory.

    A start of this run that ended before its first checkpoint does not count as another run (unless --resume is none).
    Neither do the run's own data and cache, `own_paths`, which may be there.
    """
    own = list_own_entries(output_dir, own_paths)
    entries = [
        entry
        for entry in (output_dir.iterdir() if output_dir.exists() else ())
        if not is_own_file(entry) and not any(entry.name == name or entry.name.startswith(f"{name}.") for name in own)
    ]
    if not any(entry.is_file() or any(entry.iterdir()) for entry in entries):
        return
    advice = "name a new one, or remove that run"
    if not (output_dir / PARAMS_FILE).exists():
        raise ValueError(f"--output-dir {output_dir} is not an empty directory: {advice}")
    try:
        params = read_params(output_dir)
    except ValueError as error:
        raise ValueError(f"--output-dir {output_dir} is not an empty directory, and {error}; {advice}") from None
    changes = find_changes(params["identity"], identity)
    if resume == "none" or params["finished"]:
        state = "a finished run" if params["finished"] else "a run, which --resume none does not resume"
        raise ValueError(f"--output-dir {output_dir} is not an empty directory: it holds {state}: {advice}")
    if changes:
        raise ValueError(
            f"--output-dir {output_dir} is not an empty directory: it holds a run without a checkpoint, and other"
            f" {', '.join(changes.values())}: {advice}"
        )


def read_params(output_dir: Path) -> dict[str, Any]:
    """Content of training_params.json; ValueError naming the file if train.py has not written it so."""
    kinds = {"options": dict, "identity": dict, "starts": list, "versions": dict, "finished": str | None}
    return read_fields(output_dir / PARAMS_FILE, kinds, written_by="train.py")


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


def is_checkpoint_of(output_dir: Path, checkpoint: Path | None) -> bool:
    """Whether the checkpoint lies where the run of this directory writes them."""
    return checkpoint is not None and checkpoint.absolute().parent == (output_dir / "checkpoints").absolute()


def check_same_run(
    checkpoint: Path, state: dict[str, Any], identity: dict[str, Any], *, allow_changes: bool, needs_model: bool
) -> list[str]:
    """Differences from the run that wrote the checkpoint; ValueError for one that is not allowed.
    With `needs_model` the checkpoint holds only a part of the weights, and belongs to the model with the others."""
    changes = find_changes(state["identity"], identity)
    fixed = choose_changes(changes, [OF_METHOD, ORIGIN, *list_deciding_options("method")], needs_model=needs_model)
    if fixed and allow_changes:
        raise ValueError(
            f"{checkpoint} was made with other {', '.join(fixed)}: its content depends on them, so not even"
            f" --allow-changed-options can change them: give the same ones, or start from an export in a new"
            " --output-dir"
        )
    if changes and not allow_changes:
        raise ValueError(
            f"{checkpoint} was made with other {', '.join(changes.values())}: give the same ones, choose a new"
            " --output-dir, or pass --allow-changed-options to resume anyway"
        )
    return list(changes.values())


def check_checkpoints(
    inputs: RunInputs, checkpoint: Checkpoint | None, identity: dict[str, Any], *, allow_changes: bool
) -> list[str]:
    """`check_same_run` with the checkpoint to resume from; ValueError if a run that starts with the weights and the
    optimizer state of --continue-from would misuse them."""
    changes, needs_model, origin = [], not inputs.method.saves_frozen, inputs.origin
    if checkpoint is not None:
        changes = check_same_run(
            checkpoint.path, checkpoint.state, identity, allow_changes=allow_changes, needs_model=needs_model
        )
    if origin is not None:
        names = [OF_METHOD, "tokenizer", *list_deciding_options("method", "state")]
        fixed = choose_changes(find_changes(origin.state["identity"], identity), names, needs_model=needs_model)
        if fixed:
            raise ValueError(
                f"--continue-from {origin.path}: was made with other {', '.join(fixed)}: a run with its weights and"
                f" optimizer state needs the same ones: give them, or start from an export (--model-name-or-path)"
            )
    return changes


def choose_changes(changes: dict[str, str], names: list[str], *, needs_model: bool) -> list[str]:
    """Describes changes of these parts of an identity; with `needs_model`, also of the model."""
    keys = [*map(name_in_identity, names), *(["model"] if needs_model else [])]
    return [changes[key] for key in keys if key in changes]


# Options of older versions that decided numbers, with the value that is like having none.
FORMER = {
    **{"desirable-weight": 1.0, "undesirable-weight": 1.0, "preference-label-smoothing": 0.0},
    **{"lora-use-rslora": False, "muon-momentum": 0.95, "muon-scale": "match-rms-adamw"},
}


def find_changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Changed parts of a run's identity, described by name. Options that an older version did not record count as their
    defaults; other parts that it did not record are not compared."""
    defaults = {name_in_identity(name): to_json(value) for name, value in list_defaults().items()}
    defaults |= {ORIGIN: None, ORDER: PERMUTATION}
    changes = {}
    for name in sorted(before.keys() | now.keys()):
        if name not in before and name not in defaults:
            continue
        old, new = before.get(name, defaults.get(name)), now.get(name, FORMER.get(name))
        if isinstance(new, list) and not isinstance(old, list):  # an older version took one value, or None
            old = [] if old is None else [old]
        if old != new:
            is_digest = name in (OF_METHOD, ORIGIN) or (isinstance(old, str) and len(old) == 64)
            changes[name] = name if is_digest else f"{name} ({old} before, now {new})"
    return changes


def name_in_identity(option: str) -> str:
    return option.replace("_", "-")


def record_start(
    output_dir: Path, values: Mapping[str, Any], identity: dict[str, Any], facts: dict[str, Any], world: World
) -> None:
    """Writes training_params.json: the options' `values` of this start, and each start.

    `facts` of this start, as JSON: its `first_step`, the checkpoint that it is `resumed_from` (without one, earlier
    starts belong to another run), and others. Time and hardware are added.
    """
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    start = {
        "started": timestamp(),
        **facts,
        "world_size": world.world_size,
        "device": describe_device(world.device),
        "versions": read_versions(),
        "git_commit": commit or None,  # None outside a checkout
        "command": hide_in(sys.argv),
    }
    starts = []
    if start["resumed_from"] and (output_dir / PARAMS_FILE).exists():  # else the checkpoint is from another directory
        try:
            starts = read_params(output_dir)["starts"]
        except ValueError as error:
            log.warning(f"warning: {error}; writing a new one, without the earlier starts")
    starts.append(start)
    params = {"options": hide_in(values), "identity": identity, "finished": None, **start, "starts": starts}
    write_params(output_dir, params)


def record_end(output_dir: Path) -> None:
    """Records in training_params.json that the run is finished."""
    write_params(output_dir, read_params(output_dir) | {"finished": timestamp()})


def write_params(output_dir: Path, params: dict[str, Any]) -> None:
    path = output_dir / PARAMS_FILE
    try:
        write_text(path, json.dumps(params, indent=2) + "\n")
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from None


def timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def describe_run(values: Mapping[str, Any], world: World) -> str:
    """The console's first lines: versions, devices, and the options that are not at their defaults."""
    changed = [
        f"{option.name}={value}"
        for option, _ in iterate_fields(TrainOptions)
        if (value := values[option.name]) != option.default
    ]
    versions = ", ".join(f"{name} {number}" for name, number in read_versions().items())
    return f"{world.world_size} x {describe_device(world.device)}; {versions}\noptions: {', '.join(changed)}"


@functools.cache
def read_versions() -> dict[str, str]:
    names = ("torch", "transformers", "datasets", "numba", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def unwrap(paths: Mapping[str, tuple[str, ...]], options: TrainOptions) -> dict[str, Any]:
    """The paths in the form that the option takes: some take only one."""
    values = flatten_options(options)
    return {name: found[0] if isinstance(values[name], str) else found for name, found in paths.items()}


def flatten_with_urls(options: TrainOptions) -> dict[str, Any]:
    """All options by name, with URLs in place of the local copies of data sets."""
    named = {name: tuple(map(name_source, paths)) for name, paths in list_data_sets(options).items() if paths}
    return flatten_options(options) | unwrap(named, options)


def identify_run(inputs: RunInputs, optimization: OptimizationOptions) -> dict[str, Any]:
    """Everything that affects a run's numbers: a checkpoint only fits a run with the same identity. Includes the number
    of steps only if the learning rate depends on it."""
    data, has_own_end = inputs.data, optimization.needs_end and optimization.schedule_steps is None
    values = inputs.values | {"batch_size": inputs.data_options.samples_per_step}
    digests = [
        fingerprint_data(source, source=sidecar and sidecar.get("source"))
        for source, sidecar in zip(data.sources, inputs.sidecars, strict=True)
    ]
    reference = teacher = None
    if inputs.objective.reference is not None:
        from mini_trainer.run.references import identify_reference

        reference = identify_reference(inputs)
    if inputs.objective.teacher is not None:
        from mini_trainer.run.teachers import identify_teacher

        teacher = identify_teacher(inputs)
    return {
        "data": digests[0] if len(digests) == 1 else hash_json(digests),
        "tokenizer": fingerprint_tokenizer(inputs.tokenizer),
        "chat template": fingerprint_chat_template(inputs.tokenizer),
        "model": fingerprint_model(inputs.model_dir),
        ORDER: name_rule([len(kept) for kept in data.kept_of]),
        "compute-dtype": str(inputs.compute_dtype).removeprefix("torch."),
        "number of steps": inputs.num_steps if has_own_end else None,
        REFERENCE: reference,
        TEACHER: teacher,
        OF_METHOD: inputs.method.list_data_hashes(),
        ORIGIN: None if inputs.origin is None else inputs.origin.digest,
        **{name_in_identity(name): to_json(hide_in(values[name])) for name in list_identifying_options()},
    }
