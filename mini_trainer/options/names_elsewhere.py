"""Answers to unknown option names: the option with the same meaning here, the reason why there is none, or the closest
name. Loaded only for unknown names. The names are those of upstream mini_trainer, InstructLab, transformers, TRL, peft,
Axolotl, LLaMA-Factory and torchrun; docs/tasks/coming_from.md compares them, and mini_trainer/tools/importers/
translates files.
"""

import difflib
import re
from collections.abc import Callable, Collection

from mini_trainer.options import TrainOptions, flag_name, list_types
from mini_trainer.options.doors import TRAINERS
from mini_trainer.options.fields import COLUMN_NAMES
from mini_trainer.options.tools import ProcessDataOptions

LEAST_SIMILARITY = 0.75  # below, most suggestions mean something else: --sharding-strategy is not --learning-rate
PROGRAMS = {"train.py": list_types(TrainOptions), "process_data.py": list_types(ProcessDataOptions)}

# Names that options had, and what to use instead.
RENAMED: dict[str, str] = {
    "warmup_ratio": "--num-warmup-steps takes a share below 1, such as 0.03",
    "ema_decay": "--ema-half-life, in samples: the batch's size x ln 0.5 / ln DECAY",
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), "--kto-weight-ratio is the first over the second"),
    "preference_label_smoothing": "--label-smoothing",
    "validate_training_data": "--validation-data-path training-data",
    "validate_average": "--weight-average ema is validated beside the model",
    "write_predictions": "evaluate_model.py --data writes the predictions of each sample",
    "reuse_reference_only": "log-probabilities that an earlier run kept beside the data are reused by themselves",
    **{f"{name}_field": f"--columns {name}=COLUMN" for name in COLUMN_NAMES},
    "hub_private": "the repository's own settings: create it before the run, as private",
    "hub_license": "the license of the base model's card is taken over; change it in the repository's README.md",
    "track_project": "the tracker's environment: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, TRACKIO_PROJECT",
    "track_name": "the tracker's environment: WANDB_NAME, MLFLOW_RUN_NAME; by default the name of --output-dir",
    "lora_use_rslora": "--lora-alpha times the square root of --lora-rank is the same scale",
    "mock_length": "--block-size",
    "append_stop_token": "--missing-stop-token append",
    "allow_missing_stop_token": "--missing-stop-token allow",
    "plan_world_size": "--plan-for 8, or 8xH100",
    "plan_device": "--plan-for 8xH100",
    **dict.fromkeys(("num_cycles", "lr_power"), "--lr-shape"),
    "muon_momentum": "it is always 0.95",
    "muon_scale": "it is always that of AdamW's updates, so that AdamW's learning rates carry over",
    **dict.fromkeys(("adam_learning_rate", "layer_lr_decay"),
                    "--learning-rate-for sets the learning rate of parameters by their names"),
    "callback_errors": "an exception ends the run; catch it in the hook to continue",
}  # fmt: skip

# Our options with the same meaning; of several, the first that a program has.
NAMES_ELSEWHERE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("model", "model_path", "base_model", "pretrained_model_name_or_path", "model_id",
                     "base_model_name_or_path"), ("model_name_or_path", "model")),
    **dict.fromkeys(("revision_of_model", "model_version"), ("model_revision",)),
    **dict.fromkeys(("data", "dataset", "datasets", "train_file", "train_data", "train_dataset"),
                    ("data_path", "input_file")),
    **dict.fromkeys(("dataset_name", "dataset_path"), ("input_dataset",)),
    "dataset_train_split": ("split",),
    **dict.fromkeys(("eval_dataset", "validation_file", "test_datasets"), ("validation_data_path",)),
    **dict.fromkeys(("val_set_size", "val_size", "validation_split"), ("validation_share",)),
    **dict.fromkeys(("interleave_probs", "mixing_weights"), ("data_weights",)),
    **dict.fromkeys(("output", "ckpt_output_dir", "save_dir", "checkpoint_dir"), ("output_dir", "output_file")),
    **dict.fromkeys(("data_output_path", "tokenized_path", "dataset_prepared_path"), ("output_file",)),
    **dict.fromkeys(("max_length", "max_len", "max_seq_len", "max_seq_length", "sequence_len", "seq_length",
                     "cutoff_len", "max_prompt_length", "model_max_length"), ("max_sample_num_tokens",)),
    "max_batch_len": ("max_tokens_per_gpu",),
    **dict.fromkeys(("chat_tmpl_path", "chat_template_path"), ("chat_template",)),
    **dict.fromkeys(("dataset_num_proc", "preprocessing_num_workers", "num_cpu_procs", "dataset_processes",
                     "data_process_num_cpu_procs", "num_workers"), ("num_proc",)),
    **dict.fromkeys(("tokens", "add_tokens", "special_tokens"), ("add_special_tokens",)),
    "mock_data_len": ("block_size",),
    "effective_batch_size": ("batch_size",),
    **dict.fromkeys(("lr", "learning_rate_peak", "peak_lr"), ("learning_rate",)),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), ("max_epochs",)),
    **dict.fromkeys(("steps", "num_steps", "max_train_steps", "num_training_steps"), ("max_steps",)),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps"), ("num_warmup_steps",)),
    **dict.fromkeys(("lr_scheduler_type", "lr_schedule", "scheduler"), ("lr_scheduler",)),
    **dict.fromkeys(("cosine_min_lr_ratio", "min_lr_rate"), ("min_lr_ratio",)),
    **dict.fromkeys(("optim", "optimizer_type"), ("optimizer",)),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    **dict.fromkeys(("eps", "adam_epsilon", "adamw_eps", "epsilon"), ("adam_eps",)),
    "adamw_weight_decay": ("weight_decay",),
    **dict.fromkeys(("grad_clip", "gradient_clipping", "clip_grad_norm", "max_norm"), ("max_grad_norm",)),
    **dict.fromkeys(("random_seed", "data_seed"), ("seed",)),
    **dict.fromkeys(("neftune_noise_alpha", "noisy_embedding_alpha"), ("neftune_alpha",)),
    "label_smoothing_factor": ("label_smoothing",),
    "router_aux_loss_coef": ("router_aux_loss",),
    **dict.fromkeys(("beta", "rl_beta", "pref_beta", "dpo_beta", "orpo_alpha"), ("preference_beta",)),
    **dict.fromkeys(("pref_loss", "dpo_loss_type", "rl"), ("preference_loss",)),
    "simpo_gamma": ("preference_gamma",),
    **dict.fromkeys(("pref_ftx", "rpo_alpha", "cpo_alpha"), ("preference_nll_weight",)),
    **dict.fromkeys(("ref_model", "ref_model_name_or_path"), ("reference_model",)),
    **dict.fromkeys(("kto_desirable_weight", "kto_chosen_weight", "kto_undesirable_weight", "kto_rejected_weight"),
                    ("kto_weight_ratio",)),
    "dpo_label_smoothing": ("label_smoothing",),
    "center_rewards_coefficient": ("reward_centering",),
    **dict.fromkeys(("use_lora", "use_peft", "peft"), ("lora",)),
    **dict.fromkeys(("lora_r", "r", "rank"), ("lora_rank",)),
    "alpha": ("lora_alpha",),
    "dropout": ("lora_dropout",),
    **dict.fromkeys(("target_modules", "lora_target", "lora_targets"), ("lora_target_modules",)),
    **dict.fromkeys(("modules_to_save", "additional_target"), ("lora_modules_to_save",)),
    **dict.fromkeys(("use_dora", "peft_use_dora"), ("lora_use_dora",)),
    **dict.fromkeys(("lora_model_dir", "adapter_name_or_path"), ("lora_adapter",)),
    **dict.fromkeys(("gradient_checkpointing", "use_gradient_checkpointing"), ("activation_checkpointing",)),
    "activation_offloading": ("offload_activations",),
    **dict.fromkeys(("use_liger_kernel", "use_liger", "enable_liger_kernel"), ("use_liger_kernels",)),
    "torch_compile": ("compile",),
    "fp8": ("float8",),
    **dict.fromkeys(("attn_implementation", "flash_attn", "flash_attention", "flash_attention_2"), ("attention",)),
    "sharding_strategy": ("sharding",),
    **dict.fromkeys(("cpu_offload_params", "cpu_offload_optimizer", "offload"), ("cpu_offload",)),
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size"),
                    ("context_parallel",)),
    **dict.fromkeys(("save_steps", "checkpointing_steps"), ("checkpoint_every_steps",)),
    "save_total_limit": ("keep_checkpoints",),
    "save_samples": ("min_samples_per_checkpoint",),
    "save_dtype": ("export_dtype",),
    **dict.fromkeys(("save_best_val_loss", "load_best_model_at_end"), ("export_best",)),
    "metric_for_best_model": ("best_metric",),
    **dict.fromkeys(("resume_from_checkpoint", "resume_from_full_state_checkpoint"), ("resume",)),
    **dict.fromkeys(("eval_steps", "eval_every", "validation_frequency"), ("validate_every_steps",)),
    "patience": ("early_stopping_patience",),
    **dict.fromkeys(("report_to", "log_with"), ("track",)),
    "log_level": ("logging_level",),
    "hub_model_id": ("push_to_hub",),
}  # fmt: skip

COMPUTE = "on CUDA compute is in bfloat16 with float32 weights (--compute-dtype, --master-weights)"
FLOAT16 = f"float16 needs loss scaling, which is not supported: {COMPUTE}"
STEP = "--batch-size counts the samples of a step on all GPUs together, --max-tokens-per-gpu those that run at once"
PACKED = "samples are always packed without padding, and never see each other; --max-tokens-per-gpu is a pack's length"
LOGGED = "every step is printed and written to training_metrics_0.jsonl"
VALIDATED = (
    "runs with --validation-data-path are validated before the first step and after the last, and every"
    " --validate-every-steps or --validate-at-epoch"
)
EVALUATION = "validation is packed like training, by --max-tokens-per-gpu, and reports the loss and token accuracy"
TORCHRUN = "an argument of torchrun, before the script: torchrun --nproc-per-node=8 train.py"
WANDB, MLFLOW = "--track wandb", "--track mlflow"
SHARDED = "FSDP2 always shards weights, gradients and optimizer state (--sharding, --cpu-offload)"
LOADING = "samples are read ahead in a thread; there are no loader processes to configure"
QUANTIZED = "--base-quantization nf4 holds the base of --lora in 4 bits"
ONE_RANK = "all adapters are alike: --lora-rank and --lora-alpha, in the layers of --lora-target-modules"
START = "adapters start at zero, with the usual random values in their first matrix"
RECOGNIZED = "read from the model's own config and tokenizer"
TEMPLATED = "the chat template writes it: the model's own, or --chat-template"
SCHEDULE_SHAPE = "--min-lr-ratio, --lr-shape and --num-decay-steps shape the schedule"
MESSAGES_ONLY = "only the assistant's turns are trained on; messages with train: false are left out"
MOMENTS = "--adam-beta1, --adam-beta2 and --adam-eps"
PREFERENCE = "--preference-loss names the loss of --objective preference, --loss-weighting dft that of single tokens"

# Why there is no such option, or which ones do what it did.
EXPLAINED: dict[str, str] = {
    **dict.fromkeys(("bf16", "bfloat16", "pure_bf16", "dtype", "torch_dtype", "model_dtype", "precision",
                     "mixed_precision", "train_dtype", "bf16_full_eval", "tf32"), COMPUTE),
    **dict.fromkeys(("fp16", "float16", "fp16_full_eval", "half"), FLOAT16),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps",
                     "train_batch_size", "auto_find_batch_size", "per_gpu_train_batch_size"), STEP),
    **dict.fromkeys(("packing", "sample_packing", "neat_packing", "padding_free", "is_padding_free",
                     "pad_to_multiple_of", "pad_to_sequence_len", "packing_strategy", "eval_packing",
                     "eval_sample_packing", "pad_token", "padding_side", "batch_flattening"), PACKED),
    **dict.fromkeys(("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_on_each_node",
                     "logging_nan_inf_filter", "include_num_input_tokens_seen", "include_tokens_per_second",
                     "skip_memory_metrics", "plot_loss", "log_interval"), LOGGED),
    "log_level_replica": "--logging-level is that of rank 0, which prints",
    "disable_tqdm": "a run in a terminal has one live line; --logging-level WARNING leaves the step lines out",
    "do_train": "train.py always trains; --dry-run only plans, evaluate_model.py measures models",
    **dict.fromkeys(("do_eval", "eval_strategy", "evaluation_strategy", "validate_at_final", "eval_on_start",
                     "evals_per_epoch", "eval_delay"), VALIDATED),
    "do_predict": "generate.py and evaluate_model.py read prompts",
    "min_samples_per_validation": "--validate-every-steps counts steps, each of --batch-size samples",
    **dict.fromkeys(("val_loss_improvement_threshold", "early_stopping_threshold"),
                    "--best-metric loss:0.01 sets the least improvement"),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size", "eval_accumulation_steps", "prediction_loss_only",
                     "batch_eval_metrics", "include_for_metrics", "eval_do_concat_batches", "eval_use_gather_object"),
                    EVALUATION),
    "greater_is_better": "follows from --best-metric",
    **dict.fromkeys(("save_strategy", "saves_per_epoch"),
                    "--checkpoint-every-steps or --checkpoint-every-minutes to resume from, --checkpoint-at-epoch or"
                    " --min-samples-per-checkpoint for models"),
    **dict.fromkeys(("on_demand_checkpointing", "enable_jit_checkpoint"),
                    "always on: a run that is asked to end (SIGTERM, SIGINT, SIGUSR1) saves its whole state first"),
    **dict.fromkeys(("accelerate_full_state_at_epoch", "save_only_model", "save_safetensors", "save_on_each_node"),
                    "checkpoints always hold the whole state and exports the model alone, in safetensors"),
    "export_name": "hf_format/latest always links to the newest export; --keep-exports 1 keeps no other",
    "keep_last_checkpoint_only": "--checkpoint-at-epoch with --keep-exports 1 keeps one export, hf_format/latest",
    **dict.fromkeys(("ignore_data_skip", "restore_callback_states_from_checkpoint", "auto_resume_from_checkpoints"),
                    "the same command resumes a run exactly, with its place in the data (--resume)"),
    "overwrite_output_dir": "another run's directory is never overwritten: give a new --output-dir",
    "training_mode": "the end that is given is the mode: --max-epochs, --max-steps or --max-tokens; without one a run"
                     " has no end",
    "lr_scheduler_kwargs": SCHEDULE_SHAPE,
    **dict.fromkeys(("optim_args", "adamw_betas", "betas"), f"the optimizer's arguments are {MOMENTS}"),
    "optim_target_modules": "--optimizer muon is for the blocks' matrices; GaLore and the like are not supported",
    **dict.fromkeys(("lr_groups", "embedding_lr", "loraplus_lr_ratio", "lora_plus_lr_ratio"),
                    "--learning-rate-for sets the learning rate of parameters by their names"),
    "average_tokens_across_devices": "always on: the loss is the mean over all trained tokens of the step",
    **dict.fromkeys(("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
                    "--activation-checkpointing has its modes; it is torch's, non-reentrant"),
    **dict.fromkeys(("disable_flash_attn", "disable_flash_attention"), "--attention sdpa"),
    "disable_gradient_checkpointing": "--activation-checkpointing none",
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), "--compile uses torch's inductor, block by block"),
    "liger_kernel_config": "--use-liger-kernels replaces norms, MLPs and rotary embeddings",
    "use_cache": "always off in training",
    "torch_empty_cache_steps": "--max-tokens-per-gpu bounds the memory of a step; the cache is not emptied",
    **dict.fromkeys(("full_determinism", "deterministic"),
                    "--seed sets the order and dropout; a resumed run repeats its numbers"),
    **dict.fromkeys(("use_cpu", "no_cuda"),
                    "a machine without a GPU trains on the CPU; CUDA_VISIBLE_DEVICES= hides GPUs"),
    **dict.fromkeys(("deepspeed", "deepspeed_options", "fsdp", "fsdp_config", "fsdp_options", "distributed_backend",
                     "fsdp_transformer_layer_cls_to_wrap", "dp_shard_size", "accelerator_config",
                     "parallelism_config", "zero_stage", "cpu_offload_optimizer_ratio", "fsdp_version",
                     "cpu_offload_optimizer_pin_memory"), SHARDED),
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
                    "weights are sharded by FSDP2, products are not; --context-parallel splits long samples"),
    **dict.fromkeys(("nproc_per_node", "nnodes", "node_rank", "rdzv_id", "rdzv_endpoint", "rdzv_backend", "master_addr",
                     "master_port", "num_gpus", "num_processes", "num_machines", "local_rank", "world_size"), TORCHRUN),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
                     "ddp_backend"), "gradients are reduced by FSDP2 (--micro-batch-grad-sync)"),
    "ddp_timeout": "--start-timeout and --hang-timeout are in seconds",
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
                     "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
                    LOADING),
    "dataloader_drop_last": "the stream of samples has no incomplete last batch",
    **dict.fromkeys(("remove_unused_columns", "length_column_name", "dataset_kwargs", "skip_prepare_dataset"),
                    "tokenized data has the columns that training reads; process_data.py writes them"),
    **dict.fromkeys(("group_by_length", "train_sampling_strategy", "shuffle_dataset", "disable_shuffling",
                     "curriculum_sampling"), "the order is always random, another one in each epoch (--seed)"),
    "truncation_mode": "longer samples are dropped and counted (--max-sample-num-tokens), not cut",
    **dict.fromkeys(("streaming", "dataset_streaming"),
                    "rows of --input-dataset are streamed, tokenized data is read as needed"),
    "dataset_config": "--input-dataset NAME:CONFIG",
    "dataset_test_split": "tokenize it, and give --validation-data-path; or --validation-share of the rows",
    "data_output_dir": "--output-file, or --data-cache-dir where train.py reads rows itself",
    "document_column_name": "--format document with --columns text=COLUMN",
    "dataset_text_field": "--columns text=COLUMN",
    "pretraining_config": "--format document with --block-size packs documents",
    "process_data": "--input-file takes rows, --data-path tokenized data",
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss", "train_on_inputs", "train_on_prompt",
                     "mask_history", "train_on_input"), MESSAGES_ONLY),
    **dict.fromkeys(("eos_token", "eot_tokens", "default_system_message", "default_system", "template",
                     "use_legacy_tmpl", "system_prompt"), TEMPLATED),
    **dict.fromkeys(("model_init_kwargs", "model_type", "tokenizer_type", "tokenizer_name", "tokenizer_name_or_path",
                     "config_name", "use_fast_tokenizer"), RECOGNIZED),
    "use_dolomite": "transformers' own models are trained with packed samples",
    **dict.fromkeys(("loss_type", "stage"), PREFERENCE),
    "loss_weights": "--preference-nll-weight adds the chosen answers' likelihood",
    "disable_dropout": "dropout is --lora-dropout alone, 0 by default, and the model config's own",
    **dict.fromkeys(("precompute_ref_log_probs", "precompute_ref_batch_size"),
                    "the reference's log-probabilities are always computed first, and kept"),
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
                    "the reference stays as it is (--reference-model)"),
    **dict.fromkeys(("ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau", "use_weighting"),
                    "the losses of pairs are those of --preference-loss"),
    "osft_rank_allocation": "every layer keeps the same share (--osft-unfreeze-rank-ratio); --osft-keep-energy lets the"
                            " activations decide how many",
    "allow_downloads": "images are read from files and data: URLs: download them before",
    "osft_upcast_dtype": "decompositions are always computed in double precision",
    "load_in_8bit": f"8-bit base models are not supported: {QUANTIZED}",
    **dict.fromkeys(("load_in_4bit", "quantization_bit", "quantize_data_type", "quantization", "qlora", "use_qlora"),
                    QUANTIZED),
    **dict.fromkeys(("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "use_bnb_nested_quant",
                     "quantization_method", "double_quantization"), QUANTIZED),
    **dict.fromkeys(("adapter", "finetuning_type", "peft_type", "training_type"),
                    "--lora trains adapters, --osft a subspace; without them all weights are trained"),
    **dict.fromkeys(("lora_task_type", "task_type"), "follows from --objective"),
    **dict.fromkeys(("lora_target_linear", "lora_target_parameters", "target_parameters"),
                    "without --lora-target-modules every linear layer of the blocks has an adapter, experts too"),
    **dict.fromkeys(("lora_bias", "bias"), "adapters have no biases"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules",
                     "layer_replication", "trainable_token_indices"), ONE_RANK),
    **dict.fromkeys(("init_lora_weights", "loftq_config", "eva_config", "corda_config", "pissa_init"), START),
    "wandb_project": f"{WANDB}, and the environment variable WANDB_PROJECT",
    **dict.fromkeys(("wandb_run_name", "wandb_name"), f"{WANDB}, and the environment variable WANDB_NAME"),
    "wandb_entity": f"{WANDB}, and the environment variable WANDB_ENTITY",
    "use_wandb": WANDB,
    "wandb_mode": f"{WANDB}, and the environment variable WANDB_MODE",
    "mlflow_tracking_uri": f"{MLFLOW}, and the environment variable MLFLOW_TRACKING_URI",
    "mlflow_experiment_name": f"{MLFLOW}, and the environment variable MLFLOW_EXPERIMENT_NAME",
    "mlflow_run_name": f"{MLFLOW}, and the environment variable MLFLOW_RUN_NAME",
    "project": RENAMED["track_project"],
    **dict.fromkeys(("run_name", "experiment_name"), RENAMED["track_name"]),
    "hub_private_repo": RENAMED["hub_private"],
    **dict.fromkeys(("use_rslora", "peft_use_rslora"), RENAMED["lora_use_rslora"]),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
                    "--track trackio, and trackio's own environment variables, such as TRACKIO_SPACE_ID"),
    **dict.fromkeys(("tensorboard_log_dir", "use_tensorboard"), "--track tensorboard writes into --output-dir"),
    "hub_token": "huggingface_hub's own: the environment variable HF_TOKEN, or hf auth login",
    **dict.fromkeys(("hub_strategy", "hub_always_push"), "every export is uploaded to --push-to-hub"),
    **dict.fromkeys(("hub_revision", "hub_model_revision"), "exports are uploaded to the main branch of --push-to-hub"),
    "debug": "a hang ends the run with all stacks (--hang-timeout); --profile-steps traces, --logging-level DEBUG",
    "enable_thinking": "an argument of the chat template, as enable_thinking=false after --template-args",
    "use_muon": "--optimizer muon",
    "use_dft_loss": "--loss-weighting dft",
    "use_eaft_loss": "--loss-weighting eaft",
    "reward_model": "--objective reward",
    **dict.fromkeys(("auto_mapping", "inference_mode", "peft_version"), "exported adapters have it in peft's format"),
    "local_files_only": "the environment variable HF_HUB_OFFLINE=1",
    "follow": "mini-trainer board DIR follows the runs in a directory, and their curves",
    "modelfile": "Ollama needs two lines, FROM ./FILE.gguf and PARAMETER stop TOKEN, and knows usual chat templates",
}  # fmt: skip


def describe_unknown(name: str, known: Collection[str], *, spell: Callable[[str], str]) -> str:
    """The end of a message about an unknown option: a reason, the option that may be meant, or nothing.

    `known`: options of the program, with no_ in front where that turns one off. `spell`: writes one as users do.
    """
    if (old := name.removeprefix("no_")) in RENAMED:
        return f": {name_programs(RENAMED[old], known)}"
    is_off = name.startswith(("no_", "disable_"))
    for each in (name, re.sub("^(no|disable|use|enable|with)_", "", name)):
        if each in EXPLAINED:
            return f": {name_programs(EXPLAINED[each], known)}"
        meant = NAMES_ELSEWHERE.get(each, (each,))
        if option := next((option for option in meant if option in known), None):
            return f"; did you mean {spell(f'no_{option}' if is_off and f'no_{option}' in known else option)}?"
        if program := find_program(meant[0]):
            return f"; {flag_name(meant[0])} is an option of {program}"
    if trainer := next((trainer for trainer, peer in TRAINERS.items() if name in peer.RULES), None):
        return f": a key of {trainer}'s files, which mini-trainer import-config translates and explains"
    close = difflib.get_close_matches(
        name, [option for option in known if is_off or not option.startswith("no_")], n=1, cutoff=LEAST_SIMILARITY
    )
    return f"; did you mean {spell(close[0])}?" if close else ""


def find_program(option: str) -> str | None:
    return next((program for program, options in PROGRAMS.items() if option in options), None)


def name_programs(text: str, known: Collection[str]) -> str:
    """A text with the program's name after options that are another program's."""

    def name_program(flag: re.Match) -> str:
        option = flag[1].replace("-", "_")
        program = None if option in known else find_program(option)
        return flag[0] if program is None else f"{flag[0]} of {program}"

    return re.sub(r"--([a-z][a-z\d-]+)", name_program, text)
