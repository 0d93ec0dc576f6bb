"""LLaMA-Factory's preferences: stages dpo, kto and rm with their keys, and the columns of their data sets."""

from typing import Any

from mini_trainer.tools.importers.preferences import (
    LOSSES,
    MEANS_OF_MEANS,
    POINT,
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
    allow,
    needless,
    read_number,
    refuse,
    set_option,
)

OBJECTIVES = {"dpo": "preference", "kto": "kto", "rm": "reward"}
HEAD = f"{DIFFERS}: the head has no bias and no dropout, and is exported with the model; there it is a file beside it"
QUESTIONS = ("question", "instruction")  # columns whose text becomes the user's message


def find_objective(given: dict[str, Any]) -> str:
    return OBJECTIVES.get(str(given.get("stage")), "causal-lm")


def list_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Values for keys of preferences that are left out."""
    defaults = {"causal-lm": {}, "reward": {}, "kto": {"pref_beta": 0.1},
                "preference": {"pref_beta": 0.1, "pref_loss": "sigmoid"}}[find_objective(given)]  # fmt: skip
    return defaults | ({"simpo_gamma": 0.5} if given.get("pref_loss") == "simpo" else {})


def convert_stage(to: Conversion, value: str) -> str:
    return {"dpo": f"{NEEDLESS}: pref_loss says the loss", "kto": f"objective: kto; {POINT}",
            "rm": f"objective: reward; {HEAD}"}[value]  # fmt: skip


def convert_loss(to: Conversion, key: str, value: Any) -> str:
    """The loss; with orpo and pref_ftx, the likelihood's weight."""
    known = {name: LOSSES[name] for name in ("sigmoid", "hinge", "ipo")} | {"orpo": "orpo", "simpo": "simpo"}
    if not isinstance(value, str) or value not in known:
        raise Refusal(f"the loss {value!r} is not here: {', '.join(known)} are")
    told = set_loss(to, known[value])
    return f"{told}; {MEANS_OF_MEANS}" if value == "orpo" else told


def convert_likelihood(to: Conversion, key: str, value: Any) -> str:
    """The weight of the chosen answers' negative log-likelihood, to which ORPO's own 1 is added."""
    weight = read_number(key, value)
    if weight == 0:
        return NEEDLESS
    if to.objective == "kto":
        raise Refusal("a likelihood beside KTO's loss is not here")
    weight += 1 if to.get("pref_loss") == "orpo" else 0
    return f"{set_option('preference_nll_weight')(to, key, weight)}; {MEANS_OF_MEANS}"


def convert_adapter_dropout(to: Conversion, key: str, value: Any) -> str:
    if to.objective in ("preference", "kto"):
        return f"{NEEDLESS}: no dropout, as there where preferences are learned"
    return set_option("lora_dropout")(to, key, value)


def convert_adapter(to: Conversion, key: str, value: Any) -> str:
    """The adapter to continue from, which is part of the reference here."""
    told = set_option("lora_adapter")(to, key, value)
    if to.objective in ("causal-lm", "reward") or to.get("ref_model") or to.get("pref_loss") in ("orpo", "simpo"):
        return told
    return f"{told}; {DIFFERS}: the reference is the model with this adapter, there without it"


def convert_reference_bits(to: Conversion, key: str, value: Any) -> str:
    return f"{DIFFERS}: the reference stays unquantized" if value else NEEDLESS


def read_rows(to: Conversion, name: str, entry: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Options of process_data.py for one data set of preferences or of feedback."""
    columns = {what: column for what, column in entry.get("columns", {}).items() if column is not None}
    check_columns(to, name, entry, columns)
    read_prompt = read_text_prompt if entry.get("formatting", "alpaca") == "alpaca" else read_chat_prompt
    source = {"format": to.row_format} | read_prompt(to, name, columns, notes)
    if to.objective == "kto":
        return source | name_columns(label_field=(columns["kto_tag"], ("label", "kto_tag")))
    return source | name_columns(
        chosen_field=(columns["chosen"], ("chosen", "chosen_response")),
        rejected_field=(columns["rejected"], ("rejected", "rejected_response")),
    )


def check_columns(to: Conversion, name: str, entry: dict[str, Any], columns: dict[str, str]) -> None:
    """Refuses data sets without the answers that are needed, and with columns that are not read."""
    if to.objective == "kto" and "kto_tag" not in columns:
        raise Refusal(f"{name} has no kto_tag, which says what answers are good")
    if to.objective != "kto" and not (entry.get("ranking") and {"chosen", "rejected"} <= columns.keys()):
        raise Refusal(f"{name} has no ranking with the columns chosen and rejected")
    unread = [what for what in ("history",) if what in columns]
    unread += [what for what in ("system", "tools") if columns.get(what, what) != what]
    if unread:
        raise Refusal(f"{name}: columns for {', '.join(unread)} are not read with answers that are preferred")


def read_text_prompt(to: Conversion, name: str, columns: dict[str, str], notes: list[str]) -> dict[str, Any]:
    """The columns of Alpaca's prompt and, for feedback, of its answer."""
    prompt, query = columns.get("prompt", "prompt"), columns.get("query", "input")
    if prompt not in QUESTIONS or query != "input":
        raise Refusal(
            f"{name}: texts in the columns {prompt} and {query} would be continued without a chat template; rename them"
            " to question and input"
        )
    there = "after one line break" if "query" in columns else "nowhere"
    notes.append(f"{DIFFERS}: a row's input follows its prompt after a blank line, there {there}")
    answer = columns.get("response", "output")
    return name_columns(completion_field=(answer, ("completion",))) if to.objective == "kto" else {}


def read_chat_prompt(to: Conversion, name: str, columns: dict[str, str], notes: list[str]) -> dict[str, Any]:
    """The column of a prompt's messages or, for feedback, of the whole chat's."""
    messages = columns.get("messages", "conversations")
    if to.objective == "kto" and messages not in ("messages", "conversations"):
        raise Refusal(f"{name}: whole chats in the column {messages} are not read; rename it to messages")
    return name_columns(prompt_field=(messages, ("messages", "conversations")))


OTHER_LOSS = "changes the loss, and has no counterpart"
PREFERENCE_RULES: dict[str, Rule] = {
    "pref_loss": of_objective("preference", rule=convert_loss),
    "pref_beta": of_objective("preference", "kto", rule=set_option("preference_beta")),
    "pref_ftx": of_objective("preference", "kto", rule=convert_likelihood),
    "pref_bco_weight": of_objective("preference", rule=refuse(OTHER_LOSS)),
    "dpo_label_smoothing": of_objective("preference", rule=set_above_zero("preference_label_smoothing")),
    "simpo_gamma": of_objective("preference", rule=lambda to, key, value: set_option("preference_gamma")(to, key, value)
                                if to.get("pref_loss") == "simpo" else NEEDLESS),
    "kto_chosen_weight": of_objective("kto", rule=set_option("desirable_weight")),
    "kto_rejected_weight": of_objective("kto", rule=set_option("undesirable_weight")),
    "ref_model": of_objective("preference", "kto", rule=set_option("reference_model")),
    "ref_model_adapters": of_objective("preference", "kto", rule=refuse("merge the reference's adapter into it:"
                                                                        " mini-trainer merge-adapter")),
    "ref_model_quantization_bit": of_objective("preference", "kto", rule=convert_reference_bits),
    "ld_alpha": of_objective("preference", rule=allow(1, reason=OTHER_LOSS)),
    **dict.fromkeys(("reward_model", "ppo_buffer_size", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards",
                     "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type"),
                    needless("only PPO uses it, which is refused")),
}  # fmt: skip
