"""TRL's trainers of preferences: keys and defaults of DPOConfig, KTOConfig, ORPOConfig, CPOConfig and RewardConfig.

Their files do not name the trainer. Each is a peer of its own, recognised by its keys or named with --trainer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mini_trainer.tools.importers import trl
from mini_trainer.tools.importers.batches import PeerBatch, describe_device_batch
from mini_trainer.tools.importers.preferences import (
    POINT,
    PROMPT_LIKELIHOOD,
    TOGETHER,
    convert_lengths,
    convert_loss_smoothing,
    convert_losses,
    set_above_zero,
    set_loss,
)
from mini_trainer.tools.importers.rules import (
    DIFFERS,
    NEEDLESS,
    Conversion,
    Refusal,
    Rule,
    allow,
    missing,
    needless,
    of_lora,
    read_number,
    refuse,
    set_option,
)


@dataclass(frozen=True)
class Peer:
    """One of TRL's trainers, with what conversion.py asks of every peer."""

    objective: str
    defaults: dict[str, Any]
    RULES: dict[str, Rule]
    normalize: Callable[[dict[str, Any]], dict[str, Any]] = trl.normalize
    trains_adapter: Callable[[dict[str, Any]], bool] = trl.trains_adapter

    def find_objective(self, given: dict[str, Any]) -> str:
        return self.objective

    def list_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        defaults = trl.list_shared_defaults(given) | self.defaults
        return {key: value for key, value in defaults.items() if "lora" not in key or self.trains_adapter(given)}

    def describe_batch(self, to: Conversion) -> PeerBatch:
        """Pairs of a step, or answers of KTO's."""
        return describe_device_batch(to, pack_length=None)


def convert_length(to: Conversion, key: str, value: Any) -> str:
    """The longest sequence; pairs of the reward trainer that are longer are dropped there, all others cut."""
    length = read_number(key, value)
    told = convert_lengths(to, length, to.get_number("per_device_train_batch_size", default=8))
    there = f"if one is longer than {length}" if to.objective == "reward" else f"each is cut to {length}"
    return f"{told}; {TOGETHER} {there}"


def convert_kto_loss(to: Conversion, key: str, value: Any) -> str:
    if value != "kto":
        raise Refusal(f"the loss {value!r} on single answers is not here: kto is")
    return f"{NEEDLESS}: objective kto; pairs need format: preference and feedback_from_pairs: true; {POINT}"


def convert_orpo(to: Conversion, key: str, value: Any) -> str:
    return f"{set_loss(to, 'orpo')}; {PROMPT_LIKELIHOOD}"


def convert_sampling(to: Conversion, key: str, value: Any) -> str:
    return NEEDLESS if value == "random" else f"{DIFFERS}: samples come in a random order, there {value}"


def convert_task(to: Conversion, key: str, value: Any) -> str:
    return NEEDLESS if value == "SEQ_CLS" else f"{DIFFERS}: the new head trains beside the adapters, there it stays"


def list_cpo_keys(given: dict[str, Any]) -> dict[str, Any]:
    """CPOConfig's keys. "alphapo" is short for simpo without the likelihood; the SimPO paper's own trainer has
    gamma_beta_ratio and sft_weight in place of simpo_gamma and cpo_alpha."""
    given = trl.normalize(given)
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


def convert_cpo_loss(to: Conversion, key: str, value: Any) -> str:
    if value != "simpo":
        raise Refusal(f"CPO's loss {value!r}, without a reference, is not here: simpo is")
    return set_loss(to, "simpo")


OTHER_LOSS = "changes the loss, and has no counterpart"
BASE: dict[str, Rule] = trl.SHARED | {
    "max_length": convert_length,
    "max_prompt_length": missing("prompts are not cut"),
    "disable_dropout": needless("adapters have no dropout then; a model's own is that of its config"),
    "generate_during_eval": missing("generate.py writes answers"),
    **dict.fromkeys(("padding_value", "label_pad_token_id", "is_encoder_decoder", "ignore_bias_buffers",
                     "max_target_length", "use_logits_to_keep", "use_liger_loss"),
                    needless("nothing is padded, and the loss never holds all logits")),
}  # fmt: skip
WITH_REFERENCE: dict[str, Rule] = BASE | {
    "beta": set_option("preference_beta"),
    "precompute_ref_log_probs": needless("the reference is always computed once, before the first step"),
    "precompute_ref_batch_size": needless("max_tokens_per_gpu says it"),
    "sync_ref_model": refuse("the reference stays what it is (TR-DPO moves it)"),
    "ref_model_mixup_alpha": needless("it is an argument of sync_ref_model"),
    "ref_model_sync_steps": needless("it is an argument of sync_ref_model"),
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
    "reference_free": refuse("sums of log-probabilities without a reference are not here: simpo and orpo are"),
}
KTO_RULES: dict[str, Rule] = WITH_REFERENCE | {
    "loss_type": convert_kto_loss,
    "desirable_weight": set_option("desirable_weight"),
    "undesirable_weight": set_option("undesirable_weight"),
    "train_sampling_strategy": convert_sampling,
}
ORPO_RULES: dict[str, Rule] = BASE | {
    "loss": convert_orpo,
    "beta": set_option("preference_beta"),
    "max_completion_length": needless("it is for encoder-decoders"),
}
CPO_RULES: dict[str, Rule] = BASE | {
    "loss_type": convert_cpo_loss,
    "beta": set_option("preference_beta"),
    "simpo_gamma": set_option("preference_gamma"),
    "cpo_alpha": set_above_zero("preference_nll_weight"),
    "gamma_beta_ratio": needless("it is written as simpo_gamma, times beta"),
    "sft_weight": needless("it is written as cpo_alpha"),
    "label_smoothing": allow(0, reason=OTHER_LOSS),
    "alpha": allow(0, reason=OTHER_LOSS),
    "max_completion_length": needless("it is for encoder-decoders"),
}
REWARD_RULES: dict[str, Rule] = BASE | {
    "center_rewards_coefficient": set_option("reward_centering"),
    "lora_task_type": of_lora(convert_task),
}
WITH_LOSS = {"learning_rate": 1e-6, "beta": 0.1}
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
