"""Whose configuration a file is, and all of it in this trainer's options."""

from typing import Any

from command_line import parse_value
from options import ProcessDataOptions, TrainOptions
from trainers.keys import DEFAULTS, DEFAULTS_OF_LORA, TRAINERS
from trainers.rules import MISSING, NEEDLESS, Conversion, Rule


def recognize(given: dict[str, Any]) -> str:
    """The trainer with the most keys of its own in the file."""
    counts = {name: sum(key in given for key in own) for name, (_, own) in TRAINERS.items()}
    best = max(counts, key=counts.get)
    if counts[best] == 0:
        raise ValueError(f"its keys are of no trainer that is known ({', '.join(TRAINERS)}): say which with --trainer")
    return best


def convert(given: dict[str, Any], trainer: str, *, num_gpus: int) -> Conversion:
    """Goes through every key, in the file's order, and through those left out that have other defaults here."""
    rules, _ = TRAINERS[trainer]
    has_lora = given.get("use_peft") or given.get("adapter") or given.get("finetuning_type") == "lora"
    defaults = DEFAULTS[trainer] | (DEFAULTS_OF_LORA[trainer] if has_lora else {})
    to = Conversion(defaults | {key: value for key, value in given.items() if value is not None}, num_gpus)
    for key, value in given.items():
        if key not in rules:
            to.told[key] = f"{MISSING}: not known here"
        elif value is None and key not in defaults:
            to.told[key] = f"{NEEDLESS}: empty"
        else:
            to.told[key] = follow(rules[key], to, key, to.given[key])
    for key in [name for name in defaults if name not in given]:
        to.told[key] = f"{follow(rules[key], to, key, defaults[key])} ({trainer}'s default)"
    to.data.setdefault("output_file", "data.arrow")
    to.train.setdefault("data_path", "data.arrow")
    return to


def follow(rule: Rule, to: Conversion, key: str, value: Any) -> str:
    """What a rule says of a key; that it has no counterpart, if its value is none that the options here can have."""
    before = to.train, to.data
    to.train, to.data = dict(to.train), dict(to.data)
    try:
        told = rule(to, key, value)
        to.train = parse_said(to.train, before[0], TrainOptions)
        to.data = parse_said(to.data, before[1], ProcessDataOptions)
        return told
    except ValueError as error:
        reason = str(error)
    except TypeError:  # a list, a mapping or a number in the place of something else
        reason = f"{key} cannot be {value!r}"
    to.train, to.data = before
    return f"{MISSING}: {reason}"


def parse_said(values: dict[str, Any], before: dict[str, Any], options_class: type) -> dict[str, Any]:
    """Options with those that are not as they were `before` in their own types; ValueError if one can be none."""
    return {
        name: value if name in before and value is before[name] else parse_value(name, value, options_class)
        for name, value in values.items()
    }
