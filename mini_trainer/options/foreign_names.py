"""Names and values of other trainers: the option with the same meaning here, or the reason why there is none.

One table for the answers to unknown options and values (options/answers.py), the names that the Python API takes,
`mini-trainer import-config`, and the comparison in docs/tasks/coming_from.md. The names are those of Red Hat's
mini_trainer, InstructLab, supertrainer, transformers, TRL, peft, Axolotl, LLaMA-Factory and torchrun.
"""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Row(NamedTuple):
    """Names with one meaning. Without options they have no counterpart, for a reason."""

    names: str  # with * for any rest of a name
    options: str = ""  # ours with this meaning: of several, the first that a program has; "=": of the same name
    # Theirs -> ours, which is the option's value, or values of several options; {}: so it is here anyway.
    values: Mapping[Any, Any] = {}
    reason: str = ""  # why there is no option; beside options, how they differ
    decides: bool = False  # what is learned: other values than those in the table are refused in files
    of: str = ""  # the trainers whose files have these names with this meaning; none: all
    of_texts: bool = False  # without effect where answers are compared

    def list_names(self) -> list[str]:
        return self.names.split()

    def list_options(self, name: str) -> list[str]:
        return [name if option == "=" else option for option in self.options.split()]

    def belongs_to(self, trainer: str) -> bool:
        return not self.of or any(fnmatchcase(trainer, pattern) for pattern in self.of.split())

    def convert(self, value: Any, *, name: str) -> dict[str, Any]:
        """Our options for a value of `name`; KeyError for one that has no counterpart."""
        found = [ours for theirs, ours in self.values.items() if theirs == value or (theirs is ANY and value)]
        if not found and (not self.options or (self.values and self.decides)):
            raise KeyError(value)
        if found and isinstance(found[0], dict):
            return dict(found[0])
        return {self.list_options(name)[0]: found[0] if found else value}


ANY = object()  # as a value of theirs: any that is set, and not named before
ALL_FILES = "axolotl llama-factory trl*"
WITH_LOSS = "trl-dpo trl-kto trl-orpo trl-cpo"
PAIRS = {"objective": "preference"}
NF4 = {True: "nf4", False: {}}
ON = {True: {}}  # always on here
OFF: dict[Any, Any] = {False: {}, None: {}}  # always off here
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
SHARDING = {
    "FULL_SHARD": {"sharding": "full"},
    "SHARD_GRAD_OP": {"sharding": "full", "reshard_after_forward": "never"},
    "HYBRID_SHARD": {"sharding": "hybrid"},
    "NO_SHARD": {"sharding": "hybrid", "shard_size": 1},
}
SCHEDULES = {
    **{name: name for name in ("constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt")},
    "cosine_with_restarts": "cosine_with_restarts",
    "cosine_with_min_lr": {"lr_scheduler": "cosine", "min_lr_ratio": ...},  # ...: from lr_scheduler_kwargs
    "warmup_stable_decay": "wsd",
}
SCHEDULE_ARGUMENTS = {  # of lr_scheduler_kwargs, by schedule
    "cosine_with_min_lr": {"min_lr": "min_lr_ratio", "min_lr_rate": "min_lr_ratio"},
    "cosine_with_restarts": {"num_cycles": "lr_shape"},
    "polynomial": {"power": "lr_shape", "lr_end": "min_lr_ratio"},
    "warmup_stable_decay": {"num_decay_steps": "lr_shape", "min_lr_ratio": "min_lr_ratio"},
}
RATES = ("min_lr", "lr_end")  # of a schedule's arguments, those that are learning rates, not ratios of them
ADAMW = "adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused paged_adamw_32bit paged_adamw"
ADAMW_8BIT = (
    "adamw8bit adamw_bnb_8bit adamw_8bit adamw_torch_8bit ao_adamw_8bit paged_adamw_8bit adamw_torch_4bit ao_adamw_4bit"
)
OPTIMIZERS = dict.fromkeys(ADAMW.split(), "adamw") | dict.fromkeys(ADAMW_8BIT.split(), "adamw8bit") | {"muon": "muon"}
FULL_CHECKPOINTING = dict.fromkeys((True, "true", "unsloth", "offload", "offload_disk"), "full") | {False: "none"}
COMPUTE = "on CUDA compute is in bfloat16 with float32 weights (--compute-dtype, --master-weights)"
QUANTIZED = "--base-quantization nf4 holds the base of --lora in 4 bits"
TEMPLATED = "the chat template writes it: the model's own, or --chat-template"
MESSAGES_ONLY = "only the assistant's turns are trained on; messages with train: false are left out"
SHUFFLED = "the order is always random, another one in each epoch (--seed)"
VALIDATED = (
    "runs with --validation-data-path are validated before the first step and after the last, and every"
    " --validate-every-steps or --validate-at-epoch"
)
ROLLOUTS = "reinforcement learning (GRPO, PPO and others) has no objective here"
NO_OBJECTIVE = "has no objective here"
NOT_TRAINING = "is not training: see generate.py, evaluate_model.py and mini-trainer merge-adapter"
OTHER_LOSS = "changes the loss, and has no counterpart: --preference-loss names those of pairs"
OTHER_METHOD = "changes how or what is trained, and has no counterpart"
TRACKED = (
    "the tracker's environment: WANDB_PROJECT and WANDB_NAME, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_NAME;"
    " by default a run has the name of --output-dir"
)
TRACKER_KEYS = {  # keys that turn a tracker on
    "wandb": "wandb_project wandb_run_name wandb_name",
    "mlflow": "mlflow_experiment_name mlflow_run_name",
}
SPEED = "affects only speed or memory"

TABLE = (
    # The model and its tokenizer.
    Row("base_model model model_path pretrained_model_name_or_path model_id base_model_name_or_path model_name",
        "model_name_or_path model"),
    Row("revision_of_model model_version", "model_revision"),
    Row("model_name_or_path model_revision output_dir learning_rate weight_decay adam_beta1 adam_beta2 seed lora_alpha"
        " lora_dropout lora_modules_to_save data_weights", "=", of=ALL_FILES),
    Row("model_init_kwargs model_kwargs model_type tokenizer_type tokenizer_name tokenizer_name_or_path tokenizer_path"
        " config_name use_fast_tokenizer tokenizer_use_* tokenizer_legacy base_model_config cls_model_config"
        " base_model_ignore_patterns is_*_derived_model", reason="read from the model's own config and tokenizer"),
    Row("use_dolomite", reason="transformers' own models are trained with packed samples", decides=True),
    Row("model_config tokenizer_config rope_scaling reinit_weights",
        values={False: {}}, reason="the model and its tokenizer are trained as their directory has them", decides=True,
        of="axolotl llama-factory"),
    # Rows.
    Row("data_path data dataset datasets train_file train_data train_dataset", "data_path input_file"),
    Row("dataset_name dataset_path hf_name", "input_dataset"),
    Row("dataset_train_split", "split"),
    Row("dataset_config", reason="--input-dataset NAME:CONFIG"),
    Row("eval_dataset validation_file eval_file test_datasets dataset_test_split", "validation_data_path"),
    Row("val_set_size val_size validation_split", "validation_share"),
    Row("dataset_text_field column_name document_column_name", reason="--columns text=COLUMN"),
    Row("pretraining_config", reason="--format document with --block-size packs documents"),
    Row("interleave_probs mixing_weights", "data_weights"),
    Row("mix_strategy", values={"concat": {}}, reason="--data-weights draw samples; a data set that ends starts over"),
    Row("output ckpt_output_dir save_dir checkpoint_dir", "output_dir output_file"),
    Row("data_output_path tokenized_path dataset_prepared_path push_dataset_to_hub overwrite_cache", "output_file"),
    Row("data_output_dir", reason="--output-file, or --data-cache-dir where train.py reads rows itself"),
    Row("process_data", reason="--input-file takes rows, --data-path tokenized data"),
    Row("max_length sequence_len cutoff_len max_seq_length max_len max_seq_len seq_length max_prompt_length"
        " model_max_length", "max_sample_num_tokens"),
    Row("truncation_mode excess_length_strategy", values={"drop": {}},
        reason="longer samples are dropped and counted (--max-sample-num-tokens), not cut"),
    Row("chat_tmpl_path chat_template_path chat_template_jinja", "chat_template"),
    Row("eos_token eot_tokens default_system_message default_system template system_prompt tool_format", "",
        {"empty": {}}, TEMPLATED),
    Row("use_legacy_tmpl", reason=f"{TEMPLATED}, a Jinja file", decides=True),
    Row("enable_thinking", reason="an argument of the chat template, as enable_thinking=false after --template-args"),
    Row("dataset_num_proc preprocessing_num_workers num_cpu_procs dataset_processes data_process_num_cpu_procs"
        " num_workers", "num_proc"),
    Row("tokens add_tokens special_tokens add_special_tokens", "add_special_tokens"),
    Row("new_special_tokens_config init_special_tokens", decides=True,
        reason="new tokens, named by --add-special-tokens, begin as the mean of the others"),
    Row("mock_data_len", "block_size"),
    Row("max_samples", "subset", reason="drawn at random after tokenizing, there the first rows of each data set",
        of="llama-factory"),
    Row("completion_only_loss train_on_completions", "", ON, MESSAGES_ONLY, decides=True),
    Row("train_on_inputs train_on_prompt mask_history train_on_input", "", OFF, MESSAGES_ONLY, decides=True),
    Row("assistant_only_loss", values=ON,
        reason="only the assistant's turns are trained on, there whole chats; of prompts with completions, both train"
        " on the completion"),
    Row("remove_unused_columns length_column_name dataset_kwargs skip_prepare_dataset dataset_prompt_column",
        reason="tokenized data has the columns that training reads; process_data.py writes them"),
    Row("group_by_length train_sampling_strategy disable_shuffling curriculum_sampling sample_packing_sequentially"
        " shuffle_buffer_size buffer_size", values={False: {}, "random": {}},
        reason=SHUFFLED),
    Row("shuffle_dataset shuffle_merged_datasets shuffle_before_merging_datasets", values=ON, reason=SHUFFLED),
    Row("*streaming", reason="rows of --input-dataset are streamed, tokenized data is read as needed"),
    Row("packing sample_packing* neat_packing padding_free is_padding_free pad_to_multiple_of pad_to_sequence_len"
        " packing_strategy eval_packing eval_sample_packing pad_token padding_side padding_value label_pad_token_id"
        " batch_flattening multipack_* pretrain_multipack_* streaming_multipack_* max_packed_sequence_len"
        " dpo_padding_free",
        reason="samples are always packed without padding, and never see each other; --max-tokens-per-gpu is a pack's"
        " length"),
    # Batches, and the end of a run.
    Row("effective_batch_size", "batch_size"),
    Row("max_batch_len", "max_tokens_per_gpu"),
    Row("per_device_train_batch_size micro_batch_size gradient_accumulation_steps train_batch_size"
        " auto_find_batch_size per_gpu_train_batch_size",
        reason="--batch-size counts the samples of a step on all GPUs together, --max-tokens-per-gpu those that run at"
        " once"),
    Row("num_train_epochs num_epochs epochs", "max_epochs"),
    Row("steps num_steps max_train_steps num_training_steps", "max_steps"),
    Row("training_mode", reason="the end that is given is the mode: --max-epochs, --max-steps or --max-tokens; without"
        " one a run has no end"),
    # Optimization.
    Row("lr learning_rate_peak peak_lr", "learning_rate"),
    Row("warmup_steps warmup_ratio lr_warmup_steps", "num_warmup_steps"),
    Row("lr_scheduler lr_scheduler_type lr_schedule scheduler", "lr_scheduler", SCHEDULES, decides=True),
    Row("lr_scheduler_kwargs",
        reason="--min-lr-ratio and --lr-shape shape the schedule"),
    Row("num_decay_steps", "lr_shape"),
    Row("ema_half_life tail_steps", "average_over"),
    Row("cosine_min_lr_ratio min_lr_rate", "min_lr_ratio"),
    Row("optim optimizer optimizer_type", "optimizer",
        OPTIMIZERS, decides=True, reason="only AdamW, with 32- or 8-bit moments, and muon"),
    Row("optim_args adamw_betas betas optim_target_modules", decides=True,
        reason="the optimizer's arguments are --adam-beta1, --adam-beta2 and --adam-eps"),
    Row("beta1", "adam_beta1"),
    Row("beta2", "adam_beta2"),
    Row("eps adamw_eps adam_epsilon epsilon", "adam_eps"),
    Row("adamw_weight_decay", "weight_decay"),
    Row("max_grad_norm grad_clip gradient_clipping clip_grad_norm max_norm", "max_grad_norm", {0: None}),
    Row("random_seed data_seed random_state", "seed"),
    Row("neftune_noise_alpha noisy_embedding_alpha", values={0: {}, None: {}}, decides=True,
        reason="noise on embeddings has no option here; --label-smoothing and --weight-decay regularize"),
    Row("label_smoothing_factor", "label_smoothing", {0: {}}, of_texts=True),
    Row("router_aux_loss_coef", "router_aux_loss", {0: {}}),
    Row("average_tokens_across_devices",
        reason="always on: the loss is the mean over all trained tokens of the step"),
    Row("lr_groups embedding_lr loraplus_lr_ratio lora_plus_lr_ratio", decides=True,
        reason="--learning-rate-for sets the learning rate of parameters by their names"),
    # Objectives and losses.
    Row("rl", "objective", {name: PAIRS | {"preference_loss": name} for name in ("ipo", "orpo", "simpo")}
        | {"dpo": PAIRS, "kto": {"objective": "kto"}}, f"{NO_OBJECTIVE}; reinforcement learning neither", decides=True,
        of="axolotl"),
    Row("stage", "objective", {"sft": {}, "pt": {"format": "document"}, "dpo": PAIRS, "kto": {"objective": "kto"},
        "rm": {"objective": "reward"}}, NO_OBJECTIVE, decides=True, of="llama-factory"),
    Row("reward_model", "objective", {True: {"objective": "reward"}, False: {}}, NO_OBJECTIVE, decides=True),
    Row("pref_loss", "preference_loss", {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}, OTHER_LOSS,
        decides=True),
    Row("loss_type", "loss_weighting", {"nll": {}, "chunked_nll": {}, "dft": "dft"}, NO_OBJECTIVE, decides=True,
        of="trl"),
    Row("loss_type", "", {"kto": {}}, NO_OBJECTIVE, decides=True, of="trl-kto"),
    Row("loss_type dpo_loss_type", "preference_loss", decides=True, of="trl-dpo trl-cpo axolotl"),
    Row("rl_beta dpo_beta orpo_alpha pref_beta", "preference_beta", decides=True, of="axolotl llama-factory"),
    Row("beta", "preference_beta", decides=True, of=WITH_LOSS),
    Row("simpo_gamma", "preference_gamma", decides=True, of="trl-cpo axolotl llama-factory"),
    Row("gamma_beta_ratio sft_weight", reason="--preference-gamma is this ratio times beta; --preference-nll-weight",
        decides=True, of="trl-cpo"),
    Row("pref_ftx rpo_alpha", "preference_nll_weight", decides=True, of="trl-dpo axolotl llama-factory"),
    Row("cpo_alpha", "preference_nll_weight", decides=True, of="trl-cpo axolotl"),
    Row("loss_weights dpo_loss_weights", reason="--preference-nll-weight adds the chosen answers' likelihood",
        of="trl-dpo axolotl"),
    Row("dpo_label_smoothing", "label_smoothing", {0: {}}, of="llama-factory"),
    Row("label_smoothing alpha", "", {0: {}}, OTHER_LOSS, decides=True, of="trl-cpo"),
    Row("label_smoothing dpo_label_smoothing", of="trl-dpo axolotl",
        reason="ignored by this loss in today's TRL; earlier versions trained conservative DPO, which is"
        " --label-smoothing"),
    Row("kto_desirable_weight kto_chosen_weight kto_undesirable_weight kto_rejected_weight desirable_weight"
        " undesirable_weight", "kto_weight_ratio"),
    Row("center_rewards_coefficient", "reward_centering"),
    Row("ref_model ref_model_name_or_path", "reference_model"),
    Row("precompute_ref_log_probs precompute_ref_batch_size ref_model_init_kwargs model_adapter_name ref_adapter_name"
        " force_use_ref_model ref_model_quantization_bit",
        reason="the reference's log-probabilities are always computed first, and kept"),
    Row("sync_ref_model ref_model_adapters", values=OFF, decides=True,
        reason="the reference stays as it is (--reference-model); mini-trainer merge-adapter puts an adapter into it"),
    Row("ref_model_mixup_alpha ref_model_sync_steps", reason="the reference stays as it is (--reference-model)"),
    Row("ld_alpha f_divergence_type", "", {1: {}, "reverse_kl": {}}, OTHER_LOSS, decides=True),
    Row("use_weighting dpo_use_weighting dpo_norm_loss pref_bco_weight reference_free rlhf_type", "",
        {False: {}}, OTHER_LOSS, decides=True),
    Row("disable_dropout", reason="dropout is --lora-dropout alone, 0 by default, and the model config's own"),
    Row("use_dft_loss", "loss_weighting", {True: "dft", False: {}}),
    Row("use_eaft_loss use_eaft", "loss_weighting", {True: "eaft", False: {}},
        "the entropy is divided by ln 20 = 2.9957, there by 3"),
    Row("eaft_alpha eaft_k", "", {1: {}, 20: {}}, "--loss-weighting eaft has the entropy of 20 tokens as weight",
        decides=True),
    Row("trl reward_funcs num_generations reward_model_path ppo_* reward_weights scale_rewards nemo_gym_enabled"
        " grpo_* vllm", reason=ROLLOUTS, decides=True, of=ALL_FILES),
    Row("teacher_model teacher_model_name_or_path gkd_* kd_trainer kd_*", decides=True, of=ALL_FILES,
        reason="--teacher-model and --teacher-weight distil, which files of other trainers are not translated to"),
    Row("teacher_data", reason="score-data lets a teacher read other rows; --teacher-scores names what it wrote",
        decides=True),
    Row("export_dir infer_backend predict_with_generate merge_lora_only sampler_type",
        reason=NOT_TRAINING, decides=True),
    Row("process_reward_model ebft diffusion use_asft_loss", reason=NO_OBJECTIVE, decides=True),
    Row("qat llmcompressor model_quantization_config nvfp4_merge_aware use_onebitllms", decides=True,
        reason="training for or with other quantized weights is not supported"),
    # Methods.
    Row("use_peft adapter finetuning_type use_lora peft peft_type training_type", "lora",
        {True: True, False: False, "lora": True, "qlora": {"lora": True, "base_quantization": "nf4"}, "full": False},
        "only full fine-tuning, LoRA and QLoRA are translated", decides=True),
    Row("lora_r r rank lora_rank", "lora_rank"),
    Row("alpha", "lora_alpha"),
    Row("dropout", "lora_dropout"),
    Row("lora_target target_modules lora_target_modules lora_targets", "lora_target_modules",
        {"all": (), "all-linear": ()}),
    Row("lora_target_linear lora_target_parameters target_parameters",
        reason="without --lora-target-modules every linear layer of the blocks has an adapter, experts too"),
    Row("additional_target modules_to_save", "lora_modules_to_save"),
    Row("use_rslora peft_use_rslora", reason="--lora-alpha times the square root of --lora-rank is the same scale"),
    Row("use_dora peft_use_dora", "lora_use_dora"),
    Row("lora_model_dir adapter_name_or_path", "lora_adapter"),
    Row("lora_task_type task_type", reason="follows from --objective", values={"CAUSAL_LM": {}, "SEQ_CLS": {}}),
    Row("lora_bias bias", "", {"none": {}}, "adapters have no biases"),
    Row("rank_pattern alpha_pattern layers_to_transform layers_pattern exclude_modules layer_replication"
        " trainable_token_indices peft_layer* lora_*_pattern peft_trainable_token_indices", decides=True,
        reason="all adapters are alike: --lora-rank and --lora-alpha, in the layers of --lora-target-modules"),
    Row("init_lora_weights peft_init_lora_weights loftq_config eva_config corda_config", "",
        {True: {}, False: {}, "kaiming": {}}, decides=True,
        reason="adapters start at zero, with the usual random values in their first matrix"),
    Row("load_in_4bit use_qlora qlora quantize_data_type", "base_quantization", NF4 | {"nf4": "nf4"}),
    Row("quantization_bit", "base_quantization", {4: "nf4"}),
    Row("load_in_8bit", reason=f"8-bit base models are not supported: {QUANTIZED}"),
    Row("bnb_4bit_quant_type quantization_type quantization_method", "",
        {"nf4": {}, "bnb": {}, "bitsandbytes": {}}, QUANTIZED, decides=True),
    Row("quantization", reason=QUANTIZED, decides=True),
    Row("bnb_4bit_* bnb_config_kwargs use_bnb_nested_quant double_quantization bitsandbytes_kwargs peft_kwargs gptq*",
        reason=QUANTIZED),
    Row("osft_upcast_dtype", reason="decompositions are always computed in double precision"),
    Row("osft_output_dtype", reason="exports have one data type, --export-dtype", decides=True),
    Row("osft_memory_efficient_init", reason="a decomposition holds one block's matrices at a time"),
    Row("use_muon use_galore use_apollo use_badam use_adam_mini use_llama_pro mixture_of_depths relora lisa_n_layers"
        " unfrozen_parameters shift_attn trainer_cls pissa_init peft use_kt use_mca use_megatron_bridge"
        " use_hyper_parallel *_model_parallel_size sequence_parallel",
        reason=OTHER_METHOD, decides=True, of=ALL_FILES),
    Row("use_muon", "optimizer", {True: "muon", False: {}}),
    Row("galore_* apollo_* badam_* asft_* pissa_* freeze_trainable_* oft_* kt_* relora_* lisa_* jagged_*"
        " f_alpha_* discopop_*", reason="an argument of a method that is not here"),
    # Computation.
    Row("gradient_checkpointing use_gradient_checkpointing", "activation_checkpointing", FULL_CHECKPOINTING),
    Row("gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant_gc",
        reason="--activation-checkpointing has its modes; it is torch's, non-reentrant"),
    Row("disable_gradient_checkpointing", "activation_checkpointing", {True: "none", False: {}}),
    Row("activation_offloading", "offload_activations",
        {True: {"activation_checkpointing": "full", "offload_activations": True}, False: {}}),
    Row("use_liger_kernels use_liger_kernel use_liger enable_liger_kernel dpo_use_liger_kernel liger_rope"
        " liger_rms_norm liger_glu_activation", "kernels", {True: "fused", False: "eager"}),
    Row("liger_*", reason="--kernels fused replaces norms, MLPs and rotary embeddings"),
    Row("compile_model torch_compile", "compile"),
    Row("torch_compile_backend torch_compile_mode", reason="--compile uses torch's inductor, block by block"),
    Row("fp8", "float8"),
    Row("tiled_mlp", "=", of=ALL_FILES),
    Row("disable_flash_attn disable_flash_attention", "attention", {True: "sdpa", False: {}}),
    Row("attn_implementation flash_attn flash_attention flash_attention_2 use_xformers xformers_attention sdp_attention"
        " flex_attention eager_attention attention_backend", "attention"),
    Row("bf16 bfloat16 pure_bf16 dtype torch_dtype model_dtype precision mixed_precision bf16_full_eval tf32",
        reason=COMPUTE),
    Row("fp16 float16 fp16_full_eval half", reason=f"float16 needs loss scaling, which is not supported: {COMPUTE}"),
    Row("train_dtype", "master_weights", DTYPES),
    Row("sharding_strategy fsdp_sharding_strategy", "sharding", SHARDING, decides=True),
    Row("cpu_offload_params cpu_offload_optimizer offload", "cpu_offload"),
    Row("context_parallel_size sequence_parallel_degree sequence_parallel_size", "context_parallel",
        {0: {}, 1: {}}),
    Row("tensor_parallel_size", "", {1: {}},
        "weights are sharded by FSDP2, products are not; --context-parallel splits long samples"),
    Row("deepspeed deepspeed_* fsdp fsdp_* distributed_backend dp_shard_size dp_replicate_size accelerator_config"
        " parallelism_config zero_stage cpu_offload_optimizer_*",
        reason="FSDP2 always shards weights, gradients and optimizer state (--sharding, --cpu-offload)"),
    Row("nproc_per_node nnodes node_rank rdzv_id rdzv_endpoint rdzv_backend master_addr master_port num_gpus"
        " num_processes num_machines local_rank world_size devices",
        reason="an argument of torchrun, before the script: torchrun --nproc-per-node=8 train.py"),
    Row("ddp_timeout", reason="--start-timeout and --hang-timeout are in seconds"),
    Row("ddp ddp_*", reason="gradients are reduced by FSDP2 (--micro-batch-grad-sync)"),
    Row("dataloader_drop_last", reason="the stream of samples has no incomplete last batch"),
    Row("dataloader_*", reason="samples are read ahead in a thread; there are no loader processes to configure"),
    Row("use_cpu no_cuda accelerator",
        reason="a machine without a GPU trains on the CPU; CUDA_VISIBLE_DEVICES= hides GPUs"),
    Row("torch_empty_cache_steps", reason="--max-tokens-per-gpu bounds the memory of a step"),
    Row("use_cache", reason="always off in training"),
    Row("full_determinism deterministic",
        reason="--seed sets the order and dropout; a resumed run repeats its numbers"),
    Row("lora_*_kernel use_*kernels use_sonicmoe use_scattermoe use_unsloth cut_cross_entropy low_cpu_mem_usage"
        " device_map experts_implementation *_cross_entropy torchdistx_path use_ray ray_*", reason=SPEED),
    # Checkpoints, exports, validation.
    Row("save_steps checkpointing_steps", "checkpoint_every_steps"),
    Row("save_strategy saves_per_epoch", reason="--checkpoint-every-steps or --checkpoint-every-minutes to resume from,"
        " --checkpoint-at-epoch or --min-samples-per-checkpoint for models"),
    Row("save_total_limit", "keep_checkpoints"),
    Row("save_samples", "min_samples_per_checkpoint"),
    Row("save_dtype", "export_dtype", DTYPES),
    Row("save_best_val_loss load_best_model_at_end", "export_best"),
    Row("metric_for_best_model", "best_metric"),
    Row("greater_is_better", reason="follows from --best-metric"),
    Row("val_loss_improvement_threshold early_stopping_threshold",
        reason="--best-metric loss:0.01 sets the least improvement"),
    Row("on_demand_checkpointing enable_jit_checkpoint",
        reason="always on: a run that is asked to end (SIGTERM, SIGINT, SIGUSR1) saves its whole state first"),
    Row("accelerate_full_state_at_epoch save_only_model save_safetensors save_on_each_node",
        reason="checkpoints always hold the whole state and exports the model alone, in safetensors"),
    Row("export_name", reason="hf_format/latest always links to the newest export; --keep-exports 1 keeps no other"),
    Row("keep_last_checkpoint_only", "keep_exports", {True: 1, False: {}}),
    Row("resume_from_full_state_checkpoint resume_from_checkpoint", "resume"),
    Row("ignore_data_skip restore_callback_states_from_checkpoint auto_resume_from_checkpoints",
        reason="the same command resumes a run exactly, with its place in the data (--resume)"),
    Row("overwrite_output_dir", reason="another run's directory is never overwritten: give a new --output-dir"),
    Row("eval_steps eval_every validation_frequency", "validate_every_steps"),
    Row("validate_at_final do_eval eval_strategy evaluation_strategy eval_on_start evals_per_epoch eval_delay",
        reason=VALIDATED),
    Row("per_device_eval_batch_size eval_batch_size eval_accumulation_steps prediction_loss_only batch_eval_metrics"
        " include_for_metrics eval_do_concat_batches eval_use_gather_object compute_accuracy",
        reason="validation is packed like training, by --max-tokens-per-gpu, and reports the loss and token accuracy"),
    Row("min_samples_per_validation", reason="--validate-every-steps counts steps, each of --batch-size samples"),
    Row("patience early_stopping_patience", "early_stopping_patience"),
    Row("do_train", "", {True: {}}, "train.py always trains; --dry-run only plans, evaluate_model.py measures models",
        decides=True),
    Row("do_predict", "", OFF, "generate.py and evaluate_model.py read prompts",
        decides=True),
    # Reports.
    Row("serialized_callbacks", "callbacks"),
    Row("report_to log_with", "track", {"none": (), "all": ()}),
    Row("project run_name experiment_name wandb_project mlflow_experiment_name wandb_run_name"
        " wandb_name mlflow_run_name", reason=TRACKED),
    *(Row(names, "track", {False: {}, ANY: tracker}, TRACKED, of=ALL_FILES) for tracker, names in TRACKER_KEYS.items()),
    Row("use_tensorboard tensorboard_log_dir", reason="--track tensorboard writes into --output-dir"),
    Row("wandb_entity wandb_mode wandb_*", reason="--track wandb, and its environment variables, such as WANDB_ENTITY"),
    Row("use_wandb", reason="--track wandb"),
    Row("mlflow_*", reason="--track mlflow, and the environment variable MLFLOW_TRACKING_URI"),
    Row("trackio_*", reason="--track has no trackio: wandb, tensorboard or mlflow"),
    Row("log_level", "logging_level"),
    Row("log_level_replica", reason="--logging-level is that of rank 0, which prints"),
    Row("logging_* log_on_each_node include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics"
        " plot_loss log_interval", reason="every step is printed and written to training_metrics_0.jsonl"),
    Row("disable_tqdm", reason="a run in a terminal has one live line; --logging-level WARNING leaves the step lines"
        " out"),
    Row("loss_watchdog_*", reason="a loss that is not finite ends the run"),
    Row("hub_model_id", "push_to_hub"),
    Row("hub_private_repo", reason="the repository's own setting: create it before the run, as private"),
    Row("hub_token", reason="huggingface_hub's own: the environment variable HF_TOKEN, or hf auth login"),
    Row("hub_revision hub_model_revision", reason="exports are uploaded to the main branch of --push-to-hub"),
    Row("hub_strategy hub_always_push hub_*", reason="every export is uploaded to --push-to-hub"),
    Row("debug", reason="a hang ends the run with all stacks (--hang-timeout); --profile-steps traces, --logging-level"
        " DEBUG"),
    Row("local_files_only", reason="the environment variable HF_HUB_OFFLINE=1"),
)  # fmt: skip
NAMED: dict[str, list[Row]] = {}
for row in TABLE:
    for name in row.list_names():
        NAMED.setdefault(name, []).append(row)
PATTERNS = [(name, row) for name, rows in NAMED.items() if "*" in name for row in rows]
# How some values differ here, by theirs or ours.
DIFFERENCES = {
    "adamw_torch_4bit": "its moments have 8 bits instead of 4",
    "ao_adamw_4bit": "its moments have 8 bits instead of 4",
    "orpo": "the added likelihood is of the chosen answer's tokens, there of its prompt's, too, or a mean of each"
    " answer's mean",
    "kto": "the point of reference is of the whole batch and of answers to other prompts, there of each micro-batch"
    " over all GPUs and of neighbouring answers; samples come in a random order",
    "reward": "the head has no bias and no dropout, trains with adapters, and is exported with the model",
}
# Names of InstructLab and Red Hat's mini_trainer that are arguments of the Python API: of training, of tokenization.
TRAIN_NAMES = [
    "model_path", "ckpt_output_dir", "max_batch_len", "num_epochs", "effective_batch_size", "save_samples",
    "warmup_steps", "random_seed", "adamw_weight_decay", "adamw_eps", "use_liger_kernels", "use_liger", "log_level",
    "mock_data_len", "beta1", "beta2", "eps", "train_dtype", "save_dtype", "compile_model", "save_best_val_loss",
    "resume_from_full_state_checkpoint", "validation_frequency", "keep_last_checkpoint_only", "eval_file",
    "disable_flash_attn", "fsdp_sharding_strategy", "is_padding_free", "on_demand_checkpointing",
    "accelerate_full_state_at_epoch", "validate_at_final", "use_dolomite", "use_legacy_tmpl", "osft_output_dtype",
    "osft_memory_efficient_init",
]  # fmt: skip
DATA_NAMES = ["data_path", "data_output_path", "max_seq_len", "model_path", "chat_tmpl_path", "num_cpu_procs"]
# Names without a row that decide what is learned, by a word in them.
DECIDING = re.compile(
    "(^|_)(rl|rlhf|stage|loss|losses|objective|masking|mask|reward|rewards|teacher|distill|distillation|kd|grpo|ppo|gkd"
    "|optim|optimizer|method|unlearning|freeze|frozen)(_|$)"
)


def find_row(name: str, trainer: str | None = None) -> Row | None:
    """The row of a name, or else of a pattern. With a trainer its own come first, without one those of all trainers."""
    rows = NAMED.get(name) or [row for pattern, row in PATTERNS if fnmatchcase(name, pattern)]
    rows = [row for row in rows if trainer is None or row.belongs_to(trainer)]
    return next((row for row in rows if bool(row.of) == (trainer is not None)), next(iter(rows), None))


def convert_schedule(
    scheduler: str, values: Mapping[str, Any], learning_rate: float
) -> tuple[dict[str, Any], list[str]]:
    """Our options for transformers' `lr_scheduler_kwargs`, and the names of those that the schedule does not have."""
    known = SCHEDULE_ARGUMENTS.get(scheduler, {})
    found = {
        known[name]: value / learning_rate if name in RATES else value
        for name, value in values.items()
        if name in known and value is not None
    }
    return found, [name for name in values if name not in known]


def find_option(name: str, known: Collection[str]) -> str | None:
    """The first option of a program with the meaning of a foreign name."""
    row = find_row(name)
    return None if row is None else next((option for option in row.list_options(name) if option in known), None)
