"""Plots the curves of several training runs: an HTML page, or a figure for papers.

    python -m mini_trainer plot-metrics runs/a runs/b --output curves.html
    python -m mini_trainer plot-metrics runs/a runs/b --output curves.png
    python -m mini_trainer plot-metrics runs/a --follow

The page is a single file that needs no network (docs/tasks/curves.md). With --follow it is served to browsers on this
machine and updated while runs continue. Runs, finished or not, are only read.
"""

from pathlib import Path

from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import PlotOptions

if __name__ == "__main__":
    options = parse_options(PlotOptions)  # before the slow imports: --help and typos answer at once

from mini_trainer.data.stores.disk import check_output, make_parent, written_aside
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say
from mini_trainer.use.plots.curves_page import choose_smoothing, make_curves_page
from mini_trainer.use.plots.figure import write_figure
from mini_trainer.use.plots.run_files import Run, iterate_warnings, open_runs
from mini_trainer.use.plots.server import DEFAULT_PORT, CurvesServer


def plot_metrics(options: PlotOptions) -> None:
    """Writes or serves the curves; ValueError or OSError for user errors."""
    if options.output is not None:
        check_output(Path(options.output))
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
    make_parent(path)
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
