"""Runs a sweep: its rungs one after the other, in each the remaining trials; and the record of their results.

A search without rungs has one, the end of the runs. In a halving search a rung ends the runs early, at `max_steps` of
its own, with the learning-rate schedule of the whole run (`schedule_steps`); the best trials continue from their
checkpoints. All trials of a rung are compared at once, so that neither kills nor the order in which they end can change
which ones continue.
"""

import json
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import read_fields, read_metrics, remove
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.messages import say
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.run.file_names import METRICS_FILE, PARAMS_FILE, VALIDATION_FILE
from mini_trainer.run.stages import Record, Stage, describe_code, hash_files, list_changes, write_record
from mini_trainer.tools.sweep.results import (
    BEST,
    CURVES,
    RESULTS,
    describe_best,
    describe_result,
    describe_table,
    write_curves,
    write_results,
)
from mini_trainer.tools.sweep.running import Pool
from mini_trainer.tools.sweep.settings import SweepSettings, Values, describe_settings, describe_values, list_files
from mini_trainer.tools.sweep.study import Study, is_number
from mini_trainer.tools.sweep.tasks import TASKS, WHOLE, Task, holding_tasks

RECORD, STORAGE = "sweep.json", "study.journal"
WRITTEN = (STORAGE, PARAMS_FILE, "trial_0", RESULTS, CURVES, BEST)  # are not written over without a record
MOST_STARTS = 4  # of a trial in a row that were ended from outside before it is given up
# Ends from outside: the trial is started again.
ENDED_FROM_OUTSIDE = (ExitCode.SAVED_AND_REQUEUE, ExitCode.PEER_DIED, ExitCode.HANG, ExitCode.INTERRUPTED)
# Ends that say nothing of the trial's options: the sweep stops, and the trial is not recorded.
ENDS_OF_ALL = (ExitCode.IO, ExitCode.LOCKED, ExitCode.NO_VALID_CHECKPOINT)


def run_sweep(settings: SweepSettings, drawn: list[Values], pool: Pool, *, more_is_better: bool) -> None:
    """Runs, or continues, a sweep. ValueError, OSError or RunError say why it cannot; RunError if every trial fails."""
    try:
        with holding_tasks(settings.root) as tasks:
            settle(settings, drawn)
            study = Study(settings.root / STORAGE, settings, more_is_better=more_is_better)
            study.add(drawn)
            found = Sweep(settings, study, pool)
            for folder in tasks:
                if (folder / STORAGE).exists():
                    found.adopt_failures(Study(folder / STORAGE, settings, more_is_better=more_is_better))
            found.run()
    finally:
        pool.lock.release()


def run_task(
    settings: SweepSettings, drawn: list[Values], pool: Pool, task: Task, *, is_first: bool, more_is_better: bool
) -> None:
    """Runs, or continues, the trials of one task. `pool` is in the task's folder; `is_first`: no task was there."""
    try:
        settle(settings, drawn, is_first=is_first)
        study = Study(pool.root / STORAGE, settings, more_is_better=more_is_better)
        study.add(drawn)
        sweep = Sweep(settings, study, pool, task)
        sweep.check_failed()
        sweep.run_rung(settings.rungs[-1])
    finally:
        pool.lock.release()
    states = [one.state for one in study.list_trials() if task.has(one.number)]
    say(
        f"task {task}: {len(states)} trials have ended, {states.count('failed')} of them failed. Once all tasks have,"
        " the same command without --task, in one process, writes the results"
    )


def settle(settings: SweepSettings, drawn: list[Values], *, is_first: bool = True) -> None:
    """Records the settings, and refuses others than those that the directory has; trials can be added to a random
    search. Unless `is_first`, other tasks of the sweep write there."""
    path = settings.root / RECORD
    now: Record = {"settings": describe_settings(settings), "files": hash_files(list_files(settings, drawn))}
    if path.exists():
        advice = "; restore it, or choose another output_dir"
        before = read_fields(path, {"settings": dict, "files": dict}, written_by="mini-trainer sweep", advice=advice)
        kept = json.loads(json.dumps(now))
        num_before = before["settings"].get("num_trials")
        can_grow = settings.search == "random" == before["settings"].get("search") and isinstance(num_before, int)
        if can_grow and settings.num_trials > num_before:
            kept["settings"]["num_trials"] = num_before
        changes = list_changes(before, kept)
        if changes and has_begun(settings.root):
            raise ValueError(
                f"{settings.root} belongs to a sweep with other settings:\n  " + "\n  ".join(changes) + "\nundo the"
                " changes, or choose another output_dir; only num_trials of search: random can be raised"
            )
        if changes:
            for found in (settings.root / STORAGE, settings.root / RESULTS, *settings.root.glob("trial_*")):
                remove(found)
    elif is_first and (found := [name for name in WRITTEN if (settings.root / name).exists()]):
        raise ValueError(f"output_dir: {settings.root} has {found[0]} of something else; choose another directory")
    write_record(path, now)


def has_begun(root: Path) -> bool:
    """Whether a trial has started to train there, or tasks share it; before that, an error in the settings or rows can
    be fixed in place."""
    return (root / TASKS).exists() or any(root.glob(f"trial_*/run/{PARAMS_FILE}"))


class Sweep:
    """A sweep that runs."""

    def __init__(self, settings: SweepSettings, study: Study, pool: Pool, task: Task = WHOLE):
        self.settings, self.study, self.pool, self.task = settings, study, pool, task
        self.num_starts: dict[int, int] = {}  # in a row that were ended from outside

    def run(self) -> None:
        """Runs all rungs, and says which trial is the best."""
        self.check_failed()
        counts = count_trials(len(self.study.list_trials()), self.settings)
        for rung, num_next in zip(self.settings.rungs, [*counts[1:], None], strict=True):
            self.run_rung(rung)
            if num_next is not None:
                self.choose(rung, num_next)
        self.report()

    def run_rung(self, rung: int | None) -> None:
        """Runs the trials that are in a rung and have no result there yet."""
        unended = [one for one in self.study.list_trials() if not one.has_ended and rung not in one.results]
        waiting = [one.number for one in unended if self.task.has(one.number)]
        for number in list(waiting):
            if self.has_reached(number, rung):  # a kill came before that was recorded, or the journal is an older one
                self.study.start(number)
                self.record(number, rung)
                waiting.remove(number)

        def end(number: int, code: int, last_words: str) -> bool:
            return self.end(number, rung, code, last_words)

        def start(number: int) -> Stage:
            stage = self.make_stage(number, rung)
            check_can_start(stage)
            self.study.start(number)
            trial = self.study.read(number)
            until = "" if rung is None or rung == self.settings.rungs[-1] else f", until step {rung}"
            say(f"{trial.name}: {describe_values(trial.values)}{until}")
            return stage

        self.pool.run(waiting, start, end)

    def make_stage(self, number: int, rung: int | None) -> Stage:
        """The run of a trial until a rung."""
        trial, folder = self.study.read(number), self.find_folder(number)
        options = self.settings.options_of(trial.values) | {"output_dir": str(folder / "run")}
        if rung is not None:
            options |= limit_to_rung(options, rung, is_last=rung == self.settings.rungs[-1])
        return Stage(program="train", folder=folder, options=options)

    def find_folder(self, number: int) -> Path:
        return self.settings.root / self.study.read(number).name

    def has_reached(self, number: int, rung: int | None) -> bool:
        """Whether a trial's run has ended at the rung, or has continued from it to a later one."""
        stage = self.make_stage(number, rung)
        if stage.has_ended or not stage.file("yaml").is_file():
            return stage.has_ended
        later = [self.make_stage(number, one).text for one in self.settings.rungs if rung is not None and one > rung]
        run = self.find_folder(number) / "run"
        is_there = stage.file("yaml").read_text(encoding="utf-8") in later and (run / PARAMS_FILE).is_file()
        return is_there and (is_finished(run) or count_steps(run / METRICS_FILE) >= rung)

    def check_failed(self) -> None:
        """ValueError if a failed trial has a result after all: the journal does not match the runs."""
        last = self.settings.rungs[-1]
        for one in self.study.list_trials():
            if one.state == "failed" and self.has_reached(one.number, last) and self.read_result(one.number, last):
                raise self.study.refuse(f"{one.name} has failed, but its run has ended with a result")

    def adopt_failures(self, task: Study) -> None:
        """Notes the trials that have failed in a task, and have no result since."""
        unended = {one.number for one in self.study.list_trials() if not one.has_ended}
        for one in task.list_trials():
            if (
                one.state == "failed"
                and one.number in unended
                and not self.has_reached(one.number, self.settings.rungs[-1])
            ):
                self.study.start(one.number)
                self.study.fail(one.number, one.facts["error"])

    def read_result(self, number: int, rung: int | None) -> dict[str, Any] | None:
        """The best validation of a trial's run until the rung; None if none has a number as the metric."""
        try:
            return read_best(self.find_folder(number) / "run" / VALIDATION_FILE, self.settings.metric, until=rung)
        except ValueError as error:
            raise ValueError(f"{error}; remove {self.find_folder(number)} to train the trial again") from None

    def end(self, number: int, rung: int | None, code: int, last_words: str) -> bool:
        """Records the end of a trial's process; False if it has to be started again."""
        if code == ExitCode.DONE:
            self.num_starts.pop(number, None)
            self.record(number, rung)
            return True
        if code in ENDED_FROM_OUTSIDE or not 0 <= code <= 128:
            self.num_starts[number] = self.num_starts.get(number, 0) + 1
            if self.num_starts[number] < MOST_STARTS:
                say(f"trial_{number}: ended from outside ({name_code(code)}); starting it again")
                return False
        why = f"{name_code(code)}: {last_words or 'without output'}"
        run = self.find_folder(number) / "run"
        if code in ENDS_OF_ALL or (code == ExitCode.FAILED and not run.exists()):  # it ended before train had begun
            raise RunError(describe_code(code), f"trial_{number}: {self.add_log(number, why)}")
        self.fail(number, why)
        return True

    def record(self, number: int, rung: int | None) -> None:
        """Records the result of a run that has reached the rung: its best validation so far."""
        run = self.find_folder(number) / "run"
        best = self.read_result(number, rung)
        if best is None:
            return self.fail(number, f"no validation has a number as {self.settings.metric}")
        identity = read_fields(run / PARAMS_FILE, {"identity": dict}, written_by="train.py")["identity"]
        self.check_model(number, model := identity.get("model"))
        steps = count_steps(run / METRICS_FILE, until=rung)
        self.study.note(number, step=best["step"], steps=steps, model=model)
        result = best[self.settings.metric]
        if rung == self.settings.rungs[-1]:
            self.study.complete(number, result)
            self.clean(number)
        else:
            self.study.report(number, rung, result)
        trials = self.study.list_trials()
        own = [one for one in trials if self.task.has(one.number)]
        num_ended = sum(one.has_ended or rung in one.results for one in own)
        say(f"trial_{number}: {describe_result(trials[number], self.settings)} ({num_ended} of {len(own)})")

    def check_model(self, number: int, model: str) -> None:
        """ValueError if the files of the model have changed since an earlier trial."""
        trials = self.study.list_trials()
        names = [self.settings.options_of(one.values)["model_name_or_path"] for one in trials]
        name = names[number]
        for one, other in zip(trials, names, strict=True):
            if other == name and one.facts.get("model", model) != model:
                raise ValueError(f"{name}: trial_{number} has trained other weights than {one.name}: start a new sweep")

    def fail(self, number: int, error: str) -> None:
        self.study.fail(number, error)
        say(f"trial_{number}: failed, {self.add_log(number, error)}")

    def add_log(self, number: int, message: str) -> str:
        return f"{message}\n(all output: {self.find_folder(number) / 'train.log'})"

    def clean(self, number: int) -> None:
        """Removes the checkpoints of a trial that has ended: its command makes the same ones again."""
        remove(self.find_folder(number) / "run" / "checkpoints")

    def choose(self, rung: int, num_next: int) -> None:
        """Ends all trials of a rung but the best."""
        reached = [one for one in self.study.list_trials() if rung in one.results]
        ranked = sorted(reached, key=lambda one: (self.study.signed(one.results[rung]), one.number))
        for one in ranked[num_next:]:
            if not one.has_ended:
                self.study.prune(one.number)
            self.clean(one.number)
        if ranked:
            kept = ", ".join(one.name for one in ranked[:num_next])
            say(f"after step {rung}, {min(num_next, len(ranked))} of {len(ranked)} trials continue: {kept}")

    def report(self) -> None:
        """Writes the results, and prints the table and the best trial."""
        trials = self.study.list_trials()
        ranked = self.study.rank(trials)
        failed = [one for one in trials if one.state == "failed"]
        for one in ranked:
            self.clean(one.number)  # a kill may have come before
        write_results(self.settings, [*ranked, *failed])
        say(describe_table(self.settings, [*ranked, *failed]))
        if not ranked:
            raise RunError(ExitCode.FAILED, f"all {len(trials)} trials failed; {self.study.advise_again()}")
        if ranked[0].state != "complete":  # a pruned one was worse than those that failed after it
            raise RunError(
                ExitCode.FAILED,
                f"no best trial: none of {len(trials)} has completed, {len(failed)} failed and the others were pruned"
                f" before; {self.study.advise_again()}",
            )
        say(write_curves(self.settings, ranked))
        say(describe_best(self.settings, ranked[0], self.pool.num_processes))


def find_direction(metric: str) -> bool:
    """Whether more of a metric is better; ValueError for one that no validation reports."""
    if metric == "loss":
        return False
    from mini_trainer.objectives.specs import list_metrics  # seconds to import

    found = list_metrics()
    if metric not in found:
        raise ValueError(
            f"train: best_metric: given {metric!r}, allowed: those of the objective, of {', '.join(found)}"
        )
    return found[metric]


def count_trials(num_trials: int, settings: SweepSettings) -> list[int]:
    """The number of trials in each rung."""
    counts = [num_trials]
    for _ in settings.rungs[1:]:
        counts.append(max(1, counts[-1] // settings.reduction_factor))
    return counts


def limit_to_rung(options: Values, rung: int, *, is_last: bool) -> Values:
    """The options that end a run at a rung, and leave its schedule that of the whole run."""
    changes: dict[str, Any] = {"max_steps": rung}
    grouped = group_options(TrainOptions, **options)
    if grouped.optimization.needs_end:
        changes["schedule_steps"] = options["max_steps"]
    if not is_last:
        changes["save_final_checkpoint"] = False  # the trained model, which this one is not yet
        if grouped.checkpoints.checkpoint_every_steps is None:
            changes["checkpoint_every_steps"] = rung  # the next rung continues from it
    return changes


def check_can_start(stage: Stage) -> None:
    """ValueError if train would refuse to start because the run has ended without a checkpoint, which says nothing of
    the trial."""
    run = Path(stage.options["output_dir"])
    has_ended = (run / PARAMS_FILE).is_file() and is_finished(run)
    if has_ended and not any((run / "checkpoints").glob("*step_*")):
        raise ValueError(
            f"{run}: holds a run that has ended, not as {stage.file('yaml')} says, and no checkpoint to continue from;"
            f" remove {stage.folder} to train the trial again"
        )


def is_finished(run: Path) -> bool:
    advice = f"; remove {run.parent} to train the trial again"
    params = read_fields(run / PARAMS_FILE, {"finished": str | None}, written_by="train.py", advice=advice)
    return params["finished"] is not None


def read_best(path: Path, metric: str, *, until: int | None) -> dict[str, Any] | None:
    """The last validation, at most after `until` steps, that its run called the best; None if no validation was.

    ValueError, naming file and line, for a damaged line, and if there is no validation.
    """
    rows = []
    for number, _, row in read_metrics(path):
        if row is None or not isinstance(row.get("is_best"), bool):
            raise ValueError(f"{path}: line {number} is damaged")
        if until is None or row["step"] <= until:
            rows.append(row)
    if not rows:
        raise ValueError(f"{path}: has no validation{'' if until is None else f' until step {until}'}")
    best = [row for row in rows if row["is_best"] and is_number(row.get(metric))]
    return best[-1] if best else None


def count_steps(path: Path, *, until: int | None = None) -> int:
    """Number of steps of a run, at most `until`."""
    steps = max((row["step"] for _, _, row in read_metrics(path) if row is not None), default=0)
    return steps if until is None else min(steps, until)


def name_code(code: int) -> str:
    """An exit code in words."""
    if code < 0 or code > 128:
        return f"killed by signal {-code if code < 0 else code - 128}"
    return f"{describe_code(code).name.lower()} ({code})"
