"""Options by name, in any group; and values that are written as text."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar, get_origin

Options = TypeVar("Options")


def iterate_fields(options_class: type) -> Iterator[tuple[dataclasses.Field, str | None]]:
    """Every option's field, in the order of --help, with the name of its group; None for those in no group."""
    for entry in dataclasses.fields(options_class):
        if dataclasses.is_dataclass(entry.type):
            yield from ((option, entry.name) for option in dataclasses.fields(entry.type))
        else:
            yield entry, None


def list_types(options_class: type) -> dict[str, Any]:
    """The type of every option by its name."""
    return {option.name: option.type for option, _ in iterate_fields(options_class)}


def flatten_options(options: Any) -> dict[str, Any]:
    """The value of every option by its name."""
    return {
        option.name: getattr(options if group is None else getattr(options, group), option.name)
        for option, group in iterate_fields(type(options))
    }


def group_options(options_class: type[Options], **values: Any) -> Options:
    """Options from values by name, the others at their defaults. TypeError for a name that no option has.

    Of an option that takes several values, one that stands alone is taken for a tuple of it.
    """
    groups: dict[str, dict[str, Any]] = {}
    for option, group in iterate_fields(options_class):
        if option.name in values:
            value = values.pop(option.name)
            is_alone = get_origin(option.type) is tuple and not isinstance(value, (tuple, list))
            groups.setdefault(group, {})[option.name] = (value,) if is_alone else value
    if values:
        raise TypeError(f"no options: {', '.join(values)}")
    types = {entry.name: entry.type for entry in dataclasses.fields(options_class)}
    grouped = {group: types[group](**chosen) for group, chosen in groups.items() if group is not None}
    return options_class(**groups.get(None, {}), **grouped)


def replace_options(options: Options, **changes: Any) -> Options:
    """The same options with some values changed, by name."""
    return group_options(type(options), **(flatten_options(options) | changes))


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def parse_duration(text: str | None) -> float | None:
    """Seconds in '90' or '0.5' (minutes) or '1:30:00' (hours, minutes, seconds); None where there is no limit."""
    if text is None:
        return None
    try:
        if clock := re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text):
            hours, minutes, rest = map(int, clock.groups())
            seconds = 3600.0 * hours + 60 * minutes + rest
        else:
            seconds = 60 * float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text}: must be minutes (90) above 0, or hours, minutes and seconds (1:30:00)")
    return seconds


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step, counted from 1, in '10:13' or '10'; ValueError if it is neither."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"{text}: must be a step (10), or the first and the last one (10:13), counted from 1")
    return first, last


def parse_subset(text: str) -> int | float:
    """A number of samples in '10', a share of them in '1%'; ValueError if it is neither."""
    try:
        if not text.endswith("%"):
            if (count := int(text)) >= 1:
                return count
        elif 0 < (share := float(text[:-1]) / 100) <= 1:
            return share
    except ValueError:
        pass
    raise ValueError(f"{text}: must be a number of samples (10), or a share of them above 0 and up to 100% (1%)")
