"""Compares continual experiments: their derived numbers side by side, and which of them are not dominated."""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_trainer.continual.matrix import Derived, Experiment

Summary = dict[str, dict[str, Derived]]  # kind -> name -> derived number
Point = tuple[float, float]  # forgotten, learnt

NO_VALUE = "–"
GAP = "  "  # between the columns of a table
KIND_NOTES = {"score": "scores", "loss": "losses, negated: more is better"}


@dataclass(frozen=True)
class Measure:
    """A derived number that tables show."""

    name: str  # its key in `summarise`
    title: str
    about: str
    higher_is_better: bool = True


MEASURES = (
    Measure("average", "average", "Mean of all tasks at the end."),
    Measure("learnt", "learnt", "Mean of each task right after its own training."),
    Measure("backward_transfer", "backward transfer", "Change of earlier tasks since their own training."),
    Measure("forward_transfer", "forward transfer", "Change of later tasks before their own training."),
    Measure("forgetting", "forgetting", "Drop of earlier tasks from their best score.", higher_is_better=False),
    Measure("forgotten", "probes forgotten", "Drop of the probes from the start.", higher_is_better=False),
)


def check_comparable(experiments: Sequence[Experiment]) -> None:
    """Raises ValueError, naming every experiment without measurements, or whose tasks, probes or metrics are not those
    of the first."""
    for experiment in experiments:
        if not experiment.kinds:
            raise ValueError(f"{experiment.name}: nothing was measured yet")
    first, *others = experiments
    problems = [text for other in others for text in find_differences(first, other)]
    if problems:
        advice = "compare experiments that measure the same tasks in the same way"
        raise ValueError("\n".join([*problems, advice]))


def find_differences(first: Experiment, other: Experiment) -> list[str]:
    """Differences that keep the numbers of two experiments from being compared."""
    found = []
    for what in ("tasks", "probes"):
        own, wanted = getattr(other, what), getattr(first, what)
        if set(own) != set(wanted):
            found.append(f"{other.name}: its {what} are {join(own)}, those of {first.name} {join(wanted)}")
    for kind in first.kinds:
        sets, own_sets = describe_sets(first, kind), describe_sets(other, kind)
        for name in sets.keys() & own_sets.keys():
            if sets[name] != own_sets[name]:
                found.append(f"{other.name}: {name} has {own_sets[name]}, in {first.name} {sets[name]}")
    return found


def describe_sets(experiment: Experiment, kind: str) -> dict[str, str]:
    """How each set was measured."""
    cells = {name: next(iter(own.values())) for name, own in experiment.find_cells(kind).items()}
    return {name: f"{len(cell.values):,} questions by {cell.metric}" for name, cell in cells.items()}


def join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def describe_comparison(experiments: Sequence[Experiment]) -> str:
    """A table for the terminal of each kind; ValueError if the experiments cannot be compared."""
    check_comparable(experiments)
    summaries = [experiment.summary for experiment in experiments]
    kinds = dict.fromkeys(kind for experiment in experiments for kind in experiment.kinds)
    return "\n\n".join(describe_kind(kind, experiments, summaries) for kind in kinds)


def describe_kind(kind: str, experiments: Sequence[Experiment], summaries: Sequence[Summary]) -> str:
    """Two lines per experiment: the values with their deviation over sequences, and the 95 % intervals."""
    rows = [["experiment", *(measure.title for measure in MEASURES), "method"]]
    for experiment, summary in zip(experiments, summaries, strict=True):
        own = [summary.get(kind, {}).get(measure.name) for measure in MEASURES]
        rows.append([experiment.name + describe_progress(experiment), *map(write_value, own), experiment.method])
        rows.append(["", *map(write_interval, own), ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        GAP.join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:-1]), method]) for name, *cells, method in rows
    ]
    head = f"{KIND_NOTES[kind]} (below them: 95 % intervals; ±: standard deviation over sequences)"
    return "\n".join([head, *(line.rstrip() for line in lines)])


def describe_progress(experiment: Experiment) -> str:
    """Progress of an unfinished experiment; empty if it is complete."""
    done = sum(max(len(sequence.rows) - 1, 0) for sequence in experiment.sequences)
    total = sum(len(sequence.tasks) for sequence in experiment.sequences)
    return "" if done == total else f" ({done} of {total} trainings done)"


def write_value(derived: Derived | None) -> str:
    if derived is None:
        return NO_VALUE
    return f"{derived.mean:.3f}" + ("" if derived.deviation is None else f" ± {derived.deviation:.3f}")


def write_interval(derived: Derived | None) -> str:
    return "" if derived is None else f"[{derived.low:.3f}, {derived.high:.3f}]"


def find_front(points: Sequence[Point | None]) -> list[bool]:
    """Marks the points on the Pareto front: no other point is at least as good in both, and better in one."""
    there = [point for point in points if point is not None]
    return [
        point is not None and not any(one != point and one[0] <= point[0] and one[1] >= point[1] for one in there)
        for point in points
    ]
