"""Reads a file of metrics into columns of numbers, while a run writes it."""

import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mini_trainer.options.reading import open_regular

MetricsLine = dict[str, Any]
Column = NDArray[np.float64]
# Metrics with a place on the page. Others get a chart under their own name, except for `NOT_READ`.
STEP_COLUMNS = (
    "loss", "lr", "grad_norm", "tokens_per_second", "peak_memory_usage_GB", "mfu", "osft_leak", "time_per_batch",
    "data_wait_seconds", "total_samples_accumulated", "total_tokens_accumulated", "rewards/accuracies",
    "rewards/margins", "rewards/chosen", "rewards/rejected",
)  # fmt: skip
VALIDATION_COLUMNS = (
    "is_best", "total_samples_accumulated", "loss", "perplexity", "token_accuracy", "rewards/accuracies",
    "rewards/margins",
)  # fmt: skip
MAX_LINE_BYTES = 1 << 20  # longer lines are damaged
NOT_READ = {
    "epoch", "num_samples", "num_loss_counted_tokens", "num_total_tokens", "grad_accum", "samples_per_second",
    "packing_efficiency", "rank_balance", "seconds",
}  # fmt: skip
SOURCE, SET = "source: ", "set: "  # prefixes of columns of a source or a set
OTHERS = ""  # in place of a prefix: the columns that only a file names


class MetricsReader:
    """A file of JSON lines with a `step` each, as columns; NaN for missing numbers. Only the others are stored, with
    the indices of their lines: a run may name 10,000 metrics."""

    def __init__(self, path: Path, names: tuple[str, ...]):
        self.path, self.names = path, names
        self._forget()

    def _forget(self) -> None:
        self.offset = 0  # number of bytes read
        self.last_line = b""  # line that ends at `offset`
        self.is_within_line = False  # whether `offset` is within a line that is too long
        self.num_damaged = 0
        self.is_behind = False  # the last `read` has left lines unread
        self.columns = {name: (array("q"), array("d")) for name in ("step", *self.names)}
        self.filled: list[tuple[str, ...]] = []  # by line: the columns with a number in it

    def read(self, most_bytes: int | None = None) -> None:
        """Reads new lines, or the whole file again if a resumed run has truncated it. OSError if that fails.

        After `most_bytes` it stops, and `is_behind`.
        """
        if not self.path.exists():
            self._forget()
            return
        with open_regular(self.path) as file:
            file.seek(self.offset - len(self.last_line))
            if file.read(len(self.last_line)) != self.last_line:
                self._forget()
            file.seek(self.offset)
            self.is_behind, first = False, self.offset
            while line := file.readline(MAX_LINE_BYTES + 1):
                if not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
                    break
                if most_bytes is not None and self.offset - first >= most_bytes:
                    self.is_behind = True
                    break
                self.offset, self.last_line = self.offset + len(line), line
                is_rest, self.is_within_line = self.is_within_line, not line.endswith(b"\n")
                if not is_rest:
                    self._add(line)

    def _add(self, line: bytes) -> None:
        if (row := parse_row(line)) is None:
            self.num_damaged += 1
            return
        steps = self.columns["step"][1]
        while steps and steps[-1] >= row["step"]:  # were repeated after a resume
            for name in self.filled.pop():
                for numbers in self.columns[name]:
                    numbers.pop()
        index, filled = len(self), []
        for name, number in ((name, to_float(value)) for name, value in row.items() if name not in NOT_READ):
            if math.isfinite(number) or (name in self.columns and not math.isnan(number)):
                indices, numbers = self.columns.setdefault(name, (array("q"), array("d")))
                indices.append(index)
                numbers.append(number)
                filled.append(name)
        names = tuple(filled)
        self.filled.append(self.filled[-1] if self.filled and self.filled[-1] == names else names)  # as most lines have

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.filled)

    def __getitem__(self, name: str) -> Column:
        indices, numbers = self.columns[name]
        column = np.full(len(self), np.nan)
        column[np.array(indices)] = numbers
        return column

    def count(self, name: str) -> int:
        """Number of steps with a finite number in the column."""
        return int(np.isfinite(np.array(self.columns[name][1])).sum())

    def list_columns(self, prefix: str) -> list[str]:
        """The columns with this prefix, or `OTHERS`."""
        if prefix != OTHERS:
            return [name for name in self.columns if name.startswith(prefix)]
        known = {"step", *self.names}
        return [name for name in self.columns if name not in known and not name.startswith((SOURCE, SET))]


def parse_row(line: bytes) -> MetricsLine | None:
    """A line's values by name, including the losses of its sources and sets; None if it is not a line of metrics."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not math.isfinite(to_float(row.get("step"))):
        return None
    for key, prefix in (("sources", SOURCE), ("sets", SET)):
        parts = row.get(key)
        if isinstance(parts, dict):
            row |= {prefix + name: part.get("loss") for name, part in parts.items() if isinstance(part, dict)}
    if "is_best" in row:
        row["is_best"] = int(row["is_best"] is True)
    return row


def find_best(validations: MetricsReader) -> int | None:
    """Index of the best validation: the last that its run called so, by `--best-metric`; else that of lowest loss."""
    called_best = np.flatnonzero(validations["is_best"] == 1)
    if len(called_best):
        return int(called_best[-1])
    losses = validations["loss"]
    return int(np.nanargmin(losses)) if np.isfinite(losses).any() else None


def to_float(value: Any) -> float:
    """The value as a float; NaN if it is not a number."""
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < 1e300 else math.nan
