"""What a pretrained model learnt and forgot, by method: a table and a picture of experiments of
examples/recipes/forgetting.yaml.

    python benchmarks/forgetting.py runs/forgetting/methods --picture front.png

One half of every set's questions chooses each method's learning rate, the one with the largest difference of learnt and
forgotten; the other half reports. Learnt: right answers to facts in wordings that were not trained. Forgotten: the mean
drop of right answers to knowledge, arithmetic and instructions, in which every set counts alike. Intervals (95 %) are
bootstraps over questions, and over seeds where there are several.

`--kl` adds KL(start || model), the mean over tokens of Python's own docstrings: general text, of which nothing is
trained. It loads every export with transformers.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import paths  # noqa: F401
import torch
from continual_tasks import read_docstrings
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mini_trainer.continual.matrix import Experiment, Sequence, read_experiment

OURS = "osft"
TASK, PROBES, OWN = "facts", ("knowledge", "arithmetic", "instructions"), "own_answers"
CHOOSE, REPORT, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)  # questions
NUM_RESAMPLES, NUM_TEXTS, MAX_TOKENS = 10_000, 40, 256


@dataclass(frozen=True)
class Point:
    """A method with one learning rate: what it learnt and forgot, as measured and in resamples (the first entry is
    the measured one)."""

    method: str
    rate: str
    learnt: np.ndarray
    forgotten: np.ndarray

    @property
    def merit(self) -> float:
        return float(self.learnt[0] - self.forgotten[0])


def measure(experiment: Experiment, questions: slice = REPORT) -> Point:
    """The point on these questions; resamples of all experiments draw the same ones."""
    rng, (method, rate) = np.random.default_rng(0), split_name(experiment)
    seeds = draw(np.random.default_rng(1), len(experiment.sequences))
    learnt = resample(rng, [after(one, TASK)[questions] for one in experiment.sequences], seeds)
    drops = [
        resample(rng, [(before(one, name) - after(one, name))[questions] for one in experiment.sequences], seeds)
        for name in PROBES
    ]
    return Point(method, rate, learnt, np.mean(drops, axis=0))


def split_name(experiment: Experiment) -> tuple[str, str]:
    """Method and learning rate: full_1e4 is full at 1e-4."""
    method, _, rate = experiment.name.rpartition("_")
    return method, rate.replace("e", "e-")


def before(sequence: Sequence, name: str) -> np.ndarray:
    return sequence.rows[0]["score"][name].values


def after(sequence: Sequence, name: str) -> np.ndarray:
    return sequence.rows[-1]["score"][name].values


def draw(rng: np.random.Generator, size: int) -> np.ndarray:
    """(1 + resamples, size): all indices, then as many drawn with replacement."""
    return np.concatenate([np.arange(size)[None], rng.integers(0, size, (NUM_RESAMPLES, size))])


def resample(rng: np.random.Generator, by_seed: list[np.ndarray], seeds: np.ndarray) -> np.ndarray:
    """(1 + resamples,): means over drawn seeds (1 + resamples, n) and drawn questions."""
    values = np.stack(by_seed)
    counts = np.stack([(seeds == i).mean(axis=1) for i in range(len(by_seed))], axis=1)
    questions = draw(rng, values.shape[1])
    found = np.empty(len(seeds))
    for start in range(0, len(seeds), 500):
        rows = slice(start, start + 500)
        found[rows] = np.einsum("ds,sdq->d", counts[rows], values[:, questions[rows]]) / values.shape[1]
    return found


def write_interval(values: np.ndarray) -> str:
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return f"{values[0]:.2f} [{low:.2f}, {high:.2f}]"


def write_table(experiments: list[Experiment], kl: dict[str, float]) -> Iterator[str]:
    titles = ["method", "rate", "seeds", "learnt", "forgotten", *PROBES, "own answers, loss", *(["KL"] if kl else [])]
    yield f"| {' | '.join(titles)} |"
    yield "| --- " * len(titles) + "|"
    first = experiments[0].sequences[0].rows[0]
    start = [f"{first['score'][name].mean:.2f}" for name in PROBES]
    yield (
        f"| before | | | {first['score'][TASK].mean:.2f} | | {' | '.join(start)} | {first['loss'][OWN].mean:.2f} |"
        + (" 0 |" if kl else "")
    )
    for experiment in experiments:
        point = measure(experiment)
        ends = [sequence.rows[-1] for sequence in experiment.sequences]
        probes = " | ".join(f"{np.mean([end['score'][name].mean for end in ends]):.2f}" for name in PROBES)
        loss = np.mean([end["loss"][OWN].mean for end in ends])
        divergence = f" {kl[experiment.name]:.3f} |" if kl else ""
        yield (
            f"| {point.method} | {point.rate} | {len(ends)} | {write_interval(point.learnt)} |"
            f" {write_interval(point.forgotten)} | {probes} | {loss:.2f} |{divergence}"
        )


def write_chosen(experiments: list[Experiment]) -> Iterator[str]:
    """The best rate of each method by one half of the questions, and its numbers on the other."""
    best: dict[str, tuple[float, Experiment]] = {}
    for experiment in experiments:
        point = measure(experiment, CHOOSE)
        if point.method not in best or point.merit > best[point.method][0]:
            best[point.method] = (point.merit, experiment)
    yield f"| method | chosen rate | learnt | forgotten | more than {OURS} learnt, all questions | forgotten |"
    yield "| --- " * 6 + "|"
    ours = measure(best[OURS][1], ALL)
    for _, experiment in best.values():
        point, whole = measure(experiment), measure(experiment, ALL)
        numbers = (point.learnt, point.forgotten, whole.learnt - ours.learnt, whole.forgotten - ours.forgotten)
        yield f"| {point.method} | {point.rate} | {' | '.join(map(write_interval, numbers))} |"


def write_seeds(experiments: list[Experiment]) -> Iterator[str]:
    """What each seed of a method learnt and forgot."""
    for experiment in experiments:
        if len(experiment.sequences) > 1:
            points = [measure(replace(experiment, sequences=(one,)), ALL) for one in experiment.sequences]
            learnt, forgotten = (
                ", ".join(f"{getattr(point, name)[0]:.2f}" for point in points) for name in ("learnt", "forgotten")
            )
            yield f"{experiment.name}: learnt {learnt}; forgotten {forgotten}"


def write_pairs(experiments: list[Experiment], pairs: list[list[str]]) -> Iterator[str]:
    """What one method learnt and forgot more than the other, on the same questions."""
    points = {experiment.name: measure(experiment, ALL) for experiment in experiments}
    for one, other in ((points[one], points[other]) for one, other in pairs):
        yield (
            f"{one.method} {one.rate} - {other.method} {other.rate}:"
            f" learnt {write_interval(one.learnt - other.learnt)},"
            f" forgotten {write_interval(one.forgotten - other.forgotten)}"
        )


@torch.no_grad()
def find_divergences(experiments: dict[Path, Experiment], start: str) -> dict[str, float]:
    """Each experiment's mean KL(start || model) per token of general text, in nats, over its seeds."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    texts = [chat["messages"][1]["content"] for chat in read_docstrings()][::25][:NUM_TEXTS]
    ids = [tokenizer(text, return_tensors="pt").input_ids[:, :MAX_TOKENS] for text in texts]
    model = load(start)
    expected = [read(model, one) for one in ids]
    found = {}
    for root, experiment in experiments.items():
        own = []
        for export in sorted(root.glob("order_1_seed_*/1_*/run/hf_format/latest")):
            model = load(str(export))
            pairs = zip(ids, expected, strict=True)
            own.append(torch.cat([(one.exp() * (one - read(model, text))).sum(-1) for text, one in pairs]).mean())
        found[experiment.name] = float(torch.stack(own).mean())
    return found


def load(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def read(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """(tokens, vocabulary): log-probabilities."""
    return model(ids).logits[0].log_softmax(-1)


def plot(experiments: list[Experiment], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    by_method: dict[str, list[Point]] = {}
    for experiment in experiments:
        point = measure(experiment)
        by_method.setdefault(point.method, []).append(point)
    colors = pyplot.get_cmap("tab10")
    for i, (method, points) in enumerate(by_method.items()):
        points.sort(key=lambda point: float(point.rate))
        xs, ys = ([float(getattr(point, name)[0]) for point in points] for name in ("forgotten", "learnt"))
        axes.plot(xs, ys, "os^Dv*PX"[i // 10 * 5 + i % 5] + "-", color=colors(i % 10), label=method.replace("_", " "))
        for x, y, point in zip(xs, ys, points, strict=True):
            axes.annotate(point.rate, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7)
    axes.set(
        xlabel="forgotten: mean drop of right answers to what nobody trained",
        ylabel="learnt: right answers to new facts",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("roots", nargs="+", type=Path, help="output_dir of one or more experiments with methods")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--kl", metavar="START", help="the start model: adds KL(start || model)")
    parser.add_argument("--pair", nargs=2, action="append", default=[], help="two names of methods to compare")
    args = parser.parse_args()
    found = {path.parent: read_experiment(path.parent) for root in args.roots for path in root.glob("*/results.json")}
    found = {root: experiment for root, experiment in found.items() if experiment.sequences}
    if not found:
        parser.error(f"{', '.join(map(str, args.roots))}: no METHOD/results.json of an experiment that ended")
    experiments = sorted(found.values(), key=lambda one: (split_name(one)[0], float(split_name(one)[1])))
    kl = find_divergences(found, args.kl) if args.kl else {}
    print("\n".join(["All questions; learnt and forgotten on one half:\n", *write_table(experiments, kl)]))
    print("\n".join(["\nThe rate chosen on the other half:\n", *write_chosen(experiments)]))
    print("\n".join(["\nBy seed, all questions:", *write_seeds(experiments)]))
    if args.pair:
        print("\n".join(["\nDifferences, all questions:", *write_pairs(experiments, args.pair)]))
    if args.picture:
        plot(experiments, args.picture)


if __name__ == "__main__":
    main()
