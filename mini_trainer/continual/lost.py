"""Finds questions that a model answered well right after it had learnt their task, and badly at the end."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.continual.matrix import Cell, Experiment
from mini_trainer.continual.measuring import read_harness
from mini_trainer.data.stores.disk import list_wrong

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
        answers = [read_answers(directory, cell, rows[:most]) for cell in (then, now)]
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


def read_answers(directory: Path, cell: Cell, rows: Sequence[int]) -> list[Answer]:
    """A cell's answers to some of its questions; ValueError if its file is missing, or has other scores."""
    if len(rows) == 0:
        return []
    if cell.samples is None:
        raise ValueError("no answers were kept")
    lines = open_answers(directory / cell.samples, cell.samples)
    if len(lines) != len(cell.values):
        raise ValueError(f"{cell.samples}: has {len(lines):,} answers, but {len(cell.values):,} scores were measured")
    answers = [parse_answer(lines[i], cell.samples) for i in rows]
    for i, answer in zip(rows, answers, strict=True):
        if not np.isclose(answer["scores"].get(cell.metric, np.nan), cell.values[i]):
            raise ValueError(f"{cell.samples}: the score of answer {i} differs from the measured one")
    return answers


def open_answers(path: Path, name: str) -> Sequence[bytes | Answer]:
    """A file's answers in the order of the questions: lines that are still to be parsed, or the harness's samples."""
    try:
        # Bytes, because splitlines splits text also at line separators within answers.
        return path.read_bytes().splitlines() if path.suffix == ".jsonl" else read_harness(path)
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{name}: is damaged: {error}") from None


def parse_answer(line: bytes | Answer, name: str) -> Answer:
    if isinstance(line, dict):
        return {"place": f"document {line['index']}", "references": [line.get("reference")]} | line
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is damaged: {error}") from None
    if not isinstance(answer, dict) or (wrong := list_wrong(answer, {"scores": dict})):
        raise ValueError(f"{name}: is damaged: {f'see {wrong[0]}' if isinstance(answer, dict) else 'not an object'}")
    return answer
