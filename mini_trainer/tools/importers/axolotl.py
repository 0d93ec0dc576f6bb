"""Axolotl's keys, its defaults (its pydantic schemas), and how it counts a step."""

from typing import Any

from mini_trainer.tools.importers.axolotl_data import FORMAT_RULES, has_images
from mini_trainer.tools.importers.batches import PeerBatch, multiply_rows
from mini_trainer.tools.importers.preferences import AXOLOTL_OBJECTIVES, AXOLOTL_RULES, convert_lengths
from mini_trainer.tools.importers.rules import (
    DIFFERS,
    NEEDLESS,
    Conversion,
    Refusal,
    Rule,
    allow,
    differs,
    if_off,
    if_set,
    missing,
    needless,
    of_lora,
    of_new_lora,
    only_if,
    read_names,
    read_number,
    refuse,
    say,
    set_data_option,
    set_if_true,
    set_in_both,
    set_option,
    set_to,
    set_tracker,
    set_unless_zero,
    unless,
)
from mini_trainer.tools.importers.shared_keys import (
    ALL_LINEAR,
    OPTIMIZER,
    OUTSIDE,
    SCHEDULE,
    STABLE_RANK,
    convert_entropy_weighting,
    convert_epochs,
    convert_evals,
    convert_lora,
    convert_saves,
    convert_sharding,
    convert_share,
    convert_targets,
    counts_rows,
)
from mini_trainer.tools.importers.training_arguments import (
    ATTENTION,
    COMMON,
    IN_BF16,
    OFFLOADING,
    PACKED,
    RESUMED,
    SPEED,
)

# Plugins that only change speed or logging; any other may change the training signal.
PLUGINS = ("cut_cross_entropy", "liger", "kernels", "expert_parallel", "swanlab")


def normalize(given: dict[str, Any]) -> dict[str, Any]:
    """The keys, with older names as the newer ones."""
    given = dict(given)
    if "dpo_beta" in given:
        given.setdefault("rl_beta", given["dpo_beta"])
    if given.get("max_packed_sequence_len"):
        given.setdefault("sample_packing", True)
    return given


def trains_adapter(given: dict[str, Any]) -> bool:
    return given.get("adapter") in ("lora", "qlora")


def find_objective(given: dict[str, Any]) -> str:
    return "reward" if given.get("reward_model") else AXOLOTL_OBJECTIVES.get(str(given.get("rl")), "causal-lm")


def list_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Axolotl's values, and for preferences TRL's, for keys that are left out, where this trainer's default differs."""
    defaults = {"lr_scheduler": "cosine", "num_epochs": 1, "micro_batch_size": 1, "adam_beta2": 0.999,
                "sequence_len": 512}  # fmt: skip
    if given.get("warmup_steps") is None and given.get("warmup_ratio") is None:
        defaults["warmup"] = 0.03
    if find_objective(given) not in ("causal-lm", "reward"):
        defaults["rl_beta"] = given.get("orpo_alpha", 0.1)
    if given.get("rl") == "simpo":
        defaults["cpo_alpha"] = 1.0
    return defaults


def convert_default_warmup(to: Conversion, key: str, value: Any) -> str:
    """Axolotl's default: min(3 % of the steps, 100), and never a single step."""
    if to.get("lr_scheduler") == "constant":
        return f"{NEEDLESS}: the constant schedule has no warm-up"
    if (steps := to.get_number("max_steps", default=-1)) > 0:
        number = min(int(value * steps), 100)
        to.train["num_warmup_steps"] = 2 if number == 1 else number
        return f"num_warmup_steps: {to.train['num_warmup_steps']}"
    to.train["num_warmup_steps"] = value
    return f"num_warmup_steps: {value}; {DIFFERS}: there at most 100 steps"


def convert_length(to: Conversion, key: str, value: Any) -> str:
    """The longest sample, or a document's block; and the tokens of one GPU's micro-batch."""
    length, rows = read_number(key, value), to.get_number("micro_batch_size", default=1)
    if not to.reads_texts:
        return convert_lengths(to, length, rows, there=f"if one is longer than {length}")
    to.train["max_tokens_per_gpu"] = length * rows
    if to.get("pretraining_dataset"):
        to.data["block_size"] = length
        return f"block_size: {length} (of process_data.py); max_tokens_per_gpu: {length * rows}"
    to.data["max_sample_num_tokens"] = length
    return (
        f"max_sample_num_tokens: {length} (of process_data.py: longer ones are dropped);"
        f" max_tokens_per_gpu: {length * rows}"
    )


def convert_all_linear(to: Conversion, key: str, value: Any) -> str:
    """Every linear layer and those that are named: their union."""
    named = to.get("lora_target_modules", default=[])
    names = [named] if isinstance(named, str) else list(named)
    if OUTSIDE & set(names):
        raise Refusal(
            f"adapters on {', '.join(sorted(OUTSIDE & set(names)))} beside every linear layer of the blocks cannot be"
            " asked for together: name the layers in lora_target_modules"
        )
    return f"{NEEDLESS}: every linear layer of the blocks has an adapter"


def convert_parameters(to: Conversion, key: str, value: Any) -> str:
    """Experts held as one tensor: they are targets like other layers here."""
    names = [value] if isinstance(value, str) else value
    chosen = to.get("lora_target_modules", default=[])
    if to.get("lora_target_linear") or chosen in ALL_LINEAR:
        return f"{NEEDLESS}: experts have adapters among every linear layer"
    return (
        f"{DIFFERS}: {', '.join(map(str, names))} have no adapter; leave lora_target_modules out for all"
        f" layers, experts too"
    )


def convert_tokens(to: Conversion, key: str, value: Any) -> str:
    """Tokens by role: padding is never computed, others are the tokenizer's own."""
    if not isinstance(value, dict):
        raise ValueError(f"special_tokens is a mapping, given {value!r}")
    more = read_names("additional_special_tokens", value.get("additional_special_tokens") or [])
    if more:
        to.data["add_special_tokens"] = [*to.data.get("add_special_tokens", []), *more]
    roles = [role for role in value if role not in ("pad_token", "additional_special_tokens", "unk_token")]
    added = [f"add_special_tokens: {more} (of process_data.py)"] if more else []
    changed = [f"{DIFFERS}: {', '.join(roles)} are the tokenizer's own"] if roles else []
    return "; ".join(added + changed) or f"{NEEDLESS}: nothing is padded"


def convert_plugins(to: Conversion, key: str, value: Any) -> str:
    names = value if isinstance(value, list) else [value]
    other = [str(name) for name in names if not any(f"integrations.{part}." in str(name) for part in PLUGINS)]
    if other:
        raise Refusal(f"{', '.join(other)}: an unknown plugin may change the training signal")
    return f"{NEEDLESS}: speed alone; --use-liger-kernels takes Liger's kernels"


def convert_model_config(to: Conversion, key: str, value: Any) -> str:
    """Changes to the model's config: only the experts' balancing loss has a counterpart."""
    if value == {"output_router_logits": True}:
        return f"{DIFFERS}: --router-aux-loss with a coefficient turns the experts' balancing loss on"
    raise Refusal(f"the model's config is never changed here: {value}")


def describe_batch(to: Conversion) -> PeerBatch:
    """Rows of a step, which are packs if samples are packed; GPUs that share a row count once."""
    a_gpu = to.get_number("micro_batch_size", default=1)
    total = to.get_number("batch_size", default=0)
    accumulated = to.get_number("gradient_accumulation_steps", default=(total // max(1, a_gpu)) or 1)
    shared = to.get_number("context_parallel_size", default=1) * to.get_number("tensor_parallel_size", default=1)
    length = to.get_number("sequence_len", default=512)
    packs = bool(to.get("sample_packing")) and not to.get("pretraining_dataset") and to.reads_texts
    return multiply_rows(
        a_gpu, accumulated, max(1, to.num_gpus // max(1, shared)), pack_length=length if packs else None
    )


KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "flash_attn_cross_entropy",
           "flash_attn_rms_norm", "flash_attn_fuse_qkv", "flash_attn_fuse_mlp", "use_kernels", "use_sonicmoe",
           "use_scattermoe", "use_dsv4_kernels", "dsv4_fp4_grouped_mode", "use_glm_dsa_kernels", "fused_attn_kernel",
           "experts_implementation", "quantize_moe_experts", "torch_compile_mode", "torch_compile_backend",
           "chunked_cross_entropy", "cut_cross_entropy", "unsloth_cross_entropy_loss", "low_cpu_mem_usage",
           "llama4_linearized_experts", "tiled_mlp_num_shards", "sample_packing_eff_est", "total_num_tokens",
           "sample_packing_seq_len_multiplier", "expert_parallel_num_nvl_bytes", "expert_parallel_token_capacity",
           "gemma4_hybrid_attn_impl", "experimental_skip_move_to_device", "qlora_sharded_model_loading", "lora_on_cpu",
           "gpu_memory_limit", "device_map", "ddp", "ddp_bucket_cap_mb", "accelerator_config", "use_ray",
           "ray_num_workers", "flex_attn_compile_kwargs", "expert_parallel_size", "liger_layer_norm",
           "liger_rms_norm_gated", "tokenizer_use_fast", "flash_optimum", "bnb_config_kwargs")  # fmt: skip
RULES: dict[str, Rule] = COMMON | FORMAT_RULES | AXOLOTL_RULES | {
    "base_model": set_in_both("model_name_or_path"),
    "use_eaft": if_set(convert_entropy_weighting),
    **dict.fromkeys(("eaft_alpha", "eaft_k"), needless("they are use_eaft's, which needs 1 and 20")),
    "revision_of_model": set_in_both("model_revision"),
    "lr_scheduler": SCHEDULE,
    "optimizer": OPTIMIZER,
    "optim_args": refuse("arguments of an optimizer are not passed on: give adam_beta1, adam_beta2 and adam_epsilon"),
    "num_epochs": convert_epochs,
    **dict.fromkeys(("micro_batch_size", "batch_size"), counts_rows),
    "warmup": convert_default_warmup,
    "saves_per_epoch": convert_saves,
    "evals_per_epoch": convert_evals,
    "eval_batch_size": needless("validation is packed as training is"),
    "val_set_size": convert_share,
    **dict.fromkeys(("dataset_processes", "dataset_num_proc"), set_data_option("num_proc")),
    "sequence_len": convert_length,
    "excess_length_strategy": unless(
        "drop", rule=say(f"{DIFFERS}: longer samples are dropped and counted, given {{value!r}}")
    ),
    "min_sample_len": missing("short samples are kept"),
    "adapter": convert_lora,
    "lora_r": of_new_lora(set_option("lora_rank")),
    "lora_target_modules": of_new_lora(
        only_if(
            lambda to: not to.get("lora_target_linear"),
            convert_targets,
            otherwise="lora_target_linear asks for every linear layer, these among them",
        )
    ),
    "lora_target_linear": of_new_lora(if_set(convert_all_linear)),
    "lora_target_parameters": of_new_lora(convert_parameters),
    "lora_modules_to_save": of_new_lora(set_option("lora_modules_to_save")),
    "lora_model_dir": of_lora(set_option("lora_adapter")),
    "lora_fan_in_fan_out": needless("the layer's own kind says it"),
    "peft_use_rslora": STABLE_RANK,
    "peft_use_dora": of_new_lora(set_option("lora_use_dora")),
    "peft_init_lora_weights": of_lora(allow(True, "kaiming", reason="adapters are initialized to zero here")),
    "noisy_embedding_alpha": set_unless_zero("neftune_alpha"),
    "cosine_min_lr_ratio": set_option("min_lr_ratio"),
    "cosine_constant_lr_ratio": differs("the learning rate reaches its lowest at the run's end"),
    "lr_quadratic_warmup": differs("warm-up is linear"),
    "wandb_project": set_tracker("wandb", variable="WANDB_PROJECT"),
    "wandb_name": set_tracker("wandb", variable="WANDB_NAME"),
    "use_wandb": needless("wandb_project asks for it"),
    "wandb_run_id": needless("a resumed run continues in the tracker's run"),
    "wandb_entity": missing("set WANDB_ENTITY"),
    "wandb_watch": missing("gradients are not sent"),
    "wandb_log_model": missing("--push-to-hub uploads exports"),
    "use_tensorboard": set_tracker("tensorboard"),
    "mlflow_tracking_uri": set_tracker("mlflow"),
    "mlflow_experiment_name": set_tracker("mlflow", variable="MLFLOW_EXPERIMENT_NAME"),
    "trackio_project_name": set_tracker("trackio", variable="TRACKIO_PROJECT"),
    "trackio_run_name": differs("the run is named after output_dir"),
    "trackio_space_id": missing("set TRACKIO_SPACE_ID"),
    "use_swanlab": missing("trackers are wandb, tensorboard, mlflow, trackio"),
    "special_tokens": convert_tokens,
    "tokens": set_data_option("add_special_tokens"),
    "eot_tokens": differs("turns end with the stop token that the chat template writes"),
    "default_system_message": differs("a system message is the row's own, or the template's"),
    "train_on_inputs": only_if(
        lambda to: not to.get("pretraining_dataset"),
        refuse("prompts are never trained here, only the assistant's tokens"),
    ),
    "tiled_mlp": set_if_true(tiled_mlp=True),
    "activation_offloading": OFFLOADING,
    "plugins": convert_plugins,
    **dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_glu_activation"), set_if_true(use_liger_kernels=True)),
    "liger_fused_linear_cross_entropy": needless("the loss never holds all logits"),
    "model_config": convert_model_config,
    "float16": differs("computed in bfloat16"),
    **dict.fromkeys(("bfloat16", "torch_dtype"), IN_BF16),
    "freeze_mm_modules": if_off(only_if(lambda to: has_images(to.given), set_to(freeze=["nothing"]))),
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_degree"),
                    unless(0, 1, rule=set_option("context_parallel"))),
    "tensor_parallel_size": unless(
        1, rule=say(f"{DIFFERS}: weights are sharded, not products; the step has the samples that it had")
    ),
    "shuffle_merged_datasets": if_off(say(f"{DIFFERS}: samples come in a random order, another one in each epoch")),
    "shuffle_before_merging_datasets": needless("samples come in a random order, another one in each epoch"),
    **dict.fromkeys(("sample_packing_sequentially", "curriculum_sampling"), differs("the order is always random")),
    "dataset_exact_deduplication": missing("repeated rows are trained on as often as they occur"),
    "resize_token_embeddings_to_32x": needless("the vocabulary grows as tokens are added"),
    "tokenizer_use_mistral_common": differs("the tokenizer and template are those of the Hugging Face format"),
    "tokenizer_config": refuse("the tokenizer is the model's own directory's: put it there"),
    "model_quantization_config": refuse("a quantized base is not trained; load_in_4bit quantizes an unquantized one"),
    "reinit_weights": refuse("weights are the model's; training from random weights is not supported"),
    "gptq": refuse("a base in GPTQ is not trained: use the unquantized model, in 4 bits with load_in_4bit"),
    "relora": refuse("adapters are not merged while they train (ReLoRA)"),
    "lisa_n_layers": refuse("LISA's changing layers are not supported"),
    "unfrozen_parameters": refuse("the trainable parts of a model are chosen by LoRA or OSFT"),
    "use_onebitllms": refuse("models of 1.58 bits are not trained"),
    "nvfp4_merge_aware": refuse("adapters for a base in NVFP4 are not supported"),
    "loraplus_lr_ratio": refuse("both of an adapter's matrices have one learning rate (LoRA+ has two)"),
    "peft": refuse("LoftQ's initial values are not supported"),
    **dict.fromkeys(("lr_groups", "embedding_lr"), refuse("all parameters have one learning rate")),
    "trainer_cls": refuse("custom trainer classes are not run"),
    "test_datasets": missing("tokenize them, and give validation_data_path"),
    "save_first_step": needless("--preset sanity tries an export first"),
    **dict.fromkeys(("eval_table_size", "generate_samples"), missing("generate.py writes answers")),
    "strict": needless("an unknown option is always refused"),
    **dict.fromkeys(("loss_watchdog_threshold", "loss_watchdog_patience"),
                    needless("a loss that is not finite ends the run")),
    "torchdistx_path": needless("the optimizer is torch's"),
    **dict.fromkeys(("peft_layers_to_transform", "peft_layers_pattern", "lora_rank_pattern", "lora_alpha_pattern",
                     "peft_trainable_token_indices", "peft_layer_replication"),
                    of_lora(refuse("all adapters have one rank, in the layers of lora_target_modules"))),
    **dict.fromkeys(("sample_packing", "eval_sample_packing", "pad_to_sequence_len", "pad_to_multiple_of",
                     "multipack_real_batches", "max_packed_sequence_len", "sample_packing_group_size",
                     "sample_packing_bin_size", "batch_flattening", "pretrain_multipack_attn",
                     "pretrain_multipack_buffer_size", "streaming_multipack_buffer_size"), PACKED),
    **dict.fromkeys(("flash_attention", "sdp_attention", "xformers_attention", "flex_attention",
                     "eager_attention"), ATTENTION),
    **dict.fromkeys(("auto_resume_from_checkpoints", "dataset_prepared_path", "push_dataset_to_hub",
                     "streaming"), RESUMED),
    **dict.fromkeys(("model_type", "tokenizer_type", "base_model_config", "cls_model_config", "is_llama_derived_model",
                     "is_mistral_derived_model", "is_falcon_derived_model", "tokenizer_legacy",
                     "base_model_ignore_patterns"), needless("the checkpoint's config says it")),
    **dict.fromkeys(("dp_shard_size", "dp_replicate_size", "fsdp_version"), convert_sharding),
    **dict.fromkeys(("local_rank", "debug", "world_size", "hf_use_auth_token"), needless("torchrun says it")),
    **dict.fromkeys(KERNELS, SPEED),
}  # fmt: skip
