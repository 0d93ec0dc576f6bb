"""Generates and scores a model's answers to a task's prompts; existing results are reused."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.data.rows.prompts import Prompt, read_prompts
from mini_trainer.data.stores.disk import written_aside
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.options.problems.packages import require
from mini_trainer.options.tools import EvaluateOptions, SamplingOptions
from mini_trainer.use.evaluation.comparison import Scores
from mini_trainer.use.evaluation.kept import is_made_by, read_lines, write_made
from mini_trainer.use.evaluation.likelihood import measure_length, score_choices
from mini_trainer.use.evaluation.metrics import PACKAGES, choose_measures, read_label, score_answer, score_corpus
from mini_trainer.use.evaluation.results import Measured, Sample
from mini_trainer.use.inference.answers import AnswerFile, describe_making, dump, is_cut, is_refused
from mini_trainer.use.inference.batch import answer_all
from mini_trainer.use.inference.engine import Engine

CHOICE_MEASURES = ["choice", "choice_normalised"]
SCORING = "white space at a prompt's end is scored with its choices"  # results scored differently are not reused


@dataclass(frozen=True)
class EvaluationTask:
    """Prompts with their references, and the measures of every answer."""

    name: str
    prompts: list[Prompt]
    measures: list[str]
    labels: list[str] = field(default_factory=list)

    @property
    def has_choices(self) -> bool:
        return bool(self.prompts[0].choices)


def open_task(path: str, name: str, options: EvaluateOptions) -> EvaluationTask:
    """Reads a task's file; ValueError for a prompt without a reference."""
    prompts = read_prompts([path], options.format, flag="--task")
    with_choices = [prompt for prompt in prompts if prompt.choices]
    if with_choices:
        if len(with_choices) < len(prompts):
            other = next(prompt for prompt in prompts if not prompt.choices)
            raise ValueError(f"--task {path}: some rows have choices, but {other.place} has none: make two tasks")
        if options.engines.engine != "hf":
            raise ValueError(f"--task {path}: choices are scored by likelihood, which needs --engine hf")
        return EvaluationTask(name, prompts, CHOICE_MEASURES)
    for prompt in prompts:
        if not prompt.references:
            raise ValueError(f"--task {path}: {prompt.place} has no reference (a last answer, completion or answer)")
    references = [prompt.references for prompt in prompts]
    measures = choose_measures(options.metrics, references)
    for measure in measures:
        if measure in PACKAGES:
            require(PACKAGES[measure], flag=f"--metrics {measure}")
    labels = sorted({reference for several in references for reference in several}) if "label" in measures else []
    return EvaluationTask(name, prompts, measures, labels)


def measure_task(
    task: EvaluationTask, engine: Engine, sampling: SamplingOptions, folder: Path, *, world: World
) -> list[Sample] | None:
    """A model's answers and their scores, in the order of the prompts; on rank 0 only. All ranks call this."""
    samples = answer_choices(task, engine, folder, world) if task.has_choices else None
    if not task.has_choices:
        made_by = describe_making(engine.describe(), sampling)
        file = AnswerFile(folder / f"{task.name}.answers.jsonl", task.prompts, made_by, num_samples=1)
        lines = answer_all(engine, file, world)
        samples = None if lines is None else [score_line(line, task) for line in lines]
    if samples is not None:
        write_samples(folder / f"{task.name}.scores.jsonl", samples, task)
    return samples


def score_line(line: dict[str, Any], task: EvaluationTask) -> Sample:
    """An answer with its scores. Without an answer they are 0, also where an empty answer would score more."""
    prompt, answer = task.prompts[line["index"]], line["answer"]
    scores = {
        name: 0.0
        if is_refused(line)
        else score_answer(name, answer, prompt.references, labels=task.labels, source=prompt.rewritten)
        for name in task.measures
    }
    sample = {key: line[key] for key in ("answer", "finish_reason", "num_tokens")} | {"scores": scores}
    return sample | ({"label": read_label(answer, task.labels)} if "label" in task.measures else {})


def write_samples(path: Path, samples: Sequence[Sample], task: EvaluationTask) -> None:
    with written_aside(path) as (aside,):
        lines = [
            {"index": i, "place": prompt.place, "prompt": prompt.shown, "references": prompt.references} | sample
            for i, (prompt, sample) in enumerate(zip(task.prompts, samples, strict=True))
        ]
        aside.write_text("".join(map(dump, lines)), encoding="utf-8")


def collect_task(task: EvaluationTask, samples: Sequence[list[Sample]]) -> Measured:
    """All models' samples side by side."""
    shown = [
        {
            "place": prompt.place,
            "prompt": prompt.shown,
            "references": [prompt.choices[prompt.right_choice]] if prompt.choices else list(prompt.references),
        }
        for prompt in task.prompts
    ]
    ones = np.ones(len(task.prompts))
    scores = [
        Scores(name, np.array([[sample["scores"][name] for sample in own] for own in samples]), ones)
        for name in task.measures
    ]
    extras = [summarize_answers(task, own) for own in samples]
    return Measured(task.name, "choices" if task.has_choices else "answers", shown, list(samples), scores, extras)


def summarize_answers(task: EvaluationTask, samples: Sequence[Sample]) -> dict[str, Any]:
    """Corpus measures of a model's answers, in addition to the means of their scores."""
    if task.has_choices:
        return {}
    answers = [sample["answer"] for sample in samples]
    counts = {"num_cut": sum(map(is_cut, samples)), "num_refused": sum(map(is_refused, samples))}
    return {**counts, **score_corpus(task.measures, answers, [prompt.references for prompt in task.prompts])}


def answer_choices(task: EvaluationTask, engine: Engine, folder: Path, world: World) -> list[Sample] | None:
    """The likeliest choice of each prompt, by log-probability and by log-probability per character."""
    path = folder / f"{task.name}.choices.jsonl"
    made_by = engine.describe() | {"rows": [prompt.row for prompt in task.prompts], "scoring": SCORING}
    if not call_on_rank0(world, lambda: is_made_by(path, made_by)):
        found = score_choices(engine, task.prompts, world)
        if found is not None:
            write_made(path, "".join(json.dumps(values) + "\n" for values in found), made_by)
    if world.rank != 0:
        return None
    values = read_lines(path)
    for number, (prompt, own) in enumerate(zip(task.prompts, values, strict=True), start=1):
        if not isinstance(own, list) or len(own) != len(prompt.choices):
            raise ValueError(
                f"{path}: line {number} is damaged: not a number for each choice; remove it to measure again"
            )
    return [choose(prompt, own) for prompt, own in zip(task.prompts, values, strict=True)]


def choose(prompt: Prompt, values: Sequence[float]) -> Sample:
    """The likeliest choices of a prompt, from its choices' log-probabilities."""
    by_length = [value / measure_length(choice) for value, choice in zip(values, prompt.choices, strict=True)]
    best, best_by_length = (max(range(len(own)), key=own.__getitem__) for own in (values, by_length))
    scores = (float(best == prompt.right_choice), float(best_by_length == prompt.right_choice))
    return {
        "answer": prompt.choices[best],
        "log_probabilities": list(values),
        "scores": dict(zip(CHOICE_MEASURES, scores, strict=True)),
    }
