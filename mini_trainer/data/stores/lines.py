"""Unparsed rows of a file, and placeholders for unreadable ones."""

from dataclasses import dataclass
from typing import Any

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
class Row:
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
