"""Reads the files of finished or running runs: metrics as columns of numbers, options, starts, and how they ended.

A run can be read while it writes: only new lines are read, and an incomplete line is left for the next read.
"""

import math
import os
import shlex
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mini_trainer.data.stores.json_lines import parse_sample
from mini_trainer.distributed.ending import EXIT_FILE, ExitCode
from mini_trainer.distributed.lock import LOCK_FILE, SECONDS_TO_WATCH
from mini_trainer.options.reading import open_regular, parse_object, read_json
from mini_trainer.run.file_names import METRICS_FILE, PARAMS_FILE, SAMPLES_FILE, VALIDATION_FILE

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
        """Reads new lines, or the whole file again if a resumed run has truncated it. OSError if that fails. After
        `most_bytes` it stops, and `is_behind`."""
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
    if (row := parse_object(line)) is None or not math.isfinite(to_float(row.get("step"))):
        return None
    for key, prefix in (("sources", SOURCE), ("sets", SET)):
        parts = row.get(key)
        if isinstance(parts, dict):
            row |= {prefix + name: part.get("loss") for name, part in parts.items() if isinstance(part, dict)}
    if "is_best" in row:
        row["is_best"] = int(row["is_best"] is True)
    return row


def find_best(validations: MetricsReader) -> int | None:
    """Index of the best validation: the last that its run called so, by `--best-metric`."""
    called_best = np.flatnonzero(validations["is_best"] == 1)
    return int(called_best[-1]) if len(called_best) else None


def to_float(value: Any) -> float:
    """The value as a float; NaN if it is not a number."""
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < 1e300 else math.nan


MOST_BYTES = 8 << 20  # of a file; the later lines are left out

Sample = dict[str, Any]  # a line


class Reread:
    """The rows that `function` reads from a file, and reads again when the file has changed."""

    def __init__(self, path: Path, function: Callable[[Path], list[dict[str, Any]]]):
        self.path, self.function = path, function
        self.rows: list[dict[str, Any]] = []
        self.identity: tuple[int, int, int] | None = None  # time (ns), size and inode of the file

    def read(self) -> None:
        """OSError if it is no file."""
        found = self.path.stat() if self.path.exists() else None
        identity = None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
        if identity != self.identity:
            self.rows, self.identity = [] if identity is None else self.function(self.path), identity


def read_samples(path: Path) -> list[Sample]:
    with open_regular(path) as file:
        rows = map(parse_sample, file.read(MOST_BYTES).splitlines(keepends=True))
        return [row for row in rows if row is not None]


# How a run has ended that did not crash.
CALM_ENDS = {
    ExitCode.DONE: "finished",
    ExitCode.SAVED_AND_REQUEUE: "stopped",
    ExitCode.STOPPED_BY_USER: "stopped",
    ExitCode.INTERRUPTED: "stopped",
    ExitCode.BAD_INPUT: "stopped",  # its last start was refused, and changed nothing
}


@dataclass(frozen=True)
class State:
    """Whether a run is running, or how it ended, as its files say."""

    kind: Literal["running", "finished", "stopped", "crashed", "unknown"]
    text: str
    message: str = ""  # what ended it


class Run:
    """A run's directory: its metrics so far, its options and its starts."""

    def __init__(self, path: Path, name: str, most_bytes: int | None = None):
        """ValueError if the directory is not a run's. `most_bytes`: see `read`."""
        self.path, self.name = path, name
        check_is_run(path)
        self.steps = MetricsReader(path / METRICS_FILE, STEP_COLUMNS)
        self.validations = MetricsReader(path / VALIDATION_FILE, VALIDATION_COLUMNS)
        self.samples = Reread(path / SAMPLES_FILE, read_samples)
        self.params: MetricsLine = {}
        self.warnings: list[str] = []
        self.read(most_bytes)

    def read(self, most_bytes: int | None = None) -> None:
        """Updates all data from the files, metrics by up to `most_bytes`: see `MetricsReader.read`. ValueError or
        OSError if the run is no longer there."""
        check_is_run(self.path)
        self.steps.read(most_bytes)
        self.validations.read(most_bytes)
        self.samples.read()
        self.warnings = [
            f"{reader.path}: {reader.num_damaged:,} damaged line{'' if reader.num_damaged == 1 else 's'} skipped"
            for reader in (self.steps, self.validations)
            if reader.num_damaged
        ]
        self.params, problem = read_run_params(self.path)
        if problem:
            self.warnings.append(f"{self.path}: {problem}: its options and starts are not shown")

    @property
    def options(self) -> MetricsLine:
        return self.params.get("options", {})

    @property
    def starts(self) -> list[MetricsLine]:
        """All starts in order, including the first, as `run.identity.record_start` writes them."""
        return self.params.get("starts", [])

    @property
    def hours(self) -> Column:
        """Hours of training and waiting for data at the end of each step, without starts, checkpoints and exports."""
        seconds = self.steps["time_per_batch"], self.steps["data_wait_seconds"]
        return np.cumsum(sum(np.where(np.isfinite(each), each, 0) for each in seconds)) / 3600

    @property
    def version(self) -> tuple[object, ...]:
        """A value that changes whenever there is new data."""
        read = (self.steps.offset, self.validations.offset, self.samples.identity)
        return (*read, self.params.get("started"), self.describe_state())

    def describe_state(self) -> str:
        """The run's state: running, or how it ended."""
        return find_state(self.path, self.params).text


def read_run_params(path: Path) -> tuple[MetricsLine, str]:
    """The content of the run's training_params.json, and the problem with it; {} if it cannot be read."""
    try:
        params = read_json(path / PARAMS_FILE)
    except (ValueError, OSError) as error:
        return {}, str(error)
    return (params, "") if isinstance(params, dict) else ({}, f"{PARAMS_FILE} is not an object")


def find_state(path: Path, params: MetricsLine) -> State:
    """State of the run in `path`. A lock that is not touched any more, without a recorded end, is a crashed run's."""
    try:
        last_beat = (path / LOCK_FILE).stat().st_mtime
    except OSError:  # no lock file
        last_beat = None
    if last_beat is not None and time.time() - last_beat < SECONDS_TO_WATCH:
        return State("running", "running")
    if params.get("finished"):
        return State("finished", "finished")
    try:
        end = read_json(path / EXIT_FILE)
        if end["code"] == ExitCode.DONE:
            return State("finished", "finished")
        text = f"{str(end['name']).replace('_', ' ')} ({end['code']})"
        return State(CALM_ENDS.get(end["code"], "crashed"), text, str(end.get("message") or ""))
    except (ValueError, OSError, KeyError, TypeError):  # also for one that train.py has not written
        if last_beat is None:
            return State("unknown", "end not recorded")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last_beat))
        return State("crashed", "no heartbeat", f"no heartbeat since {when}: killed, or its machine is gone")


def check_is_run(path: Path) -> None:
    """Raises ValueError, with suggestions, if the directory is not a run's."""
    if not path.is_dir():
        what = "not a directory" if path.exists() else "no such directory"
        raise ValueError(f"{path}: {what}; name the --output-dir of a run")
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


def name_runs(paths: list[Path]) -> list[str]:
    """The paths from their common folder; the last two parts of a single one."""
    full = [os.path.abspath(path) for path in paths]
    if len(full) == 1:
        return ["/".join(part.strip("/") for part in Path(full[0]).parts[-2:] if part != "/") or "/"]
    return [os.path.relpath(path, os.path.commonpath(full)) for path in full]


def open_runs(paths: list[Path]) -> list[Run]:
    """Opens the runs; one ValueError lists all problems with the directories."""
    resolved = [path.resolve() for path in paths]
    problems = [f"{path}: given more than once" for i, path in enumerate(paths) if resolved[i] in resolved[:i]]
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
