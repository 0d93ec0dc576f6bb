"""Fields of Red Hat's mini_trainer, which training_hub gives: each becomes an option, or a note that it has no effect.

docs/reference/training_hub.md has the table of all its fields.
"""

import math
from typing import Any

from mini_trainer.api.arguments import NOTHING, TrainingArgs, TrainingMode
from mini_trainer.api.errors import make_bad_input
from mini_trainer.api.tokenized import names_tokenized
from mini_trainer.options import OptimizationOptions

NAMES = {  # theirs -> ours
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_eps",
    "save_best_val_loss": "export_best",
    "resume_from_full_state_checkpoint": "resume",
}
DTYPES = {"train_dtype": "master_weights", "save_dtype": "export_dtype"}
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
VALIDATION_DATA = ("validation_data_path", "validation_split", "validation_share")
ENDS = {"epoch": "max_epochs", "step": "max_steps", "token": "max_tokens", "infinite": None}
ALWAYS = {
    "on_demand_checkpointing": "every run saves its state when asked to stop (SIGTERM, SIGINT, SIGUSR1)",
    "accelerate_full_state_at_epoch": "checkpoints hold the full state; checkpoint_every_steps and"
    " checkpoint_every_minutes set when they are saved",
    "validate_at_final": "validation data is measured after the last step, and before the first",
}
NO_COUNTERPART = {
    "use_dolomite": "every transformers model is trained with packed sequences",
    "use_legacy_tmpl": "name the template's Jinja file with chat_tmpl_path",
    "osft_output_dtype": "exports have one data type, save_dtype",
}
SCHEDULES = {"cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}  # transformers' names of two
LEARNING_RATE = OptimizationOptions().learning_rate
RATES = {"min_lr", "lr_end"}  # of a schedule's arguments, those that are learning rates
SCHEDULE_ARGUMENTS = {
    "cosine_with_min_lr": {"min_lr": "min_lr_ratio", "min_lr_rate": "min_lr_ratio"},
    "cosine_with_restarts": {"num_cycles": "lr_shape"},
    "polynomial": {"power": "lr_shape", "lr_end": "min_lr_ratio"},
    "warmup_stable_decay": {"num_decay_steps": "num_decay_steps", "min_lr_ratio": "min_lr_ratio"},
}


def convert_fields(given: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Takes Red Hat's fields out of `given`. Returns options with the field that each is from, and its value.

    BadInputError for values that have no meaning here.
    """
    for name, reason in NO_COUNTERPART.items():
        if given.pop(name, None):
            raise make_bad_input(f"{name} has no counterpart here: {reason}")
    if given.get("save_best_val_loss") is False and not any(given.get(name) for name in VALIDATION_DATA):
        del given["save_best_val_loss"]  # their default; an option without effect would be refused
    found = {ours: (name, given.pop(name)) for name, ours in NAMES.items() if name in given}
    for name, ours in DTYPES.items():
        if name in given:
            found[ours] = (name, read_dtype(given.pop(name)))
    precision = given.pop("osft_upcast_dtype", None)
    if precision is not None and read_dtype(precision) not in ("float32", "float64"):
        raise make_bad_input(
            f"osft_upcast_dtype {precision}: OSFT decomposes in float64 and computes in float32, always"
        )
    for name in ALWAYS:
        given.pop(name, None)
    threshold = given.pop("val_loss_improvement_threshold", None)
    if threshold:
        found["best_metric"] = ("val_loss_improvement_threshold", f"loss:{threshold}")
    samples = given.pop("min_samples_per_validation", None)
    if samples is not None:
        found["validate_every_steps"] = ("min_samples_per_validation", count_steps(samples, given))
    choose_end(given)
    return found | convert_schedule(given)


def read_dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)


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


def convert_schedule(given: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Converts transformers' names and arguments of schedules, `lr_scheduler` and `lr_scheduler_kwargs`."""
    scheduler, values = str(given.get("lr_scheduler", "")), given.pop("lr_scheduler_kwargs", None) or {}
    if scheduler in SCHEDULES:
        given["lr_scheduler"] = SCHEDULES[scheduler]
    known = SCHEDULE_ARGUMENTS.get(scheduler, {})
    unknown = [name for name in values if name not in known]
    if unknown:
        allowed = ", ".join(known) or "none"
        raise make_bad_input(
            f"lr_scheduler_kwargs: {', '.join(unknown)}: allowed with {scheduler or 'the default'}: {allowed}"
        )
    found = {known[name]: ("lr_scheduler_kwargs", value) for name, value in values.items() if value is not None}
    for name in RATES & values.keys():
        found["min_lr_ratio"] = ("lr_scheduler_kwargs", values[name] / given.get("learning_rate", LEARNING_RATE))
    return found


def list_notes(args: TrainingArgs) -> list[str]:
    """Fields that have no effect, and defaults of Red Hat's that apply, or do not."""
    given = {name: value for name, value in vars(args).items() if value is not NOTHING and value is not None}
    notes = [f"{name} is always on: {reason}" for name, reason in ALWAYS.items() if name in given]
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
