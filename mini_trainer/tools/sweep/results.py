"""The results of a sweep: the table of its trials, results.json, the page of curves, and the best one's options."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from mini_trainer.data.stores.disk import written_aside
from mini_trainer.distributed.command import name_launch
from mini_trainer.options import TrainOptions, list_types
from mini_trainer.options.fields import flag_for
from mini_trainer.options.option_files import describe_options
from mini_trainer.tools.sweep.settings import UNEXPORTED, SweepSettings, Values, show_value
from mini_trainer.tools.sweep.study import Trial
from mini_trainer.use.plots.curves_page import make_curves_page
from mini_trainer.use.plots.run_files import Run

RESULTS, CURVES, BEST = "results.json", "curves.html", "best.yaml"
MOST_CURVES = 24  # runs on the page: the best ones


def describe_result(trial: Trial, settings: SweepSettings) -> str:
    """A trial's result in a few words."""
    return f"{settings.metric} {trial.result:.4f} after step {trial.facts['step']}"


def describe_table(settings: SweepSettings, trials: Sequence[Trial]) -> str:
    """The trials in the order in which they are given, one per line."""
    names = [one.name for one in settings.parameters]
    head = ["trial", settings.metric, "at step", "steps", *names, "state", "run"]
    rows = [head]
    for one in trials:
        result = "" if one.result is None or one.state == "failed" else f"{one.result:.4f}"
        steps = [str(one.facts.get(name, "")) for name in ("step", "steps")]
        run = str(find_run(settings, one))
        rows.append([str(one.number), result, *steps, *map(show_value, one.values.values()), one.state, run])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip


def find_run(settings: SweepSettings, trial: Trial) -> Path:
    return Path(settings.output_dir) / trial.name / "run"


def write_results(settings: SweepSettings, trials: Sequence[Trial]) -> None:
    """Writes the table as JSON, best first."""
    rows = [dataclasses.asdict(one) | {"facts": dict(one.facts)} for one in trials]
    content = {"metric": settings.metric, "search": settings.search, "trials": rows}
    with written_aside(settings.root / RESULTS) as (aside,):
        aside.write_text(json.dumps(content, indent=2) + "\n")


def write_curves(settings: SweepSettings, ranked: Sequence[Trial]) -> str:
    """Writes the page of the best trials' curves, in which the best is marked; returns where it is."""
    shown = ranked[:MOST_CURVES]
    names = [one.name + (", best" if i == 0 else "") for i, one in enumerate(shown)]
    runs = [Run(settings.root / one.name / "run", name) for one, name in zip(shown, names, strict=True)]
    path = settings.root / CURVES
    with written_aside(path) as (aside,):
        aside.write_text(make_curves_page(runs, smoothing=None, best=0), encoding="utf-8")
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
    values = "".join(f"  {name}: {show_value(value)}\n" for name, value in best.values.items())
    return f"best: {best.name}, {describe_result(best, settings)}\n{values}to train it again: {command}"


def describe_command(settings: SweepSettings, number: int, values: Values) -> str:
    """The command that runs a trial by hand, whole, with all its options as flags."""
    options = settings.options_of(values) | {"output_dir": str(Path(settings.output_dir) / f"trial_{number}" / "run")}
    types, words = list_types(TrainOptions), name_launch("train", settings.num_processes)
    for name, value in options.items():
        given = list(value) if isinstance(value, tuple) else value
        words += flag_for(name, given, field_type=types[name])
    return shlex.join(words)
