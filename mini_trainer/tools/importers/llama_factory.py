"""LLaMA-Factory's keys, its defaults (its hparams), its list of data sets, and how it counts a step."""

import json
from pathlib import Path
from typing import Any

from mini_trainer.tools.importers import llama_factory_preferences
from mini_trainer.tools.importers.batches import PeerBatch, describe_device_batch
from mini_trainer.tools.importers.llama_factory_preferences import (
    PREFERENCE_RULES,
    convert_adapter,
    convert_adapter_dropout,
)
from mini_trainer.tools.importers.preferences import TOGETHER, convert_lengths
from mini_trainer.tools.importers.rules import (
    DIFFERS,
    MISSING,
    NEEDLESS,
    Conversion,
    Refusal,
    Rule,
    allow,
    differs,
    missing,
    needless,
    of_lora,
    of_new_lora,
    read_names,
    read_number,
    refuse,
    set_data_option,
    set_if_true,
    set_list,
    set_option,
)
from mini_trainer.tools.importers.shared_keys import (
    convert_bits,
    convert_entropy_weighting,
    convert_epochs,
    convert_lora,
    convert_model,
    convert_revision,
    convert_share,
    convert_targets,
)
from mini_trainer.tools.importers.sources import add_sources, describe_sources
from mini_trainer.tools.importers.training_arguments import ATTENTION, PACKED, SPEED, TRAINING_ARGUMENTS

ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
                  "history": "history", "tools": "tools"}  # fmt: skip
TEMPLATE = (
    f"{DIFFERS}: the model's own chat template is used; where LLaMA-Factory's is another, give a Jinja file as"
    " chat_template"
)


def normalize(given: dict[str, Any]) -> dict[str, Any]:
    return given


def trains_adapter(given: dict[str, Any]) -> bool:
    return given.get("finetuning_type", "lora") == "lora"


def find_objective(given: dict[str, Any]) -> str:
    return llama_factory_preferences.find_objective(given)


def list_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's values for keys that are left out, where this trainer's default differs."""
    defaults = {"finetuning_type": "lora", "cutoff_len": 2048, "learning_rate": 5e-5, "lr_scheduler_type": "linear",
                "num_train_epochs": 3, "per_device_train_batch_size": 8, "adam_beta2": 0.999}  # fmt: skip
    defaults |= llama_factory_preferences.list_defaults(given)
    return defaults | ({"lora_rank": 8} if trains_adapter(given) else {})


def convert_stage(to: Conversion, key: str, value: Any) -> str:
    """Supervised fine-tuning, documents, or preferences."""
    if not to.reads_texts:
        return llama_factory_preferences.convert_stage(to, value)
    if value == "pt":
        to.data["format"] = "document"
        return f"format: document (of process_data.py); {DIFFERS}: texts are trained whole, without a chat template"
    if value != "sft":
        raise Refusal(f"{value!r} has no objective here: sft, pt, dpo, kto and rm are read")
    return NEEDLESS


def is_pretraining(to: Conversion) -> bool:
    return to.get("stage") == "pt"


def convert_length(to: Conversion, key: str, value: Any) -> str:
    """The longest sample, or a document's block; and the tokens of one GPU's micro-batch."""
    length, rows = read_number(key, value), to.get_number("per_device_train_batch_size", default=8)
    if not to.reads_texts:
        return f"{convert_lengths(to, length, rows)}; {TOGETHER} each is cut to {length}"
    to.train["max_tokens_per_gpu"] = length * rows
    tokens = f"max_tokens_per_gpu: {to.train['max_tokens_per_gpu']}"
    if is_pretraining(to):
        to.data["block_size"] = length
        return f"block_size: {length} (of process_data.py); {tokens}"
    to.data["max_sample_num_tokens"] = length
    return (
        f"max_sample_num_tokens: {length} (of process_data.py); {tokens}; {DIFFERS}: longer ones are dropped, there cut"
    )


def convert_datasets(to: Conversion, key: str, value: Any) -> str:
    """Data sets by name, from the list that lies beside their files."""
    info = Path(str(to.get("dataset_dir", default="data"))) / "dataset_info.json"
    listed = read_list(info)
    names, notes = read_names(key, value), []
    absent = [name for name in names if name not in listed]
    if absent:
        return (
            f"{MISSING}: give its file as input_file in data.yaml (given {value!r}; {', '.join(absent)} not in {info})"
        )
    sources = [read_entry(to, name, listed[name], info, notes) for name in names]
    add_sources(to, sources)
    return describe_sources(sources, notes)


def read_list(path: Path) -> dict[str, dict[str, Any]]:
    """The list of data sets, empty without a file; ValueError if the file holds something else."""
    try:
        listed = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        raise ValueError(f"{path}: not a mapping of names to data sets with a file_name and columns")
    for entry in listed.values():
        columns, tags = entry.get("columns", {}), entry.get("tags", {})
        texts = [entry.get("file_name"), *(columns.values() if isinstance(columns, dict) else [0])]
        texts += tags.values() if isinstance(tags, dict) else [0]
        if not all(isinstance(text, str | None) for text in texts):
            raise ValueError(f"{path}: not a mapping of names to data sets with a file_name and columns")
    return listed


def read_entry(to: Conversion, name: str, entry: dict[str, Any], info: Path, notes: list[str]) -> dict[str, Any]:
    """Options of process_data.py for one data set."""
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    if to.reads_texts and (entry.get("ranking") or "kto_tag" in columns):
        raise Refusal(f"{name} holds preferences: stage {to.get('stage', default='sft')} does not learn from them")
    if {"videos", "audios"} & columns.keys():
        raise Refusal(f"{name} has videos or sound, which are not trained here")
    source = read_place(name, entry, info)
    if "images" in columns and not to.reads_texts:
        raise Refusal(f"{name} has images: answers that are preferred are read without them")
    if "images" in columns:
        if "input_dataset" in source:
            raise Refusal(f"images of {name}: are read beside files of rows; download it, and name its files")
        source["images"] = True
        convert_freezing(to, "freeze_vision_tower", True)
        if columns["images"] != "images":
            notes.append(f"{DIFFERS}: images are read from the column images, {name} has them in {columns['images']}")
    if entry.get("num_samples"):
        notes.append(f"{DIFFERS}: all rows of {name} are used, given num_samples {entry['num_samples']}")
    if is_pretraining(to):
        text = columns.get("prompt", "instruction")
        return source | ({} if text in ("text", "document") else {"text_field": text})
    kind = entry.get("formatting", "alpaca")
    if kind not in ("alpaca", "sharegpt", "openai"):
        raise Refusal(f"{name}: formatting {kind!r} is not known here: alpaca, sharegpt and openai are")
    if not to.reads_texts:
        check_message_keys(name, kind, tags)
        return source | llama_factory_preferences.read_rows(to, name, entry, notes)
    if kind == "alpaca":
        return source | read_alpaca(name, columns)
    return source | read_chat(name, kind, columns, tags)


def read_place(name: str, entry: dict[str, Any], info: Path) -> dict[str, Any]:
    """The option for the rows' place: a file beside the list, or a data set of the hub."""
    if "hf_hub_url" in entry:
        subset = entry.get("subset")
        source = {"input_dataset": entry["hf_hub_url"] if subset is None else f"{entry['hf_hub_url']}:{subset}"}
        return source | ({"split": entry["split"]} if entry.get("split", "train") != "train" else {})
    if entry.get("file_name") is None:
        raise Refusal(f"{name} of {info} has no file_name: rows are read from files or Hugging Face's hub")
    return {"input_file": [str(info.parent / entry["file_name"])]}


def read_alpaca(name: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Alpaca's columns, or a prompt and its answer under names of their own."""
    used = {what: column for what, column in columns.items() if what in ALPACA_COLUMNS and column is not None}
    has_query = not columns or "query" in used  # columns that are not listed are not read there
    if has_query and all(ALPACA_COLUMNS[what] == column for what, column in used.items()):
        return {"format": "alpaca"}
    if used.keys() <= {"prompt", "response"}:
        return {"format": "completion", "prompt_field": used.get("prompt", "instruction"),
                "completion_field": used.get("response", "output")}  # fmt: skip
    given = ", ".join(f"{what}: {column}" for what, column in used.items() if ALPACA_COLUMNS[what] != column)
    raise Refusal(f"{name}: columns of other names ({given}) can be read for prompt and response alone; rename them")


def read_chat(name: str, kind: str, columns: dict[str, Any], tags: dict[str, Any]) -> dict[str, Any]:
    """Messages, by the names of their keys; speakers must have names that process_data.py knows."""
    data_format, own = check_message_keys(name, kind, tags)
    field = columns.get("messages") or "conversations"
    return {"format": data_format} | ({} if field == own else {"messages_field": field})


def check_message_keys(name: str, kind: str, tags: dict[str, Any]) -> tuple[str, str]:
    """The format of messages with the column that it reads, by the names of their keys."""
    pair = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    formats = {("role", "content"): ("messages", "messages"), ("from", "value"): ("sharegpt", "conversations")}
    if kind == "openai" and not tags:
        pair = ("role", "content")
    if pair not in formats:
        raise Refusal(f"{name}: messages have role and content, or from and value, given {pair[0]} and {pair[1]}")
    return formats[pair]


def convert_masking(to: Conversion, key: str, value: Any) -> str:
    if not value:
        return NEEDLESS
    raise Refusal(
        "prompts are never trained here" if key == "train_on_prompt"
        else "every turn of the assistant is trained; a row's messages can have train: false"
    )  # fmt: skip


def convert_subset(to: Conversion, key: str, value: Any) -> str:
    """The first rows of each data set there; as many rows drawn at random here."""
    to.train["subset"] = str(read_number(key, value))
    return (
        f"subset: {value}; {DIFFERS}: drawn at random after tokenizing, there the first rows; also of validation data"
    )


def convert_quantization(to: Conversion, key: str, value: Any) -> str:
    if value in ("bnb", "bitsandbytes"):
        return NEEDLESS
    raise Refusal(f"the base is quantized by bitsandbytes (nf4), given {value!r}")


def convert_freezing(to: Conversion, key: str, value: Any) -> str:
    """Parts of a vision-language model: by default vision and projector are frozen, and the language part trains."""
    defaults = {"freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False}
    parts = {
        "freeze_vision_tower": "vision",
        "freeze_multi_modal_projector": "projector",
        "freeze_language_model": "language",
    }
    frozen = [parts[name] for name, default in defaults.items() if to.get(name, default=default)]
    if to.is_lora:
        is_default = frozen == ["vision", "projector"]
        return (
            f"{NEEDLESS}: adapters are in the language part"
            if is_default
            else f"{DIFFERS}: only the language part has adapters"
        )
    to.train["freeze"] = frozen or ["nothing"]
    return f"freeze: {', '.join(to.train['freeze'])}"


def describe_batch(to: Conversion) -> PeerBatch:
    """Rows of a step, which are packs if samples are packed."""
    packs = (to.get("packing") or to.get("neat_packing")) and not is_pretraining(to) and to.reads_texts
    length = to.get_number("cutoff_len", default=2048)
    return describe_device_batch(to, pack_length=length if packs else None)


OTHER_TRAINING = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro",
                  "mixture_of_depths", "loraplus_lr_ratio", "pissa_init", "use_kt", "use_mca", "use_megatron_bridge",
                  "use_hyper_parallel", "shift_attn", "rope_scaling")  # fmt: skip
MEGATRON = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
)
# Arguments of methods that their switch refuses or accepts.
BESIDE = ("apollo_layerwise", "apollo_target", "apollo_rank", "apollo_scale", "apollo_scale_type", "galore_layerwise",
          "galore_target", "galore_rank", "galore_scale", "badam_mode", "badam_switch_mode", "badam_switch_interval",
          "badam_verbose", "asft_alpha", "freeze_trainable_layers", "freeze_trainable_modules", "oft_block_size",
          "oft_target", "pissa_iter", "pissa_convert", "eaft_alpha", "kt_config", "kt_cpu_activation", "kt_weight_path",
          "kt_non_expert_weight_path", "fp8_backend", "fp8_enable_fsdp_float8_all_gather")  # fmt: skip
RULES: dict[str, Rule] = TRAINING_ARGUMENTS | PREFERENCE_RULES | {
    "model_name_or_path": convert_model,
    "model_revision": convert_revision,
    "num_train_epochs": convert_epochs,
    "stage": convert_stage,
    "finetuning_type": convert_lora,
    "lora_rank": of_new_lora(set_option("lora_rank")),
    "lora_dropout": of_new_lora(convert_adapter_dropout),
    "lora_target": of_new_lora(lambda to, key, value: convert_targets(to, key, read_names(key, value))),
    "additional_target": of_new_lora(set_list("lora_modules_to_save")),
    "adapter_name_or_path": of_lora(convert_adapter),
    "quantization_bit": of_lora(convert_bits),
    "quantization_method": of_lora(convert_quantization),
    "quantization_type": of_lora(allow("nf4", reason="the base is held in nf4")),
    "double_quantization": of_lora(needless("the base is held in nf4")),
    "dataset": convert_datasets,
    "dataset_dir": needless("input_file is a path"),
    "eval_dataset": missing("tokenize it, and give validation_data_path"),
    "val_size": convert_share,
    "template": lambda to, key, value: NEEDLESS if value in ("empty",) else TEMPLATE,
    "cutoff_len": convert_length,
    "max_samples": convert_subset,
    "preprocessing_num_workers": set_data_option("num_proc"),
    "overwrite_cache": needless("process_data.py writes to the file of output_file"),
    "tokenized_path": needless("process_data.py writes to the file of output_file"),
    "packing": PACKED,
    "neat_packing": PACKED,
    "train_on_prompt": convert_masking,
    "mask_history": convert_masking,
    "default_system": differs("a system message is the row's own, or the template's"),
    "enable_thinking": differs("prompts with and without thinking are the template's and the rows' own"),
    "tool_format": differs("tools are written by the model's own template"),
    "image_max_pixels": differs("the model's own processor sizes images"),
    "image_min_pixels": differs("the model's own processor sizes images"),
    **dict.fromkeys(("video_max_pixels", "video_fps", "video_maxlen"), needless("rows with videos are refused")),
    **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), convert_freezing),
    "flash_attn": ATTENTION,
    "enable_liger_kernel": set_if_true(use_liger_kernels=True),
    "disable_gradient_checkpointing": set_if_true(activation_checkpointing="none"),
    "pure_bf16": needless("weights stay in float32; --master-weights bfloat16 holds them in 16 bits"),
    "use_dft_loss": set_if_true(loss_weighting="dft"),
    "use_eaft_loss": convert_entropy_weighting,
    "plot_loss": needless("mini-trainer plot-metrics draws every metric"),
    "compute_accuracy": needless("validations report token accuracy"),
    "interleave_probs": lambda to, key, value: set_option("data_weights")(to, key, read_names(key, value)),
    "mix_strategy": lambda to, key, value: NEEDLESS if value == "concat"
    else f"{DIFFERS}: data_weights draw samples; a data set that runs out starts over",
    "disable_shuffling": differs("the order is always random"),
    "streaming": SPEED,
    "buffer_size": SPEED,
    "use_v1_kernels": SPEED,
    "use_unsloth": SPEED,
    "ray_num_workers": SPEED,
    "resize_vocab": needless("the vocabulary grows as tokens are added"),
    "add_special_tokens": lambda to, key, value: set_data_option("add_special_tokens")(to, key, read_names(key, value)),
    "add_tokens": lambda to, key, value: set_data_option("add_special_tokens")(to, key, read_names(key, value)),
    "new_special_tokens_config": refuse("descriptions of tokens are not read: add_special_tokens names them"),
    "init_special_tokens": refuse("new tokens begin as the mean of the others"),
    **dict.fromkeys(OTHER_TRAINING, refuse("changes how or what is trained, and has no counterpart")),
    **dict.fromkeys(MEGATRON, refuse("files for Megatron are not translated")),
    **dict.fromkeys(BESIDE, needless("it is an argument of a method that has its own switch")),
}  # fmt: skip
