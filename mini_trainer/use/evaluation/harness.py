"""Runs EleutherAI's lm-evaluation-harness: its tasks, prompts and measures; our intervals and tests."""

import functools
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mini_trainer.options.command_line import suggest
from mini_trainer.options.problems.finding import require
from mini_trainer.options.tools import EvaluateOptions
from mini_trainer.use.evaluation.comparison import SampleScores
from mini_trainer.use.evaluation.kept import is_made_by, read_samples, write_made
from mini_trainer.use.evaluation.results import Measured
from mini_trainer.use.evaluation.task_files import (
    describe_task_file,
    find_dependencies,
    is_task_file,
    name_task,
    read_config,
)
from mini_trainer.use.inference.hf_engine import HFEngine
from mini_trainer.use.inference.loading import FoundModel

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

HARNESS = "--lm-eval"
MAX_SHOWN = 4000  # characters of a prompt kept for the page


def check_harness(tasks: Sequence[str]) -> None:
    """ValueError if the harness is needed and not installed, if a task's file is missing or defines no task, or if the
    harness does not know a name."""
    if not tasks:
        return
    require("lm_eval", flag="--lm-eval")
    for task in filter(is_task_file, tasks):
        try:
            name_task(Path(task))
        except ValueError as error:
            raise ValueError(f"--lm-eval {error}") from None
    names = [task for task in tasks if not is_task_file(task)]
    known = open_tasks(tuple(tasks))[0].task_index if names else {}
    for name in names:
        if name not in known:
            raise ValueError(
                f"--lm-eval {name}: not a task or group of lm_eval {version('lm_eval')}{suggest(name, known, most=3)}"
                " (lm_eval ls tasks lists them; your own tasks are .yaml files)"
            )


def run_harness(
    found: FoundModel, options: EvaluateOptions, folder: Path, *, device: torch.device
) -> dict[str, list[dict[str, Any]]]:
    """Each task's samples with their scores, by the task's name."""
    path = folder / "lm_eval.json"
    tasks = [describe_task_file(Path(task)) if is_task_file(task) else task for task in options.lm_eval]
    made_by = found.identify() | {"tasks": tasks, "dtype": options.engines.dtype, "lm_eval": version("lm_eval")}
    if not is_made_by(path, made_by):
        samples = call_harness(HFEngine(found, options.engines, options.sampling, device=device), options.lm_eval)
        write_made(path, json.dumps(samples), made_by)
    return read_samples(path)


def call_harness(engine: HFEngine, tasks: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Runs the harness on the engine's loaded model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    manager, names = open_tasks(tasks)
    model = HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=engine.batch_size)
    try:
        results = simple_evaluate(model=model, tasks=names, task_manager=manager, log_samples=True, bootstrap_iters=0)
    except KeyError as error:
        raise ValueError(f"--lm-eval {' '.join(tasks)}: the harness does not find {error}") from None
    if not results["samples"]:
        raise ValueError(f"--lm-eval {' '.join(tasks)}: the harness finds no task there")
    return {task: [keep(sample) for sample in samples] for task, samples in results["samples"].items()}


@functools.cache
def open_tasks(tasks: tuple[str, ...]) -> tuple["TaskManager", list[str]]:
    """The harness's index of tasks, and the key of each task there: a file's path, or the name of a group."""
    from lm_eval.tasks import TaskManager

    files = {task: Path(task).absolute() for task in tasks if is_task_file(task)}
    # Indexing all of the harness's own tasks takes from seconds to minutes.
    needs_its_own = len(files) < len(tasks) or any(find_dependencies(path)[1] for path in files.values())
    folders = sorted({str(path.parent) for path in files.values()})
    manager = TaskManager(include_path=folders or None, include_defaults=needs_its_own)
    names = list(tasks)
    for i, task in enumerate(tasks):
        if task not in files:
            continue
        names[i] = str(files[task])
        if "group" in read_config(files[task])[0]:
            names[i] = name_task(files[task])
            entry = manager.task_index.get(names[i])
            if entry is None or Path(entry.yaml_path).resolve() != files[task].resolve():
                where = "nowhere" if entry is None else entry.yaml_path
                raise ValueError(f"--lm-eval {task}: the harness finds group {names[i]} in {where}: rename one of them")
    return manager, names


def keep(sample: dict[str, Any]) -> dict[str, Any]:
    """The fields kept of one of the harness's samples: prompt, reference, answer and scores."""
    scores = {name: float(sample[name]) for name in sample["metrics"] if isinstance(sample[name], (int, float))}
    return {
        "prompt": str(next(iter(sample["arguments"]))[0])[:MAX_SHOWN],
        "reference": str(sample["target"]),
        "answer": str(sample["filtered_resps"][0]),
        "scores": scores,
        "index": sample["doc_id"],
    }


def collect_harness(outcomes: Sequence[dict[str, list[dict[str, Any]]] | None]) -> list[Measured]:
    """All models' results on the harness's tasks, side by side."""
    if not outcomes or outcomes[0] is None:
        return []
    measured = []
    for task, first in outcomes[0].items():
        samples = [sorted(outcome[task], key=lambda sample: sample["index"]) for outcome in outcomes]
        first = samples[0]
        shown = [
            {"place": f"document {sample['index']}", "prompt": sample["prompt"], "references": [sample["reference"]]}
            for sample in first
        ]
        scores = [
            SampleScores(
                name, np.array([[sample["scores"][name] for sample in own] for own in samples]), np.ones(len(first))
            )
            for name in first[0]["scores"]
        ]
        measured.append(Measured(task, "harness", shown, samples, scores, [{} for _ in samples]))
    return measured
