"""The measurements of a continual-learning experiment: every set after every task, and numbers derived from them.

R[t][i] is the mean of task i after training on t tasks; R[0] is the start model's, and tasks count from 1 in the order
of training, T in all. A kind whose metric is a loss is negated, so that more is better everywhere. The derived numbers,
each over the tasks that were measured:

| name                         | definition                               | source                                 |
| ---------------------------- | ---------------------------------------- | -------------------------------------- |
| average                      | mean_i R[T][i]                           | GEM's ACC, TRACE's OP                  |
| learnt                       | mean_i R[i][i]                           |                                        |
| backward_transfer            | mean_{i<T} R[T][i] - R[i][i]             | GEM's BWT                              |
| forward_transfer             | mean_{i>=2} R[i-1][i] - R[0][i]          | GEM's FWT                              |
| forgetting                   | mean_{i<T} max_{i<=l<T} R[l][i] - R[T][i]| Chaudhry et al.                        |
| forgotten                    | mean_p R[0][p] - R[T][p]                 | probes p, which never train            |

GEM: Lopez-Paz and Ranzato 2017, arXiv 1706.08840. Chaudhry et al. 2018, arXiv 1801.10112. TRACE: Wang et al. 2023,
arXiv 2310.06762.

Intervals are percentile bootstrap intervals over questions: those of a set are drawn once for all t and all sequences.
Where there are several sequences, these are drawn as well. Intervals of what differs between few sequences are too
narrow: simulated with certain questions they cover the truth in 76 % of cases for 3 sequences, 82 % for 5 and 90 % for
9, so `deviation` is reported beside them.

C cells, n questions, R resamples, D = 1 + R draws: the measured value, then its resamples. P probes, S sequences.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.data.stores.disk import write_text
from mini_trainer.options.reading import read_object
from mini_trainer.use.evaluation.comparison import LEVEL, count_draws, cut, find_interval

FILE = "results.json"
SEED = 0  # of the bootstrap
NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class Cell:
    """One model on one set, by one metric."""

    metric: str  # exact_match, rouge_l, acc, loss, ...
    values: np.ndarray  # (n,): score of each question; for a loss the mean over the sample's trained tokens
    weights: np.ndarray | None = None  # (n,): trained tokens of each sample of a loss; None: all equal
    samples: str | None = None  # path, relative to the experiment's directory, of the file with the answers

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))

    @property
    def higher_is_better(self) -> bool:
        return self.metric != "loss"


MatrixRow = dict[str, dict[str, Cell]]  # kind ("score" or "loss") -> set (task or probe), if measured -> cell


@dataclass(frozen=True)
class Sequence:
    """One order of the tasks with one seed."""

    tasks: tuple[str, ...]  # in the order of training
    order: int
    seed: int
    rows: tuple[MatrixRow, ...]  # after t = 0, 1, ..., T tasks; fewer while the experiment runs


@dataclass(frozen=True)
class Experiment:
    """All that was measured."""

    name: str  # for people: of the output directory, or given
    method: str  # one line for labels, such as "OSFT, own answers replayed"
    tasks: tuple[str, ...]  # in the settings' order
    probes: tuple[str, ...]  # general sets, never trained
    sequences: tuple[Sequence, ...]
    measure: str = "all"  # or "seen": a task is measured from its own training on

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for sequence in self.sequences for row in sequence.rows for kind in row}, reverse=True)

    @cached_property
    def summary(self) -> "dict[str, dict[str, Derived]]":
        """kind -> name -> derived number, by `summarise`."""
        return summarise(self)

    def find_cells(self, kind: str) -> dict[str, dict[tuple[int, int], Cell]]:
        """The cells of each set, by the sequence's index and the number of trained tasks."""
        found: dict[str, dict[tuple[int, int], Cell]] = {}
        for s, sequence in enumerate(self.sequences):
            for t, row in enumerate(sequence.rows):
                for name, cell in row.get(kind, {}).items():
                    found.setdefault(name, {})[s, t] = cell
        return found


@dataclass(frozen=True)
class Derived:
    """A derived number: the mean over sequences, with its interval."""

    mean: float
    low: float
    high: float
    deviation: float | None  # standard deviation over sequences; None if it is that of one
    by_sequence: tuple[float | None, ...]  # None: not measured


def summarise(experiment: Experiment, *, num_resamples: int = NUM_RESAMPLES) -> dict[str, dict[str, Derived]]:
    """kind -> name -> derived number; those that nothing was measured for are missing."""
    found = {}
    for kind in experiment.kinds:
        random = np.random.default_rng(SEED)
        draws: Draws = {}  # negated where lower is better
        for name, cells in experiment.find_cells(kind).items():
            means = draw_set(list(cells.values()), random, num_resamples)
            draws |= {(name, *place): own for place, own in zip(cells, means.T, strict=True)}
        own = [derive(*lay_out(experiment, s, draws)) for s in range(len(experiment.sequences))]
        names = [name for name in NAMES if any(name in one for one in own)]
        found[kind] = {name: combine([one.get(name) for one in own], random) for name in names}
    return found


Draws = dict[tuple[str, int, int], np.ndarray]  # (set, sequence, t) -> (D,): R[t][set] of a sequence


def draw_set(cells: list[Cell], random: np.random.Generator, num_resamples: int) -> np.ndarray:  # (D, C)
    values = np.stack([cell.values if cell.higher_is_better else -cell.values for cell in cells], axis=1)  # (n, C)
    ones = np.ones(len(values))
    weights = np.stack([ones if cell.weights is None else cell.weights for cell in cells], axis=1)
    both = np.concatenate([weights * values, weights], axis=1)  # (n, 2C)
    sums = [both.sum(0, keepdims=True)]
    for num_drawn in cut(num_resamples, len(values)):
        sums.append(count_draws(random.integers(len(values), size=(num_drawn, len(values)))) @ both)
    totals, divisors = np.split(np.concatenate(sums), 2, axis=1)
    return totals / divisors


def lay_out(experiment: Experiment, s: int, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """A sequence's trained tasks, in its order, (D, T + 1, T), and the probes, (D, T + 1, P). NaN: not measured."""
    sequence = experiment.sequences[s]
    num_rows, num_draws = len(sequence.rows), len(next(iter(draws.values())))
    trained = sequence.tasks[: max(num_rows - 1, 0)]
    found = []
    for names in (trained, experiment.probes):
        grid = np.full((num_draws, num_rows, len(names)), np.nan)
        for i, name in enumerate(names):
            for t in range(num_rows):
                grid[:, t, i] = draws.get((name, s, t), np.nan)
        found.append(grid)
    return found[0], found[1]


def derive(tasks: np.ndarray, probes: np.ndarray) -> dict[str, np.ndarray]:
    """The derived numbers (D,) of a sequence, from (D, T + 1, T) and (D, T + 1, P)."""
    num_tasks = tasks.shape[2]
    if num_tasks == 0:
        return {}
    each = np.arange(num_tasks)  # task i + 1, and the model just before its training
    learnt, last = tasks[:, each + 1, each], tasks[:, -1]  # (D, T)
    best = [np.fmax.reduce(tasks[:, i + 1 : num_tasks, i], axis=1) for i in range(num_tasks - 1)]  # ignores NaN
    numbers = {
        "average": average(last),
        "learnt": average(learnt),
        "backward_transfer": average((last - learnt)[:, :-1]),
        "forward_transfer": average((tasks[:, each, each] - tasks[:, 0])[:, 1:]),
        "forgetting": average(np.stack(best, axis=1) - last[:, :-1]) if best else None,
        "forgotten": average(probes[:, 0] - probes[:, -1]),
    }
    return {name: own for name, own in numbers.items() if own is not None}


NAMES = ("average", "learnt", "backward_transfer", "forward_transfer", "forgetting", "forgotten")


def average(draws: np.ndarray) -> np.ndarray | None:  # (D, K) -> (D,)
    """The mean over measured columns; None if there are none."""
    measured = draws[:, ~np.isnan(draws[0])]
    return measured.mean(1) if measured.shape[1] else None


def combine(own: list[np.ndarray | None], random: np.random.Generator) -> Derived:
    """One number over the sequences that have it, from its draws (D,) in each."""
    draws = np.stack([one for one in own if one is not None], axis=1)  # (D, S)
    num_draws, num_sequences = draws.shape
    drawn = np.take_along_axis(draws[1:], random.integers(num_sequences, size=(num_draws - 1, num_sequences)), 1)
    low, high = find_interval(drawn.mean(1))
    return Derived(
        mean=float(draws[0].mean()),
        low=float(low),
        high=float(high),
        deviation=float(draws[0].std(ddof=1)) if num_sequences > 1 else None,
        by_sequence=tuple(None if one is None else float(one[0]) for one in own),
    )


def write_experiment(experiment: Experiment, path: Path) -> None:
    """Writes `path`, results.json in the experiment's directory: a line for each key, the derived numbers first."""
    content = {
        "name": experiment.name,
        "method": experiment.method,
        "tasks": experiment.tasks,
        "probes": experiment.probes,
        "measure": experiment.measure,
        "bootstrap": {"level": LEVEL, "num_resamples": NUM_RESAMPLES, "seed": SEED, "losses_are_negated": True},
        "derived": experiment.summary,
        "sequences": experiment.sequences,
    }
    encode = json.JSONEncoder(default=describe, allow_nan=False).encode
    lines = [f"  {encode(key)}: {encode(value)}" for key, value in content.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def describe(value: Derived | Sequence | Cell | np.ndarray) -> Any:
    """The value as JSON has it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Cell):
        return {name: getattr(value, name) for name in ("metric", "mean", "samples", "values", "weights")}
    return vars(value)


def read_experiment(directory: Path) -> Experiment:
    """Reads results.json in an experiment's directory; ValueError names a file that holds something else."""
    path = directory / FILE
    content = read_object(path)
    try:
        return Experiment(
            name=content["name"],
            method=content["method"],
            tasks=tuple(content["tasks"]),
            probes=tuple(content["probes"]),
            sequences=tuple(map(read_sequence, content["sequences"])),
            measure=content["measure"],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not the results of mini-trainer continual: {error!r}") from None


def read_sequence(entry: dict[str, Any]) -> Sequence:
    rows = tuple(
        {kind: {name: read_cell(cell) for name, cell in cells.items()} for kind, cells in row.items()}
        for row in entry["rows"]
    )
    return Sequence(tasks=tuple(entry["tasks"]), order=entry["order"], seed=entry["seed"], rows=rows)


def read_cell(entry: dict[str, Any]) -> Cell:
    weights = None if entry["weights"] is None else np.array(entry["weights"], float)
    return Cell(entry["metric"], np.array(entry["values"], float), weights, entry["samples"])
