"""Rows of a file, unparsed or as strict JSON."""

import json
import math
import reprlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mini_trainer.options.reading import parse_object

MAX_ROW_BYTES = 64 << 20
NUM_BYTES_SHOWN = 200  # bytes shown of a row that is too long


@dataclass(frozen=True)
class TooLong:
    """A row that was skipped because it is too long."""

    beginning: bytes
    num_bytes: int


@dataclass(frozen=True)
class BadRow:
    """A malformed row of a table, and the reason."""

    beginning: bytes
    reason: str


Line = tuple[int, bytes | TooLong | BadRow | dict[str, str]]  # its number, from 1, and its content


@dataclass(frozen=True)
class RawRow:
    """An unparsed row of a file; `number` counts rows, and is also the `line` for Parquet files. `lost`: where nulls
    were removed that may be the row's own (data/rows/values.py)."""

    number: int
    line: int
    value: bytes | TooLong | BadRow | dict[str, Any]
    lost: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The place as shown in messages; the elements of a JSON list can share a line."""
        return str(self.line) if self.line == self.number else f"{self.line} (row {self.number})"


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


def parse_sample(line: bytes) -> dict[str, Any] | None:
    """The content of a complete line of a run's samples_0.jsonl; None if it is damaged."""
    row = parse_object(line) or {}
    has_texts = all(isinstance(row.get(key), str) for key in ("prompt", "answer", "finish_reason"))
    return row if has_texts and type(row.get("step")) is int and line.endswith(b"\n") else None
