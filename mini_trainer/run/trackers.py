"""Experiment trackers (wandb, TensorBoard, MLflow, trackio) as one sink, each with its own thread and bounded queue.

A tracker that fails, hangs or is slow is reported once; training never waits for it (docs/tracking.md).
"""

import hashlib
import heapq
import itertools
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mini_trainer.data.stores.disk import read_metrics, read_object, written_aside
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import describe_error, hide_secrets
from mini_trainer.run.training_log import METRICS_FILE, VALIDATION_FILE, Sink

TRACKERS_FILE = "trackers.json"  # in the run's directory: the ids of its runs in trackers
QUEUE_LENGTH = 1000  # steps and validations that a tracker may be behind
SECONDS_TO_COLLECT = 1.0  # between calls of a tracker, since logging many steps at once is cheaper
SECONDS_TO_FINISH = 60.0  # at the end of the run, for all trackers together
MAX_NAME = 100  # maximum characters of a data set's name in a metric's name
FALLEN_BEHIND, FAILED = "fallen behind", "failed"

# Groups of step metrics; all others are in train/, such as a method's own metrics.
DATA = ("num_samples", "num_loss_counted_tokens", "num_total_tokens", "total_samples_accumulated",
        "total_tokens_accumulated", "packing_efficiency")  # fmt: skip
PERFORMANCE = ("tokens_per_second", "samples_per_second", "time_per_batch", "data_wait_seconds", "mfu",
               "peak_memory_usage_GB", "rank_balance", "grad_accum")  # fmt: skip
GROUPS = dict.fromkeys(DATA, "data") | dict.fromkeys(PERFORMANCE, "performance")


Entry = tuple[int, dict[str, float]]  # a step, and its numbers by grouped names


@dataclass(frozen=True)
class TrackedRun:
    """The run's description for trackers, before its first metrics."""

    name: str
    project: str | None  # None: from the tracker's own environment, else `DEFAULT_PROJECT`
    output_dir: Path
    first_step: int  # steps completed before this start
    options: dict[str, Any]  # by name, JSON
    facts: dict[str, Any]  # host, directory, versions, devices: JSON
    read_earlier: Callable[[int], Iterator[Entry]]  # reads earlier starts' metrics from a step on
    known: dict[str, str]  # argument of `keep` in an earlier start; empty in the first
    keep: Callable[[dict[str, str]], None]  # stores what the next start needs to resume the tracker's run


class Tracker(Protocol):
    """One tracker package. All methods are called in this tracker's thread, and may raise or block."""

    def start(self, run: TrackedRun) -> tuple[str, int | None]:
        """Creates the tracker's run, or resumes the earlier one.

        Returns its location, and the first step that it does not have; None if that is unknown.
        """
        ...

    def log(self, entries: list[Entry]) -> None:
        """Logs the numbers of some steps, in order; skips steps that the tracker has from an earlier start."""
        ...

    def flush(self) -> None: ...

    def finish(self) -> None: ...


class TrackerThread:
    """A tracker, its queue, and the thread that calls it."""

    def __init__(self, title: str, tracker: Tracker, run: TrackedRun):
        self.title, self.tracker, self.run = title, tracker, run
        self.queue: queue.Queue[Entry | None] = queue.Queue(QUEUE_LENGTH)
        self.told: set[str] = set()  # kinds of problems that have been reported
        self.num_lost = 0  # steps and validations that were not logged
        self.is_dead = False
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"tracker {title}", daemon=True)
        self.thread.start()

    def put(self, entry: Entry | None) -> None:
        """Queues an entry, or None to flush. Never blocks: entries are dropped if the queue is full."""
        try:
            if not self.is_dead:
                return self.queue.put_nowait(entry)
        except queue.Full:
            self.tell(FALLEN_BEHIND, f"is {QUEUE_LENGTH} entries behind; further entries are dropped")
        self.num_lost += entry is not None

    def tell(self, kind: str, what: str) -> None:
        """Logs a warning, once per kind of problem."""
        if kind not in self.told:
            self.told.add(kind)
            log.warning(
                f"warning: --track {self.title}: {what}; training continues, and everything is in the metrics files"
            )

    def _work(self) -> None:
        try:
            where, first_lacking = self.tracker.start(self.run)
            log.info(f"tracking: {self.title}: {hide_secrets(where)}")
        except (Exception, SystemExit) as error:
            self.is_dead = True
            return self.tell(FAILED, f"could not be started: {describe_error(error)}")
        if first_lacking is not None:
            earlier = self.run.read_earlier(first_lacking)
            while entries := list(itertools.islice(earlier, QUEUE_LENGTH)):
                self._take(entries)
        is_over = False
        while not is_over:
            is_over = self.ending.wait(SECONDS_TO_COLLECT)  # before the queue is emptied for the last time
            self._take([self.queue.get() for _ in range(self.queue.qsize())])
        try:
            self.tracker.finish()
        except (Exception, SystemExit) as error:
            self.tell(FAILED, f"could not be finished: {describe_error(error)}")

    def _take(self, taken: list[Entry | None]) -> None:
        entries = [entry for entry in taken if entry is not None]
        try:
            if entries:
                self.tracker.log(entries)
            if len(entries) < len(taken):
                self.tracker.flush()
        except (Exception, SystemExit) as error:  # later calls may succeed, when the network is back
            self.num_lost += len(entries)
            self.tell(FAILED, f"failed: {describe_error(error)}")


class Trackers(Sink):
    """Passes steps and validations to every tracker (see `run.training_log.Sink`)."""

    def __init__(self, trackers: dict[str, Tracker], describe_run: Callable[[str], TrackedRun]):
        self.threads = [TrackerThread(title, tracker, describe_run(title)) for title, tracker in trackers.items()]

    def write(self, metrics: dict[str, Any]) -> None:
        self._put((metrics["step"], name_step_metrics(metrics)))

    def write_validation(self, metrics: dict[str, Any]) -> None:
        self._put((metrics["step"], name_validation_metrics(metrics)))

    def flush_to_disk(self) -> None:
        """Requests a flush without waiting: a checkpoint needs only the metrics files."""
        self._put(None)

    def close(self) -> None:
        """Waits at most `SECONDS_TO_FINISH` for all trackers to log their entries."""
        deadline = time.monotonic() + SECONDS_TO_FINISH
        for thread in self.threads:
            thread.ending.set()
        for thread in self.threads:
            thread.thread.join(max(0.0, deadline - time.monotonic()))
            if thread.thread.is_alive():
                thread.tell(FAILED, f"has not finished {SECONDS_TO_FINISH:.0f} s after the run's end")
            if thread.num_lost:
                log.info(f"tracking: {thread.title} is missing {thread.num_lost:,} entries")

    def _put(self, entry: Entry | None) -> None:
        for thread in self.threads:
            thread.put(entry)


def name_step_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """A line of training_metrics_0.jsonl by grouped names, such as train/loss, without nulls."""
    plain = {name: value for name, value in metrics.items() if name not in ("step", "sources")}
    named = keep_numbers({f"{GROUPS.get(name, 'train')}/{name}": value for name, value in plain.items()})
    for source, values in metrics.get("sources", {}).items():
        named |= name_parts(f"source/{clean_name(source)}", values)
    return named


def name_validation_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """A validation's metrics by their names in trackers; if there are several sets, also those of each."""
    named = name_parts("validation", {name: value for name, value in metrics.items() if name not in ("step", "sets")})
    sets = metrics.get("sets", {})
    for name, values in sets.items() if len(sets) > 1 else ():
        named |= name_parts(f"validation/{clean_name(name)}", values)
    return named


def name_parts(group: str, values: dict[str, Any]) -> dict[str, float]:
    return keep_numbers({f"{group}/{name}": value for name, value in values.items()})


class EarlierSteps:
    """Metrics in the files when the run starts; the metrics that this start adds go through the queue."""

    def __init__(self, output_dir: Path):
        paths = {output_dir / METRICS_FILE: name_step_metrics, output_dir / VALIDATION_FILE: name_validation_metrics}
        self.parts = [(path, path.stat().st_size, naming) for path, naming in paths.items() if path.exists()]

    def read(self, first_step: int) -> Iterator[Entry]:
        """Yields steps and validations from `first_step` on, in order."""
        entries = heapq.merge(*(read_entries(*part) for part in self.parts), key=lambda entry: entry[0])
        return (entry for entry in entries if entry[0] >= first_step)


def read_entries(path: Path, size: int, name_metrics: Callable[[dict[str, Any]], dict[str, float]]) -> Iterator[Entry]:
    """Yields the lines of the first `size` bytes, but not damaged ones."""
    for _, line, metrics in read_metrics(path):
        size -= len(line)
        if size < 0:
            return
        if metrics is not None:
            yield metrics["step"], name_metrics(metrics)


def keep_numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


def clean_name(name: str) -> str:
    """Makes a data set's name a valid part of a metric's name in every tracker: no slashes or characters that MLflow
    refuses.

    A changed name ends with a digest of the original, so that different names stay different.
    """
    clean = re.sub(r"[^A-Za-z0-9_.\- ]", "_", name)[:MAX_NAME].strip(" .")
    if clean == name != "":
        return clean
    return f"{clean}_{hashlib.sha256(name.encode()).hexdigest()[:6]}".lstrip("_")


class KnownRuns:
    """trackers.json: what each tracker needs to resume its run. Trackers' threads write it atomically, in turn."""

    def __init__(self, output_dir: Path):
        self.path, self.lock = output_dir / TRACKERS_FILE, threading.Lock()
        try:
            self.runs: dict[str, dict[str, str]] = read_object(self.path) if self.path.exists() else {}
            if not all(isinstance(known, dict) for known in self.runs.values()):
                raise ValueError(f"{self.path}: its entries are not valid")
        except ValueError as error:
            log.warning(f"warning: {error}: trackers start new runs")
            self.runs = {}

    def keep(self, title: str, known: dict[str, str]) -> None:
        with self.lock:
            self.runs[title] = known
            with written_aside(self.path) as (aside,):
                aside.write_text(json.dumps(self.runs, indent=2) + "\n")
