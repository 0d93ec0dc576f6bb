"""The page of curves: the curves of runs, of which long ones are thinned, keeping extremes; and tables of results,
options that differ, and starts."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.options import TrainOptions, iterate_fields
from mini_trainer.options.reading import read_text
from mini_trainer.use.pages.page import escape_json, fold, make_page
from mini_trainer.use.plots.run_files import OTHERS, SET, SOURCE, Column, MetricsReader, Run, Sample, find_best

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
MOST_PROMPTS = 16  # on the page
MOST_ANSWERS = 12  # to a prompt, of all runs together
MOST_CHARS = 2000  # of a text
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
    of_steps, of_validations = [run.steps for run in runs], [run.validations for run in runs]
    first, *others = [chart for chart in STEP_CHARTS if chart.key == "loss" or has_numbers(of_steps, chart)]
    validations = [chart for chart in VALIDATION_CHARTS if has_numbers(of_validations, chart)]
    validations += make_other_charts(of_validations, is_of_validations=True)
    others += make_other_charts(of_steps, is_of_validations=False)
    sources = [
        Chart(name, name.removeprefix(SOURCE), is_noisy=True, section="Loss by source")
        for name in list_parts(of_steps, SOURCE)[:MOST_PARTS]
    ]
    sets = [
        Chart(name, name.removeprefix(SET), is_of_validations=True, section="Validation loss by set")
        for name in list_parts(of_validations, SET)[:MOST_PARTS]
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


def has_numbers(readers: list[MetricsReader], chart: Chart) -> bool:
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
    return min(MOST_POINTS, max(FEWEST_POINTS, NUMBERS_ON_PAGE // (len(runs) * (5 + 3 * num_curves))))


def describe_run(run: Run, index: int, charts: list[Chart], *, max_points: int) -> dict[str, Any]:
    """A run's curves as JSON."""
    num_steps = len(run.steps)
    starts = choose_starts(num_steps, max_points)
    sizes = np.diff(starts, append=num_steps)
    ends = starts + sizes - 1  # each point's last step
    resumes = [start for start in run.starts[1:] if start["resumed_from"]]
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
        "resumes": {
            "x": place_on_axes(run, (start["first_step"] for start in resumes)),
            "texts": [f"resumed after step {start['first_step']:,}" for start in resumes],
        },
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


def describe_samples(runs: Sequence[list[Sample]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The prompts with the runs' answers, in the order of their steps, as JSON; and notes on what is left out."""
    found: dict[str, list[list[Sample]]] = {}  # by prompt, for each run
    for i, rows in enumerate(runs):
        for row in rows:
            found.setdefault(row["prompt"], [[] for _ in runs])[i].append(row)
    most, notes = max(2, MOST_ANSWERS // max(1, len(runs))), []
    if len(found) > MOST_PROMPTS:
        notes.append(f"Of {len(found):,} sample prompts, {MOST_PROMPTS} are shown.")
    largest = max((len(rows) for of_runs in found.values() for rows in of_runs), default=0)
    if largest > most:
        notes.append(f"Of the answers to each sample prompt, up to {largest:,} in a run, {most} of each run are shown.")
    prompts = [
        {
            "prompt": fold(prompt, MOST_CHARS),
            "answers": [describe_answer(row, i) for i, rows in enumerate(of_runs) for row in choose_rows(rows, most)],
        }
        for prompt, of_runs in list(found.items())[:MOST_PROMPTS]
    ]
    return prompts, notes


def choose_rows(rows: list[Sample], most: int) -> list[Sample]:
    """The first and the last, and evenly spaced ones between."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def describe_answer(row: Sample, run: int) -> dict[str, Any]:
    is_cut = row["finish_reason"] == "length"
    return {"run": run, "step": row["step"], "text": fold(row["answer"], MOST_CHARS), "is_cut": is_cut}


NO_VALUE = "–"
OWN_OPTIONS = {"output_dir", "config"}  # different in every run, or merged into the other options
MAX_CELL_CHARS = 300


Table = dict[str, list]  # "head" and "rows" of text cells; in some tables, rows begin with the index of their run


def summarise(runs: list[Run]) -> Table:
    """Results of the runs, one per row."""
    head = ["state", "steps", "tokens", "loss", "best validation", "at step", "tokens/s", "memory", "hours"]
    return {"head": head, "rows": [summarise_run(run) for run in runs]}


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
        format_number(summarise_finite(steps["tokens_per_second"]), ",.0f"),
        format_number(summarise_finite(steps["peak_memory_usage_GB"], np.max), ".2f", " GB"),
        f"{run.hours[-1]:.2f}",
    ]


def summarise_finite(values: np.ndarray, function: Callable[[np.ndarray], Any] = np.median) -> float:
    """The median, or the `function`, of the finite values; NaN if there are none."""
    values = values[np.isfinite(values)]
    return float(function(values)) if len(values) else np.nan


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
    """Options and facts that differ between runs, and options that all runs share but that are not defaults. A run
    whose options cannot be read has no value, which does not count as different."""
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
    head = ["option", *(run.name for run in runs)]
    return {"head": head, "rows": differing}, {"head": ["option", "value"], "rows": shared}


def list_values(run: Run) -> dict[str, Any]:
    """A run's options, and other facts of its last start: machine, commit, versions, shortened digests."""
    if not run.options:
        return {}
    digests = {
        f"digest of {name}": value[:12]
        for name, value in run.params["identity"].items()
        if isinstance(value, str) and len(value) == 64 and name.replace("-", "_") not in run.options
    }
    options = {name: value for name, value in run.options.items() if name not in OWN_OPTIONS}
    last = run.starts[-1]
    commit = {} if last["git_commit"] is None else {"git commit": last["git_commit"][:12]}
    versions = {f"version of {name}": number for name, number in last["versions"].items()}
    return options | {"machine": name_machine(last)} | commit | versions | digests


def name_machine(start: dict[str, Any]) -> str:
    return f"{start['world_size']} × {start['device']}"


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
        [str(index), start["started"].replace("T", " ")[:19], f"{start['first_step']:,}",
         start["resumed_from"] or NO_VALUE, name_machine(start), ", ".join(start["changed_options"]) or NO_VALUE]
        for index, run in enumerate(runs)
        for start in run.starts
        if len(run.starts) > 1 or start["resumed_from"]
    ]  # fmt: skip
    return {"head": ["run", "started", "after step", "resumed from", "on", "changed options"], "rows": rows}


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
        "tables": {"summary": summarise(runs), "differing": differing, "shared": shared, "starts": list_starts(runs)},
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
