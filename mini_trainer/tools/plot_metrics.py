"""Plots the curves of several training runs as an HTML page.

    python -m mini_trainer plot-metrics runs/a runs/b --output curves.html

The page is a single file that needs no network (docs/tasks/curves.md). Runs, finished or not, are only read.
"""

from pathlib import Path

from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import PlotOptions

if __name__ == "__main__":
    options = parse_options(PlotOptions)  # before the slow imports: --help and typos answer at once

from mini_trainer.data.stores.disk import check_output, make_parent, write_text
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say
from mini_trainer.use.plots.curves import make_curves_page
from mini_trainer.use.plots.run_files import iterate_warnings, open_runs


def plot_metrics(options: PlotOptions) -> None:
    """Writes the page, and prints its URL; ValueError or OSError for user errors."""
    path = Path(options.output)
    check_output(path)
    runs = open_runs([Path(run) for run in options.runs])
    for warning in iterate_warnings(runs):
        say(f"warning: {warning}", is_error=True)
    make_parent(path)
    write_text(path, make_curves_page(runs))
    say(f"curves: {path.absolute().as_uri()}")


if __name__ == "__main__":
    with ending_with_message(when_interrupted="interrupted; no output is left"):
        plot_metrics(options)
