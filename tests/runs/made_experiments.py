"""Made-up continual experiments, with the files of answers that their cells name."""

from collections.abc import Iterable, Sequence

import numpy as np

from mini_trainer.continual.matrix import Cell, Experiment
from mini_trainer.continual.matrix import Sequence as TaskSequence

HOSTILE = "</script><img src=x onerror=alert(1)> $DATA$ \"quote' <b> &lt; \u202e ü"


def make_experiment(
    name: str,
    *,
    tasks: Sequence[str] = ("math", "code", "law"),
    probes: Sequence[str] = ("world_knowledge",),
    orders: Iterable[Sequence[int]] = ((0, 1, 2),),
    seeds: Sequence[int] = (0,),
    kinds: Sequence[str] = ("score",),
    num_questions: int = 40,
    keeping: float = 0.6,
) -> Experiment:
    """Tasks are learnt with their training, and forgotten after it but for the share `keeping`."""
    random = np.random.default_rng(len(name))
    sequences = []
    for order, places in enumerate(orders):
        names = tuple(tasks[place] for place in places)
        for seed in seeds:
            rows = [
                {
                    kind: {
                        one: make_cell(kind, draw_level(names, one, t, keeping), num_questions, random,
                                       f"samples/{order}_{seed}_{t}/{one}.scores.jsonl")
                        for one in (*tasks, *probes)
                    }
                    for kind in kinds
                }
                for t in range(len(names) + 1)
            ]  # fmt: skip
            sequences.append(TaskSequence(names, order, seed, tuple(rows)))
    return Experiment(name, f"method of {name}", tuple(tasks), tuple(probes), tuple(sequences))


def draw_level(names: Sequence[str], one: str, t: int, keeping: float) -> float:
    """The share of right answers to a set after t tasks."""
    if one not in names:
        return 0.7 * (1 - (1 - keeping) * t / 10)
    place = names.index(one) + 1
    return 0.15 + 0.01 * t if t < place else 0.85 * (1 - (1 - keeping) * (1 - 0.5 ** (t - place)))


def make_cell(kind: str, level: float, num_questions: int, random: np.random.Generator, samples: str) -> Cell:
    if kind == "loss":
        values = np.abs(random.normal(2.5 - 2 * level, 0.3, num_questions))
        return Cell("loss", values, random.integers(1, 50, num_questions).astype(float))
    return Cell("exact_match", (random.random(num_questions) < level).astype(float), None, samples)
