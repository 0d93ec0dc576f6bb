"""Rules: each sets the options that correspond to another trainer's key, and returns the key's outcome."""

import math
from collections.abc import Callable
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
    """Outcomes of another trainer's keys so far, and the resulting options."""

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


def set_unless_zero(name: str) -> Rule:
    """Rule for a key that is train.py's option `name`, where 0 turns it off in the other trainer."""
    return lambda to, key, value: set_option(name)(to, key, value) if value else NEEDLESS


def set_data_option(name: str) -> Rule:
    """Rule for a key that is process_data.py's option `name`."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.data[name] = value
        return f"{name}: {value} (of process_data.py)"

    return rule


def set_if_true(**values: Any) -> Rule:
    """Rule for a switch that sets the options `values`."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if not value:
            return NEEDLESS
        to.train.update(values)
        return ", ".join(f"{name}: {chosen}" for name, chosen in values.items())

    return rule


def needless(reason: str) -> Rule:
    return lambda to, key, value: f"{NEEDLESS}: {reason}"


def missing(reason: str) -> Rule:
    return lambda to, key, value: f"{MISSING}: {reason}" if value else NEEDLESS


def differs(reason: str) -> Rule:
    """Rule for a key that, if set, changes training in a way that has no option here."""
    return lambda to, key, value: f"{DIFFERS}: {reason}" if value else NEEDLESS


def refuse(reason: str) -> Rule:
    """Rule for a key that, if set, makes the file unsupported."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if not value:
            return NEEDLESS
        raise Refusal(reason)

    return rule


def allow(allowed: Any, *, reason: str) -> Rule:
    """Rule for a key with one allowed value."""
    return lambda to, key, value: NEEDLESS if value == allowed else refuse(f"{reason}, given {value!r}")(to, key, True)


def of_lora(rule: Rule) -> Rule:
    """Limits a rule to files that train adapters; in other files the key has no effect."""
    return lambda to, key, value: rule(to, key, value) if to.is_lora else f"{NEEDLESS}: no adapter trains"


def of_new_lora(rule: Rule) -> Rule:
    """A rule for files that train new adapters; one that is continued keeps its rank, its scale and its layers."""

    def rule_of_new(to: Conversion, key: str, value: Any) -> str:
        if to.get("adapter_name_or_path", "lora_model_dir"):
            return f"{NEEDLESS}: the adapter that is continued says it"
        return rule(to, key, value)

    return of_lora(rule_of_new)


def choose(name: str, choices: dict[Any, Any]) -> Rule:
    """Rule that sets the option `name` from a table of the key's values; other values have no counterpart."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if value not in list(choices):
            return f"{MISSING}: {name} can be {', '.join(map(str, dict.fromkeys(choices.values())))}"
        to.train[name] = choices[value]
        return f"{name}: {choices[value]}"

    return rule


def set_list(name: str) -> Rule:
    """Rule that sets the list option `name` from a list or a comma-separated string."""
    return lambda to, key, value: set_option(name)(to, key, read_names(key, value)) if value else NEEDLESS


def set_tracker(name: str, *, option: str | None = None) -> Rule:
    """Rule for a key that enables tracker `name`."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if not value:
            return NEEDLESS
        to.train["track"] = sorted({*to.train.get("track", []), name})
        if option is not None:
            to.train[option] = value
        return f"track: {name}" + (f", {option}: {value}" if option else "")

    return rule
