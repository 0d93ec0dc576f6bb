"""Draws curves of runs as a figure for papers: loss and validation large, learning rate and gradient norm small."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.data.stores.disk import written_aside
from mini_trainer.use.plots.columns import Column, Points, choose_starts
from mini_trainer.use.plots.curves import COLOURS, DASHES
from mini_trainer.use.plots.run_files import Run
from mini_trainer.use.plots.tables import shorten_number

INCHES = (7.2, 3.2)  # the text width of a page; names of runs are added below
INCHES_PER_ROW = 0.16  # height of a row of names
CHARS_PER_ROW = 110  # width of a row of names
LOG_FROM = 30  # ratio of maximum to minimum gradient norm above which the axis is logarithmic
DOTS_PER_INCH = 300
MOST_POINTS = 1500  # per curve, more than print can show
LINE_STYLES = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))
STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "svg.fonttype": "none",  # keep text as text
    "pdf.fonttype": 42,
}


def write_figure(path: Path, runs: list[Run], *, smoothing: int) -> None:
    """Writes the figure, in the format of the suffix of `path`. ValueError if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a figure of curves needs matplotlib: pip install matplotlib") from None
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name may contain characters that no font has
        figure = Figure(figsize=INCHES, layout="constrained")
        draw_figure(figure, runs, smoothing=smoothing)
        with written_aside(path) as (aside,):
            figure.savefig(aside, format=path.suffix[1:].lower(), dpi=DOTS_PER_INCH)


def draw_figure(figure: Any, runs: list[Run], *, smoothing: int) -> None:
    """Draws all curves into `figure`, a matplotlib Figure."""
    grid = figure.add_gridspec(2, 2, width_ratios=(2.1, 1))
    loss = figure.add_subplot(grid[:, 0])
    lr, grad_norm = (figure.add_subplot(grid[row, 1], sharex=loss) for row in (0, 1))
    lines = [draw_run(run, index, (loss, lr, grad_norm), smoothing=smoothing) for index, run in enumerate(runs)]
    loss.set(xlabel="step", ylabel="loss")
    lr.set_title("learning rate", loc="left")
    lr.tick_params(labelbottom=False)
    lr.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("e-0", "e-"))
    grad_norm.set_title("gradient norm", loc="left")
    grad_norm.set_xlabel("step")
    loss.xaxis.set_major_formatter(lambda step, _: shorten_number(step).replace(" ", ""))
    norms = np.concatenate([line.get_ydata() for line in grad_norm.lines])
    norms = norms[np.isfinite(norms)]
    if len(norms) and norms.min() > 0 and norms.max() / norms.min() > LOG_FROM:
        grad_norm.set_yscale("log")
    rates = [line.get_ydata() for line in lr.lines]
    if rates and np.nanmin(np.concatenate([[0.0], *rates])) >= 0:
        lr.set_ylim(bottom=0)  # a constant rate is level, and not its rounding
    names = [run.name for run in runs]
    if any(len(run.validations) for run in runs):
        (marked,) = loss.plot([], [], ":o", color="#555555", linewidth=0.9, markersize=3, markerfacecolor="none")
        names, lines = [*names, "validation"], [*lines, marked]
    if len(names) > 1:
        write_names(figure, names, lines)


def write_names(figure: Any, names: list[str], lines: list[Any]) -> None:
    """Writes the names below the curves, as many per row as fit."""
    num_columns = max(1, min(len(names), CHARS_PER_ROW // (max(map(len, names)) + 8)))
    num_rows = -(-len(names) // num_columns)
    figure.set_figheight(INCHES[1] + INCHES_PER_ROW * num_rows)
    # Names are set afterwards, because matplotlib omits labels that begin with an underscore.
    legend = figure.legend(lines, [" "] * len(names), loc="outside lower left", ncols=num_columns)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=name, parse_math=False)  # dollar signs are literal


def draw_run(run: Run, index: int, axes: tuple[Any, Any, Any], *, smoothing: int) -> Any:
    """Draws a run's curves, and returns its line for the legend."""
    loss, lr, grad_norm = axes
    colour = COLOURS[index % len(COLOURS)][0]
    style = LINE_STYLES[DASHES[index // len(COLOURS) % len(DASHES)]]
    steps, sizes = run.steps.points("step").last, run.steps.sizes
    losses, norms = run.steps.points("loss"), run.steps.points("grad_norm")
    smoothed = Points.of_steps(smooth(losses.mean, smoothing, sizes=sizes))
    (line,) = draw_line(loss, steps, smoothed, color=colour, linestyle=style, linewidth=1.2, zorder=3)
    if smoothing > 1:
        draw_line(loss, steps, losses, color=colour, linewidth=0.4, alpha=0.3, zorder=2)
    draw_line(lr, steps, run.steps.points("lr"), color=colour, linestyle=style, linewidth=0.9)
    smoothed = Points.of_steps(smooth(norms.mean, smoothing, sizes=sizes))
    draw_line(grad_norm, steps, smoothed, color=colour, linestyle=style, linewidth=0.9)
    if len(run.validations):
        loss.plot(
            run.validations["step"], run.validations["loss"], ":o", color=colour, linewidth=0.9, markersize=3,
            markerfacecolor="none", zorder=4,
        )  # fmt: skip
    return line


def draw_line(axes: Any, x: Column, points: Points, **style: Any) -> Any:
    """Draws a curve; a long one as the minimum and maximum of every group of points."""
    y = points.mean
    starts = choose_starts(np.ones(len(x)), MOST_POINTS)
    if len(starts) < len(x):
        points = points.merge(starts)
        x, y = np.repeat(x[starts], 2), np.stack([points.low, points.high], axis=1).ravel()
    return axes.plot(x, np.where(np.isfinite(y), y, np.nan), **style)


def smooth(values: Column, window: int, *, sizes: Column) -> Column:
    """Average around each step, weighted by distance, as on the page; `sizes`: number of steps of each value."""
    decay = (window - 1) / (window + 1)
    is_there = np.isfinite(values)
    sums, totals = np.zeros(len(values)), np.zeros(len(values))
    own = (1 - decay**sizes) / (1 - decay)
    for order in (range(len(values)), range(len(values) - 1, -1, -1)):
        total = weighted = 0.0
        for i in order:
            if is_there[i]:
                kept = decay ** sizes[i]
                weighted, total = weighted * kept + values[i] * own[i], total * kept + own[i]
                sums[i], totals[i] = sums[i] + weighted, totals[i] + total
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(is_there, (sums - np.where(is_there, values, 0) * own) / (totals - own), np.nan)
