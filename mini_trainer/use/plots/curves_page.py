"""Makes the HTML page of curves and its data."""

import os
import time
from pathlib import Path
from typing import Any

from mini_trainer.use.pages.page import escape_json, make_page
from mini_trainer.use.plots.curves import count_points, describe_run, list_charts, list_omissions
from mini_trainer.use.plots.run_files import Run, describe_samples
from mini_trainer.use.plots.tables import compare_options, list_starts, summarise

PAGE = Path(__file__).with_name("curves.html")
LIBRARY = PAGE.with_name("chart.js")
STEPS_PER_WINDOW = 50  # steps of the longest run per step of the default smoothing window
SHORTEST_WINDOW = 3


def describe_page(runs: list[Run], *, smoothing: int | None, is_live: bool, best: int | None = None) -> dict[str, Any]:
    """The data for the page's script, as JSON; `is_live`: it is served by the board of all runs; `best`: index of the
    run that is marked as the best of a sweep."""
    charts, max_points = list_charts(runs), count_points(runs)
    differing, shared = compare_options(runs)
    samples, omitted = describe_samples([run.samples.rows for run in runs])
    warnings = [warning for run in runs for warning in run.warnings]
    written = f"{'Read' if is_live else 'Written'} on {time.strftime('%Y-%m-%d at %H:%M %Z')}."
    return {
        "title": make_title(runs),
        "runs": [
            describe_run(run, i, charts, max_points=max_points) | {"is_best": i == best} for i, run in enumerate(runs)
        ],
        "charts": [vars(chart) for chart in charts],
        "smoothing": choose_smoothing(runs) if smoothing is None else smoothing,
        "tables": {
            name: {"head": table.head, "rows": table.rows}
            for name, table in {
                "summary": summarise(runs),
                "differing": differing,
                "shared": shared,
                "starts": list_starts(runs),
            }.items()
        },
        "samples": samples,
        "notes": [*warnings, *list_omissions(runs), *omitted, written],
        "is_live": is_live,
        "is_behind": any(run.steps.is_behind for run in runs),  # lines are left to read
        "version": make_version(runs),
    }


def make_title(runs: list[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    folder = Path(os.path.commonpath([os.path.abspath(run.path) for run in runs])).name
    return f"{len(runs)} runs" + (f" in {folder}" if folder else "")


def choose_smoothing(runs: list[Run]) -> int:
    """Smoothing window in steps; smaller for short runs."""
    window = max(len(run.steps) for run in runs) // STEPS_PER_WINDOW
    return next((steps for steps in (100, 50, 30, 20, 10, 5) if steps <= window), SHORTEST_WINDOW)


def make_version(runs: list[Run]) -> str:
    """A text that changes whenever a run has new data."""
    return repr([run.version for run in runs])


def make_curves_page(
    runs: list[Run],
    *,
    smoothing: int | None,
    is_live: bool = False,
    best: int | None = None,
) -> str:
    """The page as HTML; see `describe_page`."""
    page = describe_page(runs, smoothing=smoothing, is_live=is_live, best=best)
    policy = "; img-src data:" + ("; connect-src 'self'" if is_live else "")
    parts = {"DATA": escape_json(page)}
    return make_page(PAGE, parts, title=page["title"], library=LIBRARY.read_text(encoding="utf-8"), policy=policy)
