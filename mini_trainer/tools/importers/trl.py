"""TRL's keys and defaults: ModelConfig, the scripts' own, SFTConfig, DPOConfig, KTOConfig, ORPOConfig, CPOConfig and
RewardConfig.

Their files do not name the trainer. Each is a separate peer, recognised by its keys or named with --trainer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mini_trainer.tools.importers.batches import PeerBatch, describe_device_batch
from mini_trainer.tools.importers.preferences import (
    OTHER_LOSS,
    POINT,
    PROMPT_LIKELIHOOD,
    REFERENCE_FIRST,
    convert_lengths,
    convert_loss_smoothing,
    convert_losses,
    set_above_zero,
)
from mini_trainer.tools.importers.rules import (
    DIFFERS,
    NEEDLESS,
    Conversion,
    Refusal,
    Rule,
    allow,
    by_value,
    differs,
    if_off,
    missing,
    needless,
    noting,
    of_lora,
    only_if,
    read_number,
    refuse,
    refuse_any,
    say,
    set_data_option,
    set_if_true,
    set_in_both,
    set_option,
    set_to,
    set_tracker,
    set_weight_ratio,
    unless,
)
from mini_trainer.tools.importers.shared_keys import convert_targets
from mini_trainer.tools.importers.sources import add_sources, convert_template_text, name_hub_rows
from mini_trainer.tools.importers.training_arguments import IN_BF16, OFFLOADING, PACKED, TRAINING_ARGUMENTS

WHOLE = (
    f"{DIFFERS}: whole chats are trained on there, only the assistant's tokens here; of prompts with completions,"
    f" both train on the completion"
)

DEFAULTS = {"lr_scheduler_type": "linear", "num_train_epochs": 3, "per_device_train_batch_size": 8,
            "adam_beta2": 0.999, "max_length": 1024}  # fmt: skip
LORA_DEFAULTS = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}


def normalize(given: dict[str, Any]) -> dict[str, Any]:
    """The older name of max_length."""
    given = dict(given)
    if "max_seq_length" in given:
        given.setdefault("max_length", given["max_seq_length"])
    return given


@dataclass(frozen=True)
class Peer:
    """One of TRL's trainers, with what conversion.py asks of every peer."""

    objective: str
    defaults: dict[str, Any]
    RULES: dict[str, Rule]
    normalize: Callable[[dict[str, Any]], dict[str, Any]] = normalize

    def trains_adapter(self, given: dict[str, Any]) -> bool:
        return bool(given.get("use_peft"))

    def find_objective(self, given: dict[str, Any]) -> str:
        return self.objective

    def list_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        """TRL's values for keys that are left out, where this trainer's default differs."""
        defaults = DEFAULTS | LORA_DEFAULTS | self.defaults
        return {key: value for key, value in defaults.items() if "lora" not in key or self.trains_adapter(given)}

    def describe_batch(self, to: Conversion) -> PeerBatch:
        """Rows of a step, which are packs if texts are packed; pairs, or answers of KTO's."""
        packs = to.reads_texts and to.get("packing")
        return describe_device_batch(to, pack_length=to.get_number("max_length", default=1024) if packs else None)


def convert_length(to: Conversion, key: str, value: Any) -> str:
    """The longest sample; pairs of the reward trainer that are longer are dropped there, all others cut."""
    length, rows = read_number(key, value), to.get_number("per_device_train_batch_size", default=8)
    there = {"causal-lm": "cut", "reward": f"if one is longer than {length}"}
    return convert_lengths(to, length, rows, there=there.get(to.objective, f"each is cut to {length}"))


def convert_dataset(to: Conversion, key: str, value: Any) -> str:
    """A data set of the hub, with its configuration and its split."""
    if not isinstance(value, str):
        raise ValueError(f"{key} is a name, given {value!r}")
    if to.get("dataset_mixture"):
        return f"{NEEDLESS}: dataset_mixture overrides it"
    source = name_hub_rows(value, to.get("dataset_config"), split=to.get("dataset_train_split"))
    return add_sources(to, [source], [])


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
        sources.append(name_hub_rows(name, config, split=split) | take_share(entry, split, notes))
    size = value.get("test_split_size")
    if size is not None:
        share = read_number("test_split_size", size)
        if 0 < share < 1:
            to.data["validation_share"] = share
        else:
            notes.append(f"{DIFFERS}: validation_share is a share, given test_split_size {size}")
    return add_sources(to, sources, notes)


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


def convert_peft_targets(to: Conversion, key: str, value: Any) -> str:
    told = convert_targets(to, key, value)
    is_default = value == ["q_proj", "v_proj"]
    return f"{told}; {DIFFERS}: peft chooses by the architecture, for most of them these" if is_default else told


def list_cpo_keys(given: dict[str, Any]) -> dict[str, Any]:
    """CPOConfig's keys. "alphapo" is short for simpo without the likelihood; the SimPO paper's own trainer has
    gamma_beta_ratio and sft_weight in place of simpo_gamma and cpo_alpha."""
    given = normalize(given)
    if given.get("loss_type") == "alphapo":
        given |= {"loss_type": "simpo", "cpo_alpha": 0}
    if "gamma_beta_ratio" in given and given.get("loss_type", "sigmoid") == "sigmoid":
        given = {"beta": 2.0, "cpo_alpha": given.get("sft_weight", 0)} | given | {"loss_type": "simpo"}
        try:
            ratio, beta = (read_number(key, given[key]) for key in ("gamma_beta_ratio", "beta"))
            given.setdefault("simpo_gamma", ratio * beta)
        except ValueError:  # reported where the key is followed
            pass
    return given


# Keys of all of its trainers.
SHARED: dict[str, Rule] = TRAINING_ARGUMENTS | {
    "max_length": convert_length,
    "model_name_or_path": set_in_both("model_name_or_path"),
    "model_revision": set_in_both("model_revision"),
    "dataset_name": convert_dataset,
    "dataset_config": needless("it is written into input_dataset"),
    "dataset_train_split": needless("it is written as split"),
    "dataset_test_split": missing("tokenize it, and give validation_data_path"),
    **dict.fromkeys(("dataset_mixture", "datasets"), convert_mixture),
    "dataset_mixer": convert_mixer,
    "dataset_splits": needless("those for training are written as split"),
    "dataset_streaming": needless("rows are read as they come"),
    "truncation_mode": needless("longer samples are dropped"),
    **dict.fromkeys(("chat_template", "chat_template_path"), convert_template_text),
    **dict.fromkeys(("dataset_num_proc", "preprocessing_num_workers"), set_data_option("num_proc")),
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
    "wandb_project": set_tracker("wandb", variable="WANDB_PROJECT"),
    "wandb_entity": missing("set WANDB_ENTITY"),
    "hub_model_revision": differs("exports are uploaded to the repository's main branch"),
    "callbacks": missing("write them as classes for callbacks: docs/reference/callbacks.md"),
    "benchmarks": missing("evaluate_model.py measures models"),
    "system_prompt": differs("a system message is the row's own, or the template's"),
    "dataset_prompt_column": needless("rows show their columns; --columns names another"),
}  # fmt: skip
SFT_RULES: dict[str, Rule] = SHARED | {
    "max_seq_length": needless("it is max_length"),
    "dataset_text_field": unless(
        "text", rule=lambda to, key, value: set_data_option("columns")(to, key, [f"text={value}"])
    ),
    "dataset_kwargs": differs("rows are tokenized by process_data.py"),
    "assistant_only_loss": if_off(say(WHOLE)),
    "completion_only_loss": by_value(
        {False: refuse_any("prompts are never trained here, only completions")}, other=say(NEEDLESS)
    ),
    "loss_type": by_value(
        {"nll": say(NEEDLESS), "chunked_nll": say(NEEDLESS), "dft": set_to(loss_weighting="dft")},
        other=refuse_any("the loss {value!r} has no objective here"),
    ),
    "packing": PACKED,
    "packing_strategy": only_if(
        lambda to: to.get("packing"),
        unless("bfd", rule=say(f"{DIFFERS}: samples are packed whole, and never see each other")),
    ),
    "eval_packing": PACKED,
}
BASE: dict[str, Rule] = SHARED | {
    "max_prompt_length": missing("prompts are not cut"),
    "disable_dropout": needless("adapters have no dropout then; a model's own is that of its config"),
    "generate_during_eval": missing("generate.py writes answers"),
    **dict.fromkeys(("padding_value", "label_pad_token_id", "is_encoder_decoder", "ignore_bias_buffers",
                     "max_target_length", "use_logits_to_keep", "use_liger_loss"),
                    needless("nothing is padded, and the loss never holds all logits")),
}  # fmt: skip
WITH_REFERENCE: dict[str, Rule] = BASE | {
    "beta": set_option("preference_beta"),
    "precompute_ref_log_probs": REFERENCE_FIRST,
    "precompute_ref_batch_size": needless("max_tokens_per_gpu says it"),
    "sync_ref_model": refuse("the reference stays fixed (TR-DPO moves it)"),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), needless("it is an argument of sync_ref_model")),
    "ref_model_init_kwargs": needless("the reference is loaded as the model is"),
    **dict.fromkeys(("model_adapter_name", "ref_adapter_name", "force_use_ref_model"),
                    needless("the reference is the model that the run starts with, or --reference-model")),
}  # fmt: skip
DPO_RULES: dict[str, Rule] = WITH_REFERENCE | {
    "loss_type": convert_losses("loss_weights"),
    "loss_weights": needless("they are written with the loss"),
    "label_smoothing": convert_loss_smoothing("loss_type"),
    "rpo_alpha": set_above_zero("preference_nll_weight"),
    "ld_alpha": allow(1, reason=OTHER_LOSS),
    "f_divergence_type": allow("reverse_kl", reason=OTHER_LOSS),
    "f_alpha_divergence_coef": needless("it is an argument of f_divergence_type"),
    "discopop_tau": needless("it is an argument of a loss that is refused"),
    "use_weighting": refuse(OTHER_LOSS),
    "reference_free": refuse("sums of log-probabilities without a reference are not supported: simpo and orpo are"),
}
KTO_RULES: dict[str, Rule] = WITH_REFERENCE | {
    "loss_type": by_value(
        {"kto": needless(f"objective kto; pairs need format: preference and feedback_from_pairs: true; {POINT}")},
        other=refuse_any("the loss {value!r} on single answers is not supported: kto is"),
    ),
    **dict.fromkeys(
        ("desirable_weight", "undesirable_weight"), set_weight_ratio("desirable_weight", "undesirable_weight")
    ),
    "train_sampling_strategy": unless(
        "random", rule=say(f"{DIFFERS}: samples come in a random order, there {{value}}")
    ),
}
ORPO_RULES: dict[str, Rule] = BASE | {
    "loss": noting(set_to(preference_loss="orpo"), PROMPT_LIKELIHOOD),
    "beta": set_option("preference_beta"),
    "max_completion_length": needless("it is for encoder-decoders"),
}
CPO_RULES: dict[str, Rule] = BASE | {
    "loss_type": by_value(
        {"simpo": set_to(preference_loss="simpo")},
        other=refuse_any("CPO's loss {value!r}, without a reference, is not supported: simpo is"),
    ),
    "beta": set_option("preference_beta"),
    "simpo_gamma": set_option("preference_gamma"),
    "cpo_alpha": set_above_zero("preference_nll_weight"),
    "gamma_beta_ratio": needless("it is written as simpo_gamma, times beta"),
    "sft_weight": needless("it is written as cpo_alpha"),
    **dict.fromkeys(("label_smoothing", "alpha"), allow(0, reason=OTHER_LOSS)),
    "max_completion_length": needless("it is for encoder-decoders"),
}
REWARD_RULES: dict[str, Rule] = BASE | {
    "center_rewards_coefficient": set_option("reward_centering"),
    "lora_task_type": of_lora(
        unless("SEQ_CLS", rule=say(f"{DIFFERS}: the new head is trained with the adapters, there it is frozen"))
    ),
}
WITH_LOSS = {"learning_rate": 1e-6, "beta": 0.1}
SFT = Peer("causal-lm", {"learning_rate": 2e-5, "assistant_only_loss": False}, SFT_RULES)
DPO = Peer("preference", WITH_LOSS | {"loss_type": ["sigmoid"]}, DPO_RULES)
KTO = Peer("kto", WITH_LOSS | {"loss_type": "kto", "train_sampling_strategy": "sequential"}, KTO_RULES)
ORPO = Peer("preference", WITH_LOSS | {"loss": "orpo"}, ORPO_RULES)
CPO = Peer(
    "preference",
    WITH_LOSS | {"loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5},
    CPO_RULES,
    normalize=list_cpo_keys,
)
REWARD = Peer("reward", {"learning_rate": 1e-4, "lora_task_type": "CAUSAL_LM"}, REWARD_RULES)
