"""Rules: each sets the options that correspond to another trainer's key, and returns the key's outcome."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mini_trainer.options.objectives import OBJECTIVES

# Prefixes of outcomes; DIFFERS can also occur later in one.
NEEDLESS, MISSING, DIFFERS = "needs no option", "no counterpart", "differs"


class Refusal(Exception):
    """The file configures training that is not supported here; nothing is written."""


@dataclass
class Conversion:
    """Outcomes of the other trainer's keys so far, and the resulting options."""

    given: dict[str, Any]
    num_gpus: int
    is_lora: bool = False  # whether adapters train
    objective: str = "causal-lm"  # as --objective says it
    lengths: np.ndarray | None = None  # tokens of each of the user's samples, if tokenized
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # options of process_data.py that all data sets share
    sources: list[dict[str, Any]] = field(default_factory=list)  # one entry per run of process_data.py
    files: dict[str, str] = field(default_factory=dict)  # other files to write, by name
    told: dict[str, str] = field(default_factory=dict)  # the outcome of every key, as printed
    epochs: int | float | None = None

    @property
    def row_format(self) -> str | None:
        """--format of the rows that the objective needs; None: any format of texts."""
        return OBJECTIVES[self.objective].row_format

    @property
    def reads_texts(self) -> bool:
        return self.row_format is None

    @property
    def num_sequences(self) -> int:
        """Sequences of a sample: a pair's two; kto: the answer, and an unrelated one to the same prompt."""
        return 1 if self.reads_texts else 2

    def get(self, *names: str, default: Any = None) -> Any:
        """Value of the first of these keys that the file has."""
        return next((self.given[name] for name in names if self.given.get(name) is not None), default)

    def get_number(self, *names: str, default: int) -> int | float:
        """Value, as a number, of the first of these keys that the file has."""
        name = next((name for name in names if self.given.get(name) is not None), None)
        return default if name is None else read_number(name, self.given[name])

    def list_outputs(self, kind: str = "") -> list[str]:
        """Names of the tokenized data sets: data.arrow, or data_1.arrow and so on."""
        number = max(1, len(self.sources))
        return [f"data.{kind}arrow"] if number == 1 else [f"data_{i + 1}.{kind}arrow" for i in range(number)]

    def list_sources(self) -> list[dict[str, Any]]:
        """The options of each run of process_data.py."""
        outputs = zip(self.list_outputs(), self.sources or [{}], strict=True)
        return [{"output_file": output} | self.data | source for output, source in outputs]


Rule = Callable[[Conversion, str, Any], str]  # sets the options for a key and its value; returns the outcome


def read_number(key: str, value: Any) -> int | float:
    """Reads a key's value as a number, even if YAML 1.1 reads it as text (1e-4); ValueError if it is not one."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{key} must be a number, given {value!r}")
    return int(number) if number.is_integer() else number


def read_names(key: str, value: Any) -> list[str]:
    """Reads names from a list or a comma-separated string."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be a list of names, given {value!r}")
    return names


def set_option(name: str) -> Rule:
    """Rule for a key that is train.py's option `name`."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.train[name] = value
        return f"{name}: {value}"

    return rule


def set_in_both(name: str) -> Rule:
    """Rule for a key that is an option `name` of train.py and of process_data.py."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.data[name] = value
        return set_option(name)(to, key, value)

    return rule


def set_unless_zero(name: str) -> Rule:
    """Rule for a key that is train.py's option `name`, where 0 turns it off in the other trainer."""
    return if_set(set_option(name))


def set_data_option(name: str) -> Rule:
    """Rule for a key that is process_data.py's option `name`."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.data[name] = value
        return f"{name}: {value} (of process_data.py)"

    return rule


def set_to(**values: Any) -> Rule:
    """Rule that sets the options `values` for any value of the key."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.train.update(values)
        return ", ".join(f"{name}: {chosen}" for name, chosen in values.items())

    return rule


def set_if_true(**values: Any) -> Rule:
    """Rule for a switch that sets the options `values`."""
    return if_set(set_to(**values))


def say(outcome: str) -> Rule:
    """Rule that sets nothing. In its outcome, as in reasons for refusing, {value} is the key's value."""
    return lambda to, key, value: outcome.format(value=value)


def needless(reason: str) -> Rule:
    return say(f"{NEEDLESS}: {reason}")


def missing(reason: str) -> Rule:
    return if_set(say(f"{MISSING}: {reason}"))


def differs(reason: str) -> Rule:
    """Rule for a key that, if set, changes training in a way that has no option here."""
    return if_set(say(f"{DIFFERS}: {reason}"))


def refuse_any(reason: str) -> Rule:
    """Rule for a key, or some of its values, that makes the file unsupported."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        raise Refusal(reason.format(value=value))

    return rule


def refuse(reason: str) -> Rule:
    """Rule for a key that, if set, makes the file unsupported."""
    return if_set(refuse_any(reason))


def if_set(rule: Rule) -> Rule:
    """Limits a rule to files that set its key."""
    return lambda to, key, value: rule(to, key, value) if value else NEEDLESS


def if_off(rule: Rule) -> Rule:
    """Limits a rule to files that turn its key off."""
    return lambda to, key, value: NEEDLESS if value else rule(to, key, value)


def by_value(rules: Mapping[Any, Rule], *, other: Rule) -> Rule:
    """Rule for a key with a rule for each value; `other`: for all other values."""
    return lambda to, key, value: next((rules[item] for item in rules if item == value), other)(to, key, value)


def unless(*values: Any, rule: Rule) -> Rule:
    """Limits a rule to other values than these, which need no option."""
    return by_value(dict.fromkeys(values, say(NEEDLESS)), other=rule)


def allow(*allowed: Any, reason: str) -> Rule:
    """Rule for a key whose other values are refused."""
    return unless(*allowed, rule=refuse_any(f"{reason}, given {{value!r}}"))


def noting(rule: Rule, note: str) -> Rule:
    """Rule with a note after its outcome."""
    return lambda to, key, value: f"{rule(to, key, value)}; {note}"


def only_if(applies: Callable[[Conversion], Any], rule: Rule, *, otherwise: str = "") -> Rule:
    """Limits a rule to some files; in others the key has no effect, for the reason `otherwise`."""
    no_effect = f"{NEEDLESS}: {otherwise}" if otherwise else NEEDLESS
    return lambda to, key, value: rule(to, key, value) if applies(to) else no_effect


def of_lora(rule: Rule) -> Rule:
    """Limits a rule to files that train adapters."""
    return only_if(lambda to: to.is_lora, rule, otherwise="no adapter trains")


def of_new_lora(rule: Rule) -> Rule:
    """A rule for files that train new adapters; one that is continued keeps its rank, its scale and its layers."""
    is_new = only_if(
        lambda to: not to.get("adapter_name_or_path", "lora_model_dir"),
        rule,
        otherwise="the adapter that is continued says it",
    )
    return of_lora(is_new)


def choose(name: str, choices: dict[Any, Any]) -> Rule:
    """Rule that sets the option `name` from a table of the key's values; other values have no counterpart."""
    allowed = ", ".join(dict.fromkeys(map(str, choices.values())))
    rules = {value: set_to(**{name: chosen}) for value, chosen in choices.items()}
    return by_value(rules, other=say(f"{MISSING}: {name} can be {allowed}"))


def with_names(rule: Rule) -> Rule:
    """A rule for a key whose value is a list or a comma-separated string."""
    return lambda to, key, value: rule(to, key, read_names(key, value))


def set_weight_ratio(desirable: str, undesirable: str) -> Rule:
    """Rule for the weights of good and bad answers under these keys, of which only the ratio counts."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        good, bad = to.get_number(desirable, default=1) or 1, to.get_number(undesirable, default=1) or 1
        return set_option("kto_weight_ratio")(to, key, good / bad)

    return rule


def set_tracker(name: str, *, variable: str | None = None) -> Rule:
    """Rule for a key that enables tracker `name`, which reads its value in the environment."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.train["track"] = sorted({*to.train.get("track", []), name})
        return f"track: {name}" + ("" if variable is None else f"; set {variable}={value}")

    return if_set(rule)
