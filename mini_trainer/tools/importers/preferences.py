"""Preference learning in the peers' words: losses and their weights, references, KTO's point; the keys of Axolotl and
LLaMA-Factory. TRL's are in trl.py, with its trainers."""

from typing import Any

from mini_trainer.tools.importers.rules import (
    DIFFERS,
    NEEDLESS,
    Conversion,
    Refusal,
    Rule,
    allow,
    by_value,
    differs,
    if_set,
    needless,
    noting,
    only_if,
    read_names,
    read_number,
    refuse,
    refuse_any,
    say,
    set_if_true,
    set_option,
    set_to,
    set_weight_ratio,
)

# Losses with a reference by TRL's names. "sft" beside one of them is the chosen answers' negative log-likelihood.
LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "apo_zero": "apo-zero"}
OTHER_LOSS = "changes the loss, and has no counterpart"
POINT = (
    f"{DIFFERS}: the point of reference is of the whole batch and of answers to other prompts, there of each"
    " micro-batch over all GPUs and of neighbouring answers"
)
PROMPT_LIKELIHOOD = f"{DIFFERS}: the added likelihood is of the chosen answer's tokens, there of its prompt's, too"
MEANS_OF_MEANS = f"{DIFFERS}: a mean over all chosen tokens of the batch, there the mean of each answer's mean"
REFERENCE_FIRST = needless("the reference is always computed once, before the first step")


def of_objective(*objectives: str, rule: Rule) -> Rule:
    """A rule for files that learn this."""
    return only_if(lambda to: to.objective in objectives, rule, otherwise="nothing that is learned here uses it")


def convert_losses(weights_key: str) -> Rule:
    """Losses by TRL's names: one with a reference, alone or with "sft"; `weights_key` has their weights."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        names = read_names(key, value)
        given = to.get(weights_key, default=[1] * len(names))
        if not isinstance(given, list) or len(given) != len(names):
            raise Refusal(f"{len(names)} losses with the weights {given!r}: must be as many")
        weights = dict(zip(names, [read_number(weights_key, weight) for weight in given], strict=True))
        nll = weights.pop("sft", None)
        if len(weights) != 1 or not weights.keys() <= LOSSES.keys() or len(set(names)) < len(names):
            raise Refusal(f"{', '.join(names)}: one of {', '.join(LOSSES)} can be trained, alone or with sft")
        ((name, weight),) = weights.items()
        if weight != 1:
            raise Refusal(f"the weight {weight} of {name}: is 1 here; only that of sft can be chosen")
        likelihood = {"preference_nll_weight": nll} if nll else {}
        return set_to(preference_loss=LOSSES[name], **likelihood)(to, key, value)

    return rule


def convert_loss_smoothing(losses_key: str) -> Rule:
    """Smoothed labels: TRL's loss "robust" uses them, "sigmoid" no longer does."""
    ignored = say(
        f"{DIFFERS}: this loss ignores it in today's TRL; earlier versions trained conservative DPO, which is"
        " --label-smoothing {value}"
    )

    def rule(to: Conversion, key: str, value: Any) -> str:
        is_used = "robust" in read_names(losses_key, to.get(losses_key, default="sigmoid"))
        return (set_option("label_smoothing") if is_used else ignored)(to, key, value)

    return if_set(rule)


def set_above_zero(name: str) -> Rule:
    """A weight that is added only if it is above 0."""
    return lambda to, key, value: set_option(name)(to, key, value) if read_number(key, value) > 0 else NEEDLESS


def convert_lengths(to: Conversion, length: int | float, rows: int | float, *, there: str) -> str:
    """The longest sample, and the tokens of one GPU's micro-batch. `there`: what happens to longer ones."""
    longest = to.num_sequences * length
    to.data["max_sample_num_tokens"], to.train["max_tokens_per_gpu"] = longest, longest * rows
    dropped = "longer ones are dropped" if to.reads_texts else "dropped if its two sequences are longer together"
    return (
        f"max_sample_num_tokens: {longest} (of process_data.py); max_tokens_per_gpu: {longest * rows}; {DIFFERS}:"
        f" {dropped}, there {there}"
    )


# The objectives of Axolotl's rl, which hands its keys to TRL.
AXOLOTL_OBJECTIVES = {
    "dpo": "preference",
    "ipo": "preference",
    "orpo": "preference",
    "simpo": "preference",
    "kto": "kto",
}
AXOLOTL_REFUSED = dict.fromkeys(("grpo", "gdpo"), "reinforcement learning") | {"ebft": "energy-based fine-tuning"}
NO_OBJECTIVE = f"has no objective here; {', '.join(AXOLOTL_OBJECTIVES)} are read"


def of_rl(*names: str, rule: Rule) -> Rule:
    """A rule for files with one of these as `rl`."""
    return only_if(lambda to: to.get("rl") in names, rule, otherwise="rl does not use it")


RL: dict[str, Rule] = {
    "dpo": only_if(
        lambda to: not to.get("dpo_loss_type"), set_to(preference_loss="dpo"), otherwise="dpo_loss_type says the loss"
    ),
    "ipo": set_to(preference_loss="ipo"),
    "orpo": noting(set_to(preference_loss="orpo"), PROMPT_LIKELIHOOD),
    "simpo": set_to(preference_loss="simpo"),
    "kto": say(f"objective: kto; {POINT}; samples come in a random order, there in the rows' order"),
    **{name: refuse_any(f"{{value!r}}: {kind} {NO_OBJECTIVE}") for name, kind in AXOLOTL_REFUSED.items()},
}
AXOLOTL_RULES: dict[str, Rule] = {
    "rl": if_set(by_value(RL, other=refuse_any(f"{{value!r}}: it {NO_OBJECTIVE}"))),
    "rl_beta": of_rl(*AXOLOTL_OBJECTIVES, rule=set_option("preference_beta")),
    **dict.fromkeys(("dpo_beta", "orpo_alpha"), needless("it is written as rl_beta, unless that is given")),
    "simpo_gamma": of_rl("simpo", rule=set_option("preference_gamma")),
    "cpo_alpha": of_rl("simpo", rule=set_above_zero("preference_nll_weight")),
    "rpo_alpha": of_rl("dpo", rule=set_above_zero("preference_nll_weight")),
    **dict.fromkeys(
        ("kto_desirable_weight", "kto_undesirable_weight"),
        of_rl("kto", rule=set_weight_ratio("kto_desirable_weight", "kto_undesirable_weight")),
    ),
    "dpo_loss_type": of_rl("dpo", rule=convert_losses("dpo_loss_weights")),
    "dpo_loss_weights": needless("they are written with dpo_loss_type"),
    "dpo_label_smoothing": of_rl("dpo", rule=convert_loss_smoothing("dpo_loss_type")),
    "dpo_use_weighting": of_rl("dpo", "ipo", rule=refuse(OTHER_LOSS)),
    "dpo_norm_loss": refuse(OTHER_LOSS),
    "dpo_padding_free": needless("samples are always packed, and never see each other"),
    "dpo_use_liger_kernel": set_if_true(use_liger_kernels=True),
    "precompute_ref_log_probs": REFERENCE_FIRST,
    "reward_model": needless("it is written as the objective"),
    "center_rewards_coefficient": of_objective("reward", rule=set_option("reward_centering")),
    "max_prompt_len": needless("only reinforcement learning reads it"),
}

# The objectives of LLaMA-Factory's stages.
LLAMA_FACTORY_OBJECTIVES = {"dpo": "preference", "kto": "kto", "rm": "reward"}
HEAD = f"{DIFFERS}: the head has no bias and no dropout, and is exported with the model; there it is a separate file"


def convert_likelihood(to: Conversion, key: str, value: Any) -> str:
    """The weight of the chosen answers' negative log-likelihood, with ORPO's own 1 added."""
    weight = read_number(key, value)
    if weight == 0:
        return NEEDLESS
    if to.objective == "kto":
        raise Refusal("a likelihood in addition to KTO's loss is not supported")
    weight += 1 if to.get("pref_loss") == "orpo" else 0
    return f"{set_option('preference_nll_weight')(to, key, weight)}; {MEANS_OF_MEANS}"


def convert_adapter(to: Conversion, key: str, value: Any) -> str:
    """The adapter to continue from, which is part of the reference here."""
    told = set_option("lora_adapter")(to, key, value)
    if to.objective in ("causal-lm", "reward") or to.get("ref_model") or to.get("pref_loss") in ("orpo", "simpo"):
        return told
    return f"{told}; {DIFFERS}: the reference is the model with this adapter, there without it"


STAGES: dict[str, Rule] = {
    "dpo": needless("pref_loss says the loss"),
    "kto": say(f"objective: kto; {POINT}"),
    "rm": say(f"objective: reward; {HEAD}"),
}
LOSS_RULES: dict[str, Rule] = {
    **{name: set_to(preference_loss=LOSSES[name]) for name in ("sigmoid", "ipo")},
    "orpo": noting(set_to(preference_loss="orpo"), MEANS_OF_MEANS),
    "simpo": set_to(preference_loss="simpo"),
}
OTHER_LOSS_REFUSED = refuse_any(f"the loss {{value!r}} is not supported: {', '.join(LOSS_RULES)} are")
ADAPTER_DROPOUT = only_if(
    lambda to: to.objective not in ("preference", "kto"),
    set_option("lora_dropout"),
    otherwise="no dropout, as there where preferences are learned",
)
LLAMA_FACTORY_RULES: dict[str, Rule] = {
    "pref_loss": of_objective("preference", rule=by_value(LOSS_RULES, other=OTHER_LOSS_REFUSED)),
    "pref_beta": of_objective("preference", "kto", rule=set_option("preference_beta")),
    "pref_ftx": of_objective("preference", "kto", rule=convert_likelihood),
    "pref_bco_weight": of_objective("preference", rule=refuse(OTHER_LOSS)),
    "dpo_label_smoothing": of_objective("preference", rule=set_above_zero("label_smoothing")),
    "simpo_gamma": of_objective("preference", rule=only_if(lambda to: to.get("pref_loss") == "simpo",
                                                               set_option("preference_gamma"))),
    **dict.fromkeys(("kto_chosen_weight", "kto_rejected_weight"),
                    of_objective("kto", rule=set_weight_ratio("kto_chosen_weight", "kto_rejected_weight"))),
    "ref_model": of_objective("preference", "kto", rule=set_option("reference_model")),
    "ref_model_adapters": of_objective("preference", "kto", rule=refuse("merge the reference's adapter into it:"
                                                                        " mini-trainer merge-adapter")),
    "ref_model_quantization_bit": of_objective("preference", "kto", rule=differs("the reference stays unquantized")),
    "ld_alpha": of_objective("preference", rule=allow(1, reason=OTHER_LOSS)),
    **dict.fromkeys(("reward_model", "ppo_buffer_size", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards",
                     "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type"),
                    needless("only PPO uses it, which is refused")),
}  # fmt: skip
