"""Generates and scores a model's answers to a task's prompts; existing results are reused."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mini_trainer.data.rows.prompts import Prompt, read_prompts
from mini_trainer.data.stores.disk import write_text
from mini_trainer.distributed.world import World
from mini_trainer.options.tools import EvaluateOptions, SamplingOptions
from mini_trainer.use.evaluation.comparison import gather_scores
from mini_trainer.use.evaluation.metrics import choose_form, choose_measures, read_label, score_answer, score_corpus
from mini_trainer.use.evaluation.results import AnswerRecord, Measured
from mini_trainer.use.inference.answers import AnswerFile, answer_all, describe_making, dump, is_cut, is_refused
from mini_trainer.use.inference.engine import Engine


@dataclass(frozen=True)
class EvaluationTask:
    """Prompts with their references, and the measures of every answer."""

    name: str
    prompts: list[Prompt]
    measures: list[str]
    labels: list[str]  # for the measure `label`

    @property
    def shown(self) -> list[dict[str, Any]]:
        return [{"place": one.place, "prompt": one.shown, "references": list(one.references)} for one in self.prompts]


def open_task(path: str, name: str, options: EvaluateOptions) -> EvaluationTask:
    """Reads a task's file; ValueError for a prompt without a reference, and for multiple choice."""
    prompts = read_prompts([path], options.format, flag="--task")
    for prompt in prompts:
        if prompt.row.get("choices"):
            raise ValueError(
                f"--task {path}: {prompt.place} has choices: give multiple choice to --lm-eval, as a YAML file with"
                " output_type: multiple_choice and the same rows"
            )
        if not prompt.references:
            raise ValueError(f"--task {path}: {prompt.place} has no reference (a last answer, completion or answer)")
    references = [prompt.references for prompt in prompts]
    measures = choose_measures(options.metrics, references)
    labels = sorted({*chain(*references)}) if "label" in measures else []
    choose_form(tuple(labels))  # refuses labels that look the same before a model is loaded
    return EvaluationTask(name, prompts, measures, labels)


def measure_task(
    task: EvaluationTask, engine: Engine, sampling: SamplingOptions, folder: Path, *, world: World
) -> list[AnswerRecord] | None:
    """A model's answers and their scores, in the order of the prompts; on rank 0 only. All ranks call this."""
    made_by = describe_making(engine.describe(), sampling)
    file = AnswerFile(folder / f"{task.name}.answers.jsonl", task.prompts, made_by, num_samples=1)
    if (lines := answer_all(engine, file, world)) is None:
        return None
    samples = [score_line(line, task) for line in lines]
    lines = [{"index": i} | shown | sample for i, (shown, sample) in enumerate(zip(task.shown, samples, strict=True))]
    write_text(folder / f"{task.name}.scores.jsonl", "".join(map(dump, lines)))
    return samples


def score_line(line: dict[str, Any], task: EvaluationTask) -> AnswerRecord:
    """An answer with its scores. Without an answer they are 0, also where an empty answer would score more."""
    prompt, answer = task.prompts[line["index"]], line["answer"]
    scores = {
        name: 0.0 if is_refused(line) else score_answer(name, answer, prompt.references, labels=task.labels)
        for name in task.measures
    }
    sample = {key: line[key] for key in ("answer", "finish_reason", "num_tokens")} | {"scores": scores}
    return sample | ({"label": read_label(answer, task.labels)} if "label" in task.measures else {})


def collect_task(task: EvaluationTask, samples: Sequence[list[AnswerRecord]]) -> Measured:
    """All models' samples side by side."""
    references, extras = [prompt.references for prompt in task.prompts], []
    for own in samples:  # in addition to the means of their scores
        counts = {"num_cut": sum(map(is_cut, own)), "num_refused": sum(map(is_refused, own))}
        extras.append(counts | score_corpus(task.measures, [sample["answer"] for sample in own], references))
    return Measured(task.name, "answers", task.shown, list(samples), gather_scores(samples, task.measures), extras)
