"""Experiment tracker packages; each is imported only if requested, and only in its tracker's thread."""

import contextlib
import functools
import io
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_trainer.distributed.ending import log
from mini_trainer.options import TrackingOptions
from mini_trainer.options.doors import TRACKERS
from mini_trainer.run.identity import read_params
from mini_trainer.run.trackers import EarlierSteps, Entry, KnownRuns, TrackedRun, Trackers

DEFAULT_PROJECT = "mini_trainer"
MLFLOW_PARAMS, MLFLOW_METRICS = 100, 1000  # maximum that MLflow accepts in one call
MLFLOW_LONGEST = 6000  # maximum characters of a parameter
FACTS = (
    *("started", "first_step", "resumed_from", "continued_from", "changed_options"),
    *("world_size", "device", "versions", "git_commit"),
)


class Wandb:
    """Weights & Biases: online, or with WANDB_MODE=offline in the run's directory.

    Step numbers are ours. In wandb, steps only increase, and a resumed run knows its last step: steps repeated after a
    kill are skipped, since their numbers are the same. An offline run does not know it, and logs them twice.
    """

    def start(self, run: TrackedRun) -> tuple[str, int | None]:
        import wandb

        run_id = run.known.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        run.keep({"id": run_id})  # before creating the run: however this start ends, the next one uses the same id
        settings = {"console": "off"} if "WANDB_CONSOLE" not in os.environ else {}
        settings |= {"silent": True} if "WANDB_SILENT" not in os.environ else {}
        self.run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=run.name,
            id=run_id,
            resume="allow",
            dir=None if "WANDB_DIR" in os.environ else str(run.output_dir),
            config=run.options,
            allow_val_change=True,
            settings=wandb.Settings(**settings),
        )
        self.run.config.update({"run": run.facts}, allow_val_change=True)
        self.next_step = self.run.step
        if self.run.offline:
            return f"offline, in {Path(self.run.dir).parent}", None if run.known else 0
        return str(self.run.url), self.next_step

    def log(self, entries: list[Entry]) -> None:
        for step, values in entries:
            if step >= self.next_step:
                self.run.log(values, step=step)

    def flush(self) -> None:
        pass  # wandb's own process already has the data

    def finish(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in the run's directory. A resumed run makes TensorBoard discard the steps that are repeated."""

    def start(self, run: TrackedRun) -> tuple[str, int | None]:
        from torch.utils.tensorboard import SummaryWriter

        directory = run.output_dir / "tensorboard"
        run.keep({"directory": directory.name})
        is_first = not any(directory.glob("events.*"))
        purge_step = None if is_first else run.first_step + 1
        self.writer = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=10)
        for name, values in (("options", run.options), ("run", run.facts)):
            rows = "".join(f"| {key} | `{json.dumps(value)}` |\n" for key, value in values.items())
            self.writer.add_text(name, f"| | |\n| --- | --- |\n{rows}", global_step=run.first_step)
        self.writer.flush()
        return str(directory), 0 if is_first else None

    def log(self, entries: list[Entry]) -> None:
        for step, values in entries:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class MLflow:
    """An MLflow server or database, MLFLOW_TRACKING_URI, or MLflow's own default.

    MLflow would keep both values of a repeated step, so steps that it already has are skipped.
    """

    def start(self, run: TrackedRun) -> tuple[str, int | None]:
        from mlflow import MlflowClient, get_tracking_uri
        from mlflow.entities import RunTag

        for name in ("mlflow", "alembic"):  # they log the creation of their tables at length
            logging.getLogger(name).setLevel(logging.WARNING)
        self.client = MlflowClient()
        self.run_id = self._find(run.known.get("run_id"))
        self.last_steps = {key: self._last_step(key) for key in ("train/loss", "validation/loss")}
        if self.run_id is None:
            created = self.client.create_run(self._experiment(run.project), run_name=run.name)
            self.run_id = created.info.run_id
            run.keep({"run_id": self.run_id})
            self._log_options(run.options)
        self.client.update_run(self.run_id, status="RUNNING")
        tags = [RunTag(key, json.dumps(value)[:MLFLOW_LONGEST].strip('"')) for key, value in run.facts.items()]
        self.client.log_batch(self.run_id, tags=tags)
        first_lacking = min((step + 1 for step in self.last_steps.values() if step >= 0), default=0)
        return f"run {self.run_id} in {get_tracking_uri()}", first_lacking

    def _find(self, run_id: str | None) -> str | None:
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            return self.client.get_run(run_id).info.run_id
        except MlflowException:
            log.warning(f"warning: --track mlflow: the tracked run {run_id} no longer exists: starting a new one")
            return None

    def _last_step(self, key: str) -> int:
        history = [] if self.run_id is None else self.client.get_metric_history(self.run_id, key)
        return max((metric.step for metric in history), default=-1)

    def _experiment(self, project: str | None) -> str:
        from mlflow.exceptions import MlflowException

        if project is None and "MLFLOW_EXPERIMENT_ID" in os.environ:
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        found = self.client.get_experiment_by_name(name)
        try:
            return self.client.create_experiment(name) if found is None else found.experiment_id
        except MlflowException:  # another run has created it in the meantime
            return self.client.get_experiment_by_name(name).experiment_id

    def _log_options(self, options: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, str(value)[:MLFLOW_LONGEST]) for key, value in options.items()]
        for start in range(0, len(params), MLFLOW_PARAMS):
            self.client.log_batch(self.run_id, params=params[start : start + MLFLOW_PARAMS])

    def log(self, entries: list[Entry]) -> None:
        from mlflow.entities import Metric

        now, metrics = round(1000 * time.time()), []
        for step, values in entries:
            key = "validation/loss" if "validation/loss" in values else "train/loss"
            if step > self.last_steps[key]:
                metrics += [Metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), MLFLOW_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MLFLOW_METRICS])

    def flush(self) -> None:
        pass  # log_batch writes to the database immediately

    def finish(self) -> None:
        self.client.set_terminated(self.run_id)


class Trackio:
    """trackio: its local database (TRACKIO_DIR), or a Space or server (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL).

    It identifies runs by name, so a new run's name gets a random suffix. A local database records the last step of a
    resumed run, and repeated steps are skipped.
    """

    def start(self, run: TrackedRun) -> tuple[str, int | None]:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project = run.known.get("project") or run.project or os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT
        name = run.known.get("name") or f"{run.name}-{secrets.token_hex(2)}"
        run.keep({"project": project, "name": name})
        config = {"options": run.options, "run": run.facts}
        with contextlib.redirect_stdout(io.StringIO()):  # its output would garble the live line
            self.run = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)
        self.last_step = SQLiteStorage.get_max_step_for_run(project, name, run_id=self.run.id)
        return f"run {name} of project {project}", 0 if self.last_step is None else self.last_step + 1

    def log(self, entries: list[Entry]) -> None:
        for step, values in entries:
            if self.last_step is None or step > self.last_step:
                self.run.log(values, step=step)

    def flush(self) -> None:
        pass  # it writes twice a second

    def finish(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.finish()


def open_trackers(options: TrackingOptions, output_dir: Path, values: Mapping[str, Any]) -> Trackers:
    """The sink of --track; call this after training_params.json has recorded this start."""
    start = read_params(output_dir)
    known, earlier = KnownRuns(output_dir), EarlierSteps(output_dir)
    facts = {"host": socket.gethostname(), "output_dir": str(output_dir.absolute())} | {
        key: start[key] for key in FACTS
    }
    values = json.loads(json.dumps(values))

    def describe_run(title: str) -> TrackedRun:
        return TrackedRun(
            name=choose_name(options, output_dir),
            project=options.track_project,
            output_dir=output_dir,
            first_step=start["first_step"],
            options=values,
            facts=facts,
            read_earlier=earlier.read,
            known=known.runs.get(title, {}),
            keep=functools.partial(known.keep, title),
        )

    return Trackers({title: TRACKERS[title]() for title in options.track}, describe_run)


def choose_name(tracking: TrackingOptions, output_dir: Path) -> str:
    return tracking.track_name or output_dir.absolute().name
