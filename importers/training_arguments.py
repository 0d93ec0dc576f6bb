"""Rules for keys of transformers.TrainingArguments, which all other trainers' files share."""

from typing import Any

from importers.rules import (
    DIFFERS,
    NEEDLESS,
    Conversion,
    Rule,
    choose,
    counts_rows,
    missing,
    needless,
    of_lora,
    of_new_lora,
    refuse,
    say,
    say_bits,
    say_clip,
    say_epochs,
    say_evals,
    say_if_true,
    say_optimizer,
    say_patience,
    say_saves,
    say_schedule,
    say_schedule_details,
    say_sharding,
    say_steps,
    say_trackers,
    say_unless_zero,
    say_warmup,
)

PACKED = needless("samples are always packed, and never see each other")
LOGGED = needless("every step writes a line to training_metrics_0.jsonl")
IN_BF16 = needless("on CUDA compute is in bfloat16, with weights in float32")
RESUMED = needless("the same command resumes the run")
CHECKPOINTING = choose("activation_checkpointing", {True: "full", False: "none", "true": "full", "unsloth": "full",
                                                    "offload": "full", "offload_disk": "full"})  # fmt: skip
OFFLOADING = say_if_true(activation_checkpointing="full", offload_activations=True)
ATTENTION = needless("the fastest available attention is used")
BEST = needless("hf_format/best is the export with the lowest validation loss")
SPEED = needless("affects only speed")


def say_dropout(to: Conversion, key: str, value: Any) -> str:
    """Dropout of adapters, which TRL turns off where it learns preferences (disable_dropout)."""
    if not to.reads_texts and to.get("disable_dropout", default=True):
        return f"{NEEDLESS}: no dropout, as there, where disable_dropout is the default"
    return say("lora_dropout")(to, key, value)


def say_smoothing(to: Conversion, key: str, value: Any) -> str:
    if not to.reads_texts:
        return f"{NEEDLESS}: losses of preferences do not use it there"
    return say_unless_zero("label_smoothing")(to, key, value)


# Keys with the same name in all other trainers' files.
COMMON: dict[str, Rule] = {
    "output_dir": say("output_dir"),
    "learning_rate": say("learning_rate"),
    "lr_scheduler_kwargs": say_schedule_details,
    "warmup_steps": say_warmup,
    "warmup_ratio": say_warmup,
    "weight_decay": say("weight_decay"),
    "adam_beta1": say("adam_beta1"),
    "adam_beta2": say("adam_beta2"),
    "adam_epsilon": say("adam_eps"),
    "max_grad_norm": say_clip,
    "max_steps": say_steps,
    "gradient_accumulation_steps": counts_rows,
    "seed": say("seed"),
    "attn_implementation": ATTENTION,
    "trust_remote_code": needless("a model with its own code is refused, with instructions to trust it"),
    "gradient_checkpointing": CHECKPOINTING,
    "gradient_checkpointing_kwargs": needless("activation checkpointing is torch's, non-reentrant"),
    "save_steps": say_saves,
    "save_strategy": say_saves,
    "save_total_limit": say("keep_checkpoints"),
    "eval_steps": say_evals,
    "eval_strategy": say_evals,
    "evaluation_strategy": say_evals,
    "early_stopping_patience": say_patience,
    "torch_compile": say_if_true(compile=True),
    "run_name": say("track_name"),
    "hub_model_id": say("push_to_hub"),
    "hub_private_repo": say("hub_private"),
    "hub_strategy": needless("every export is uploaded"),
    "bf16": IN_BF16,
    "tf32": needless("matrix products are in bfloat16"),
    "fp16": lambda to, key, value: (
        f"{DIFFERS}: float16 needs loss scaling, which is not implemented: computed in bfloat16" if value else NEEDLESS
    ),
    "fp8": say_if_true(float8=True),
    "resume_from_checkpoint": RESUMED,
    "save_only_model": RESUMED,
    "save_safetensors": needless("exports are safetensors"),
    **dict.fromkeys(("logging_steps", "logging_first_step", "logging_strategy", "logging_dir", "log_level",
                     "disable_tqdm",
                     "include_num_input_tokens_seen", "include_tokens_per_second"), LOGGED),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), BEST),
    "group_by_length": lambda to, key, value: f"{DIFFERS}: the order is always random" if value else NEEDLESS,
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap"), say_sharding),
    "ddp_timeout": needless("--hang-timeout ends a run that hangs"),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
                     "ddp_find_unused_parameters", "dataloader_persistent_workers"), SPEED),
    "dataloader_drop_last": needless("the sample stream has no incomplete last batch"),
    "average_tokens_across_devices": needless("the loss is always the mean over all trained tokens of the step"),
    "remove_unused_columns": needless("tokenized data has the columns that training reads"),
    "neftune_noise_alpha": say_unless_zero("neftune_alpha"),
    "label_smoothing_factor": say_smoothing,
    "lora_alpha": of_new_lora(say("lora_alpha")),
    "lora_dropout": of_new_lora(say_dropout),
    "load_in_4bit": of_lora(say_bits),
    "load_in_8bit": of_lora(say_bits),
}  # fmt: skip
# Keys in TRL's and LLaMA-Factory's files, but not in Axolotl's.
TRAINING_ARGUMENTS: dict[str, Rule] = COMMON | {
    "lr_scheduler_type": say_schedule,
    "optim": say_optimizer,
    "optim_args": refuse("arguments of an optimizer are not passed on: give adam_beta1, adam_beta2 and adam_epsilon"),
    "num_train_epochs": say_epochs,
    "per_device_train_batch_size": counts_rows,
    "report_to": say_trackers,
    "push_to_hub": needless("push_to_hub is the repository's name"),
    "use_liger_kernel": say_if_true(use_liger_kernels=True),
    "overwrite_output_dir": missing("another run's directory is never overwritten"),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_on_start", "eval_accumulation_steps"),
                    needless("validation is packed like training")),
    "do_train": lambda to, key, value: refuse("only training configurations are supported")(to, key, not value),
    "do_eval": needless("the run is validated if there is validation data"),
    "use_rslora": of_new_lora(say("lora_use_rslora")),
    "use_dora": of_new_lora(say("lora_use_dora")),
    "lora_r": of_new_lora(say("lora_rank")),
    "data_seed": needless("the one seed also sets the order"),
}  # fmt: skip
