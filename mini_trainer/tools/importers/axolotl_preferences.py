"""Axolotl's preferences: rl and its keys, which it hands to TRL, and the types of their data sets."""

from typing import Any

from mini_trainer.tools.importers.preferences import (
    POINT,
    PROMPT_LIKELIHOOD,
    convert_loss_smoothing,
    convert_losses,
    name_columns,
    of_objective,
    set_above_zero,
    set_loss,
)
from mini_trainer.tools.importers.rules import (
    DIFFERS,
    NEEDLESS,
    Conversion,
    Refusal,
    Rule,
    needless,
    refuse,
    set_if_true,
    set_option,
    set_unless_zero,
)

OBJECTIVES = {"dpo": "preference", "ipo": "preference", "orpo": "preference", "simpo": "preference", "kto": "kto"}
OTHERS = {"grpo": "reinforcement learning", "gdpo": "reinforcement learning", "ebft": "energy-based fine-tuning"}
# Types that write chatml's or llama3's template, with the column of their prompts; None: rows are whole chats.
TYPES = {
    "preference": {"intel": "question", "icr": "input", "prompt_pairs": "prompt", "default": "prompt", "ultra": None,
                   "argilla_chat": None},
    "kto": {"argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"},
    "reward": {},
}  # fmt: skip
DEFAULTS = {"prompt": "{prompt}", "chosen": "{chosen}", "rejected": "{rejected}", "completion": "{completion}"}


def find_objective(given: dict[str, Any]) -> str:
    return "reward" if given.get("reward_model") else OBJECTIVES.get(str(given.get("rl")), "causal-lm")


def list_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """TRL's values for keys of preferences that are left out."""
    objective = find_objective(given)
    defaults = {} if objective in ("causal-lm", "reward") else {"rl_beta": given.get("orpo_alpha", 0.1)}
    return defaults | ({"cpo_alpha": 1.0} if given.get("rl") == "simpo" else {})


def convert_rl(to: Conversion, key: str, value: Any) -> str:
    """The objective, and the loss that it implies."""
    if not value:
        return NEEDLESS
    if str(value) not in OBJECTIVES:
        why = OTHERS.get(str(value), "it")
        raise Refusal(f"{value!r}: {why} has no objective here; {', '.join(OBJECTIVES)} are read")
    if value == "kto":
        return f"objective: kto; {POINT}; samples come in a random order, there in the rows' order"
    if value == "dpo" and to.get("dpo_loss_type"):
        return f"{NEEDLESS}: dpo_loss_type says the loss"
    told = set_loss(to, value)
    return f"{told}; {PROMPT_LIKELIHOOD}" if value == "orpo" else told


def read_rows(to: Conversion, rest: dict[str, Any], notes: list[str], kind: Any) -> dict[str, Any]:
    """Options of process_data.py for a data set of preferences, by its type."""
    source = {"format": to.row_format}
    if isinstance(kind, dict) and to.objective != "reward":
        return source | read_own_format(to, kind)
    if kind is None or (kind in ("passthrough", "passthrough.default") and to.objective == "preference"):
        return source
    family, _, name = str(kind).partition(".")
    if family == "bradley_terry" and to.objective == "reward":
        check_prompt(kind, "input", instead="without a type")
    if family == "chat_template" and to.objective == "preference":
        return source | read_messages(to, rest, notes, name or "default")
    if family in ("chatml", "llama3") and (name or "default") in TYPES[to.objective]:
        check_prompt(kind, TYPES[to.objective][name or "default"], instead=f"with type {family}.intel")
        if family == "llama3":
            notes.append(f"{DIFFERS}: the template llama3 leaves out blanks around messages")
        return source | {"chat_template": family}
    raise Refusal(
        f"type {kind!r} is not known here: chat_template, {', '.join(TYPES['preference'])} and (kto)"
        f" {', '.join(TYPES['kto'])} with chatml or llama3, and mappings of columns without formats are"
    )


def check_prompt(kind: str, column: str | None, *, instead: str) -> None:
    """Refuses a type whose prompts are in a column that is not read as the user's message."""
    if column not in ("question", "instruction", None):
        raise Refusal(
            f"type {kind!r}: texts in the column {column} would be continued without a chat template; rename it to"
            f" question, which is read {instead}"
        )


def read_messages(to: Conversion, rest: dict[str, Any], notes: list[str], name: str) -> dict[str, Any]:
    """Chats: a prompt's messages with two answers, or two whole chats."""
    # argilla, ORPO's only name, reads whole chats as argilla_chat does
    names = ("argilla",) if to.get("rl") == "orpo" else ("default", "argilla_chat")
    if name not in names:
        raise Refusal(f"type 'chat_template.{name}': with rl {to.get('rl')} {' and '.join(names)} are known here")
    chosen, rejected = rest.pop("field_chosen", "chosen"), rest.pop("field_rejected", "rejected")
    answers = name_columns(chosen_field=(chosen, ("chosen",)), rejected_field=(rejected, ("rejected",)))
    if name != "default":
        return answers
    prompt = name_columns(prompt_field=(rest.pop("field_messages", "messages"), ("messages", "conversations")))
    if prompt:
        notes.append(f"{DIFFERS}: a prompt in {prompt['prompt_field']} that is one text is continued as it is")
    return prompt | answers


def read_own_format(to: Conversion, kind: dict[str, Any]) -> dict[str, Any]:
    """Columns of other names, whose texts are continued as they are; formats of their own are refused."""
    given = {name: value for name, value in kind.items() if value is not None}
    for part, plain in DEFAULTS.items():
        text = given.pop(f"{part}_format", None) or plain
        if text != plain:
            raise Refusal(f"{part}_format {text!r}: texts are continued as they are; write it into the rows, or use"
                          " messages with a chat template")  # fmt: skip
    given.pop("field_system", None)  # only formats write it
    parts = ("prompt", "completion", "label") if to.objective == "kto" else ("prompt", "chosen", "rejected")
    columns = {f"{part}_field": given.pop(f"field_{part}", part) for part in parts}
    if given:
        raise Refusal(f"a type with the keys {', '.join(sorted(map(str, given)))} is not known here")
    return {option: name for option, name in columns.items() if f"{name}_field" != option}


def of_rl(*names: str, rule: Rule) -> Rule:
    """A rule for files with one of these as `rl`; in others the key has no effect there either."""
    return lambda to, key, value: rule(to, key, value) if to.get("rl") in names else f"{NEEDLESS}: rl does not use it"


OTHER_LOSS = "changes the loss, and has no counterpart"
PREFERENCE_RULES: dict[str, Rule] = {
    "rl": convert_rl,
    "rl_beta": of_rl(*OBJECTIVES, rule=set_option("preference_beta")),
    "dpo_beta": needless("it is written as rl_beta, unless that is there"),
    "orpo_alpha": needless("it is written as rl_beta, unless that is there"),
    "simpo_gamma": of_rl("simpo", rule=set_option("preference_gamma")),
    "cpo_alpha": of_rl("simpo", rule=set_above_zero("preference_nll_weight")),
    "rpo_alpha": of_rl("dpo", rule=set_above_zero("preference_nll_weight")),
    "kto_desirable_weight": of_rl("kto", rule=set_unless_zero("desirable_weight")),
    "kto_undesirable_weight": of_rl("kto", rule=set_unless_zero("undesirable_weight")),
    "dpo_loss_type": of_rl("dpo", rule=convert_losses("dpo_loss_weights")),
    "dpo_loss_weights": needless("they are written with dpo_loss_type"),
    "dpo_label_smoothing": of_rl("dpo", rule=convert_loss_smoothing("dpo_loss_type")),
    "dpo_use_weighting": of_rl("dpo", "ipo", rule=refuse(OTHER_LOSS)),
    "dpo_norm_loss": refuse(OTHER_LOSS),
    "dpo_padding_free": needless("samples are always packed, and never see each other"),
    "dpo_use_liger_kernel": set_if_true(use_liger_kernels=True),
    "precompute_ref_log_probs": needless("the reference is always computed once, before the first step"),
    "reward_model": needless("it is written as the objective"),
    "center_rewards_coefficient": of_objective("reward", rule=set_option("reward_centering")),
    "max_prompt_len": needless("only reinforcement learning reads it"),
}
