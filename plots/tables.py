"""Tables of runs: what came of each, which options differ, when each was started."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from options import TrainOptions, iterate_fields
from plots.curves import find_best
from plots.run_files import Run

NO_VALUE = "–"
OWN_OPTIONS = {"output_dir", "config"}  # what every run has for itself, or has been read into the others
MAX_CELL_CHARS = 300


@dataclass(frozen=True)
class Table:
    """Text in cells; the head has a cell more than a row where a row begins with the index of its run."""

    head: list[str]
    rows: list[list[str]]


def summarise(runs: list[Run]) -> Table:
    """What came of each run, one a row."""
    head = ["state", "steps", "tokens", "loss", "best validation", "at step", "tokens/s", "memory", "hours"]
    return Table(head, [summarise_run(run) for run in runs])


def summarise_run(run: Run) -> list[str]:
    steps, best = run.steps, find_best(run)
    if not len(steps):
        return [run.describe_state(), "0", *[NO_VALUE] * 7]
    return [
        run.describe_state(),
        f"{steps['step'][-1]:,.0f}",
        shorten_number(steps["total_tokens_accumulated"][-1]),
        format_number(steps["loss"][-1], ".4f"),
        NO_VALUE if best is None else f"{run.validations['loss'][best]:.4f}",
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
    """Three digits and a letter: 1.23 M."""
    if not np.isfinite(value):
        return NO_VALUE
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def compare_options(runs: list[Run]) -> tuple[Table, Table]:
    """Options, and what else a run was made with: those that differ; and those of all runs that are no defaults."""
    given = [run for run in runs if run.options]
    names = list(dict.fromkeys(name for run in given for name in run.options if name not in OWN_OPTIONS))
    values = {name: [run.options.get(name) if run.options else None for run in runs] for name in names}
    facts = [list_facts(run) for run in runs]
    values |= {name: [fact.get(name) for fact in facts] for name in dict.fromkeys(name for fact in facts for name in fact)}
    defaults = {option.name: show_default(option) for option, _ in iterate_fields(TrainOptions)}

    differing, shared = [], []
    for name, cells in values.items():
        texts = [
            NO_VALUE if not run.params or (name in names and name not in run.options) else to_text(cell)
            for run, cell in zip(runs, cells, strict=True)
        ]
        if len(set(texts) - ({NO_VALUE} if len(given) < len(runs) else set())) > 1:
            differing.append([show_name(name), *texts])
        elif texts and name in defaults and (told := next(text for text in texts if text != NO_VALUE)) != defaults[name]:
            shared.append([show_name(name), told])
    head = ["option", *(run.name for run in runs)]
    return Table(head, differing), Table(["option", "value"], shared)


def list_facts(run: Run) -> dict[str, Any]:
    """What the last start was made with beside its options; digests cut short."""
    identity = run.params.get("identity")
    identity = identity if isinstance(identity, dict) else {}
    digests = {
        f"digest of {name}": value[:12]
        for name, value in identity.items()
        if isinstance(value, str) and len(value) == 64 and name.replace("-", "_") not in run.options
    }
    return (run.starts[-1].facts if run.starts else {}) | digests


def show_default(option: dataclasses.Field) -> str | None:
    """None for what has to be given."""
    return None if option.default is dataclasses.MISSING else to_text(option.default)


def show_name(name: str) -> str:
    return name.replace("_", "-") if " " not in name else name


def to_text(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        text = str(value)
    elif isinstance(value, (list, tuple)):
        text = " ".join(map(str, value)) or "none"
    else:
        text = json.dumps(value)
    return text if len(text) <= MAX_CELL_CHARS else text[: MAX_CELL_CHARS - 1] + "…"


def list_starts(runs: list[Run]) -> Table:
    """Every start of runs that have been resumed; a row begins with the index of its run."""
    rows = [
        [str(index), start.when.replace("T", " ")[:19], f"{start.first_step:,}", start.resumed_from or NO_VALUE,
         start.machine, ", ".join(start.changed_options) or NO_VALUE]
        for index, run in enumerate(runs)
        for start in run.starts
        if len(run.starts) > 1 or start.resumed_from
    ]  # fmt: skip
    return Table(["run", "started", "after step", "resumed from", "on", "changed options"], rows)


