"""Reads the files of finished or running runs: metrics, options, starts, and how they ended.

A run can be read while it writes: only new lines are read, and an incomplete line is left for the next read.
"""

import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mini_trainer.data.stores.json_lines import parse_sample
from mini_trainer.distributed.ending import EXIT_FILE, ExitCode
from mini_trainer.distributed.lock import LOCK_FILE, SECONDS_TO_WATCH
from mini_trainer.options.reading import open_regular, read_json
from mini_trainer.run.file_names import METRICS_FILE, PARAMS_FILE, SAMPLES_FILE, VALIDATION_FILE
from mini_trainer.use.pages.page import fold
from mini_trainer.use.plots import columns

MOST_BYTES = 8 << 20  # of a file; the later lines are left out
MOST_PROMPTS = 16  # on the page
MOST_ANSWERS = 12  # to a prompt, of all runs together
MOST_CHARS = 2000  # of a text

Sample = dict[str, Any]  # a line


class SamplesReader:
    """The lines of a run's samples_0.jsonl, which are read again when the file has changed."""

    def __init__(self, path: Path):
        self.path = path / SAMPLES_FILE
        self.rows: list[Sample] = []
        self.identity: tuple[int, int, int] | None = None  # time (ns), size and inode of the file

    def read(self) -> None:
        """OSError if it is no file."""
        found = self.path.stat() if self.path.exists() else None
        identity = None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
        if identity != self.identity:
            self.rows, self.identity = [] if identity is None else read_samples(self.path), identity


def read_samples(path: Path) -> list[Sample]:
    with open_regular(path) as file:
        rows = map(parse_sample, file.read(MOST_BYTES).splitlines(keepends=True))
        return [row for row in rows if row is not None]


def describe_samples(runs: Sequence[list[Sample]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The prompts with the runs' answers, in the order of their steps, as JSON; and notes on what is left out."""
    found: dict[str, list[list[Sample]]] = {}  # by prompt, for each run
    for i, rows in enumerate(runs):
        for row in rows:
            found.setdefault(row["prompt"], [[] for _ in runs])[i].append(row)
    most, notes = max(2, MOST_ANSWERS // max(1, len(runs))), []
    if len(found) > MOST_PROMPTS:
        notes.append(f"Of {len(found):,} sample prompts, {MOST_PROMPTS} are shown.")
    largest = max((len(rows) for of_runs in found.values() for rows in of_runs), default=0)
    if largest > most:
        notes.append(f"Of the answers to each sample prompt, up to {largest:,} in a run, {most} of each run are shown.")
    prompts = [
        {
            "prompt": fold(prompt, MOST_CHARS),
            "answers": [describe_answer(row, i) for i, rows in enumerate(of_runs) for row in choose_rows(rows, most)],
        }
        for prompt, of_runs in list(found.items())[:MOST_PROMPTS]
    ]
    return prompts, notes


def choose_rows(rows: list[Sample], most: int) -> list[Sample]:
    """The first and the last, and evenly spaced ones between."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def describe_answer(row: Sample, run: int) -> dict[str, Any]:
    is_cut = row["finish_reason"] == "length"
    return {"run": run, "step": row["step"], "text": fold(row["answer"], MOST_CHARS), "is_cut": is_cut}


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


@dataclass(frozen=True)
class RunStart:
    """One start or resume of a run."""

    when: str
    first_step: int  # number of steps completed before
    resumed_from: str | None
    changed_options: list[str]
    machine: str
    facts: dict[str, Any]  # machine, commit and versions


class Run:
    """A run's directory: its metrics so far, its options and its starts."""

    def __init__(self, path: Path, name: str, most_bytes: int | None = None):
        """ValueError if the directory is not a run's. `most_bytes`: see `read`."""
        self.path, self.name = path, name
        check_is_run(path)
        self.steps = columns.MetricsReader(path / METRICS_FILE, columns.STEP_COLUMNS)
        self.validations = columns.MetricsReader(path / VALIDATION_FILE, columns.VALIDATION_COLUMNS)
        self.samples = SamplesReader(path)
        self.params: columns.MetricsLine = {}
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
    def options(self) -> columns.MetricsLine:
        options = self.params.get("options")
        return options if isinstance(options, dict) else {}

    @property
    def starts(self) -> list[RunStart]:
        """All starts in order, including the first."""
        starts = self.params.get("starts")
        starts = starts if isinstance(starts, list) else []
        return [describe_start(start) for start in starts if isinstance(start, dict)]

    @property
    def hours(self) -> columns.Column:
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


def read_run_params(path: Path) -> tuple[columns.MetricsLine, str]:
    """The content of the run's training_params.json, and the problem with it; {} if it cannot be read."""
    try:
        params = read_json(path / PARAMS_FILE)
    except (ValueError, OSError) as error:
        return {}, str(error)
    return (params, "") if isinstance(params, dict) else ({}, f"{PARAMS_FILE} is not an object")


def find_state(path: Path, params: columns.MetricsLine) -> State:
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


def describe_start(start: columns.MetricsLine) -> RunStart:
    versions = start.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    world_size, device, changes = (start.get(key) for key in ("world_size", "device", "changed_options"))
    first_step = columns.to_float(start.get("first_step"))
    return RunStart(
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


def name_runs(paths: list[Path]) -> list[str]:
    """The paths from their common folder; the last two parts of a single one."""
    full = [os.path.abspath(path) for path in paths]
    if len(full) == 1:
        return ["/".join(part.strip("/") for part in Path(full[0]).parts[-2:] if part != "/") or "/"]
    folder = os.path.commonpath(full)
    return [os.path.relpath(path, folder) for path in full]


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
