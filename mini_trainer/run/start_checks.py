"""Checks of a run's inputs against each other, and against those of the other ranks.

Each rank describes the files that it reads. Weights, checkpoints and rows to tokenize are not described: only rank 0
reads them, or their hashes are verified on reading.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mini_trainer.data.columns.base import describe_task
from mini_trainer.data.stores.contents import hash_once
from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData, find_recorded_file
from mini_trainer.distributed.agreement import DIGITS, Groups, Items, describe_program
from mini_trainer.distributed.world import World
from mini_trainer.model.fingerprints import fingerprint_config_files, fingerprint_data, fingerprint_tokenizer_state
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.objective import Objective
from mini_trainer.options import (
    TRAINING_DATA,
    EndOptions,
    ExportOptions,
    OptimizationOptions,
    ValidationOptions,
    list_differing_options,
)
from mini_trainer.run.inputs import RunInputs

FEW_UPDATES = 30  # optimizer updates below which a run gets a warning, unless --max-steps asks for so few


def check_validation(data: Mixture, validation: Mixture | None, objective: Objective | None, *, metric: str) -> None:
    """ValueError if the validation data is for a different task, or cannot measure --best-metric."""
    if validation is not None:
        advice = ": tokenize one of them again with --labels-from the other"
        check_task(data, validation, option="--validation-data-path", advice=advice)
    if objective is not None and metric not in objective.metrics:
        raise ValueError(
            f"--best-metric {metric}: validations of this objective and data have {', '.join(objective.metrics)}"
        )


def check_task(data: Mixture, other: Mixture, *, option: str, advice: str = "") -> None:
    """ValueError if `other`, the data of `option`, is for a different task than `data`."""
    if other.task != data.task:
        raise ValueError(
            f"{option} is for {describe_task(other.task)}, --data-path for {describe_task(data.task)}{advice}"
        )


def check_placeholders(config: PreTrainedConfig, family: Family, data: Mixture) -> None:
    """ValueError if the data has placeholder tokens that a multimodal model replaces with images, videos or audio."""
    placeholders = family.list_foreign(config)
    found = data.find_tokens(list(placeholders)) if placeholders else None
    if found is not None:
        row, token_id = found
        path, number = data.locate(row)
        raise ValueError(
            f"{path}: row {number} contains the token id {token_id}, a placeholder for something other than text"
            f" ({placeholders[token_id]} in config.json of model type {config.model_type!r}). Only text can be"
            f" trained on here: remove rows with images, videos or audio, and their placeholders in texts"
        )


def check_schedule(inputs: RunInputs, options: OptimizationOptions) -> None:
    """ValueError if the run exceeds the schedule that it shares."""
    most, before, own = options.schedule_steps, inputs.num_steps_before, inputs.num_steps
    if most is not None and own is None:
        raise ValueError(f"--schedule-steps {most}: the run has no end, and would exceed it: add --max-steps")
    if most is not None and before + own > most:
        after = f", after {before:,} of the runs that it continues, are {before + own:,}" if before else " are more"
        raise ValueError(f"--schedule-steps {most:,}: the run's {own:,} steps{after}: raise it, or end the run earlier")


def find_oddities(
    inputs: RunInputs,
    optimization: OptimizationOptions,
    end: EndOptions,
    validation: ValidationOptions,
    exports: ExportOptions,
    *,
    num_rows: int,
) -> None:
    """Adds warnings about valid but unlikely settings. `num_rows`: rows packed at the same time."""
    num_warmup_steps, batching = optimization.num_warmup_steps, inputs.batching
    data, num_steps = inputs.data, inputs.num_steps
    if batching is not None and batching.mean_samples > len(data.kept):
        inputs.warnings.append(f"{batching.flag}: each step draws the {len(data.kept)} samples repeatedly")
    if batching is not None and num_steps is not None and end.max_steps is None and inputs.last_step < FEW_UPDATES:
        from mini_trainer.run.choices import describe_few_updates

        inputs.warnings.append(describe_few_updates(inputs.last_step, FEW_UPDATES, inputs, optimization, end))
    if data is not None and inputs.validation_data is not None and TRAINING_DATA not in validation.validation_data_path:
        trained = {source.path.resolve() for source in data.sources}
        for source in inputs.validation_data.sources:
            if source.path.resolve() in trained:
                inputs.warnings.append(
                    f"--validation-data-path {source.path} is also trained on: its loss says nothing about other data"
                )
    if batching is not None and batching.mean_samples < num_rows:
        sharing = inputs.values["context_parallel"]
        ranks = "ranks" if sharing is None else f"groups of --context-parallel {sharing} ranks"
        inputs.warnings.append(
            f"{batching.flag}: fewer samples a step than the {num_rows} {ranks}: some of them will be idle"
        )
    if not exports.save_final_checkpoint and not exports.on_the_way:
        inputs.warnings.append("--no-save-final-checkpoint: the trained model will not be exported")
    last = None if num_steps is None else max(inputs.last_step, inputs.schedule_steps)
    if last is not None and num_warmup_steps >= last:
        inputs.warnings.append(
            f"--num-warmup-steps {num_warmup_steps}: the run of {last} steps ends before its peak learning rate"
        )


# Keys of a sidecar that training does not read.
UNREAD_KEYS = ("versions", "sources", "options", "split", "file", "sha256")


def describe_start(values: Mapping[str, Any], world: World) -> Groups:
    """Everything to compare before files are read: options by name, code, libraries, device type, environment."""
    groups = describe_program(values, world, may_differ=list_differing_options())
    resume = values["resume"]
    own = {  # a checkpoint's path can differ between ranks
        "--resume": resume if resume in ("auto", "strict", "none") else "a checkpoint",
        "--continue-from": "no" if values["continue_from"] is None else "a checkpoint",
    }
    return groups | {"options": groups["options"] | own}


def describe_inputs(inputs: RunInputs, *, verifies: bool) -> Groups:
    """Digests of the files that every rank reads, by the options that name them. `verifies`: data sets' whole content
    is hashed, as it is compared with the recorded hashes anyway."""
    read, with_code = inputs.method.list_read_files(), inputs.options.model.trust_remote_code
    models = {"--model-name-or-path": inputs.model_dir}
    models |= {flag: other.directory for flag, other in inputs.other_models.items()}
    return {
        "data": {
            f"{option}, data set {i}, {name}": value  # not by its path, which can differ between ranks
            for option, data in inputs.data_sets.items()
            for i, source in enumerate(data.sources, start=1)
            for name, value in describe_data(source, is_verified=verifies).items()
        }
        | ({} if inputs.values["sample_prompts"] is None else {"--sample-prompts": inputs.samples.digest[:DIGITS]}),
        "model": {
            "tokenizer": fingerprint_tokenizer_state(inputs.tokenizer)[:DIGITS],
            **{
                f"{flag}, {name}": digest[:DIGITS]
                for flag, model_dir in models.items()
                for name, digest in fingerprint_config_files(Path(model_dir), with_code=with_code).items()
            },
        },
        "method": {flag: f"{path.stat().st_size:,} bytes, {hash_once(path)[:DIGITS]}" for flag, path in read.items()},
        "teacher": {"--teacher-scores": str(inputs.teacher)[:DIGITS]},
    }


def describe_data(data: TokenizedData, *, is_verified: bool) -> Items:
    """A data set's samples and content, as this node reads it: the whole file unless its verification is skipped."""
    sidecar = data.sidecar or {}
    known = {key: value for key, value in sidecar.items() if key not in UNREAD_KEYS}
    known["tokenizer_dir"] = sidecar.get("tokenizer_dir") is not None  # its name follows the data set's
    return {
        "samples": f"{len(data.kept):,} of {len(data.lengths):,}",
        "size": f"{data.path.stat().st_size:,} bytes",
        "SHA-256": hash_once(data.path)[:DIGITS] if is_verified else "skipped",
        "SHA-256 in the sidecar": str(find_recorded_file(sidecar).get("sha256", "not recorded"))[:DIGITS],
        "SHA-256 of sampled blocks": fingerprint_data(data)[:DIGITS],
        "other keys of the sidecar": hash_json(known)[:DIGITS] if sidecar else "no sidecar",
    }
