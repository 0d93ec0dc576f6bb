"""Converts a whole configuration: every key by its rule, the peer's defaults, then what follows from several keys."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.doors import TRAINERS
from mini_trainer.options.problems.finding import find_wrong_options
from mini_trainer.options.settings_files import parse_value
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.tools.importers.batches import count_batch, count_epochs
from mini_trainer.tools.importers.recognition import OTHER_OBJECTIVES, PREFERENCES
from mini_trainer.tools.importers.rules import DIFFERS, MISSING, NEEDLESS, Conversion, Refusal, Rule


def convert(given: dict[str, Any], trainer: str, *, num_gpus: int, lengths: np.ndarray | None = None) -> Conversion:
    """Options for every key. `lengths`: tokens of the user's samples, to measure packs and count epochs.

    Raises ValueError with all reasons where the file asks for something that cannot be trained here.
    """
    peer = TRAINERS[trainer]
    present = peer.normalize({key: value for key, value in given.items() if value is not None})
    defaults = peer.list_defaults(present)
    is_lora, objective = peer.trains_adapter(present), peer.find_objective(present)
    to = Conversion(defaults | present, num_gpus, is_lora=is_lora, objective=objective, lengths=lengths)
    set_objective(to)
    others = OTHER_OBJECTIVES | PREFERENCES
    refused = {key: why for key, why in others.items() if key not in peer.RULES and is_set(given.get(key))}
    for key in dict.fromkeys((*given, *defaults, *present)):
        if key in refused:
            continue
        try:
            to.told[key] = follow_key(to, peer.RULES, key, is_default=key not in present and key in defaults)
        except Refusal as refusal:
            refused[key] = str(refusal)
    if refused:
        raise ValueError("; ".join(f"{key}: {reason}" for key, reason in refused.items()))
    count_batch(to, peer.describe_batch)
    count_epochs(to)
    finish_options(to)
    return to


def set_objective(to: Conversion) -> None:
    """Sets the objective, and the format of its rows, if it is not that of both scripts."""
    if not to.reads_texts:
        to.train["objective"], to.data["format"] = to.objective, to.row_format
        to.told["objective"] = f"objective: {to.objective}, format: {to.row_format} (of process_data.py)"


def finish_options(to: Conversion) -> None:
    """Adds the tokenized data's files and gives all options their types. ValueError if they contradict each other."""
    to.train.setdefault("data_path", to.list_outputs())
    if "validation_share" in to.data:
        to.train["validation_data_path"] = to.list_outputs("validation.")
    to.train = parse_said(to.train, {}, TrainOptions)
    sources = [{name: value for name, value in source.items() if value is not None} for source in to.list_sources()]
    to.sources = [parse_said(source, {}, ProcessDataOptions) for source in sources]
    problems = [problem for options in make_options(to) for problem in find_wrong_options(options)]
    if problems:
        raise ValueError(f"its options cannot be used together: {'; '.join(problems)}")


def make_options(to: Conversion) -> Iterator[TrainOptions | ProcessDataOptions]:
    """The options as the scripts take them, with stand-ins for those that the user has to give."""
    given = {"output_dir": "run", "model_name_or_path": "model"}
    yield group_options(TrainOptions, **(given | to.train))
    for source in to.sources:
        place = {} if {"input_file", "input_dataset"} & source.keys() else {"input_file": ("rows.jsonl",)}
        yield group_options(ProcessDataOptions, **({"model_name_or_path": "model"} | place | source))


def is_set(value: Any) -> bool:
    return value not in (None, False, "", [], {})


def follow_key(to: Conversion, rules: dict[str, Rule], key: str, *, is_default: bool) -> str:
    """The outcome of one key; `is_default`: its value is the peer's default."""
    if key not in rules:
        return f"{MISSING}: not known here"
    if key not in to.given:
        return f"{NEEDLESS}: empty"
    told = follow(rules[key], to, key, to.given[key])
    return f"{told} (the trainer's default)" if is_default else told


def follow(rule: Rule, to: Conversion, key: str, value: Any) -> str:
    """Applies a rule; a value that the option cannot have changes nothing and is reported as without counterpart."""
    before = dict(to.train), dict(to.data), list(to.sources)
    try:
        told = rule(to, key, value)
        to.train = parse_said(to.train, before[0], TrainOptions)
        to.data = parse_said(to.data, before[1], ProcessDataOptions)
        for source in to.sources:
            parse_said(source, {}, ProcessDataOptions)
        return told
    except ValueError as error:
        reason = str(error)
    except TypeError:  # a list, a mapping or a number in the place of something else
        reason = f"{key} cannot be {value!r}"
    to.train, to.data, to.sources = before
    return f"{MISSING}: {reason}"


def parse_said(values: dict[str, Any], before: dict[str, Any], options_class: type) -> dict[str, Any]:
    """The options in their own types; those unchanged since `before` are left. ValueError for a wrong type."""
    return {
        name: value if is_parsed(name, value, before) else parse_value(name, value, options_class)
        for name, value in values.items()
    }


def is_parsed(name: str, value: Any, before: dict[str, Any]) -> bool:
    return value is None or isinstance(value, tuple) or (name in before and value is before[name])


def list_differences(to: Conversion) -> list[str]:
    """The keys whose meaning changes, each with the difference."""
    return [f"{key}: {told}" for key, told in to.told.items() if MISSING in told or DIFFERS in told]
