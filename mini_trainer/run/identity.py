"""A run's identity, a hash or the value of everything that affects its numbers, and the record of a start, kept next to
its checkpoints: they tell whose directory this is (run/record.py).
"""

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer
from mini_trainer.data.tokenized.by_row import name_rule
from mini_trainer.data.tokenized.reader import name_source
from mini_trainer.distributed.devices import describe_device
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import hide_in
from mini_trainer.distributed.world import World
from mini_trainer.model.fingerprints import fingerprint_data, fingerprint_model
from mini_trainer.options import (
    OptimizationOptions,
    TrainOptions,
    flatten_options,
    list_data_sets,
    list_deciding_options,
    list_identifying_options,
)
from mini_trainer.run import record
from mini_trainer.run.checkpointing import Checkpoint
from mini_trainer.run.file_names import PARAMS_FILE
from mini_trainer.run.inputs import TEACHER_MODEL, RunInputs


def is_checkpoint_of(output_dir: Path, checkpoint: Path | None) -> bool:
    """Whether the checkpoint lies where the run of this directory writes them."""
    return checkpoint is not None and checkpoint.absolute().parent == (output_dir / "checkpoints").absolute()


def check_same_run(
    checkpoint: Path, state: dict[str, Any], identity: dict[str, Any], *, allow_changes: bool, needs_model: bool
) -> list[str]:
    """Differences from the run that wrote the checkpoint; ValueError for one that is not allowed.
    With `needs_model` the checkpoint holds only a part of the weights, and belongs to the model with the others."""
    changes = record.find_changes(state["identity"], identity)
    fixed = choose_changes(
        changes, [record.OF_METHOD, record.ORIGIN, *list_deciding_options("method")], needs_model=needs_model
    )
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
        names = [record.OF_METHOD, "tokenizer", *list_deciding_options("method", "state")]
        fixed = choose_changes(record.find_changes(origin.state["identity"], identity), names, needs_model=needs_model)
        if fixed:
            raise ValueError(
                f"--continue-from {origin.path}: was made with other {', '.join(fixed)}: a run with its weights and"
                f" optimizer state needs the same ones: give them, or start from an export (--model-name-or-path)"
            )
    return changes


def choose_changes(changes: dict[str, str], names: list[str], *, needs_model: bool) -> list[str]:
    """Describes changes of these parts of an identity; with `needs_model`, also of the model."""
    keys = [*map(record.name_in_identity, names), *(["model"] if needs_model else [])]
    return [changes[key] for key in keys if key in changes]


def record_start(
    output_dir: Path, values: Mapping[str, Any], identity: dict[str, Any], facts: dict[str, Any], world: World
) -> None:
    """Writes training_params.json: the options' `values` of this start, and each start. `facts` of this start, as JSON:
    its `first_step`, the checkpoint that it is `resumed_from` (without one, earlier starts belong to another run), and
    others. Time and hardware are added."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    start = {
        "started": record.timestamp(),
        "directory": os.getcwd(),  # of relative paths
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
            starts = record.read_params(output_dir)["starts"]
        except ValueError as error:
            log.warning(f"warning: {error}; writing a new one, without the earlier starts")
    starts.append(start)
    params = {"options": hide_in(values), "identity": identity, "finished": None, **start, "starts": starts}
    record.write_params(output_dir, params)


def describe_run(world: World) -> str:
    """The console's first line: devices and versions."""
    versions = ", ".join(f"{name} {number}" for name, number in read_versions().items())
    return f"{world.world_size} x {describe_device(world.device)}; {versions}"


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
    reference, teacher = None, inputs.teacher
    if inputs.objective.reference is not None:
        from mini_trainer.run.references import identify_reference

        reference = identify_reference(inputs)
    if (other := inputs.other_models.get(TEACHER_MODEL)) is not None:
        teacher = fingerprint_model(other.directory)
    kept = None if inputs.old_data is None else hash_json(list(map(fingerprint_data, inputs.old_data.sources)))
    return {
        "data": digests[0] if len(digests) == 1 else hash_json(digests),
        "tokenizer": fingerprint_tokenizer(inputs.tokenizer),
        "chat template": fingerprint_chat_template(inputs.tokenizer),
        "model": fingerprint_model(inputs.model_dir),
        record.ORDER: name_rule([len(kept) for kept in data.kept_of]),
        "compute-dtype": str(inputs.compute_dtype).removeprefix("torch."),
        "number of steps": inputs.num_steps if has_own_end else None,
        record.REFERENCE: reference,
        record.TEACHER: teacher,
        record.KEPT: kept,
        record.OF_METHOD: inputs.method.list_data_hashes(),
        record.ORIGIN: None if inputs.origin is None else inputs.origin.digest,
        **{record.name_in_identity(name): record.to_json(hide_in(values[name])) for name in list_identifying_options()},
    }
