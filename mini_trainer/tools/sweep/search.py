"""Runs the trials of a sweep, and records their results.

Trials can be shared among the tasks of an array job: each runs its own, and a start without --task collects.

    OUTPUT_DIR/tasks/3_of_8/    lock of a task, and its trials.json: the trials that have ended, with errors

Results are read from the runs. No task reads what another one writes, so that none waits.
"""

import dataclasses
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mini_trainer.data.stores.disk import remove, write_text, written_aside
from mini_trainer.distributed.command import name_launch
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.lock import RunLock
from mini_trainer.distributed.messages import say
from mini_trainer.distributed.process import find_task
from mini_trainer.options import TrainOptions, list_types, parse_shard
from mini_trainer.options.fields import flag_for
from mini_trainer.options.option_files import describe_options
from mini_trainer.options.reading import read_fields, read_metrics, read_object
from mini_trainer.run.file_names import METRICS_FILE, PARAMS_FILE, VALIDATION_FILE
from mini_trainer.run.stages import Record, Stage, describe_code, hash_files, list_changes, write_record
from mini_trainer.tools.sweep.running import Pool
from mini_trainer.tools.sweep.settings import UNEXPORTED, SweepSettings, Values, describe_settings, list_files, show
from mini_trainer.use.plots.curves import make_curves_page
from mini_trainer.use.plots.run_files import Run, to_float

RECORD, ENDS = "sweep.json", "trials.json"
RESULTS, CURVES, BEST = "results.json", "curves.html", "best.yaml"
MOST_CURVES = 24  # runs on the page: the best ones
TASKS = "tasks"  # directory in the sweep's
WRITTEN = (ENDS, PARAMS_FILE, "trial_0", RESULTS, CURVES, BEST)  # are not written over without a record
NO_RESULT = "no validation has a number as {}"
MOST_STARTS = 4  # of a trial in a row that were ended from outside before it is given up
# Ends from outside: the trial is started again.
ENDED_FROM_OUTSIDE = (ExitCode.SAVED_AND_REQUEUE, ExitCode.PEER_DIED, ExitCode.HANG, ExitCode.INTERRUPTED)
# Ends that say nothing of the trial's options: the sweep stops, and the trial is not recorded.
ENDS_OF_ALL = (ExitCode.IO, ExitCode.LOCKED, ExitCode.NO_VALID_CHECKPOINT)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial, and how it has ended."""

    number: int
    values: Values
    state: Literal["waiting", "complete", "failed"] = "waiting"
    result: float | None = None  # of a complete one
    facts: Mapping[str, Any] = field(default_factory=dict)  # step of the best validation, steps, model; error

    @property
    def name(self) -> str:
        return f"trial_{self.number}"

    def describe_result(self, metric: str) -> str:
        return f"{metric} {self.result:.4f} after step {self.facts['step']}"


@dataclass(frozen=True)
class ArrayTask:
    """One of `count` tasks, numbered from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def name_folder(self, root: Path) -> Path:
        return root / TASKS / f"{self.index}_of_{self.count}"

    def has(self, number: int) -> bool:
        """Whether it runs the trial."""
        return number % self.count == self.index - 1


WHOLE = ArrayTask(1, 1)


def choose_task(given: str | None) -> ArrayTask | None:
    """The task of this process: the one that is given, or its place among those that srun has started, if any."""
    if given is None:
        if (found := find_task()) is None:
            return None
        task = ArrayTask(*found)
        say(f"task {task} of srun: runs its share of the trials")
        return task
    try:
        return ArrayTask(*parse_shard(given))
    except ValueError as error:
        raise ValueError(f"--task {error}") from None


@contextmanager
def holding_tasks(root: Path) -> Iterator[list[Path]]:
    """Keeps tasks from running meanwhile, and yields their folders; RunError if one of them runs."""
    folders = sorted((root / TASKS).glob("*_of_*"))
    with ExitStack() as held:
        for folder in folders:
            try:
                held.callback(RunLock(folder).release)
            except RunError as error:
                raise RunError(error.code, str(error).replace("--output-dir ", "the sweep's task in ")) from None
        yield folders


def run_sweep(settings: SweepSettings, drawn: list[Values], pool: Pool, *, more_is_better: bool) -> None:
    """Runs, or continues, a sweep. ValueError, OSError or RunError say why it cannot; RunError if every trial fails."""
    try:
        with holding_tasks(settings.root) as tasks:
            settle(settings, drawn)
            found = Sweep(settings, drawn, pool)
            found.find_ends([settings.root, *tasks])
            found.run_trials()
            found.report(more_is_better=more_is_better)
    finally:
        pool.lock.release()


def run_task(settings: SweepSettings, drawn: list[Values], pool: Pool, task: ArrayTask, *, is_first: bool) -> None:
    """Runs, or continues, the trials of one task. `pool` is in the task's folder; `is_first`: no task was there."""
    try:
        settle(settings, drawn, is_first=is_first)
        found = Sweep(settings, drawn, pool, task)
        found.find_ends([pool.root])
        found.run_trials()
    finally:
        pool.lock.release()
    states = [one.state for one in found.own]
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
        # Before a trial trains, or tasks share it, an error in the settings or rows can be fixed in place.
        if changes and ((settings.root / TASKS).exists() or any(settings.root.glob(f"trial_*/run/{PARAMS_FILE}"))):
            raise ValueError(
                f"{settings.root} belongs to a sweep with other settings:\n  " + "\n  ".join(changes) + "\nundo the"
                " changes, or choose another output_dir; only num_trials of search: random can be raised"
            )
        if changes:
            for found in (settings.root / ENDS, settings.root / RESULTS, *settings.root.glob("trial_*")):
                remove(found)
    elif is_first and (found := [name for name in WRITTEN if (settings.root / name).exists()]):
        raise ValueError(f"output_dir: {settings.root} has {found[0]} of something else; choose another directory")
    write_record(path, now)


class Sweep:
    """A sweep that runs; of a task, only its own trials."""

    def __init__(self, settings: SweepSettings, drawn: list[Values], pool: Pool, task: ArrayTask = WHOLE):
        self.settings, self.pool, self.task = settings, pool, task
        self.trials = [Trial(number=number, values=values) for number, values in enumerate(drawn)]
        self.num_starts: dict[int, int] = {}  # in a row that were ended from outside

    @property
    def own(self) -> list[Trial]:
        return [one for one in self.trials if self.task.has(one.number)]

    def find_ends(self, folders: Sequence[Path]) -> None:
        """Notes which trials have ended: those whose runs have, and those that are recorded in the folders."""
        errors: dict[str, str | None] = {}  # by number; None for trials with results
        for path in (folder / ENDS for folder in folders):
            errors |= read_object(path) if path.exists() else {}
        for one in self.own:
            error = errors.get(str(one.number), "")
            has_result = error is None and (self.find_folder(one.number) / "run" / PARAMS_FILE).exists()
            if has_result or self.make_stage(one.number).has_ended:
                self.read_end(one.number)
            elif error:
                self.note(one.number, state="failed", facts={"error": error})

    def run_trials(self) -> None:
        """Runs the trials that have not ended."""
        self.pool.run([one.number for one in self.own if one.state == "waiting"], self.start, self.end)

    def start(self, number: int) -> Stage:
        values = ", ".join(f"{name} {show(value)}" for name, value in self.trials[number].values.items())
        say(f"{self.trials[number].name}: {values}")
        return self.make_stage(number)

    def make_stage(self, number: int) -> Stage:
        """A trial's run."""
        folder = self.find_folder(number)
        options = self.settings.options_of(self.trials[number].values) | {"output_dir": str(folder / "run")}
        return Stage(program="train", folder=folder, options=options)

    def note(self, number: int, **changes: Any) -> None:
        self.trials[number] = dataclasses.replace(self.trials[number], **changes)

    def find_folder(self, number: int) -> Path:
        return self.settings.root / self.trials[number].name

    def end(self, number: int, code: int, last_words: str) -> bool:
        """Records the end of a trial's process; False if it has to be started again."""
        if code == ExitCode.DONE:
            self.num_starts.pop(number, None)
            self.read_end(number)
            self.record_end(number)
            return True
        if code in ENDED_FROM_OUTSIDE or not 0 <= code <= 128:
            self.num_starts[number] = self.num_starts.get(number, 0) + 1
            if self.num_starts[number] < MOST_STARTS:
                say(f"trial_{number}: ended from outside ({name_code(code)}); starting it again")
                return False
        why, folder = f"{name_code(code)}: {last_words or 'without output'}", self.find_folder(number)
        # Without a directory of the run, it ended before train had begun.
        if code in ENDS_OF_ALL or (code == ExitCode.FAILED and not (folder / "run").exists()):
            raise RunError(describe_code(code), f"trial_{number}: {why}\n(all output: {folder / 'train.log'})")
        self.note(number, state="failed", facts={"error": why})
        self.record_end(number)
        return True

    def record_end(self, number: int) -> None:
        ends = {one.number: one.facts.get("error") for one in self.trials if one.state != "waiting"}
        write_text(self.pool.root / ENDS, json.dumps(ends, indent=2) + "\n")
        one = self.trials[number]
        if one.state == "failed":
            return say(f"{one.name}: failed, {one.facts['error']}\n(all output: {self.find_folder(number)}/train.log)")
        ended = [each.state != "waiting" for each in self.own]
        say(f"{one.name}: {one.describe_result(self.settings.metric)} ({sum(ended)} of {len(ended)})")

    def read_end(self, number: int) -> None:
        """Notes the result of a run that has ended, its best validation, and removes its checkpoints: its command makes
        the same ones again."""
        run = self.find_folder(number) / "run"
        try:
            best = read_best(run / VALIDATION_FILE, self.settings.metric)
        except ValueError as error:
            raise ValueError(f"{error}; remove {run.parent} to train the trial again") from None
        if best is None:
            return self.note(number, state="failed", facts={"error": NO_RESULT.format(self.settings.metric)})
        identity = read_fields(run / PARAMS_FILE, {"identity": dict}, written_by="train.py")["identity"]
        self.check_model(number, model := identity.get("model"))
        steps = max((row["step"] for _, _, row in read_metrics(run / METRICS_FILE) if row is not None), default=0)
        facts = {"step": best["step"], "steps": steps, "model": model}
        self.note(number, state="complete", result=best[self.settings.metric], facts=facts)
        remove(run / "checkpoints")

    def check_model(self, number: int, model: str) -> None:
        """ValueError if the files of the model have changed since an earlier trial."""
        names = [self.settings.options_of(one.values)["model_name_or_path"] for one in self.trials]
        name = names[number]
        for one, other in zip(self.trials, names, strict=True):
            if other == name and one.facts.get("model", model) != model:
                raise ValueError(f"{name}: trial_{number} has trained other weights than {one.name}: start a new sweep")

    def report(self, *, more_is_better: bool) -> None:
        """Writes the results, and prints the table and the best trial."""
        ranked = rank(self.trials, more_is_better=more_is_better)
        failed = [one for one in self.trials if one.state == "failed"]
        write_results(self.settings, [*ranked, *failed])
        say(describe_table(self.settings, [*ranked, *failed]))
        if not ranked:
            raise RunError(
                ExitCode.FAILED,
                f"all {len(failed)} trials failed; their last words are above; to run them again, remove {ENDS} in"
                f" {self.settings.root} and its tasks, and start the same command again",
            )
        say(write_curves(self.settings, ranked))
        say(describe_best(self.settings, ranked[0], self.pool.num_processes))


def rank(trials: Iterable[Trial], *, more_is_better: bool) -> list[Trial]:
    """Trials with a result, best first, and of equal ones the one with the lower number."""
    sign = -1 if more_is_better else 1
    return sorted((one for one in trials if one.result is not None), key=lambda one: (sign * one.result, one.number))


def find_direction(metric: str) -> bool:
    """Whether more of a metric is better; ValueError for one that no validation reports."""
    if metric == "loss":
        return False
    from mini_trainer.objectives.objective import list_metrics  # seconds to import

    found = list_metrics()
    if metric not in found:
        raise ValueError(f"train: best_metric: given {metric!r}, allowed: the objective's, of {', '.join(found)}")
    return found[metric]


def read_best(path: Path, metric: str) -> dict[str, Any] | None:
    """The last validation that its run called the best; None if no validation was. ValueError, naming file and line,
    for a damaged line, and if there is no validation."""
    rows = []
    for number, _, row in read_metrics(path):
        if row is None or not isinstance(row.get("is_best"), bool):
            raise ValueError(f"{path}: line {number} is damaged")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: has no validation")
    best = [row for row in rows if row["is_best"] and math.isfinite(to_float(row.get(metric)))]
    return best[-1] if best else None


def name_code(code: int) -> str:
    """An exit code in words."""
    if code < 0 or code > 128:
        return f"killed by signal {-code if code < 0 else code - 128}"
    return f"{describe_code(code).name.lower()} ({code})"


def describe_table(settings: SweepSettings, trials: Sequence[Trial]) -> str:
    """The trials in the order in which they are given, one per line."""
    names = [one.name for one in settings.parameters]
    rows = [["trial", settings.metric, "at step", "steps", *names, "state", "run"]]
    for one in trials:
        result = "" if one.result is None else f"{one.result:.4f}"
        steps = [str(one.facts.get(name, "")) for name in ("step", "steps")]
        run = str(Path(settings.output_dir) / one.name / "run")
        rows.append([str(one.number), result, *steps, *map(show, one.values.values()), one.state, run])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip


def write_results(settings: SweepSettings, trials: Sequence[Trial]) -> None:
    """Writes the table as JSON, best first."""
    rows = [dataclasses.asdict(one) | {"facts": dict(one.facts)} for one in trials]
    content = {"metric": settings.metric, "search": settings.search, "trials": rows}
    write_text(settings.root / RESULTS, json.dumps(content, indent=2) + "\n")


def write_curves(settings: SweepSettings, ranked: Sequence[Trial]) -> str:
    """Writes the page of the best trials' curves, in which the best is marked; returns where it is."""
    shown = ranked[:MOST_CURVES]
    names = [one.name + (", best" if i == 0 else "") for i, one in enumerate(shown)]
    runs = [Run(settings.root / one.name / "run", name) for one, name in zip(shown, names, strict=True)]
    path = settings.root / CURVES
    write_text(path, make_curves_page(runs, best=0))
    return f"curves: {path.as_uri()}"


def describe_best(settings: SweepSettings, best: Trial, num_processes: int) -> str:
    """The best trial, and the command that trains it again; writes its options."""
    options = settings.options_of(best.values)
    left_out = [name for name, value in UNEXPORTED.items() if name not in settings.train and options[name] == value]
    path = settings.root / BEST
    with written_aside(path) as (aside,):
        kept = {name: value for name, value in options.items() if name not in left_out}
        aside.write_text(describe_options(TrainOptions, kept), encoding="utf-8")
    shown = Path(settings.output_dir)
    words = [*name_launch("train", num_processes), "--config", str(shown / BEST)]
    command = shlex.join([*words, "--output-dir", str(shown / "best")])
    values = "".join(f"  {name}: {show(value)}\n" for name, value in best.values.items())
    return f"best: {best.name}, {best.describe_result(settings.metric)}\n{values}to train it again: {command}"


def describe_command(settings: SweepSettings, number: int, values: Values) -> str:
    """The command that runs a trial by hand, whole, with all its options as flags."""
    options = settings.options_of(values) | {"output_dir": str(Path(settings.output_dir) / f"trial_{number}" / "run")}
    types, words = list_types(TrainOptions), name_launch("train", settings.num_processes)
    for name, value in options.items():
        given = list(value) if isinstance(value, tuple) else value
        words += flag_for(name, given, field_type=types[name])
    return shlex.join(words)
