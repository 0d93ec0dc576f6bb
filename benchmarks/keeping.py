"""What a pretrained model learnt in three tasks in a row, and what it forgot of what nobody trained, by method.

    python benchmarks/keeping.py collect runs/forgetting/keeping --output benchmarks/results/keeping.jsonl
    python benchmarks/keeping.py show benchmarks/results/keeping.jsonl --picture benchmarks/results/keeping.png

`collect` adds experiments of examples/recipes/keeping.yaml to a file: one line for each model after each task, with
every question's score and every own answer's loss. `show` reads that file alone, so intervals can be computed again.

A half of every set's questions chooses each method's learning rate, on the first seed: the one with the largest
difference of right answers to the tasks at the end and lost ones of the probes. The other half reports. The worst
moment is the task after which the most is lost of all probes with right answers. Intervals (95 %) are bootstraps over
questions and seeds; every method gets the same resamples.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import paths  # noqa: F401

from mini_trainer.continual.matrix import read_experiment
from mini_trainer.use.evaluation.comparison import count_draws, find_interval

TASKS, PROBES, OWN = ("facts", "tickets", "chains"), ("knowledge", "instructions"), "own_answers"
CHOOSE, REPORT, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)  # questions
FIRST_SEED, NUM_RESAMPLES = 42, 10_000
REFERENCE = "full"
Line = dict[str, Any]  # method, rate, seed, num_tasks; set -> "0110..." or losses; tokens and seconds of its training


def collect(root: Path) -> Iterator[Line]:
    """The lines of an experiment: of the start first."""
    experiment = read_experiment(root)
    method, _, rate = root.name.rpartition("_")
    start = experiment.sequences[0].rows[0]
    yield {
        "method": "before",
        "num_tasks": 0,
        **read_sets(start),
        "weights": start["loss"][OWN].weights.astype(int).tolist(),
    }
    for sequence in experiment.sequences:
        for i, (task, row) in enumerate(zip(sequence.tasks, sequence.rows[1:], strict=False), start=1):
            folder = root / f"order_{sequence.order}_seed_{sequence.seed}" / f"{i}_{task}"
            yield {
                **dict(method=method, rate=rate.replace("e", "e-"), seed=sequence.seed, num_tasks=i),
                **read_sets(row),
                **read_steps(folder / "run" / "training_metrics_0.jsonl"),
            }


def read_sets(row: dict) -> Line:
    scores = {name: "".join(f"{value:g}" for value in cell.values) for name, cell in row["score"].items()}
    if any(set(digits) - {"0", "1"} for digits in scores.values()):
        raise ValueError("a question that is neither right nor wrong")
    return scores | {OWN: [round(float(loss), 4) for loss in row["loss"][OWN].values]}


def read_steps(path: Path) -> Line:
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        "num_steps": len(steps),
        "num_tokens": steps[-1]["total_tokens_accumulated"],
        "num_kept_tokens": sum(step.get("num_kept_tokens", 0) for step in steps),
        "seconds": round(sum(step["time_per_batch"] for step in steps)),
    }


@dataclass(frozen=True)
class Results:
    """A method at one learning rate. All numbers are (1 + resamples,): the measured one first."""

    method: str
    rate: str
    lines: list[list[Line]]  # of each seed: before, then after each task
    questions: slice

    @cached_property
    def seeds(self) -> np.ndarray:  # (1 + resamples, seeds): weights
        return draw_weights(len(self.lines), seed=len(self.lines))

    def read(self, name: str, num_tasks: int) -> np.ndarray:
        """The share of right answers to a set after `num_tasks` tasks, or the mean loss, over questions and seeds."""
        by_seed = [lines[num_tasks][name] for lines in self.lines]
        values = np.array([list(map(float, one)) for one in by_seed])[:, self.questions]
        sizes = np.array(self.lines[0][0]["weights"])[self.questions] if name == OWN else np.ones(values.shape[1])
        drawn = draw_weights(len(sizes), seed=(*TASKS, *PROBES, OWN).index(name)) * sizes
        return (drawn @ values.T / drawn.sum(1, keepdims=True) * self.seeds).sum(1)

    def lose(self, name: str, num_tasks: int = len(TASKS)) -> np.ndarray:
        """What is lost of a probe after so many tasks; of own answers, the rise of the loss."""
        change = self.read(name, 0) - self.read(name, num_tasks)
        return -change if name == OWN else change

    def lose_probes(self, num_tasks: int = len(TASKS)) -> np.ndarray:
        return np.mean([self.lose(name, num_tasks) for name in PROBES], axis=0)

    @cached_property
    def learnt(self) -> np.ndarray:
        return np.mean([self.read(name, i) for i, name in enumerate(TASKS, start=1)], axis=0)

    @cached_property
    def at_end(self) -> np.ndarray:
        return np.mean([self.read(name, len(TASKS)) for name in TASKS], axis=0)

    @cached_property
    def worst(self) -> np.ndarray:
        return max((self.lose_probes(i + 1) for i in range(len(TASKS))), key=lambda lost: lost[0])

    @property
    def merit(self) -> float:
        return float(self.at_end[0] - self.lose_probes()[0])

    def add(self, name: str) -> float:
        """Mean over seeds of the sum over tasks."""
        return float(np.mean([sum(line[name] for line in lines[1:]) for lines in self.lines]))


def draw_weights(size: int, *, seed: int) -> np.ndarray:
    """(1 + resamples, size): all alike, then how often each is drawn."""
    drawn = count_draws(np.random.default_rng(seed).integers(size, size=(NUM_RESAMPLES, size)))
    return np.concatenate([np.ones((1, size)), drawn]) / size


class Table:
    """All lines, by method and rate."""

    def __init__(self, lines: list[Line]):
        (self.before,) = (line for line in lines if line["method"] == "before")
        found: dict[tuple[str, str], dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
        for line in lines:
            if line["method"] != "before":
                found[line["method"], line["rate"]][line["seed"]].append(line)
        whole = {
            key: {seed: [self.before, *own] for seed, own in sorted(seeds.items()) if len(own) == len(TASKS)}
            for key, seeds in sorted(found.items(), key=lambda item: (item[0][0], float(item[0][1])))
        }
        self.lines = {key: seeds for key, seeds in whole.items() if seeds}  # others have not ended yet

    def read(self, key: tuple[str, str], questions: slice, *, seeds: Collection[int] | None = None) -> Results:
        """Its results with these seeds, by default all."""
        lines = [own for seed, own in self.lines[key].items() if seeds is None or seed in seeds]
        return Results(*key, lines, questions)

    def choose(self) -> dict[str, tuple[str, str]]:
        """Each method with the rate that one half of the questions prefers on the first seed."""
        found: dict[str, Results] = {}
        for key, own in self.lines.items():
            if FIRST_SEED in own:
                results = self.read(key, CHOOSE, seeds=[FIRST_SEED])
                if results.method not in found or results.merit > found[results.method].merit:
                    found[results.method] = results
        return {method: (method, results.rate) for method, results in found.items()}


def write_row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def write_head(*titles: str) -> Iterator[str]:
    yield write_row(*titles)
    yield "|" + " --- |" * len(titles)


def write_interval(values: np.ndarray) -> str:
    low, high = find_interval(values[1:])
    return f"{values[0]:.2f} [{low:.2f}, {high:.2f}]"


def write_rates(table: Table) -> Iterator[str]:
    yield from write_head(
        *("method", "rate", "learnt", "at the end", *(f"{name} lost" for name in PROBES), "worst moment"),
        *("own answers, loss", "tokens", "kept tokens", "minutes"),
    )
    for key in table.lines:
        one = table.read(key, REPORT, seeds=[FIRST_SEED])
        numbers = (one.learnt, one.at_end, *map(one.lose, PROBES), one.worst, one.read(OWN, len(TASKS)))
        counts = f"{one.add('num_tokens'):,.0f}", f"{one.add('num_kept_tokens'):,.0f}", f"{one.add('seconds') / 60:.0f}"
        yield write_row(*key, *(f"{number[0]:.2f}" for number in numbers), *counts)


def write_chosen(table: Table) -> Iterator[str]:
    yield from write_head(
        *("method", "rate", "seeds", "learnt", "at the end", *(f"{name} lost" for name in PROBES), "worst moment"),
        "own answers, loss lost",
    )
    for key in table.choose().values():
        one = table.read(key, REPORT)
        numbers = one.learnt, one.at_end, *map(one.lose, PROBES), one.worst, one.lose(OWN)
        yield write_row(*key, len(one.lines), *map(write_interval, numbers))


def write_differences(table: Table) -> Iterator[str]:
    """What each method has more than full fine-tuning, on the same questions and seeds."""
    yield from write_head(
        "method", "rate", "at the end", "lost of the probes", "worst moment", "own answers, loss lost"
    )
    chosen = table.choose()
    for key in chosen.values():
        if key[0] != REFERENCE:
            own = table.lines[key].keys() & table.lines[chosen[REFERENCE]].keys()
            one, other = (table.read(each, REPORT, seeds=own) for each in (key, chosen[REFERENCE]))
            pairs = [(each.at_end, each.lose_probes(), each.worst, each.lose(OWN)) for each in (one, other)]
            yield write_row(*key, *(write_interval(a - b) for a, b in zip(*pairs, strict=True)))


def write_moments(table: Table) -> Iterator[str]:
    """Right answers and losses before and after each task, means over seeds, all questions."""
    sets = (*TASKS, *PROBES, OWN)
    yield from write_head("method", "rate", "after", *sets)
    chosen = [table.read(key, ALL) for key in table.choose().values()]
    moments = [("", "", "before", chosen[0], 0)]
    moments += [(one.method, one.rate, task, one, i) for one in chosen for i, task in enumerate(TASKS, start=1)]
    for method, rate, after, one, i in moments:
        shown = [f"{one.read(name, i)[0]:.2f}" if name in one.lines[0][i] else "–" for name in sets]
        yield write_row(method, rate, after, *shown)


def plot(table: Table, path: Path) -> None:
    """Tasks known at the end against what is lost, of the first seed at every rate, and means of all at the chosen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lost = {
        "knowledge: right answers lost": lambda one: one.lose("knowledge"),
        "instructions: right answers lost": lambda one: one.lose("instructions"),
        "both, at the worst moment": lambda one: one.worst,
        "own answers: rise of the loss": lambda one: one.lose(OWN),
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 9), sharey=True)
    by_method: dict[str, list[Results]] = defaultdict(list)
    for key in table.lines:
        by_method[key[0]].append(table.read(key, REPORT, seeds=[FIRST_SEED]))
    chosen = {method: table.read(key, REPORT) for method, key in table.choose().items()}
    for axis, (title, read) in zip(axes.flat, lost.items(), strict=True):
        for i, (method, several) in enumerate(by_method.items()):
            marker, color = "os^Dv*PXhd<>"[i], pyplot.colormaps["tab20"](i * 2 % 20 + i // 10)
            xs, ys = [float(read(one)[0]) for one in several], [float(one.at_end[0]) for one in several]
            axis.plot(xs, ys, marker + "-", color=color, markersize=4, alpha=0.6)
            mean = chosen[method]
            axis.plot(
                read(mean)[0],
                mean.at_end[0],
                marker,
                color=color,
                markersize=11,
                mec="k",
                label=method.replace("_", " "),
            )
            for x, y, one in zip(xs, ys, several, strict=True):
                axis.annotate(one.rate, (x, y), textcoords="offset points", xytext=(4, 3), fontsize=6)
        axis.set(xlabel=title)
        axis.margins(0.1)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set(ylabel="right answers to all three tasks at the end")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("collect")
    adding.add_argument("roots", nargs="+", type=Path, help="output_dir of one or more experiments with methods")
    adding.add_argument("--output", type=Path, required=True)
    showing = commands.add_parser("show")
    showing.add_argument("rows", type=Path)
    showing.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if args.command == "collect":
        known = args.output.read_text().splitlines() if args.output.exists() else []
        found = [
            line for root in args.roots for path in sorted(root.glob("*/results.json")) for line in collect(path.parent)
        ]
        args.output.write_text("".join(f"{line}\n" for line in dict.fromkeys([*known, *map(json.dumps, found)])))
        return
    table = Table([json.loads(line) for line in args.rows.read_text().splitlines()])
    for title, write in {
        f"Seed {FIRST_SEED}, the half that reports:": write_rates,
        "The rate that the other half chose, all seeds:": write_chosen,
        f"More than {REFERENCE}:": write_differences,
        "All questions, means over seeds:": write_moments,
    }.items():
        print("\n".join([title, "", *write(table), ""]))
    if args.picture:
        plot(table, args.picture)


if __name__ == "__main__":
    main()
