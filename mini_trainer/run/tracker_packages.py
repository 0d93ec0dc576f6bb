"""Experiment tracker packages: starts their runs. Each is imported only if requested, in its tracker's thread."""

import contextlib
import io
import json
import logging
import os
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Any

from mini_trainer.distributed.ending import log
from mini_trainer.run.trackers import STEP, VALIDATION, Entry, Ids, Keep, StartedRun, TrackedRun

DEFAULT_PROJECT = "mini_trainer"
MLFLOW_LONGEST = 6000  # maximum characters of a parameter


def start_wandb(run: TrackedRun, ids: Ids, keep: Keep) -> StartedRun:
    """Weights & Biases: online, or with WANDB_MODE=offline in the run's directory.

    Step numbers are ours. In wandb, steps only increase, and a resumed run knows its last step: steps repeated after a
    kill are skipped, since their numbers are the same. An offline run does not know it, and logs them twice.
    """
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
    return StartedRun(where, partial(log_each, started), started.finish, first_lacking)


def log_each(run: Any, entries: list[Entry]) -> None:
    """Logs to a run of wandb or trackio."""
    for step, values in entries:
        run.log(values, step=step)


def start_tensorboard(run: TrackedRun, ids: Ids, keep: Keep) -> StartedRun:
    """Event files in the run's directory. A resumed run makes TensorBoard discard the steps that are repeated."""
    from torch.utils.tensorboard import SummaryWriter

    directory = run.output_dir / "tensorboard"
    keep({"directory": directory.name})
    is_first = not any(directory.glob("events.*"))
    writer = SummaryWriter(str(directory), purge_step=None if is_first else run.first_step + 1)

    def log_entries(entries: list[Entry]) -> None:
        for step, values in entries:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        writer.flush()  # a resumed run relies on the steps before its checkpoint

    for name, values in (("options", run.options), ("run", run.facts)):
        rows = "".join(f"| {key} | `{json.dumps(value)}` |\n" for key, value in values.items())
        writer.add_text(name, f"| | |\n| --- | --- |\n{rows}", global_step=run.first_step)
    writer.flush()
    return StartedRun(str(directory), log_entries, writer.close, {STEP: 0, VALIDATION: 0} if is_first else {})


def start_mlflow(run: TrackedRun, ids: Ids, keep: Keep) -> StartedRun:
    """An MLflow server or database, MLFLOW_TRACKING_URI, or MLflow's own default.

    A client instead of MLflow's active run, which prints, and is ended at exit. MLflow would keep both values of a
    repeated step, so steps that it already has are skipped.
    """
    from mlflow import MlflowClient, get_tracking_uri
    from mlflow.entities import Metric, Param, RunTag

    for name in ("mlflow", "alembic"):  # they log the creation of their tables in detail
        logging.getLogger(name).setLevel(logging.WARNING)
    client, run_id, params = MlflowClient(), ids.get("run_id"), []
    if run_id is None or not resume_run(client, run_id):
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

    first_lacking = {metric: find_next_step(client, run_id, metric) for metric in (STEP, VALIDATION)}
    where = f"run {run_id} in {get_tracking_uri()}"
    return StartedRun(where, log_entries, partial(client.set_terminated, run_id), first_lacking)


def resume_run(client: Any, run_id: str) -> bool:
    """Marks MLflow's run as running; False if it is gone."""
    from mlflow.exceptions import MlflowException

    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException:
        log.warning(f"warning: --track mlflow: the tracked run {run_id} no longer exists: starting a new one")
        return False
    return True


def find_experiment(client: Any) -> str:
    from mlflow.exceptions import MlflowException

    if "MLFLOW_EXPERIMENT_ID" in os.environ:
        return os.environ["MLFLOW_EXPERIMENT_ID"]
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
    with contextlib.suppress(MlflowException):  # it exists
        return client.create_experiment(name)
    return client.get_experiment_by_name(name).experiment_id


def find_next_step(client: Any, run_id: str, metric: str) -> int:
    return max((point.step + 1 for point in client.get_metric_history(run_id, metric)), default=0)


def start_trackio(run: TrackedRun, ids: Ids, keep: Keep) -> StartedRun:
    """trackio: its local database (TRACKIO_DIR), or a Space or server (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL).

    It identifies runs by name, so a new run's name gets a random suffix. A local database records the last step of a
    resumed run, and repeated steps are skipped.
    """
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    project = ids.get("project") or os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT
    name = ids.get("name") or f"{run.name}-{secrets.token_hex(2)}"
    keep({"project": project, "name": name})
    config = {"options": run.options, "run": run.facts}
    with contextlib.redirect_stdout(io.StringIO()):  # its output would garble the live line
        started = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)
    last_step = SQLiteStorage.get_max_step_for_run(project, name, run_id=started.id)
    first_lacking = dict.fromkeys((STEP, VALIDATION), 0 if last_step is None else last_step + 1)

    def finish() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            started.finish()

    return StartedRun(f"run {name} of project {project}", partial(log_each, started), finish, first_lacking)
