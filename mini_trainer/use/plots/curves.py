"""The page of curves: the curves of runs, of which long ones are thinned, keeping extremes; and tables."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.options.reading import read_text
from mini_trainer.use.pages.page import escape_json, make_page
from mini_trainer.use.plots.columns import OTHERS, SET, SOURCE, Column, MetricsReader, find_best
from mini_trainer.use.plots.run_files import Run, describe_samples
from mini_trainer.use.plots.tables import compare_options, list_starts, summarise

PAGE = Path(__file__).with_name("curves.html")
LIBRARY = PAGE.with_name("chart.js")
STEPS_PER_WINDOW = 50  # steps of the longest run per step of the default smoothing window
SHORTEST_WINDOW = 3

# Colours that are distinct with any colour vision (tests/test_plots.py measures this): on white, on black.
COLOURS = (
    ("#0078b4", "#3c96c3"),
    ("#d25a00", "#f09600"),
    ("#005a00", "#4bf096"),
    ("#871e69", "#ff1e87"),
    ("#d25aff", "#e1c3ff"),
    ("#6900f0", "#a53cff"),
)
DASHES = ("solid", "dash", "dot", "dashdot")  # distinguish runs of the same colour if there are more runs than colours
NUMBERS_ON_PAGE = 450_000  # about 5 MB, for any number of runs
FEWEST_POINTS, MOST_POINTS = 200, 10_000  # per curve, for any number of runs
MOST_PARTS = 12  # maximum number of sources or sets with their own chart
MOST_OTHERS = 200  # of metrics that only a run's file names
ACRONYMS = {"kl", "nll", "mae", "mse"}  # in names of metrics
DIGITS = 6  # significant digits of numbers on the page


@dataclass(frozen=True)
class Chart:
    """One chart, of one column of every run."""

    key: str  # the column's name
    title: str
    unit: str = ""
    is_noisy: bool = False  # smoothed on the page
    is_of_validations: bool = False
    section: str = ""  # heading of a row of small charts


STEP_CHARTS = (
    Chart("loss", "Loss", is_noisy=True),
    Chart("lr", "Learning rate"),
    Chart("grad_norm", "Gradient norm", is_noisy=True),
    Chart("tokens_per_second", "Tokens per second", is_noisy=True),
    Chart("peak_memory_usage_GB", "Peak memory", unit="GB"),
    Chart("mfu", "Model FLOP utilisation", is_noisy=True),
    Chart("osft_leak", "OSFT leak"),
    Chart("rewards/accuracies", "Reward accuracy", is_noisy=True),
    Chart("rewards/margins", "Reward margin", is_noisy=True),
    Chart("rewards/chosen", "Reward of chosen answers", is_noisy=True),
    Chart("rewards/rejected", "Reward of rejected answers", is_noisy=True),
)
VALIDATION_CHARTS = (
    Chart("loss", "Validation loss", is_of_validations=True),
    Chart("token_accuracy", "Validation token accuracy", is_of_validations=True),
    Chart("rewards/accuracies", "Validation reward accuracy", is_of_validations=True),
    Chart("rewards/margins", "Validation reward margin", is_of_validations=True),
)


def list_charts(runs: list[Run]) -> list[Chart]:
    """The charts for which some run has numbers, in the order of the page."""
    first, *others = [chart for chart in STEP_CHARTS if chart.key == "loss" or has_numbers(runs, chart)]
    validations = [chart for chart in VALIDATION_CHARTS if has_numbers(runs, chart)]
    validations += make_other_charts([run.validations for run in runs], is_of_validations=True)
    others += make_other_charts([run.steps for run in runs], is_of_validations=False)
    sources = [
        Chart(name, name.removeprefix(SOURCE), is_noisy=True, section="Loss by source")
        for name in list_parts([run.steps for run in runs], SOURCE)[:MOST_PARTS]
    ]
    sets = [
        Chart(name, name.removeprefix(SET), is_of_validations=True, section="Validation loss by set")
        for name in list_parts([run.validations for run in runs], SET)[:MOST_PARTS]
    ]
    return [first, *validations, *others, *sources, *(sets if len(sets) > 1 else [])]


def make_other_charts(readers: list[MetricsReader], *, is_of_validations: bool) -> list[Chart]:
    """Charts of the metrics that no table here names, such as an objective's own."""
    charts = []
    for name in list_parts(readers, OTHERS)[:MOST_OTHERS]:
        words = [word.upper() if word in ACRONYMS else word for word in name.replace("/", "_").split("_")]
        title = " ".join(["validation", *words] if is_of_validations else words)
        title = title[:1].upper() + title[1:]
        charts.append(Chart(name, title, is_noisy=not is_of_validations, is_of_validations=is_of_validations))
    return charts


def has_numbers(runs: list[Run], chart: Chart) -> bool:
    readers = [run.validations if chart.is_of_validations else run.steps for run in runs]
    return any(reader.count(chart.key) for reader in readers)


def list_parts(readers: list[MetricsReader], prefix: str) -> list[str]:
    """Columns of all sources, sets or others, sorted by count of numbers, highest first."""
    counts: dict[str, int] = {}
    for reader in readers:
        for name in reader.list_columns(prefix):
            counts[name] = counts.get(name, 0) + reader.count(name)
    return sorted((name for name, count in counts.items() if count), key=lambda name: -counts[name])


def list_omissions(runs: list[Run]) -> list[str]:
    """Notes on what the page omits: sources, sets and metrics without a chart, and runs with merged points."""
    omitted, steps, validations = [], [run.steps for run in runs], [run.validations for run in runs]
    for readers, prefix, things, most in (
        (steps, SOURCE, "sources", MOST_PARTS),
        (validations, SET, "validation sets", MOST_PARTS),
        (steps, OTHERS, "other metrics", MOST_OTHERS),
        (validations, OTHERS, "other metrics of validations", MOST_OTHERS),
    ):
        if (number := len(list_parts(readers, prefix))) > most:
            omitted.append(f"Of {number} {things}, the {most} with the most points have a chart.")
    longest, most = max(len(run.steps) for run in runs), count_points(runs)
    if longest > most:
        omitted.append(
            f"Long runs are thinned to {most:,} points, in the longest run about one per {longest / most:.0f} steps:"
            " mean, minimum and maximum, so that no spike is lost."
        )
    return omitted


def count_points(runs: list[Run]) -> int:
    """Maximum number of points per curve, which bounds the page's size."""
    num_curves = sum(not chart.is_of_validations for chart in list_charts(runs))
    fitting = NUMBERS_ON_PAGE // (len(runs) * (5 + 3 * num_curves))
    return min(MOST_POINTS, max(FEWEST_POINTS, fitting))


def describe_run(run: Run, index: int, charts: list[Chart], *, max_points: int) -> dict[str, Any]:
    """A run's curves as JSON."""
    num_steps = len(run.steps)
    starts = choose_starts(num_steps, max_points)
    sizes = np.diff(starts, append=num_steps)
    ends = starts + sizes - 1  # each point's last step
    return {
        "name": run.name,
        "path": str(run.path),
        "colours": COLOURS[index % len(COLOURS)],
        "dash": DASHES[index // len(COLOURS) % len(DASHES)],
        "x": {axis: to_numbers(values[ends]) for axis, values in list_axes(run).items()},
        "sizes": to_numbers(sizes) if num_steps > len(starts) else None,
        "curves": {
            chart.key: thin(run.steps[chart.key], starts)
            for chart in charts
            if not chart.is_of_validations and chart.key in run.steps.columns
        },
        "validations": {
            "x": place_on_axes(run, run.validations["step"]),
            "curves": {
                chart.key: to_numbers(run.validations[chart.key])
                for chart in charts
                if chart.is_of_validations and chart.key in run.validations.columns
            },
            "best": find_best(run.validations),
        },
        "resumes": describe_resumes(run),
    }


def choose_starts(num_steps: int, most: int) -> np.ndarray:
    """First index of each of at most `most` equal shares of the steps."""
    return np.arange(num_steps) if num_steps <= most else -(-np.arange(most) * num_steps // most)


def thin(values: Column, starts: np.ndarray) -> dict[str, list[float | None]]:
    """Mean of each group from `starts`; minimum and maximum if there are fewer groups than steps. None: missing."""
    if len(starts) == len(values):
        return {"mean": to_numbers(values)}
    is_there = np.isfinite(values)
    count = np.add.reduceat(is_there, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(is_there, values, 0), starts) / count
    low = np.minimum.reduceat(np.where(is_there, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(is_there, values, -np.inf), starts)
    return {"mean": to_numbers(mean), "low": to_numbers(low), "high": to_numbers(high)}


def list_axes(run: Run) -> dict[str, Column]:
    """Values of the possible horizontal axes, at the end of each step."""
    return {
        "step": run.steps["step"],
        "samples": run.steps["total_samples_accumulated"],
        "tokens": run.steps["total_tokens_accumulated"],
        "hours": run.hours,
    }


def place_on_axes(run: Run, steps: Iterable[float]) -> dict[str, list[float | None]]:
    """Positions of the ends of `steps` on every axis; step 0 is the start of the run."""
    steps = np.array(list(steps), dtype=np.float64)
    at = np.searchsorted(run.steps["step"], steps, side="right") - 1
    placed = {
        axis: to_numbers(np.where(at < 0, 0, values[np.maximum(at, 0)]) if len(values) else np.zeros(len(steps)))
        for axis, values in list_axes(run).items()
    }
    return placed | {"step": to_numbers(steps)}


def describe_resumes(run: Run) -> dict[str, Any]:
    """Positions of the run's resumes, with their labels."""
    resumes = [start for start in run.starts[1:] if start.resumed_from]
    return {
        "x": place_on_axes(run, (start.first_step for start in resumes)),
        "texts": [f"resumed after step {start.first_step:,}" for start in resumes],
    }


def to_numbers(values: Column) -> list[float | None]:
    """Converts values for JSON: integers, or rounded to `DIGITS` digits; None for values that are not finite."""
    is_there = np.isfinite(values)
    there = values[is_there]
    if (np.abs(there) < 2**53).all() and (there == np.rint(there)).all():
        rounded = there.astype(np.int64)
    else:
        # An integer divided by a power of ten is the double nearest to that decimal, which JSON writes in short form.
        sizes = np.floor(np.log10(np.abs(there), where=there != 0, out=np.zeros_like(there)))
        powers = 10.0 ** np.clip(DIGITS - 1 - sizes, 0, 22)
        rounded = np.rint(there * powers) / powers
    if is_there.all():
        return rounded.tolist()
    numbers = np.full(len(values), None, dtype=object)
    numbers[is_there] = rounded
    return numbers.tolist()


def describe_page(runs: list[Run], *, is_live: bool, best: int | None = None) -> dict[str, Any]:
    """The data for the page's script, as JSON; `is_live`: it is served by the board of all runs; `best`: index of the
    run that is marked as the best of a sweep."""
    charts, max_points = list_charts(runs), count_points(runs)
    differing, shared = compare_options(runs)
    samples, omitted = describe_samples([run.samples.rows for run in runs])
    warnings = [warning for run in runs for warning in run.warnings]
    window = max(len(run.steps) for run in runs) // STEPS_PER_WINDOW
    written = f"{'Read' if is_live else 'Written'} on {time.strftime('%Y-%m-%d at %H:%M %Z')}."
    return {
        "title": name_page(runs),
        "runs": [
            describe_run(run, i, charts, max_points=max_points) | {"is_best": i == best} for i, run in enumerate(runs)
        ],
        "charts": [vars(chart) for chart in charts],
        "smoothing": next((steps for steps in (100, 50, 30, 20, 10, 5) if steps <= window), SHORTEST_WINDOW),
        "tables": {
            "summary": vars(summarise(runs)),
            "differing": vars(differing),
            "shared": vars(shared),
            "starts": vars(list_starts(runs)),
        },
        "samples": samples,
        "notes": [*warnings, *list_omissions(runs), *omitted, written],
        "is_live": is_live,
        "is_behind": any(run.steps.is_behind for run in runs),  # lines are left to read
        "version": make_version(runs),
    }


def name_page(runs: list[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    folder = Path(os.path.commonpath([os.path.abspath(run.path) for run in runs])).name
    return f"{len(runs)} runs" + (f" in {folder}" if folder else "")


def make_version(runs: list[Run]) -> str:
    """A text that changes whenever a run has new data."""
    return repr([run.version for run in runs])


def make_curves_page(runs: list[Run], *, is_live: bool = False, best: int | None = None) -> str:
    """The page as HTML; see `describe_page`."""
    page = describe_page(runs, is_live=is_live, best=best)
    policy = "; img-src data:" + ("; connect-src 'self'" if is_live else "")
    parts = {"DATA": escape_json(page)}
    return make_page(PAGE, parts, title=page["title"], library=read_text(LIBRARY), policy=policy)
