"""Experiment trackers (wandb, TensorBoard, MLflow) as one sink, each with its own thread and bounded queue.

A tracker that fails, hangs or is slow is reported once; training never waits for it (docs/tasks/tracking.md). A package
is imported only if it is requested, in its tracker's thread.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import write_text
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import describe_error, hide_secrets
from mini_trainer.options import TrackingOptions
from mini_trainer.options.doors import TRACKERS
from mini_trainer.options.reading import read_object
from mini_trainer.run.record import read_params
from mini_trainer.run.training_log import Sink

TRACKERS_FILE = "trackers.json"  # in the run's directory: the ids of its runs in trackers
QUEUE_LENGTH = 1000  # steps and validations that a tracker may be behind
SECONDS_TO_COLLECT = 1.0  # between calls of a tracker, since logging many steps at once is cheaper
SECONDS_TO_FINISH = 60.0  # at the end of the run, for all trackers together
MAX_NAME = 100  # maximum characters of a data set's name in a metric's name
FALLEN_BEHIND, FAILED = "fallen behind", "failed"
FACTS = ("started", "first_step", "resumed_from", "continued_from", "changed_options", "world_size", "device",
         "versions", "git_commit")  # fmt: skip

# Groups of step metrics; all others are in train/, such as a method's own metrics.
DATA = ("num_samples", "num_loss_counted_tokens", "num_total_tokens", "total_samples_accumulated",
        "total_tokens_accumulated", "packing_efficiency")  # fmt: skip
PERFORMANCE = ("tokens_per_second", "samples_per_second", "time_per_batch", "data_wait_seconds", "mfu",
               "peak_memory_usage_GB", "rank_balance", "grad_accum")  # fmt: skip
GROUPS = dict.fromkeys(DATA, "data") | dict.fromkeys(PERFORMANCE, "performance")
STEP, VALIDATION = "train/loss", "validation/loss"  # a metric of every step, and one of every validation

Entry = tuple[int, dict[str, float]]  # a step, and its numbers by grouped names


@dataclass(frozen=True)
class TrackedRun:
    """The run's description for trackers, before its first metrics."""

    name: str
    output_dir: Path
    first_step: int  # steps completed before this start
    options: dict[str, Any]  # by name, JSON
    facts: dict[str, Any]  # host, directory, versions, devices: JSON


Ids = dict[str, str]  # for the next start, to resume a tracker's run
Keep = Callable[[Ids], None]  # stores them


@dataclass(frozen=True)
class StartedRun:
    """A package's own run, new or resumed. Its functions are called in the tracker's thread, and may raise or block."""

    where: str
    log: Callable[[list[Entry]], None]  # of the numbers of some steps, in order
    finish: Callable[[], None]
    first_lacking: dict[str, int]  # first steps that it lacks, by `STEP` and `VALIDATION`; empty: it has none twice


# Creates the run of a package in the tracker's thread, or resumes the earlier one; without one, the ids are empty.
Tracker = Callable[[TrackedRun, Ids, Keep], StartedRun]


class KnownRuns:
    """trackers.json: each tracker's ids, to resume its run. Trackers' threads write it atomically, in turn."""

    def __init__(self, output_dir: Path):
        self.path, self.lock = output_dir / TRACKERS_FILE, threading.Lock()
        self.runs: dict[str, Ids] = {}
        try:
            self.runs = read_object(self.path) if self.path.exists() else {}
        except ValueError as error:
            log.warning(f"warning: {error}: trackers start new runs")

    def keep(self, title: str, ids: Ids) -> None:
        with self.lock:
            self.runs[title] = ids
            write_text(self.path, json.dumps(self.runs, indent=2) + "\n")


class TrackerThread:
    """A tracker, its queue, and the thread that calls it."""

    def __init__(self, title: str, tracker: Tracker, run: TrackedRun, known: KnownRuns):
        self.title, self.tracker, self.run, self.known = title, tracker, run, known
        self.queue: queue.Queue[Entry] = queue.Queue(QUEUE_LENGTH)
        self.told: set[str] = set()  # kinds of problems that have been reported
        self.num_lost = 0  # steps and validations that were not logged
        self.is_dead = False
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"tracker {title}", daemon=True)
        self.thread.start()

    def put(self, entry: Entry) -> None:
        """Never blocks: entries are dropped if the queue is full."""
        try:
            if not self.is_dead:
                return self.queue.put_nowait(entry)
        except queue.Full:
            self.tell(FALLEN_BEHIND, f"is {QUEUE_LENGTH} entries behind; further entries are dropped")
        self.num_lost += 1

    def tell(self, kind: str, what: str) -> None:
        """Logs a warning, once per kind of problem."""
        if kind not in self.told:
            self.told.add(kind)
            log.warning(
                f"warning: --track {self.title}: {what}; training continues, and everything is in the metrics files"
            )

    def _start(self) -> None:
        ids, keep = self.known.runs.get(self.title, {}), partial(self.known.keep, self.title)
        self.started = self.tracker(self.run, ids, keep)
        log.info(f"tracking: {self.title}: {hide_secrets(self.started.where)}")

    def _work(self) -> None:
        self.is_dead = not self._succeeds(self._start, "could not be started")
        if self.is_dead:
            return
        is_over = False
        while not is_over:
            is_over = self.ending.wait(SECONDS_TO_COLLECT)  # before the queue is emptied for the last time
            entries = [self.queue.get() for _ in range(self.queue.qsize())]
            lacking = [entry for entry in entries if self._lacks(entry)]
            # After a failure, later entries may succeed once the network is back.
            if lacking and not self._succeeds(partial(self.started.log, lacking), "failed"):
                self.num_lost += len(lacking)
        self._succeeds(self.started.finish, "could not be finished")

    def _succeeds(self, call: Callable[[], None], failure: str) -> bool:
        try:
            call()
        except (Exception, SystemExit) as error:
            self.tell(FAILED, f"{failure}: {describe_error(error)}")
            return False
        return True

    def _lacks(self, entry: Entry) -> bool:
        """Whether the tracker lacks an entry: a resumed run repeats steps that it may have."""
        step, values = entry
        kind = VALIDATION if any(name.startswith("validation/") for name in values) else STEP
        return step >= self.started.first_lacking.get(kind, 0)


class Trackers(Sink):
    """Passes steps and validations to every tracker (see `run.training_log.Sink`).
    A checkpoint does not wait for them: it needs only the metrics files."""

    def __init__(self, trackers: dict[str, Tracker], run: TrackedRun):
        known = KnownRuns(run.output_dir)
        self.threads = [TrackerThread(title, tracker, run, known) for title, tracker in trackers.items()]

    def write(self, metrics: dict[str, Any]) -> None:
        self._put((metrics["step"], name_step_metrics(metrics)))

    def write_validation(self, metrics: dict[str, Any]) -> None:
        self._put((metrics["step"], name_validation_metrics(metrics)))

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

    def _put(self, entry: Entry) -> None:
        for thread in self.threads:
            thread.put(entry)


def open_trackers(options: TrackingOptions, output_dir: Path, values: Mapping[str, Any]) -> Trackers:
    """The sink of --track, of a run with these `values` of options; training_params.json has recorded this start."""
    start, place = read_params(output_dir), output_dir.absolute()
    run = TrackedRun(
        name=name_run(place),
        output_dir=output_dir,
        first_step=start["first_step"],
        options=json.loads(json.dumps(values)),
        facts={"host": socket.gethostname(), "output_dir": str(place)} | {name: start[name] for name in FACTS},
    )
    return Trackers({title: TRACKERS[title] for title in options.track}, run)


def name_run(place: Path) -> str:
    """The name of a run's directory; of a sweep's trial, SWEEP_TRIAL, since each has its run in a directory `run`."""
    return place.name if place.name != "run" else f"{place.parent.parent.name}_{place.parent.name}"


def name_step_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """A line of training_metrics_0.jsonl by grouped names, such as train/loss, without nulls."""
    named = {f"{GROUPS.get(name, 'train')}/{name}": value for name, value in metrics.items() if name != "step"}
    return keep_numbers(named | name_parts("source", metrics.get("sources", {})))


def name_validation_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """A validation's metrics by their names in trackers; if there are several sets, also those of each."""
    named = {f"validation/{name}": value for name, value in metrics.items() if name != "step"}
    sets = metrics.get("sets", {})
    return keep_numbers(named | (name_parts("validation", sets) if len(sets) > 1 else {}))


def name_parts(group: str, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Metrics of data sets by their names in trackers."""
    pairs = ((clean_name(part), values) for part, values in parts.items())
    return {f"{group}/{part}/{name}": value for part, values in pairs for name, value in values.items()}


def keep_numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


def clean_name(name: str) -> str:
    """Makes a data set's name a valid part of a metric's name in every tracker: no slashes or characters that MLflow
    refuses. A changed name ends with a digest of the original, so that different names stay different."""
    clean = re.sub(r"[^A-Za-z0-9_.\- ]", "_", name)[:MAX_NAME].strip(" .")
    if clean == name != "":
        return clean
    return f"{clean}_{hashlib.sha256(name.encode()).hexdigest()[:6]}".lstrip("_")


DEFAULT_PROJECT = "mini_trainer"
MLFLOW_LONGEST = 6000  # maximum characters of a parameter


def start_wandb(run: TrackedRun, ids: Ids, keep: Keep) -> StartedRun:
    """Weights & Biases: online, or with WANDB_MODE=offline in the run's directory. Step numbers are ours. In wandb,
    steps only increase, and a resumed run knows its last step: steps repeated after a kill are skipped, since their
    numbers are the same. An offline run does not know it, and logs them twice."""
    import wandb

    run_id = ids.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    keep({"id": run_id})  # before creating the run: however this start ends, the next one uses the same id
    console, silent = os.environ.get("WANDB_CONSOLE", "off"), os.environ.get("WANDB_SILENT", "true")
    started = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
        name=os.environ.get("WANDB_NAME") or run.name,
        id=run_id,
        resume="allow",
        dir=None if "WANDB_DIR" in os.environ else str(run.output_dir),
        config=run.options,
        allow_val_change=True,
        settings=wandb.Settings(console=console, silent=silent),
    )
    started.config.update({"run": run.facts}, allow_val_change=True)
    first_lacking = {} if started.offline and ids else {STEP: started.step, VALIDATION: started.step}
    where = f"offline, in {Path(started.dir).parent}" if started.offline else str(started.url)

    def log_entries(entries: list[Entry]) -> None:
        for step, values in entries:
            started.log(values, step=step)

    return StartedRun(where, log_entries, started.finish, first_lacking)


def start_tensorboard(run: TrackedRun, ids: Ids, keep: Keep) -> StartedRun:
    """Event files in the run's directory. A resumed run makes TensorBoard discard the steps that are repeated."""
    from torch.utils.tensorboard import SummaryWriter

    directory = run.output_dir / "tensorboard"
    keep({"directory": directory.name})
    purge_step = run.first_step + 1 if any(directory.glob("events.*")) else None
    writer = SummaryWriter(str(directory), purge_step=purge_step)

    def log_entries(entries: list[Entry]) -> None:
        for step, values in entries:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        writer.flush()  # a resumed run relies on the steps before its checkpoint

    for name, values in (("options", run.options), ("run", run.facts)):
        rows = "".join(f"| {key} | `{json.dumps(value)}` |\n" for key, value in values.items())
        writer.add_text(name, f"| | |\n| --- | --- |\n{rows}", global_step=run.first_step)
    writer.flush()
    return StartedRun(str(directory), log_entries, writer.close, {})


def start_mlflow(run: TrackedRun, ids: Ids, keep: Keep) -> StartedRun:
    """An MLflow server or database, MLFLOW_TRACKING_URI, or MLflow's own default. A client instead of MLflow's active
    run, which prints, and is ended at exit. MLflow would keep both values of a repeated step, so steps that it already
    has are skipped."""
    from mlflow import MlflowClient, get_tracking_uri
    from mlflow.entities import Metric, Param, RunTag

    for name in ("mlflow", "alembic"):  # they log the creation of their tables in detail
        logging.getLogger(name).setLevel(logging.WARNING)
    client, run_id, params = MlflowClient(), ids.get("run_id"), []
    if run_id is not None:
        client.update_run(run_id, status="RUNNING")
    else:
        name = os.environ.get("MLFLOW_RUN_NAME") or run.name
        run_id = client.create_run(find_experiment(client), run_name=name).info.run_id
        keep({"run_id": run_id})
        params = [Param(name, str(value)[:MLFLOW_LONGEST]) for name, value in run.options.items()]
    tags = [RunTag(name, json.dumps(value)[:MLFLOW_LONGEST].strip('"')) for name, value in run.facts.items()]
    client.log_batch(run_id, params=params, tags=tags)

    def log_entries(entries: list[Entry]) -> None:
        now = round(1000 * time.time())
        metrics = [Metric(name, value, now, step) for step, values in entries for name, value in values.items()]
        client.log_batch(run_id, metrics=metrics)

    logged = {metric: client.get_metric_history(run_id, metric) for metric in (STEP, VALIDATION)}
    first_lacking = {metric: max((one.step + 1 for one in points), default=0) for metric, points in logged.items()}
    where = f"run {run_id} in {get_tracking_uri()}"
    return StartedRun(where, log_entries, partial(client.set_terminated, run_id), first_lacking)


def find_experiment(client: Any) -> str:
    from mlflow.exceptions import MlflowException

    if "MLFLOW_EXPERIMENT_ID" in os.environ:
        return os.environ["MLFLOW_EXPERIMENT_ID"]
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
    with contextlib.suppress(MlflowException):  # it exists
        return client.create_experiment(name)
    return client.get_experiment_by_name(name).experiment_id
