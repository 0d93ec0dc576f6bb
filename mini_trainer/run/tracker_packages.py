"""Experiment tracker packages; each is imported only if requested, and only in its tracker's thread."""

import contextlib
import io
import json
import logging
import os
import secrets
import time
from pathlib import Path

from mini_trainer.distributed.ending import log
from mini_trainer.run.trackers import STEP, VALIDATION, Entry, Ids, Keep, TrackedRun

DEFAULT_PROJECT = "mini_trainer"
MLFLOW_LONGEST = 6000  # maximum characters of a parameter


class Wandb:
    """Weights & Biases: online, or with WANDB_MODE=offline in the run's directory.

    Step numbers are ours. In wandb, steps only increase, and a resumed run knows its last step: steps repeated after a
    kill are skipped, since their numbers are the same. An offline run does not know it, and logs them twice.
    """

    def start(self, run: TrackedRun, ids: Ids, keep: Keep) -> tuple[str, dict[str, int]]:
        import wandb

        run_id = ids.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        keep({"id": run_id})  # before creating the run: however this start ends, the next one uses the same id
        console, silent = os.environ.get("WANDB_CONSOLE", "off"), os.environ.get("WANDB_SILENT", "true")
        self.run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=run.name,
            id=run_id,
            resume="allow",
            dir=None if "WANDB_DIR" in os.environ else str(run.output_dir),
            config=run.options,
            allow_val_change=True,
            settings=wandb.Settings(console=console, silent=silent),
        )
        self.run.config.update({"run": run.facts}, allow_val_change=True)
        first_lacking = {} if self.run.offline and ids else {STEP: self.run.step, VALIDATION: self.run.step}
        where = f"offline, in {Path(self.run.dir).parent}" if self.run.offline else str(self.run.url)
        return where, first_lacking

    def log(self, entries: list[Entry]) -> None:
        for step, values in entries:
            self.run.log(values, step=step)

    def finish(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in the run's directory. A resumed run makes TensorBoard discard the steps that are repeated."""

    def start(self, run: TrackedRun, ids: Ids, keep: Keep) -> tuple[str, dict[str, int]]:
        from torch.utils.tensorboard import SummaryWriter

        directory = run.output_dir / "tensorboard"
        keep({"directory": directory.name})
        is_first = not any(directory.glob("events.*"))
        self.writer = SummaryWriter(str(directory), purge_step=None if is_first else run.first_step + 1)
        for name, values in (("options", run.options), ("run", run.facts)):
            rows = "".join(f"| {key} | `{json.dumps(value)}` |\n" for key, value in values.items())
            self.writer.add_text(name, f"| | |\n| --- | --- |\n{rows}", global_step=run.first_step)
        self.writer.flush()
        return str(directory), {STEP: 0, VALIDATION: 0} if is_first else {}

    def log(self, entries: list[Entry]) -> None:
        for step, values in entries:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a resumed run relies on the steps before its checkpoint

    def finish(self) -> None:
        self.writer.close()


class MLflow:
    """An MLflow server or database, MLFLOW_TRACKING_URI, or MLflow's own default.

    A client instead of MLflow's active run, which prints, and is ended at exit. MLflow would keep both values of a
    repeated step, so steps that it already has are skipped.
    """

    def start(self, run: TrackedRun, ids: Ids, keep: Keep) -> tuple[str, dict[str, int]]:
        from mlflow import MlflowClient, get_tracking_uri
        from mlflow.entities import Param, RunTag

        for name in ("mlflow", "alembic"):  # they log the creation of their tables at length
            logging.getLogger(name).setLevel(logging.WARNING)
        self.client = MlflowClient()
        self.run_id = ids.get("run_id")
        if self.run_id is None or not self._has_run(self.run_id):
            created = self.client.create_run(self._find_experiment(run.project), run_name=run.name)
            self.run_id = created.info.run_id
            keep({"run_id": self.run_id})
            params = [Param(name, str(value)[:MLFLOW_LONGEST]) for name, value in run.options.items()]
            self.client.log_batch(self.run_id, params=params)
        self.client.update_run(self.run_id, status="RUNNING")
        tags = [RunTag(name, json.dumps(value)[:MLFLOW_LONGEST].strip('"')) for name, value in run.facts.items()]
        self.client.log_batch(self.run_id, tags=tags)
        first_lacking = {metric: self._find_next_step(metric) for metric in (STEP, VALIDATION)}
        return f"run {self.run_id} in {get_tracking_uri()}", first_lacking

    def _has_run(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self.client.get_run(run_id)
        except MlflowException:
            log.warning(f"warning: --track mlflow: the tracked run {run_id} no longer exists: starting a new one")
            return False
        return True

    def _find_experiment(self, project: str | None) -> str:
        from mlflow.exceptions import MlflowException

        if project is None and "MLFLOW_EXPERIMENT_ID" in os.environ:
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        with contextlib.suppress(MlflowException):  # it exists
            return self.client.create_experiment(name)
        return self.client.get_experiment_by_name(name).experiment_id

    def _find_next_step(self, metric: str) -> int:
        return max((point.step + 1 for point in self.client.get_metric_history(self.run_id, metric)), default=0)

    def log(self, entries: list[Entry]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(name, value, now, step) for step, values in entries for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def finish(self) -> None:
        self.client.set_terminated(self.run_id)


class Trackio:
    """trackio: its local database (TRACKIO_DIR), or a Space or server (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL).

    It identifies runs by name, so a new run's name gets a random suffix. A local database records the last step of a
    resumed run, and repeated steps are skipped.
    """

    def start(self, run: TrackedRun, ids: Ids, keep: Keep) -> tuple[str, dict[str, int]]:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project = ids.get("project") or run.project or os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT
        name = ids.get("name") or f"{run.name}-{secrets.token_hex(2)}"
        keep({"project": project, "name": name})
        config = {"options": run.options, "run": run.facts}
        with contextlib.redirect_stdout(io.StringIO()):  # its output would garble the live line
            self.run = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)
        last_step = SQLiteStorage.get_max_step_for_run(project, name, run_id=self.run.id)
        first_lacking = 0 if last_step is None else last_step + 1
        return f"run {name} of project {project}", {STEP: first_lacking, VALIDATION: first_lacking}

    def log(self, entries: list[Entry]) -> None:
        for step, values in entries:
            self.run.log(values, step=step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.finish()
