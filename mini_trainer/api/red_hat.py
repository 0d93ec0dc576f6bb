"""Fields of Red Hat's mini_trainer, which training_hub gives: each becomes an option, or a note that it has no effect.

docs/reference/training_hub.md has the table of all its fields.
"""

import math
from enum import Enum
from typing import Any

from mini_trainer.api.arguments import NOTHING, TrainingArgs, TrainingMode
from mini_trainer.api.errors import make_bad_input
from mini_trainer.api.tokenized import names_tokenized
from mini_trainer.options import OptimizationOptions, flag_name
from mini_trainer.options.foreign_names import (
    DTYPES,
    SCHEDULE_ARGUMENTS,
    SCHEDULES,
    TRAIN_NAMES,
    convert_schedule,
    find_row,
)

VALIDATION_DATA = ("validation_data_path", "validation_split", "validation_share")
ENDS = {"epoch": "max_epochs", "step": "max_steps", "token": "max_tokens", "infinite": None}
LEARNING_RATE = OptimizationOptions().learning_rate


def convert_fields(given: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Takes Red Hat's fields out of `given`. Returns options with the field that each is from, and its value.

    BadInputError for values that have no meaning here.
    """
    if given.get("save_best_val_loss") is False and not any(given.get(name) for name in VALIDATION_DATA):
        del given["save_best_val_loss"]  # their default; an option without effect would be refused
    found: dict[str, tuple[str, Any]] = {}
    precision = given.pop("osft_upcast_dtype", None)
    if precision is not None and DTYPES.get(name := to_name(precision), name) not in ("float32", "float64"):
        raise make_bad_input(
            f"osft_upcast_dtype {precision}: OSFT decomposes in float64 and computes in float32, always"
        )
    threshold = given.pop("val_loss_improvement_threshold", None)
    if threshold:
        found["best_metric"] = ("val_loss_improvement_threshold", f"loss:{threshold}")
    samples = given.pop("min_samples_per_validation", None)
    if samples is not None:
        found["validate_every_steps"] = ("min_samples_per_validation", count_steps(samples, given))
    choose_end(given)
    for name in [name for name in TRAIN_NAMES if name in given]:
        for option, value in convert_name(name, given.pop(name)).items():
            if option in found:
                raise make_bad_input(
                    f"{found[option][0]} and {name} both set {flag_name(option)}: give only one of them"
                )
            found[option] = (name, value)
    return found | convert_schedule_fields(given)


def convert_name(name: str, value: Any) -> dict[str, Any]:
    """Our options for a field, by the table of foreign names; none, if it has no effect."""
    row = find_row(name)
    if not row.options:
        if row.decides and value:
            raise make_bad_input(f"{name} has no counterpart here: {row.reason}")
        return {}
    value = to_name(value) if isinstance(value, Enum) or str(value).startswith("torch.") else value
    try:
        return row.convert(value, name=name)
    except KeyError:
        raise make_bad_input(f"{name} {value!r}: must be one of {', '.join(map(str, row.values))}") from None


def to_name(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value).removeprefix("torch.")


def count_steps(samples: int, given: dict[str, Any]) -> int:
    """Steps that train on at least `samples`."""
    batch_size = given.get("batch_size") or given.get("effective_batch_size")
    if batch_size is None or samples < 1:
        raise make_bad_input(
            f"min_samples_per_validation {samples}: must be at least 1, and needs batch_size, the samples of a step"
        )
    return math.ceil(samples / batch_size)


def choose_end(given: dict[str, Any]) -> None:
    """Leaves only the end that counts with `training_mode`, and the default schedule that comes with it."""
    mode = given.pop("training_mode", None)
    if mode is None:
        return
    end = ENDS[read_mode(mode)]
    if "num_epochs" in given:
        given["max_epochs"] = given.pop("num_epochs")
    for name in list_other_ends(mode, given):
        del given[name]
    if end is None:
        return
    if end != "max_epochs" and not given.get(end):
        raise make_bad_input(f"training_mode {read_mode(mode)!r} needs {end}, of at least 1")
    given.setdefault("lr_scheduler", "cosine")


def read_mode(mode: Any) -> str:
    """The mode's name; BadInputError for an unknown one."""
    name = mode.value if isinstance(mode, TrainingMode) else mode
    if name not in ENDS:
        raise make_bad_input(f"training_mode {name!r}: must be one of {', '.join(ENDS)}")
    return name


def list_other_ends(mode: Any, given: dict[str, Any]) -> list[str]:
    return [name for name in ENDS.values() if name in given and name != ENDS[read_mode(mode)]]


def convert_schedule_fields(given: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Converts transformers' names and arguments of schedules, `lr_scheduler` and `lr_scheduler_kwargs`."""
    scheduler, values = str(given.get("lr_scheduler", "")), given.pop("lr_scheduler_kwargs", None) or {}
    if scheduler in SCHEDULES:
        given["lr_scheduler"] = find_row("lr_scheduler").convert(scheduler, name="lr_scheduler")["lr_scheduler"]
    found, unknown = convert_schedule(scheduler, values, given.get("learning_rate", LEARNING_RATE))
    if unknown:
        allowed = ", ".join(SCHEDULE_ARGUMENTS.get(scheduler, ())) or "none"
        raise make_bad_input(
            f"lr_scheduler_kwargs: {', '.join(unknown)}: allowed with {scheduler or 'the default'}: {allowed}"
        )
    return {option: ("lr_scheduler_kwargs", value) for option, value in found.items()}


def list_notes(args: TrainingArgs) -> list[str]:
    """Fields that have no effect, and defaults of Red Hat's that apply, or do not."""
    given = {name: value for name, value in vars(args).items() if value is not NOTHING and value is not None}
    rows = {name: find_row(name) for name in TRAIN_NAMES if name in given}
    notes = [f"{name} has no effect: {row.reason}" for name, row in rows.items() if not row.options]
    if "osft_upcast_dtype" in given:
        notes.append("osft_upcast_dtype has no effect: OSFT decomposes in float64 and computes in float32")
    if given.get("mock_data") and "data_path" in given:
        notes.append("data_path has no effect: mock_data is trained on")
    elif names_tokenized(args):
        unused = [name for name in ("max_seq_len", "chat_tmpl_path") if name in given]
        notes += [f"{name} has no effect: data_path is tokenized already" for name in unused]
    elif "pretraining_config" in given and "max_seq_len" in given:
        notes.append("max_seq_len has no effect: pretraining_config sets the length of samples")
    if "training_mode" in given:
        mode = given["training_mode"]
        notes += [
            f"{name} has no effect with training_mode {read_mode(mode)!r}"
            for name in list_other_ends(mode, given)
            if given[name]
        ]
        if "lr_scheduler" not in given and ENDS[read_mode(mode)] is not None:
            notes.append("lr_scheduler is cosine, the default where training_mode comes from")
        if not {"save_dtype", "export_dtype"} & given.keys():
            notes.append("save_dtype is bfloat16; the default where training_mode comes from is the model's own")
    return notes
