"""A row as it stands in its file, and what stands there where it cannot be read."""

from dataclasses import dataclass
from typing import Any

MAX_ROW_BYTES = 64 << 20
NUM_BYTES_SHOWN = 200  # A row that is too long is shown by that much of its beginning.


@dataclass(frozen=True)
class TooLong:
    """A row that was not read."""

    beginning: bytes
    num_bytes: int


@dataclass(frozen=True)
class BadRow:
    """A row of a table that is none, and why."""

    beginning: bytes
    reason: str


Line = tuple[int, bytes | TooLong | BadRow | dict[str, str]]  # its number, from 1, and what it holds


@dataclass(frozen=True)
class Row:
    """A row as it stands in its file; `number` counts rows, and is what a Parquet file has for a line."""

    number: int
    line: int
    value: bytes | TooLong | BadRow | dict[str, Any]

    @property
    def place(self) -> str:
        """As messages say it; the elements of a JSON list can share a line."""
        return str(self.line) if self.line == self.number else f"{self.line} (row {self.number})"
