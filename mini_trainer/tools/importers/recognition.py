"""The trainer that a configuration is for, by the share of its keys that each knows; keys of other objectives."""

import re
from pathlib import Path
from typing import Any

# Keys that make a file one for something that is not trained here, each with the reason for refusing it.
ROLLOUTS = "reinforcement learning (GRPO, PPO and others) has no objective here"
NOT_TRAINING = "is not training: see generate.py, evaluate_model.py and mini-trainer merge-adapter"
DISTILLATION = "distillation has no objective here"
OTHER_OBJECTIVES = {
    "process_reward_model": "rewards of single steps have no objective here",
    **dict.fromkeys(("trl", "reward_funcs", "num_generations", "max_completion_length", "reward_model_path",
                     "ppo_epochs", "reward_weights", "scale_rewards", "nemo_gym_enabled"), ROLLOUTS),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path", "gkd_logits_topk", "kd_trainer"), DISTILLATION),
    **dict.fromkeys(("export_dir", "infer_backend", "do_predict", "predict_with_generate", "merge_lora_only",
                     "sampler_type"), NOT_TRAINING),
    **dict.fromkeys(("ebft", "diffusion"), "has no objective here"),
    "use_asft_loss": "no such loss is here",
    **dict.fromkeys(("quantization", "qat", "llmcompressor"),
                    "quantization-aware training and compression are not supported"),
}  # fmt: skip
# Keys of preference learning, which are refused in files of trainers that do not know them.
PREFERENCES = dict.fromkeys(
    ("rl", "rlhf_type", "beta", "rl_beta", "pref_loss", "pref_beta", "orpo_alpha", "simpo_gamma", "cpo_alpha",
     "kto_desirable_weight", "desirable_weight", "undesirable_weight", "dpo_loss_type", "max_prompt_length",
     "dpo_use_weighting", "rpo_alpha", "reward_model", "center_rewards_coefficient", "gamma_beta_ratio"),
    "a key of preference learning that this trainer does not have: --trainer names another, such as trl-dpo",
)  # fmt: skip
# Values that distinguish TRL's trainers, whose files share most keys: a key counts only with one of its values.
DPO_LOSSES = {"sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down", "exo_pair", "nca_pair", "bco_pair",
              "sppo_hard", "aot", "aot_unpaired", "aot_pair", "discopop", "sft", "sigmoid_norm"}  # fmt: skip
VALUES = {
    "loss_type": {"trl": {"nll", "chunked_nll", "dft"}, "trl-dpo": DPO_LOSSES, "trl-kto": {"kto", "apo_zero_unpaired"},
                  "trl-cpo": {"sigmoid", "hinge", "ipo", "simpo", "alphapo"}},
    "lora_task_type": {name: {"CAUSAL_LM"} for name in ("trl", "trl-dpo", "trl-kto", "trl-orpo", "trl-cpo")},
}  # fmt: skip
# Keys of trainers whose files are recognised only to be refused by name.
MS_SWIFT = {
    "model", "tuner_type", "train_type", "target_modules", "dataset", "load_from_cache_file", "split_dataset_ratio",
    "max_length", "dataset_num_proc", "model_author", "model_name", "padding_free", "loss_scale",
    "add_non_thinking_prefix", "merge_lora", "global_batch_size", "finetune", "lr", "lr_warmup_fraction", "min_lr",
    "no_save_optim", "no_save_rng", "freeze_llm", "freeze_vit", "freeze_aligner", "attn_impl", "attention_backend",
    "rlhf_type", "teacher_model", "lmbda", "sft_alpha", "colocate_groups", "device_groups", "use_ray", "sampler_type",
    "sampler_engine", "load_args", "load_data_args", "stream", "enable_thinking", "max_new_tokens", "system",
    "temperature", "train_iters", "truncation_strategy", "ENV", "torch_dtype", "agent_template",
    "recompute_granularity", "cross_entropy_loss_fusion", "moe_permute_fusion", "external_plugins", "micro_batch_size",
    "num_train_epochs", "logging_steps", "packing", "lora_rank", "lora_alpha", "output_dir",
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "warmup_ratio", "deepspeed", "top_p",
    "top_k", "orm_model", "prm_model", "prm_threshold", "num_return_sequences", "override_exist_file",
    "num_sampling_batch_size", "engine_kwargs", "output_file", "save_steps", "eval_steps", "save_total_limit", "seed",
    "beta", "dataset_shuffle",
}  # fmt: skip
LLAMA_FACTORY_V1 = {
    "model", "peft_config", "model_class", "kernel_config", "dist_config", "init_config", "train_dataset",
    "eval_dataset", "quant_config", "optim_config", "lr_scheduler_config", "sample_backend", "max_new_tokens",
    "cutoff_len", "micro_batch_size", "global_batch_size", "batching_strategy", "batching_workers", "cp_size",
    "cp_mode", "dp_size", "enable_activation_checkpointing", "output_dir", "learning_rate", "num_train_epochs",
    "max_steps", "bf16", "trust_remote_code", "flash_attn", "save_epochs", "custom_chat_template", "dist_timeout",
    "save_ckpt_as_hf", "logging_steps", "save_steps", "seed", "max_grad_norm",
}  # fmt: skip
REFUSED = {"ms-swift": MS_SWIFT, "LLaMA-Factory v1": LLAMA_FACTORY_V1}
# A file is a trainer's only if it has one of these keys.
# TRL's trainers, with the words that stand for them in the names of files and of their folders.
TRLS = {"trl": {"sft"}, "trl-dpo": {"dpo"}, "trl-kto": {"kto"}, "trl-orpo": {"orpo"}, "trl-cpo": {"cpo", "simpo"},
        "trl-reward": {"reward", "rm"}}  # fmt: skip
NEEDED = {
    "axolotl": {"base_model"},
    "llama-factory": {"model_name_or_path", "stage", "finetuning_type"},
    **{name: {"model_name_or_path", "dataset_name", "dataset_mixture", "max_length", "use_peft"} for name in TRLS},
    "ms-swift": {"model", "tuner_type", "ENV", "load_args"},
    "LLaMA-Factory v1": {"model", "train_dataset"},
}
LOWEST_SHARE = 0.5


def recognize(given: dict[str, Any], known: dict[str, set[str]], path: Path | None = None) -> str:
    """The trainer that knows the largest share of the file's keys; ValueError if it is none of `known`.

    The names of the file and of its folder decide between TRL's trainers that know as many.
    """
    candidates = {
        name: sum(key in keys and fits(name, key, value) for key, value in given.items()) / max(1, len(given))
        for name, keys in (known | REFUSED).items()
        if NEEDED[name] & given.keys()
    }
    shares = dict(sorted(candidates.items(), key=lambda item: -item[1]))
    names = ", ".join(name for name in known if name == "trl" or name not in TRLS)
    best = next(iter(shares), None)
    if best is None or shares[best] < LOWEST_SHARE:
        most = "" if best is None else f" ({best} knows {shares[best]:.0%} of them)"
        raise ValueError(
            f"most of its keys belong to no trainer that is known ({names}){most}: name the trainer with --trainer"
        )
    if best in REFUSED:
        raise ValueError(f"a configuration of {best}, which is not translated: {names} are (docs/tasks/coming_from.md)")
    return choose([name for name, share in shares.items() if share == shares[best]], given, path)


def fits(trainer: str, key: str, value: Any) -> bool:
    """Whether a key's value is one that the trainer has."""
    allowed = VALUES.get(key, {}).get(trainer)
    values = value if isinstance(value, list) else [value]
    return allowed is None or all(item in allowed for item in values if isinstance(item, str))


def choose(equal: list[str], given: dict[str, Any], path: Path | None) -> str:
    """One of the trainers whose keys fit equally: that of the path's name, TRL's for supervised fine-tuning if none is
    of preferences alone, or any of them if the file is refused anyway."""
    words = set() if path is None else set(re.findall("[a-z]+", "/".join(path.absolute().parts[-2:]).lower()))
    named = [name for name in equal if TRLS.get(name, set()) & words]
    if len(named) == 1:
        return named[0]
    if len(equal) == 1 or OTHER_OBJECTIVES.keys() & given.keys():
        return equal[0]
    if "trl" in equal and set(equal) <= set(TRLS):
        return "trl"
    raise ValueError(f"its keys fit {' and '.join(equal)} equally: name the trainer with --trainer")
