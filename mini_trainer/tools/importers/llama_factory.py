"""LLaMA-Factory's keys, its defaults (its hparams), and how it counts a step."""

from typing import Any

from mini_trainer.tools.importers.batches import PeerBatch, describe_device_batch
from mini_trainer.tools.importers.llama_factory_data import convert_datasets, convert_freezing, is_pretraining
from mini_trainer.tools.importers.preferences import (
    ADAPTER_DROPOUT,
    LLAMA_FACTORY_OBJECTIVES,
    LLAMA_FACTORY_RULES,
    STAGES,
    convert_adapter,
    convert_lengths,
)
from mini_trainer.tools.importers.rules import (
    DIFFERS,
    NEEDLESS,
    Conversion,
    Rule,
    allow,
    by_value,
    differs,
    if_set,
    missing,
    needless,
    of_lora,
    of_new_lora,
    read_number,
    refuse,
    refuse_any,
    say,
    set_data_option,
    set_if_true,
    set_in_both,
    set_option,
    unless,
    with_names,
)
from mini_trainer.tools.importers.shared_keys import (
    convert_bits,
    convert_entropy_weighting,
    convert_epochs,
    convert_lora,
    convert_share,
    convert_targets,
)
from mini_trainer.tools.importers.training_arguments import ATTENTION, PACKED, SPEED, TRAINING_ARGUMENTS

TEMPLATE = (
    f"{DIFFERS}: the model's own chat template is used; where LLaMA-Factory's is another, give a Jinja file as"
    " chat_template"
)


def normalize(given: dict[str, Any]) -> dict[str, Any]:
    return given


def trains_adapter(given: dict[str, Any]) -> bool:
    return given.get("finetuning_type", "lora") == "lora"


def find_objective(given: dict[str, Any]) -> str:
    return LLAMA_FACTORY_OBJECTIVES.get(str(given.get("stage")), "causal-lm")


def list_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's values for keys that are left out, where this trainer's default differs."""
    defaults = {"finetuning_type": "lora", "cutoff_len": 2048, "learning_rate": 5e-5, "lr_scheduler_type": "linear",
                "num_train_epochs": 3, "per_device_train_batch_size": 8, "adam_beta2": 0.999}  # fmt: skip
    objective = find_objective(given)
    defaults |= {"pref_beta": 0.1} if objective in ("preference", "kto") else {}
    defaults |= {"pref_loss": "sigmoid"} if objective == "preference" else {}
    defaults |= {"simpo_gamma": 0.5} if given.get("pref_loss") == "simpo" else {}
    return defaults | ({"lora_rank": 8} if trains_adapter(given) else {})


def convert_documents(to: Conversion, key: str, value: Any) -> str:
    to.data["format"] = "document"
    return f"format: document (of process_data.py); {DIFFERS}: texts are trained on as a whole, without a chat template"


def convert_length(to: Conversion, key: str, value: Any) -> str:
    """The longest sample, or a document's block; and the tokens of one GPU's micro-batch."""
    length, rows = read_number(key, value), to.get_number("per_device_train_batch_size", default=8)
    if not is_pretraining(to):
        return convert_lengths(to, length, rows, there="cut" if to.reads_texts else f"each is cut to {length}")
    to.data["block_size"], to.train["max_tokens_per_gpu"] = length, length * rows
    return f"block_size: {length} (of process_data.py); max_tokens_per_gpu: {length * rows}"


def convert_subset(to: Conversion, key: str, value: Any) -> str:
    """The first rows of each data set there; as many rows drawn at random here."""
    to.train["subset"] = str(read_number(key, value))
    return (
        f"subset: {value}; {DIFFERS}: drawn at random after tokenizing, there the first rows; also of validation data"
    )


def describe_batch(to: Conversion) -> PeerBatch:
    """Rows of a step, which are packs if samples are packed."""
    packs = (to.get("packing") or to.get("neat_packing")) and not is_pretraining(to) and to.reads_texts
    length = to.get_number("cutoff_len", default=2048)
    return describe_device_batch(to, pack_length=length if packs else None)


OTHER_TRAINING = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro",
                  "mixture_of_depths", "loraplus_lr_ratio", "pissa_init", "use_kt", "use_mca", "use_megatron_bridge",
                  "use_hyper_parallel", "shift_attn", "rope_scaling")  # fmt: skip
MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
            "sequence_parallel")  # fmt: skip
# Arguments of methods that their switch refuses or accepts.
BESIDE = ("apollo_layerwise", "apollo_target", "apollo_rank", "apollo_scale", "apollo_scale_type", "galore_layerwise",
          "galore_target", "galore_rank", "galore_scale", "badam_mode", "badam_switch_mode", "badam_switch_interval",
          "badam_verbose", "asft_alpha", "freeze_trainable_layers", "freeze_trainable_modules", "oft_block_size",
          "oft_target", "pissa_iter", "pissa_convert", "eaft_alpha", "kt_config", "kt_cpu_activation", "kt_weight_path",
          "kt_non_expert_weight_path", "fp8_backend", "fp8_enable_fsdp_float8_all_gather")  # fmt: skip
RULES: dict[str, Rule] = TRAINING_ARGUMENTS | LLAMA_FACTORY_RULES | {
    "model_name_or_path": set_in_both("model_name_or_path"),
    "model_revision": set_in_both("model_revision"),
    "num_train_epochs": convert_epochs,
    "stage": by_value(
        {"sft": say(NEEDLESS), "pt": convert_documents} | STAGES,
        other=refuse_any("{value!r} has no objective here: sft, pt, dpo, kto and rm are read"),
    ),
    "finetuning_type": convert_lora,
    "lora_rank": of_new_lora(set_option("lora_rank")),
    "lora_dropout": of_new_lora(ADAPTER_DROPOUT),
    "lora_target": of_new_lora(with_names(convert_targets)),
    "additional_target": of_new_lora(if_set(with_names(set_option("lora_modules_to_save")))),
    "adapter_name_or_path": of_lora(convert_adapter),
    "quantization_bit": of_lora(convert_bits),
    "quantization_method": of_lora(allow("bnb", "bitsandbytes", reason="the base is quantized by bitsandbytes (nf4)")),
    "quantization_type": of_lora(allow("nf4", reason="the base is held in nf4")),
    "double_quantization": of_lora(needless("the base is held in nf4")),
    "dataset": convert_datasets,
    "dataset_dir": needless("input_file is a path"),
    "eval_dataset": missing("tokenize it, and give validation_data_path"),
    "val_size": convert_share,
    "template": unless("empty", rule=say(TEMPLATE)),
    "cutoff_len": convert_length,
    "max_samples": convert_subset,
    "preprocessing_num_workers": set_data_option("num_proc"),
    **dict.fromkeys(("overwrite_cache", "tokenized_path"),
                    needless("process_data.py writes to the file of output_file")),
    **dict.fromkeys(("packing", "neat_packing"), PACKED),
    "train_on_prompt": refuse("prompts are never trained here"),
    "mask_history": refuse("every turn of the assistant is trained on; a row's messages can have train: false"),
    "default_system": differs("a system message is the row's own, or the template's"),
    "enable_thinking": differs("prompts with and without thinking are the template's and the rows' own"),
    "tool_format": differs("tools are written by the model's own template"),
    **dict.fromkeys(("image_max_pixels", "image_min_pixels"), differs("the model's own processor sizes images")),
    **dict.fromkeys(("video_max_pixels", "video_fps", "video_maxlen"), needless("rows with videos are refused")),
    **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), convert_freezing),
    "flash_attn": ATTENTION,
    "enable_liger_kernel": set_if_true(use_liger_kernels=True),
    "disable_gradient_checkpointing": set_if_true(activation_checkpointing="none"),
    "pure_bf16": needless("weights stay in float32; --master-weights bfloat16 holds them in 16 bits"),
    "use_dft_loss": set_if_true(loss_weighting="dft"),
    "use_eaft_loss": if_set(convert_entropy_weighting),
    "plot_loss": needless("mini-trainer plot-metrics draws every metric"),
    "compute_accuracy": needless("validations report token accuracy"),
    "interleave_probs": with_names(set_option("data_weights")),
    "mix_strategy": unless(
        "concat", rule=say(f"{DIFFERS}: data_weights draw samples; a data set that runs out starts over")
    ),
    "disable_shuffling": differs("the order is always random"),
    **dict.fromkeys(("streaming", "buffer_size", "use_v1_kernels", "use_unsloth", "ray_num_workers"), SPEED),
    "resize_vocab": needless("the vocabulary grows as tokens are added"),
    **dict.fromkeys(("add_special_tokens", "add_tokens"), with_names(set_data_option("add_special_tokens"))),
    "new_special_tokens_config": refuse("descriptions of tokens are not read: add_special_tokens names them"),
    "init_special_tokens": refuse("new tokens begin as the mean of the others"),
    **dict.fromkeys(OTHER_TRAINING, refuse("changes training, and has no counterpart")),
    **dict.fromkeys(MEGATRON, refuse("files for Megatron are not translated")),
    **dict.fromkeys(BESIDE, needless("it is an argument of a method that has its own switch")),
}  # fmt: skip
