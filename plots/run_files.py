"""Reads the files of finished or running runs into columns of numbers.

A run can be read while it writes: only new lines are read, and an incomplete line is left for the next read.
"""

import json
import math
import os
import shlex
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disk import read_json
from lifecycle.file_names import METRICS_FILE, PARAMS_FILE, VALIDATION_FILE
from ranks.ending import EXIT_FILE
from ranks.lock import LOCK_FILE, SECONDS_TO_WATCH

Row = dict[str, Any]
Column = NDArray[np.float64]
# Metrics with a place on the page. Others get a chart under their own name, except for `NOT_READ`.
STEP_COLUMNS = (
    "loss", "lr", "grad_norm", "tokens_per_second", "peak_memory_usage_GB", "mfu", "osft_leak", "time_per_batch",
    "data_wait_seconds", "total_samples_accumulated", "total_tokens_accumulated", "rewards/accuracies",
    "rewards/margins", "rewards/chosen", "rewards/rejected",
)  # fmt: skip
VALIDATION_COLUMNS = (
    "total_samples_accumulated", "loss", "perplexity", "token_accuracy", "rewards/accuracies", "rewards/margins",
)  # fmt: skip
NOT_READ = {
    "epoch", "num_samples", "num_loss_counted_tokens", "num_total_tokens", "grad_accum", "samples_per_second",
    "packing_efficiency", "rank_balance", "seconds",
}  # fmt: skip
SOURCE, SET = "source: ", "set: "  # prefixes of columns of a source or a set


class MetricsReader:
    """A file of JSON lines with a `step` each, as columns; NaN for missing numbers."""

    def __init__(self, path: Path, names: tuple[str, ...]):
        self.path, self.names = path, names
        self._forget()

    def _forget(self) -> None:
        self.offset = 0  # number of bytes read
        self.last_line = b""  # line that ends at `offset`
        self.num_damaged = 0
        self.columns = {"step": array("d")} | {name: array("d") for name in self.names}

    def read(self) -> None:
        """Reads new lines, or the whole file again if a resumed run has truncated it. OSError if that fails."""
        if not self.path.exists():
            self._forget()
            return
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self.last_line))
            if file.read(len(self.last_line)) != self.last_line:
                self._forget()
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset, self.last_line = self.offset + len(line), line
                self._add(line)

    def _add(self, line: bytes) -> None:
        row = parse_row(line)
        if row is None:
            self.num_damaged += 1
            return
        steps = self.columns["step"]
        while steps and steps[-1] >= row["step"]:  # the step was repeated after a resume
            for column in self.columns.values():
                column.pop()
        for name in [name for name in row if name not in self.columns and name not in NOT_READ]:
            if name.startswith((SOURCE, SET)) or math.isfinite(to_float(row[name])):
                self.columns[name] = array("d", [math.nan]) * len(steps)
        for name, column in self.columns.items():
            column.append(to_float(row.get(name)))

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> Column:
        return np.array(self.columns[name])

    def list_columns(self, prefix: str) -> list[str]:
        """The columns with this prefix."""
        return [name for name in self.columns if name.startswith(prefix)]

    def list_others(self) -> list[str]:
        """The columns that only the file names."""
        return [
            name for name in self.columns if name not in ("step", *self.names) and not name.startswith((SOURCE, SET))
        ]


def parse_row(line: bytes) -> Row | None:
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
    return row


def to_float(value: Any) -> float:
    """The value as a float; NaN if it is not a number."""
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < 1e300 else math.nan


@dataclass(frozen=True)
class Start:
    """One start or resume of a run."""

    when: str
    first_step: int  # number of steps completed before
    resumed_from: str | None
    changed_options: list[str]
    machine: str
    facts: dict[str, Any]  # machine, commit and versions


class Run:
    """A run's directory: its metrics so far, its options and its starts."""

    def __init__(self, path: Path, name: str):
        """ValueError if the directory is not a run's."""
        self.path, self.name = path, name
        check_is_run(path)
        self.steps = MetricsReader(path / METRICS_FILE, STEP_COLUMNS)
        self.validations = MetricsReader(path / VALIDATION_FILE, VALIDATION_COLUMNS)
        self.params: Row = {}
        self.warnings: list[str] = []
        self.read()

    def read(self) -> None:
        """Updates all data from the files. ValueError or OSError if the run is no longer there."""
        check_is_run(self.path)
        self.steps.read()
        self.validations.read()
        self.warnings = [
            f"{reader.path}: {count_things(reader.num_damaged, 'damaged line')} skipped"
            for reader in (self.steps, self.validations)
            if reader.num_damaged
        ]
        try:
            params = read_json(self.path / PARAMS_FILE)
            self.params = params if isinstance(params, dict) else {}
        except (ValueError, OSError) as error:
            self.params = {}
            self.warnings.append(f"{self.path}: {error}: its options and starts are not shown")

    @property
    def options(self) -> Row:
        options = self.params.get("options")
        return options if isinstance(options, dict) else {}

    @property
    def starts(self) -> list[Start]:
        """All starts in order, including the first."""
        starts = self.params.get("starts")
        return (
            [describe_start(start) for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
        )

    @property
    def hours(self) -> Column:
        """Hours of training and waiting for data at the end of each step, without starts, checkpoints and exports."""
        seconds = self.steps["time_per_batch"] + self.steps["data_wait_seconds"]
        return np.cumsum(np.where(np.isfinite(seconds), seconds, 0)) / 3600

    @property
    def version(self) -> tuple[object, ...]:
        """A value that changes whenever there is new data."""
        return (self.steps.offset, self.validations.offset, self.params.get("started"), self.describe_state())

    def describe_state(self) -> str:
        """The run's state: running, or how it ended."""
        try:
            seconds_silent = time.time() - (self.path / LOCK_FILE).stat().st_mtime
        except OSError:  # no lock file
            seconds_silent = None
        if seconds_silent is not None and seconds_silent < SECONDS_TO_WATCH:
            return "running"
        if self.params.get("finished"):
            return "finished"
        try:
            end = read_json(self.path / EXIT_FILE)
            return describe_exit(end)
        except (ValueError, OSError, KeyError, TypeError):
            return "no heartbeat" if seconds_silent is not None else "end not recorded"


def check_is_run(path: Path) -> None:
    """Raises ValueError, with suggestions, if the directory is not a run's."""
    if not path.exists():
        raise ValueError(f"{path}: no such directory; name the --output-dir of a run")
    if not path.is_dir():
        raise ValueError(f"{path}: not a directory; name the --output-dir of a run")
    if is_run(path):
        return
    try:
        runs = sorted(shlex.quote(str(entry)) for entry in path.iterdir() if entry.is_dir() and is_run(entry))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    hint = f"; did you mean {' '.join(runs[:8])}?" if runs else "; name the --output-dir of a run"
    raise ValueError(f"{path}: not a run's directory, it has no {METRICS_FILE}{hint}")


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS_FILE, PARAMS_FILE))


def describe_start(start: Row) -> Start:
    versions = start.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    world_size, device, changes = (start.get(key) for key in ("world_size", "device", "changed_options"))
    first_step = to_float(start.get("first_step"))
    return Start(
        when=str(start.get("started") or ""),
        first_step=int(first_step) if math.isfinite(first_step) else 0,
        resumed_from=str(start["resumed_from"]) if start.get("resumed_from") else None,
        changed_options=list(map(str, changes)) if isinstance(changes, list) else [],
        machine=f"{world_size} × {device}" if device else "",
        facts={
            "machine": f"{world_size} × {device}" if device else None,
            "git commit": str(start.get("git_commit") or "")[:12] or None,
            **{f"version of {name}": number for name, number in versions.items()},
        },
    )


def describe_exit(end: Row) -> str:
    if end["code"] == 0:
        return "finished"
    return f"{str(end['name']).replace('_', ' ')} ({end['code']})"


def name_runs(paths: list[Path]) -> list[str]:
    """The parts of the paths that distinguish the runs; the last two for a single run."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    if len(parts) == 1:
        return ["/".join(part.strip("/") for part in parts[0][-2:] if part != "/") or "/"]
    num_first = count_shared(parts)
    rest = [part[num_first:] or part[-1:] for part in parts]
    num_last = count_shared([part[::-1] for part in rest])
    shortened = ["/".join(part[: len(part) - num_last]) for part in rest]
    return shortened if all(shortened) else ["/".join(part) for part in rest]


def count_shared(paths: list[tuple[str, ...]]) -> int:
    """Length of the common prefix of the paths, in parts."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def open_runs(paths: list[Path]) -> list[Run]:
    """Opens the runs; one ValueError lists all problems with the directories."""
    problems = []
    resolved = [path.resolve() for path in paths]
    problems += [f"{path}: given more than once" for i, path in enumerate(paths) if resolved[i] in resolved[:i]]
    runs = []
    for path, name in zip(paths, name_runs(paths), strict=True):
        try:
            runs.append(Run(path, name))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n  ".join(dict.fromkeys(problems)))
    return runs


def iterate_warnings(runs: list[Run]) -> Iterator[str]:
    for run in runs:
        yield from run.warnings
        if not len(run.steps):
            yield f"{run.path}: no steps yet"


def count_things(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
