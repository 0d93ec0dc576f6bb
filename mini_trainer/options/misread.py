"""Values that cannot be what was meant: of the wrong type, or several joined by commas."""

import os
import re
from collections.abc import Iterable
from typing import get_origin

from mini_trainer.options.fields import flag_name, list_types, name_type

NAME = re.compile(r"[^\s,]+")
TEXTS = ("label_names",)  # where several are given, a comma in one belongs to it
BRACKETS = ("()", "[]", "{}", "<>")


def describe_misread(message: str, options_class: type) -> str:
    """tyro's message in one line, if it is about a value of the wrong type; otherwise unchanged."""
    misread = re.match(r"Error parsing (--[\w-]+): .*?(\[.*?\]|'.*?')", message, re.DOTALL)
    if misread is None:
        return message
    flag, given = misread.groups()
    kind = list_types(options_class)[flag.removeprefix("--").replace("-", "_")]
    return f"{flag}: given {given.strip('[]')}, allowed: {name_type(kind).removesuffix(' or null')}"


def refuse_joined_values(flags: Iterable[tuple[str, list[str]]], options_class: type) -> None:
    """ValueError for a list whose values are joined by commas, which would be read as a single value.

    `flags`: the options' names with their values. Commas of texts, patterns, URLs and files that exist stay.
    """
    types = list_types(options_class)
    for name, values in flags:
        parts = [part for value in values for part in split_joined(value)]
        is_text = name in TEXTS and len(values) > 1
        if get_origin(types.get(name)) is tuple and parts != values and not is_text:
            raise ValueError(
                f"{flag_name(name)} {' '.join(values)}: values of a list are separated by spaces:"
                f" {flag_name(name)} {' '.join(parts)} (in a file: [{', '.join(parts)}])"
            )


def split_joined(value: str) -> list[str]:
    """The values that commas join in one word; the word itself if they are part of it."""
    parts = [part.strip() for part in value.removesuffix(",").split(",")]
    are_alike = len({"://" in part for part in parts}) == 1  # a comma in a URL is followed by the rest of it
    are_whole = all(NAME.fullmatch(part) and is_balanced(part) for part in parts)
    return parts if are_alike and are_whole and not os.path.exists(value) else [value]


def is_balanced(part: str) -> bool:
    """Whether brackets and quotes that are opened are closed, so that a comma can follow."""
    return all(part.count(start) == part.count(end) for start, end in BRACKETS) and part.count('"') % 2 == 0
