"""Rules for keys of transformers.TrainingArguments, which all other trainers' files share."""

from mini_trainer.tools.importers.rules import (
    Rule,
    choose,
    differs,
    if_off,
    if_set,
    missing,
    needless,
    of_lora,
    of_new_lora,
    only_if,
    refuse,
    refuse_any,
    set_if_true,
    set_option,
    set_unless_zero,
)
from mini_trainer.tools.importers.shared_keys import (
    OPTIMIZER,
    SCHEDULE,
    STABLE_RANK,
    convert_alpha,
    convert_bits,
    convert_clip,
    convert_epochs,
    convert_evals,
    convert_patience,
    convert_saves,
    convert_schedule_details,
    convert_sharding,
    convert_steps,
    convert_trackers,
    convert_warmup,
    counts_rows,
)

PACKED = needless("samples are always packed, and never see each other")
LOGGED = needless("every step writes a line to training_metrics_0.jsonl")
IN_BF16 = needless("on CUDA compute is in bfloat16, with weights in float32")
RESUMED = needless("the same command resumes the run")
CHECKPOINTING = choose("activation_checkpointing", {True: "full", False: "none", "true": "full", "unsloth": "full",
                                                    "offload": "full", "offload_disk": "full"})  # fmt: skip
OFFLOADING = set_if_true(activation_checkpointing="full", offload_activations=True)
ATTENTION = needless("the fastest available attention is used")
BEST = needless("hf_format/best is the export with the lowest validation loss")
SPEED = needless("affects only speed")


# TRL turns dropout of adapters off where it learns preferences.
DROPOUT = only_if(
    lambda to: to.reads_texts or not to.get("disable_dropout", default=True),
    set_option("lora_dropout"),
    otherwise="no dropout, as there, where disable_dropout is the default",
)
SMOOTHING = only_if(
    lambda to: to.reads_texts,
    set_unless_zero("label_smoothing"),
    otherwise="losses of preferences do not use it there",
)
# Keys with the same name in all other trainers' files.
COMMON: dict[str, Rule] = {
    "output_dir": set_option("output_dir"),
    "learning_rate": set_option("learning_rate"),
    "lr_scheduler_kwargs": convert_schedule_details,
    "warmup_steps": convert_warmup,
    "warmup_ratio": convert_warmup,
    "weight_decay": set_option("weight_decay"),
    "adam_beta1": set_option("adam_beta1"),
    "adam_beta2": set_option("adam_beta2"),
    "adam_epsilon": set_option("adam_eps"),
    "max_grad_norm": convert_clip,
    "max_steps": convert_steps,
    "gradient_accumulation_steps": counts_rows,
    "seed": set_option("seed"),
    "attn_implementation": ATTENTION,
    "trust_remote_code": needless("a model with its own code is refused, with instructions to trust it"),
    "gradient_checkpointing": CHECKPOINTING,
    "gradient_checkpointing_kwargs": needless("activation checkpointing is torch's, non-reentrant"),
    "save_steps": convert_saves,
    "save_strategy": convert_saves,
    "save_total_limit": set_option("keep_checkpoints"),
    "eval_steps": convert_evals,
    "eval_strategy": convert_evals,
    "evaluation_strategy": convert_evals,
    "early_stopping_patience": convert_patience,
    "torch_compile": set_if_true(compile=True),
    "run_name": differs("a tracked run is named after output_dir, or by WANDB_NAME or MLFLOW_RUN_NAME"),
    "hub_model_id": set_option("push_to_hub"),
    "hub_private_repo": if_set(differs("the repository is public or private as its owner's settings say")),
    "hub_strategy": needless("every export is uploaded"),
    "bf16": IN_BF16,
    "tf32": needless("matrix products are in bfloat16"),
    "fp16": differs("float16 needs loss scaling, which is not implemented: computed in bfloat16"),
    "fp8": set_if_true(float8=True),
    "resume_from_checkpoint": RESUMED,
    "save_only_model": RESUMED,
    "save_safetensors": needless("exports are safetensors"),
    **dict.fromkeys(("logging_steps", "logging_first_step", "logging_strategy", "logging_dir", "log_level",
                     "disable_tqdm",
                     "include_num_input_tokens_seen", "include_tokens_per_second"), LOGGED),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), BEST),
    "group_by_length": differs("the order is always random"),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap"), convert_sharding),
    "ddp_timeout": needless("--hang-timeout ends a run that hangs"),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
                     "ddp_find_unused_parameters", "dataloader_persistent_workers"), SPEED),
    "dataloader_drop_last": needless("the sample stream has no incomplete last batch"),
    "average_tokens_across_devices": needless("the loss is always the mean over all trained tokens of the step"),
    "remove_unused_columns": needless("tokenized data has the columns that training reads"),
    "neftune_noise_alpha": set_unless_zero("neftune_alpha"),
    "label_smoothing_factor": SMOOTHING,
    "lora_alpha": of_new_lora(convert_alpha),
    "lora_dropout": of_new_lora(DROPOUT),
    "load_in_4bit": of_lora(convert_bits),
    "load_in_8bit": of_lora(convert_bits),
}  # fmt: skip
# Keys in TRL's and LLaMA-Factory's files, but not in Axolotl's.
TRAINING_ARGUMENTS: dict[str, Rule] = COMMON | {
    "lr_scheduler_type": SCHEDULE,
    "optim": OPTIMIZER,
    "optim_args": refuse("arguments of an optimizer are not passed on: give adam_beta1, adam_beta2 and adam_epsilon"),
    "num_train_epochs": convert_epochs,
    "per_device_train_batch_size": counts_rows,
    "report_to": convert_trackers,
    "push_to_hub": needless("push_to_hub is the repository's name"),
    "use_liger_kernel": set_if_true(use_liger_kernels=True),
    "overwrite_output_dir": missing("another run's directory is never overwritten"),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_on_start", "eval_accumulation_steps"),
                    needless("validation is packed like training")),
    "do_train": if_off(refuse_any("only training configurations are supported")),
    "do_eval": needless("the run is validated if there is validation data"),
    "use_rslora": STABLE_RANK,
    "use_dora": of_new_lora(set_option("lora_use_dora")),
    "lora_r": of_new_lora(set_option("lora_rank")),
    "data_seed": needless("the one seed also sets the order"),
}  # fmt: skip
