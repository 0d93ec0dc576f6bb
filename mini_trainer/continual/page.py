"""Compares continual experiments: a table for the terminal, and a page with derived numbers, every set after every
task, curves, and the front of learnt and forgotten, on which no experiment dominates another.

T tasks, P probes, K = T + P sets, S sequences with the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.continual.matrix import Derived, Experiment
from mini_trainer.continual.matrix import Sequence as TaskSequence
from mini_trainer.data.stores.disk import write_text
from mini_trainer.use.pages.page import escape_json, make_page
from mini_trainer.use.plots.curves import COLOURS, to_numbers

Point = tuple[float, float]  # forgotten, learnt

NO_VALUE = "–"
GAP = "  "  # between the columns of a table
KIND_NOTES = {"score": "scores", "loss": "losses, negated: more is better"}
PAGE = Path(__file__).with_name("page.html")
TITLES = {"score": "Scores", "loss": "Losses"}
FORGOTTEN = ("forgetting", "forgotten")  # horizontal axes of the front
MAX_NAMED = 3  # most experiments named in the title

Shown = dict[str, Any]  # data of the page's script


@dataclass(frozen=True)
class Measure:
    """A derived number that tables show."""

    name: str  # its key in `summarise`
    title: str
    about: str
    higher_is_better: bool = True


MEASURES = (
    Measure("average", "average", "Mean of all tasks at the end."),
    Measure("learnt", "learnt", "Mean of each task right after its own training."),
    Measure("backward_transfer", "backward transfer", "Change of earlier tasks since their own training."),
    Measure("forward_transfer", "forward transfer", "Change of later tasks before their own training."),
    Measure("forgetting", "forgetting", "Drop of earlier tasks from their best score.", higher_is_better=False),
    Measure("forgotten", "probes forgotten", "Drop of the probes from the start.", higher_is_better=False),
)


def check_comparable(experiments: Sequence[Experiment]) -> None:
    """ValueError, naming experiments without measurements, or with other tasks, probes or metrics than the first."""
    for experiment in experiments:
        if not experiment.kinds:
            raise ValueError(f"{experiment.name}: nothing was measured yet")
    first, *others = experiments
    if problems := [text for other in others for text in find_differences(first, other)]:
        advice = "compare experiments that measure the same tasks in the same way"
        raise ValueError("\n".join([*problems, advice]))


def find_differences(first: Experiment, other: Experiment) -> list[str]:
    """Differences that keep the numbers of two experiments from being compared."""
    found = []
    for what in ("tasks", "probes"):
        own, wanted = getattr(other, what), getattr(first, what)
        if set(own) != set(wanted):
            found.append(f"{other.name}: its {what} are {join(own)}, those of {first.name} {join(wanted)}")
    for kind in first.kinds:
        sets, own_sets = describe_sets(first, kind), describe_sets(other, kind)
        for name in sets.keys() & own_sets.keys():
            if sets[name] != own_sets[name]:
                found.append(f"{other.name}: {name} has {own_sets[name]}, in {first.name} {sets[name]}")
    return found


def describe_sets(experiment: Experiment, kind: str) -> dict[str, str]:
    """How each set was measured."""
    cells = {name: next(iter(own.values())) for name, own in experiment.find_cells(kind).items()}
    return {name: f"{len(cell.values):,} questions by {cell.metric}" for name, cell in cells.items()}


def join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def describe_comparison(experiments: Sequence[Experiment]) -> str:
    """A table for the terminal of each kind; ValueError if the experiments cannot be compared."""
    check_comparable(experiments)
    return "\n\n".join(tabulate_kind(kind, experiments) for kind in list_kinds(experiments))


def list_kinds(experiments: Sequence[Experiment]) -> list[str]:
    return list(dict.fromkeys(kind for experiment in experiments for kind in experiment.kinds))


def tabulate_kind(kind: str, experiments: Sequence[Experiment]) -> str:
    """Two lines per experiment: the values with their deviation over sequences, and the 95 % intervals."""
    rows = [["experiment", *(measure.title for measure in MEASURES), "method"]]
    for experiment in experiments:
        own = [experiment.summary.get(kind, {}).get(measure.name) for measure in MEASURES]
        rows.append([experiment.name + describe_progress(experiment), *map(write_value, own), experiment.method])
        rows.append(["", *("" if one is None else f"[{one.low:.3f}, {one.high:.3f}]" for one in own), ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [GAP.join([name.ljust(widths[0]), *map(str.rjust, row, widths[1:-1]), last]) for name, *row, last in rows]
    head = f"{KIND_NOTES[kind]} (below them: 95 % intervals; ±: standard deviation over sequences)"
    return "\n".join([head, *(line.rstrip() for line in lines)])


def describe_progress(experiment: Experiment) -> str:
    """Progress of an unfinished experiment; empty if it is complete."""
    done = sum(max(len(sequence.rows) - 1, 0) for sequence in experiment.sequences)
    total = sum(len(sequence.tasks) for sequence in experiment.sequences)
    return "" if done == total else f" ({done} of {total} trainings done)"


def write_value(derived: Derived | None) -> str:
    if derived is None:
        return NO_VALUE
    return f"{derived.mean:.3f}" + ("" if derived.deviation is None else f" ± {derived.deviation:.3f}")


def find_front(points: Sequence[Point | None]) -> list[bool]:
    """Marks the points on the Pareto front: no other point is at least as good in both, and better in one."""
    there = [point for point in points if point is not None]
    return [
        point is not None and not any(one != point and one[0] <= point[0] and one[1] >= point[1] for one in there)
        for point in points
    ]


def write_page(path: Path, experiments: Sequence[Experiment]) -> None:
    """Writes the page of one or several experiments; ValueError if they do not compare."""
    check_comparable(experiments)
    page = describe_page(experiments)
    write_text(path, make_page(PAGE, {"DATA": escape_json(page)}, title=page["title"]))


def describe_page(experiments: Sequence[Experiment]) -> Shown:
    names = [experiment.name for experiment in experiments]
    return {
        "title": ", ".join(names) if len(names) <= MAX_NAMED else f"{len(names)} experiments",
        "measures": [vars(measure) for measure in MEASURES],
        "kinds": [
            {
                "name": kind,
                "title": TITLES[kind],
                "scales": find_scales(kind, experiments),
                "fronts": [front for name in FORGOTTEN if (front := describe_front(name, kind, experiments))],
            }
            for kind in list_kinds(experiments)
        ],
        "experiments": list(map(describe_experiment, experiments)),
        "colours": COLOURS,
    }


def find_scales(kind: str, experiments: Sequence[Experiment]) -> list[Shown]:
    """The range of all cells of each metric; metrics from 0 to 1 share one."""
    means: dict[str, list[float]] = {}
    for experiment in experiments:
        for cells in experiment.find_cells(kind).values():
            for cell in cells.values():
                means.setdefault(cell.metric, []).append(cell.mean)
    groups: dict[str, list[str]] = {}
    for metric, values in means.items():
        is_share = kind == "score" and min(values) >= 0 and max(values) <= 1
        groups.setdefault("" if is_share else metric, []).append(metric)
    scales = []
    for metrics in groups.values():
        values = [value for metric in metrics for value in means[metric]]
        low, high = to_numbers(np.array([min(values), max(values)]))
        scales.append({"metrics": metrics, "low": low, "high": high, "higher_is_better": metrics != ["loss"]})
    return scales


def describe_front(name: str, kind: str, experiments: Sequence[Experiment]) -> Shown | None:
    """Scores when learnt against what was forgotten of tasks or probes; None if no experiment measured both."""
    found = [experiment.summary.get(kind, {}) for experiment in experiments]
    both = [(own.get(name), own.get("learnt")) for own in found]
    points = [None if None in pair else (pair[0].mean, pair[1].mean) for pair in both]
    if points == [None] * len(points):
        return None
    return {"name": name, "on_front": find_front(points), "is_measured": [point is not None for point in points]}


def describe_experiment(experiment: Experiment) -> Shown:
    return {
        "name": experiment.name,
        "method": experiment.method,
        "facts": describe_facts(experiment),
        "tasks": experiment.tasks,
        "probes": experiment.probes,
        "sequences": [label_sequence(experiment, sequence) for sequence in experiment.sequences],
        "kinds": {kind: show_kind(experiment, kind) for kind in experiment.kinds},
    }


def describe_facts(experiment: Experiment) -> str:
    orders = {sequence.tasks for sequence in experiment.sequences}
    seeds = {sequence.seed for sequence in experiment.sequences}
    counts = {"task": len(experiment.tasks), "probe": len(experiment.probes), "order": len(orders), "seed": len(seeds)}
    told = ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for word, number in counts.items())
    return told + describe_progress(experiment)


def label_sequence(experiment: Experiment, sequence: TaskSequence) -> str:
    """Order and seed, as far as they differ."""
    orders = {one.order for one in experiment.sequences}
    return (f"order {sequence.order}, " if len(orders) > 1 else "") + f"seed {sequence.seed}"


def show_kind(experiment: Experiment, kind: str) -> Shown:
    cells, derived = experiment.find_cells(kind), experiment.summary[kind]
    firsts = {name: next(iter(own.values())) for name, own in cells.items()}
    return {
        "derived": {own.name: vars(derived[own.name]) if own.name in derived else None for own in MEASURES},
        "metrics": {name: cell.metric for name, cell in firsts.items()},
        "counts": {name: len(cell.values) for name, cell in firsts.items()},
        "views": describe_views(experiment, kind),
    }


def describe_views(experiment: Experiment, kind: str) -> list[Shown]:
    """Each order's mean over seeds, if it has several, and each sequence."""
    views = []
    for tasks in dict.fromkeys(sequence.tasks for sequence in experiment.sequences):
        own = [s for s, sequence in enumerate(experiment.sequences) if sequence.tasks == tasks]
        grids = [read_grid(experiment, kind, s) for s in own]
        labels = [label_sequence(experiment, experiment.sequences[s]) for s in own]
        if len(own) > 1:
            values = np.stack(grids)  # (S, T + 1, K)
            parts = {"mean": values.mean(0), "deviation": values.std(0, ddof=1), "low": values.min(0),
                     "high": values.max(0)}  # fmt: skip
            order = "" if len(own) == len(experiment.sequences) else f"order {experiment.sequences[own[0]].order}, "
            label = f"{order}mean of {len(own)} sequences"
            views.append({name: show_grid(part) for name, part in parts.items()} | {"label": label, "tasks": tasks})
        for grid, label in zip(grids, labels, strict=True):
            views.append({"label": label, "tasks": tasks, "mean": show_grid(grid)})
    return views


def read_grid(experiment: Experiment, kind: str, s: int) -> np.ndarray:  # (T + 1, K)
    """A sequence's means, tasks in its order and then probes; NaN: not measured."""
    sequence = experiment.sequences[s]
    names = [*sequence.tasks, *experiment.probes]
    grid = np.full((len(sequence.tasks) + 1, len(names)), np.nan)
    for t, row in enumerate(sequence.rows):
        for k, name in enumerate(names):
            if (cell := row.get(kind, {}).get(name)) is not None:
                grid[t, k] = cell.mean
    return grid


def show_grid(grid: np.ndarray) -> list[list[float | None]]:
    return [to_numbers(row) for row in grid]
