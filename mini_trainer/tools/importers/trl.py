"""TRL's keys (ModelConfig, the scripts' own, SFTConfig), its defaults, and how it counts a step."""

from typing import Any

from mini_trainer.tools.importers.batches import PeerBatch, describe_device_batch
from mini_trainer.tools.importers.rules import (
    DIFFERS,
    NEEDLESS,
    Conversion,
    Refusal,
    Rule,
    allow,
    differs,
    missing,
    needless,
    of_lora,
    read_number,
    set_data_option,
    set_if_true,
    set_option,
    set_tracker,
)
from mini_trainer.tools.importers.shared_keys import convert_model, convert_revision, convert_targets
from mini_trainer.tools.importers.sources import add_sources, convert_template_text, describe_sources
from mini_trainer.tools.importers.training_arguments import IN_BF16, OFFLOADING, PACKED, TRAINING_ARGUMENTS

WHOLE = f"{DIFFERS}: chats are trained whole there, here the assistant's tokens alone"


def normalize(given: dict[str, Any]) -> dict[str, Any]:
    """The older name of max_length."""
    given = dict(given)
    if "max_seq_length" in given:
        given.setdefault("max_length", given["max_seq_length"])
    return given


def trains_adapter(given: dict[str, Any]) -> bool:
    return bool(given.get("use_peft"))


def find_objective(given: dict[str, Any]) -> str:
    return "causal-lm"


def list_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """TRL's values for keys that are left out, where this trainer's default differs."""
    return list_shared_defaults(given) | {"learning_rate": 2e-5, "assistant_only_loss": False}


def list_shared_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Values that all of its trainers share."""
    defaults = {"lr_scheduler_type": "linear", "num_train_epochs": 3, "per_device_train_batch_size": 8,
                "adam_beta2": 0.999, "max_length": 1024}  # fmt: skip
    lora = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    return defaults | (lora if trains_adapter(given) else {})


def convert_length(to: Conversion, key: str, value: Any) -> str:
    """The longest sample, and the tokens of one GPU's micro-batch."""
    length = read_number(key, value)
    to.data["max_sample_num_tokens"] = length
    to.train["max_tokens_per_gpu"] = length * to.get_number("per_device_train_batch_size", default=8)
    return (
        f"max_sample_num_tokens: {length} (of process_data.py); max_tokens_per_gpu: {to.train['max_tokens_per_gpu']};"
        f" {DIFFERS}: longer ones are dropped, there cut"
    )


def convert_dataset(to: Conversion, key: str, value: Any) -> str:
    """A data set of the hub, with its configuration and its split."""
    if not isinstance(value, str):
        raise ValueError(f"{key} is a name, given {value!r}")
    if to.get("dataset_mixture"):
        return f"{NEEDLESS}: dataset_mixture overrides it"
    config, split = to.get("dataset_config"), to.get("dataset_train_split")
    source = {"input_dataset": value if config is None else f"{value}:{config}"}
    source |= {} if split in (None, "train") else {"split": split}
    add_sources(to, [source])
    return describe_sources([source], [])


def convert_mixture(to: Conversion, key: str, value: Any) -> str:
    """Several data sets of the hub, each with its split and the share of its rows."""
    listed = value.get("datasets") if isinstance(value, dict) else None
    entries = listed if isinstance(listed, list) else []
    if not entries or not all(
        isinstance(entry, dict) and isinstance(entry.get("id", entry.get("path")), str) for entry in entries
    ):
        raise ValueError(f"{key} has datasets, each with its id, given {value!r}")
    sources, notes = [], []
    for entry in entries:
        name, config = entry.get("id", entry.get("path")), entry.get("config", entry.get("name"))
        split = str(entry.get("split") or "train").strip()
        source = {"input_dataset": name if config is None else f"{name}:{config}"}
        sources.append(source | ({} if split == "train" else {"split": split}) | take_share(entry, split, notes))
    size = value.get("test_split_size")
    if size is not None:
        share = read_number("test_split_size", size)
        if 0 < share < 1:
            to.data["validation_share"] = share
        else:
            notes.append(f"{DIFFERS}: validation_share is a share, given test_split_size {size}")
    add_sources(to, sources)
    return describe_sources(sources, notes)


def take_share(entry: dict[str, Any], split: str, notes: list[str]) -> dict[str, Any]:
    """A weight below 1 as a slice of the split."""
    weight = 1 if entry.get("weight") is None else read_number("weight", entry["weight"])
    if weight == 1:
        return {}
    if not 0 < weight < 1 or "[" in split or not (weight * 100).is_integer():
        raise Refusal(f"weight {weight} of {entry.get('id')}: must be whole percents up to 1")
    notes.append(f"{DIFFERS}: of {entry.get('id')} the first {weight:.0%}, there as many at random")
    return {"split": f"{split}[:{round(weight * 100)}%]"}


def convert_mixer(to: Conversion, key: str, value: Any) -> str:
    """The older mixture: names with shares, and a list of splits for training and testing."""
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{key} maps names to shares, given {value!r}")
    splits = [split for split in to.get("dataset_splits", default=["train"]) if "train" in str(split)] or ["train"]
    entries = [{"id": str(name), "weight": share, "split": split} for name, share in value.items() for split in splits]
    return convert_mixture(to, key, {"datasets": entries})


def convert_loss(to: Conversion, key: str, value: Any) -> str:
    if value in ("nll", "chunked_nll"):
        return NEEDLESS
    if value == "dft":
        to.train["loss_weighting"] = "dft"
        return "loss_weighting: dft"
    raise Refusal(f"the loss {value!r} has no objective here")


def convert_assistant_only(to: Conversion, key: str, value: Any) -> str:
    return NEEDLESS if value else f"{WHOLE}; of prompts with completions both train the completion"


def convert_text_field(to: Conversion, key: str, value: Any) -> str:
    return NEEDLESS if value == "text" else set_data_option("text_field")(to, key, value)


def convert_completion_only(to: Conversion, key: str, value: Any) -> str:
    if value is False:
        raise Refusal("prompts are never trained here, only completions")
    return NEEDLESS


def convert_strategy(to: Conversion, key: str, value: Any) -> str:
    if value == "bfd" or not to.get("packing"):
        return NEEDLESS
    return f"{DIFFERS}: samples are packed whole, and never see each other"


def convert_peft_targets(to: Conversion, key: str, value: Any) -> str:
    told = convert_targets(to, key, value)
    is_default = value == ["q_proj", "v_proj"]
    return f"{told}; {DIFFERS}: peft chooses by the architecture, for most of them these" if is_default else told


def describe_batch(to: Conversion) -> PeerBatch:
    """Rows of a step, which are packs if samples are packed."""
    length = to.get_number("max_length", default=1024)
    return describe_device_batch(to, pack_length=length if to.get("packing") else None)


# Keys of all of its trainers.
SHARED: dict[str, Rule] = TRAINING_ARGUMENTS | {
    "model_name_or_path": convert_model,
    "model_revision": convert_revision,
    "dataset_name": convert_dataset,
    "dataset_config": needless("it is written into input_dataset"),
    "dataset_train_split": needless("it is written as split"),
    "dataset_test_split": missing("tokenize it, and give validation_data_path"),
    "dataset_mixture": convert_mixture,
    "datasets": convert_mixture,
    "dataset_mixer": convert_mixer,
    "dataset_splits": needless("those for training are written as split"),
    "dataset_streaming": needless("rows are read as they come"),
    "truncation_mode": needless("longer samples are dropped"),
    "chat_template": convert_template_text,
    "chat_template_path": convert_template_text,
    "dataset_num_proc": set_data_option("num_proc"),
    "preprocessing_num_workers": set_data_option("num_proc"),
    "use_peft": set_if_true(lora=True),
    "lora_target_modules": of_lora(convert_peft_targets),
    "lora_target_parameters": of_lora(differs("experts have adapters where lora_target_modules is left out")),
    "lora_modules_to_save": of_lora(set_option("lora_modules_to_save")),
    "lora_task_type": of_lora(allow("CAUSAL_LM", reason="files that learn language are read")),
    "bnb_4bit_quant_type": of_lora(allow("nf4", reason="the base is held in nf4")),
    "use_bnb_nested_quant": of_lora(needless("the base is held in nf4")),
    "router_aux_loss_coef": set_option("router_aux_loss"),
    "eos_token": differs("turns end with the stop token that the chat template writes"),
    "shuffle_dataset": needless("the order is always random"),
    "activation_offloading": OFFLOADING,
    "use_liger": set_if_true(use_liger_kernels=True),
    **dict.fromkeys(("padding_free", "pad_to_multiple_of"), PACKED),
    **dict.fromkeys(("dtype", "torch_dtype"), IN_BF16),
    "wandb_project": set_tracker("wandb", option="track_project"),
    "wandb_entity": missing("set WANDB_ENTITY"),
    "hub_model_revision": differs("exports are uploaded to the repository's main branch"),
    "callbacks": missing("write them as classes for callbacks: docs/callbacks.md"),
    "benchmarks": missing("evaluate_model.py measures models"),
    "system_prompt": differs("a system message is the row's own, or the template's"),
    "dataset_prompt_column": needless("rows show their columns; prompt_field names another"),
}  # fmt: skip
RULES: dict[str, Rule] = SHARED | {
    "max_length": convert_length,
    "max_seq_length": needless("it is max_length"),
    "dataset_text_field": convert_text_field,
    "dataset_kwargs": differs("rows are tokenized by process_data.py"),
    "assistant_only_loss": convert_assistant_only,
    "completion_only_loss": convert_completion_only,
    "loss_type": convert_loss,
    "packing": PACKED,
    "packing_strategy": convert_strategy,
    "eval_packing": PACKED,
}
