"""Plots the curves of several training runs: an HTML page, or a figure for papers.

    python tools/plot_metrics.py runs/a runs/b --output curves.html
    python tools/plot_metrics.py runs/a runs/b --output curves.png
    python tools/plot_metrics.py runs/a --follow

The page is a single file that needs no network (docs/curves.md). With --follow it is served to browsers on this
machine and updated while runs continue. Runs, finished or not, are only read.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # imports are relative to the root

from command_line import parse_options
from options import PlotOptions

if __name__ == "__main__":
    options = parse_options(PlotOptions)  # before the slow imports: --help and typos answer at once

from disk import check_output, written_aside
from plots.figure import write_figure
from plots.page import choose_smoothing, make_curves_page
from plots.run_files import Run, iterate_warnings, open_runs
from plots.server import DEFAULT_PORT, CurvesServer
from ranks.ending import ending_with_message
from ranks.messages import say


def plot_metrics(options: PlotOptions) -> None:
    """Writes or serves the curves; ValueError or OSError for user errors."""
    runs = open_runs([Path(run) for run in options.runs])
    for warning in iterate_warnings(runs):
        say(f"warning: {warning}", is_error=True)
    if options.follow:
        port = DEFAULT_PORT if options.port is None else options.port
        with CurvesServer(runs, port=port, smoothing=options.smoothing) as server:
            server.serve("curves")
    else:
        write_curves(Path(options.output), runs, smoothing=options.smoothing)


def write_curves(path: Path, runs: list[Run], *, smoothing: int | None) -> None:
    """Writes the file and prints its path, or for a page its URL."""
    check_output(path)
    if path.suffix.lower() == ".html":
        with written_aside(path) as (aside,):
            aside.write_text(make_curves_page(runs, smoothing=smoothing), encoding="utf-8")
        say(f"curves: {path.absolute().as_uri()}")
    else:
        write_figure(path, runs, smoothing=choose_smoothing(runs) if smoothing is None else smoothing)
        say(f"curves: {path}")


if __name__ == "__main__":
    with ending_with_message(when_interrupted="interrupted; no output is left"):
        plot_metrics(options)
