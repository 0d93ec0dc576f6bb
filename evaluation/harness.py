"""EleutherAI's lm-evaluation-harness, as it is: its tasks, its prompts, its measures; our intervals and tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from command_line import check_yaml
from evaluation.comparison import Scores
from evaluation.kept import is_made_by, write_made
from evaluation.results import Measured
from inference.engine import require
from inference.hf_engine import HFEngine
from inference.models import FoundModel
from options import EvaluateOptions

MAX_SHOWN = 4000  # characters of a prompt that are kept for the page


def check_harness(tasks: Sequence[str]) -> None:
    """ValueError if the harness is asked for and not installed, or a file of a task is not there."""
    if not tasks:
        return
    require("lm_eval", flag="--lm-eval")
    for task in tasks:
        if is_file(task) and not Path(task).is_file():
            raise ValueError(f"--lm-eval {task}: no such file")


def is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def run_harness(
    found: FoundModel, options: EvaluateOptions, folder: Path, *, device: torch.device
) -> dict[str, list[dict[str, Any]]]:
    """Each task's samples, with what they were scored, by the task's name."""
    path = folder / "lm_eval.json"
    made_by = found.identify() | {"tasks": list(options.lm_eval), "dtype": options.engines.dtype}
    if not is_made_by(path, made_by):
        samples = call_harness(HFEngine(found, options.engines, options.sampling, device=device), options.lm_eval)
        write_made(path, json.dumps(samples), made_by)
    return json.loads(path.read_text())


def call_harness(engine: HFEngine, tasks: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Runs the harness on a model that is loaded here."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for task in filter(is_file, tasks):
        check_yaml(Path(task), named=f"--lm-eval {task}")
    folders = sorted({str(Path(task).absolute().parent) for task in tasks if is_file(task)})
    names = [Path(task).stem if is_file(task) else task for task in tasks]
    model = HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=engine.batch_size)
    names_its_own = any(not is_file(task) for task in tasks)  # looking through all of the harness's takes minutes
    manager = TaskManager(include_path=folders or None, include_defaults=names_its_own)
    results = simple_evaluate(model=model, tasks=names, task_manager=manager, log_samples=True, bootstrap_iters=0)
    return {task: [keep(sample) for sample in samples] for task, samples in results["samples"].items()}


def keep(sample: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one of the harness's samples: what was asked, what is right, what was said, and the numbers."""
    scores = {name: float(sample[name]) for name in sample["metrics"] if isinstance(sample[name], (int, float))}
    return {
        "prompt": str(next(iter(sample["arguments"]))[0])[:MAX_SHOWN],
        "reference": str(sample["target"]),
        "answer": str(sample["filtered_resps"][0]),
        "scores": scores,
        "index": sample["doc_id"],
    }


def collect_harness(outcomes: Sequence[dict[str, list[dict[str, Any]]] | None]) -> list[Measured]:
    """The harness's tasks, all models side by side."""
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
            Scores(name, np.array([[sample["scores"][name] for sample in own] for own in samples]), np.ones(len(first)))
            for name in first[0]["scores"]
        ]
        measured.append(Measured(task, "harness", shown, samples, scores, [{} for _ in samples]))
    return measured
