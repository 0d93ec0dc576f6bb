"""Tables of runs: results, options that differ, and starts."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_trainer.options import TrainOptions, iterate_fields
from mini_trainer.use.plots.columns import find_best
from mini_trainer.use.plots.run_files import Run

NO_VALUE = "–"
OWN_OPTIONS = {"output_dir", "config"}  # different in every run, or merged into the other options
MAX_CELL_CHARS = 300


@dataclass(frozen=True)
class Table:
    """A table of text cells. In some tables, rows begin with the index of their run."""

    head: list[str]
    rows: list[list[str]]


def summarise(runs: list[Run]) -> Table:
    """Results of the runs, one per row."""
    head = ["state", "steps", "tokens", "loss", "best validation", "at step", "tokens/s", "memory", "hours"]
    return Table(head, [summarise_run(run) for run in runs])


def summarise_run(run: Run) -> list[str]:
    steps, best = run.steps, find_best(run.validations)
    if not len(steps):
        return [run.describe_state(), "0", *[NO_VALUE] * 7]

    def last(name: str) -> float:
        return steps[name][-1]

    return [
        run.describe_state(),
        f"{last('step'):,.0f}",
        shorten_number(last("total_tokens_accumulated")),
        format_number(last("loss"), ".4f"),
        NO_VALUE if best is None else format_number(run.validations["loss"][best], ".4f"),
        NO_VALUE if best is None else f"{run.validations['step'][best]:,.0f}",
        format_number(median(steps["tokens_per_second"]), ",.0f"),
        format_number(highest(steps["peak_memory_usage_GB"]), ".2f", " GB"),
        f"{run.hours[-1]:.2f}",
    ]


def median(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else np.nan


def highest(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else np.nan


def format_number(value: float, form: str, unit: str = "") -> str:
    return format(value, form) + unit if np.isfinite(value) else NO_VALUE


def shorten_number(value: float) -> str:
    """Formats a number with three digits and a unit: 1.23 M."""
    if not np.isfinite(value):
        return NO_VALUE
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def compare_options(runs: list[Run]) -> tuple[Table, Table]:
    """Options and facts that differ between runs, and options that all runs share but that are not defaults.

    A run whose options cannot be read has no value, which does not count as different.
    """
    told = [{name: to_text(value) for name, value in list_values(run).items()} for run in runs]
    names = dict.fromkeys(name for values in told for name in values)
    defaults = {
        option.name: None if option.default is dataclasses.MISSING else to_text(option.default)
        for option, _ in iterate_fields(TrainOptions)
    }
    differing, shared = [], []
    for name in names:
        texts = [values.get(name, NO_VALUE) for values in told]
        known = {text for text, run in zip(texts, runs, strict=True) if run.options}
        if len(known) > 1:
            differing.append([show_name(name), *texts])
        elif name in defaults and known != {defaults[name]}:
            shared.append([show_name(name), *known])
    return Table(["option", *(run.name for run in runs)], differing), Table(["option", "value"], shared)


def list_values(run: Run) -> dict[str, Any]:
    """A run's options, and the facts of its last start."""
    if not run.options:
        return {}
    options = {name: value for name, value in run.options.items() if name not in OWN_OPTIONS}
    return options | {name: value for name, value in list_facts(run).items() if value is not None}


def list_facts(run: Run) -> dict[str, Any]:
    """Facts of the last start other than options: machine, commit, versions, shortened digests."""
    identity = run.params.get("identity")
    identity = identity if isinstance(identity, dict) else {}
    digests = {
        f"digest of {name}": value[:12]
        for name, value in identity.items()
        if isinstance(value, str) and len(value) == 64 and name.replace("-", "_") not in run.options
    }
    return (run.starts[-1].facts if run.starts else {}) | digests


def show_name(name: str) -> str:
    return name.replace("_", "-") if " " not in name else name


def to_text(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        text = str(value)
    elif isinstance(value, (list, tuple)):
        text = " ".join(map(str, value)) or "none"
    else:
        text = json.dumps(value).replace("e-0", "e-")
    return text if len(text) <= MAX_CELL_CHARS else text[: MAX_CELL_CHARS - 1] + "…"


def list_starts(runs: list[Run]) -> Table:
    """All starts of resumed runs; a row begins with the index of its run."""
    rows = [
        [str(index), start.when.replace("T", " ")[:19], f"{start.first_step:,}", start.resumed_from or NO_VALUE,
         start.machine, ", ".join(start.changed_options) or NO_VALUE]
        for index, run in enumerate(runs)
        for start in run.starts
        if len(run.starts) > 1 or start.resumed_from
    ]  # fmt: skip
    return Table(["run", "started", "after step", "resumed from", "on", "changed options"], rows)
