"""Parses JSON; refuses what parsers disagree on: repeated keys, NaN, infinity, numbers too large for a float."""

import json
import math
import reprlib
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unreadable:
    """A value of a table that is not JSON's, and why; refused where it is read."""

    reason: str


def parse_json(text: str) -> Any:
    try:
        return STRICT_JSON.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object; refuses repeated keys, because parsers disagree which value counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"ambiguous JSON: the key {quote(key)} occurs twice")
    return values


def read_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"not JSON: the number {digits[:40]} is too large: it would be read as infinity")
    return value


def refuse_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name} is not a JSON number")


STRICT_JSON = json.JSONDecoder(
    object_pairs_hook=refuse_repeated_keys, parse_float=read_float, parse_constant=refuse_constant
)


def read_embedded_json(text: Any, where: str) -> Any:
    if not isinstance(text, str):
        raise ValueError(f"{where} is {quote(text)}, expected JSON text")
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def quote(value: Any) -> str:
    """A value as shown in a message: on one line, and short."""
    if isinstance(value, Unreadable):
        return value.reason
    return "missing or null" if value is None else reprlib.repr(value)
