"""Finds questions that a model answered well right after it had learnt their task, and badly at the end."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from continual.matrix import Cell, Experiment
from disk import read_object

KIND = "score"  # losses have no answers
SMALLEST_FALL = 0.5  # of the scale, which for a right answer that is now wrong is 1

Answer = dict[str, Any]  # prompt, references, answer: a line of evaluate_model.py's files


@dataclass(frozen=True)
class LostTask:
    """One earlier task of a sequence: its questions whose score fell, those that fell furthest first."""

    name: str
    metric: str
    num_questions: int
    rows: np.ndarray  # indices of all that fell
    falls: list[tuple[Answer, Answer, float, float]]  # of the first: answers and scores, then and now
    problem: str = ""  # why there are no answers to show


def find_lost(experiment: Experiment, directory: Path, s: int, *, most: int) -> list[LostTask]:
    """The earlier tasks of a sequence, each with at most `most` answers, then and now."""
    sequence = experiment.sequences[s]
    last, found = len(sequence.rows) - 1, []
    for t, name in enumerate(sequence.tasks[: max(last - 1, 0)], start=1):
        then, now = (sequence.rows[k].get(KIND, {}).get(name) for k in (t, last))
        if then is not None and now is not None:
            found.append(compare_cells(name, then, now, directory, most=most))
    return found


def compare_cells(name: str, then: Cell, now: Cell, directory: Path, *, most: int) -> LostTask:
    rows = find_falls(then.values, now.values)
    falls, problem = [], ""
    try:
        answers = [read_answers(directory, cell, name, rows[:most]) for cell in (then, now)]
        scores = [cell.values[rows[:most]].tolist() for cell in (then, now)]
        falls = list(zip(*answers, *scores, strict=True))
    except ValueError as error:
        problem = str(error)
    return LostTask(name, then.metric, len(then.values), rows, falls, problem)


def find_falls(then: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Indices of the questions whose score fell by half of the scale or more, furthest first.

    The scale is 0 to 1, or for scores outside of it from the lowest to the highest.
    """
    both = np.concatenate([then, now])
    span = 1.0 if both.min() >= 0 and both.max() <= 1 else np.ptp(both)
    falls = then - now
    order = np.argsort(-falls, kind="stable")
    return order[falls[order] >= SMALLEST_FALL * span]


def read_answers(directory: Path, cell: Cell, name: str, rows: Sequence[int]) -> list[Answer]:
    """A cell's answers to some of its questions; ValueError if its file is missing, or has other scores."""
    if len(rows) == 0:
        return []
    if cell.samples is None:
        raise ValueError("no answers were kept")
    path = directory / cell.samples
    answers = pick_harness(path, name) if path.suffix == ".json" else pick_lines(path)
    if len(answers) != len(cell.values):
        raise ValueError(f"{cell.samples}: has {len(answers):,} answers, but {len(cell.values):,} scores were measured")
    picked = [answers[i] for i in rows]
    try:
        picked = [json.loads(answer) if isinstance(answer, bytes) else answer for answer in picked]
    except ValueError as error:
        raise ValueError(f"{cell.samples}: is damaged: {error}") from None
    for i, answer in zip(rows, picked, strict=True):
        if not np.isclose(answer["scores"].get(cell.metric, cell.values[i]), cell.values[i]):
            raise ValueError(f"{cell.samples}: answer {i} has another score than was measured")
    return picked


def pick_lines(path: Path) -> list[bytes]:
    """The lines of `evaluation.tasks.write_samples`, in the order of the questions."""
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def pick_harness(path: Path, name: str) -> list[Answer]:
    """The answers of one of the harness's tasks, in the order of the questions."""
    tasks = read_object(path)
    found = tasks.get(name) or (next(iter(tasks.values())) if len(tasks) == 1 else None)
    if found is None:
        raise ValueError(f"{path}: has no task {name}, but {', '.join(tasks)}")
    return [
        {"place": f"document {sample['index']}", "references": [sample["reference"]]} | sample
        for sample in sorted(found, key=lambda sample: sample["index"])
    ]
