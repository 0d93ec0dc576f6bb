"""Names that other trainers have for an option, and the option that an unknown name may stand for."""

import difflib
from collections.abc import Collection

# Names that other trainers have for an option (docs/coming_from.md), where the closest one here would mislead; of
# several the first that a program has.
NAMES_ELSEWHERE = {
    "lr": ("learning_rate",),
    "epochs": ("max_epochs",),
    "num_epochs": ("max_epochs",),
    "num_train_epochs": ("max_epochs",),
    "per_device_train_batch_size": ("batch_size",),
    "micro_batch_size": ("batch_size",),
    "gradient_accumulation_steps": ("batch_size",),
    "max_length": ("max_sample_num_tokens",),
    "max_seq_length": ("max_sample_num_tokens",),
    "sequence_len": ("max_sample_num_tokens",),
    "cutoff_len": ("max_sample_num_tokens",),
    "model": ("model_name_or_path",),
    "model_path": ("model_name_or_path", "model"),
    "base_model": ("model_name_or_path", "model"),
    "data": ("data_path", "input_file"),
    "dataset": ("data_path", "input_file"),
    "datasets": ("data_path", "input_file"),
    "train_file": ("data_path", "input_file"),
    "dataset_name": ("input_dataset",),
    "output": ("output_dir", "output_file"),
    "save_steps": ("checkpoint_every_steps",),
    "eval_steps": ("validate_every_steps",),
    "val_set_size": ("validation_share",),
    "val_size": ("validation_share",),
    "lora_r": ("lora_rank",),
    "use_peft": ("lora",),
    "load_in_4bit": ("base_quantization",),
    "quantization_bit": ("base_quantization",),
    "report_to": ("track",),
    "resume_from_checkpoint": ("resume",),
    "deepspeed": ("sharding",),
    "packing": (),  # samples always are
    "sample_packing": (),
}


def find_closest(name: str, known: Collection[str]) -> str | None:
    """The `known` option that an unknown `name` may stand for: the one that other trainers call so, or the closest."""
    if name in NAMES_ELSEWHERE:
        return next((option for option in NAMES_ELSEWHERE[name] if option in known), None)
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)
