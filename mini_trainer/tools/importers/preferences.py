"""Preference learning in the peers' words: losses and their weights, references, KTO's point, formats of rows."""

from collections.abc import Sequence
from typing import Any

from mini_trainer.tools.importers.rules import (
    DIFFERS,
    NEEDLESS,
    Conversion,
    Refusal,
    Rule,
    read_names,
    read_number,
    set_option,
)

# Losses with a reference by TRL's names. "sft" beside one of them is the chosen answers' negative log-likelihood.
LOSSES = {"sigmoid": "dpo", "robust": "robust", "ipo": "ipo", "hinge": "hinge", "apo_zero": "apo-zero",
          "apo_down": "apo-down"}  # fmt: skip
POINT = (
    f"{DIFFERS}: the point of reference is of the whole batch and of answers to other prompts, there of each"
    " micro-batch over all GPUs and of neighbouring answers"
)
PROMPT_LIKELIHOOD = f"{DIFFERS}: the added likelihood is of the chosen answer's tokens, there of its prompt's, too"
MEANS_OF_MEANS = f"{DIFFERS}: a mean over all chosen tokens of the batch, there the mean of each answer's mean"
TOGETHER = f"{DIFFERS}: dropped if its two sequences are longer together, there"


def of_objective(*objectives: str, rule: Rule) -> Rule:
    """A rule for files that learn this; in other files the key has no effect."""
    return lambda to, key, value: (
        rule(to, key, value) if to.objective in objectives else f"{NEEDLESS}: nothing that is learned here uses it"
    )


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
        return set_loss(to, LOSSES[name], nll_weight=nll)

    return rule


def set_loss(to: Conversion, loss: str, *, nll_weight: int | float | None = None) -> str:
    """Sets the loss of a pair, and the weight of the negative log-likelihood."""
    to.train["preference_loss"] = loss
    if not nll_weight:
        return f"preference_loss: {loss}"
    to.train["preference_nll_weight"] = nll_weight
    return f"preference_loss: {loss}, preference_nll_weight: {nll_weight}"


def convert_loss_smoothing(losses_key: str) -> Rule:
    """Smoothed labels: TRL's loss "robust" uses them, "sigmoid" no longer does."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if not value:
            return NEEDLESS
        losses = read_names(losses_key, to.get(losses_key, default="sigmoid"))
        if "robust" in losses:
            return set_option("preference_label_smoothing")(to, key, value)
        return (
            f"{DIFFERS}: this loss ignores it in today's TRL; earlier versions trained conservative DPO, which is"
            f" --preference-label-smoothing {value}"
        )

    return rule


def set_above_zero(name: str) -> Rule:
    """A weight that is added only if it is above 0."""
    return lambda to, key, value: set_option(name)(to, key, value) if read_number(key, value) > 0 else NEEDLESS


def convert_lengths(to: Conversion, length: int | float, rows: int | float) -> str:
    """The longest sample, and the tokens of one GPU's micro-batch, of which each sample has two sequences."""
    to.data["max_sample_num_tokens"] = to.num_sequences * length
    to.train["max_tokens_per_gpu"] = to.num_sequences * length * rows
    return (
        f"max_sample_num_tokens: {to.num_sequences * length} (of process_data.py);"
        f" max_tokens_per_gpu: {to.train['max_tokens_per_gpu']}"
    )


def name_columns(**names: tuple[str, Sequence[str]]) -> dict[str, str]:
    """Options for columns whose names are not among those that rows are looked through for."""
    return {option: name for option, (name, known) in names.items() if name not in known}
