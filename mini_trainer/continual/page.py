"""The page of continual experiments: derived numbers, every set after every task, curves, and the front of learnt and
forgotten.

T tasks, P probes, K = T + P sets, S sequences with the same order.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.continual.compare import MEASURES, Summary, check_comparable, describe_progress, find_front
from mini_trainer.continual.matrix import Derived, Experiment
from mini_trainer.continual.matrix import Sequence as TaskSequence
from mini_trainer.data.stores.disk import written_aside
from mini_trainer.use.pages.page import escape_json, make_page
from mini_trainer.use.plots.curves import COLOURS, to_numbers

PAGE = Path(__file__).with_name("page.html")
TITLES = {"score": "Scores", "loss": "Losses"}
FORGOTTEN = ("forgetting", "forgotten")  # horizontal axes of the front
MAX_NAMED = 3  # most experiments named in the title

Shown = dict[str, Any]  # data of the page's script


def write_page(path: Path, experiments: Sequence[Experiment]) -> None:
    """Writes the page of one or several experiments; ValueError if they do not compare."""
    check_comparable(experiments)
    page = describe_page(experiments)
    with written_aside(path) as (aside,):
        aside.write_text(make_page(PAGE, {"DATA": escape_json(page)}, title=page["title"]), encoding="utf-8")


def describe_page(experiments: Sequence[Experiment]) -> Shown:
    summaries = [experiment.summary for experiment in experiments]
    kinds = dict.fromkeys(kind for experiment in experiments for kind in experiment.kinds)
    names = [experiment.name for experiment in experiments]
    return {
        "title": ", ".join(names) if len(names) <= MAX_NAMED else f"{len(names)} experiments",
        "measures": [vars(measure) for measure in MEASURES],
        "kinds": [describe_kind(kind, experiments, summaries) for kind in kinds],
        "experiments": [describe_experiment(*both) for both in zip(experiments, summaries, strict=True)],
        "colours": COLOURS,
    }


def describe_kind(kind: str, experiments: Sequence[Experiment], summaries: Sequence[Summary]) -> Shown:
    return {
        "name": kind,
        "title": TITLES[kind],
        "scales": find_scales(kind, experiments),
        "fronts": [front for name in FORGOTTEN if (front := describe_front(name, kind, summaries))],
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


def describe_front(name: str, kind: str, summaries: Sequence[Summary]) -> Shown | None:
    """Scores when learnt against what was forgotten of tasks or probes; None if no experiment measured both."""
    both = [(own.get(kind, {}).get(name), own.get(kind, {}).get("learnt")) for own in summaries]
    points = [None if None in pair else (pair[0].mean, pair[1].mean) for pair in both]
    if points == [None] * len(points):
        return None
    return {"name": name, "on_front": find_front(points), "is_measured": [point is not None for point in points]}


def describe_experiment(experiment: Experiment, summary: Summary) -> Shown:
    return {
        "name": experiment.name,
        "method": experiment.method,
        "facts": describe_facts(experiment),
        "tasks": experiment.tasks,
        "probes": experiment.probes,
        "sequences": [label_sequence(experiment, sequence) for sequence in experiment.sequences],
        "kinds": {kind: show_kind(experiment, kind, summary[kind]) for kind in experiment.kinds},
    }


def describe_facts(experiment: Experiment) -> str:
    orders = {sequence.tasks for sequence in experiment.sequences}
    seeds = {sequence.seed for sequence in experiment.sequences}
    counts = (
        (len(experiment.tasks), "task"),
        (len(experiment.probes), "probe"),
        (len(orders), "order"),
        (len(seeds), "seed"),
    )
    told = ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for number, word in counts)
    return told + describe_progress(experiment)


def label_sequence(experiment: Experiment, sequence: TaskSequence) -> str:
    """Order and seed, as far as they differ."""
    orders = {one.order for one in experiment.sequences}
    return (f"order {sequence.order}, " if len(orders) > 1 else "") + f"seed {sequence.seed}"


def show_kind(experiment: Experiment, kind: str, derived: dict[str, Derived]) -> Shown:
    cells, names = experiment.find_cells(kind), [measure.name for measure in MEASURES]
    firsts = {name: next(iter(own.values())) for name, own in cells.items()}
    return {
        "derived": {name: vars(derived[name]) if name in derived else None for name in names},
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
            views.append(show_mean(grids) | {"label": label_mean(experiment, own), "tasks": tasks})
        for grid, label in zip(grids, labels, strict=True):
            views.append({"label": label, "tasks": tasks, "mean": show_grid(grid)})
    return views


def label_mean(experiment: Experiment, own: Sequence[int]) -> str:
    """The label of the mean of sequences with the same tasks in the same order."""
    is_all = len(own) == len(experiment.sequences)
    return ("" if is_all else f"order {experiment.sequences[own[0]].order}, ") + f"mean of {len(own)} sequences"


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


def show_mean(grids: Sequence[np.ndarray]) -> Shown:
    """Mean, standard deviation and range of cells measured in all sequences."""
    values = np.stack(grids)  # (S, T + 1, K)
    parts = {"mean": values.mean(0), "deviation": values.std(0, ddof=1), "low": values.min(0), "high": values.max(0)}
    return {name: show_grid(grid) for name, grid in parts.items()}


def show_grid(grid: np.ndarray) -> list[list[float | None]]:
    return [to_numbers(row) for row in grid]
