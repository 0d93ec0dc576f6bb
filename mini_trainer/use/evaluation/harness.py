"""Runs EleutherAI's lm-evaluation-harness: its tasks, prompts and measures; our intervals and tests.

YAML files of tasks are only read as data here; functions that they name are not called.
"""

import functools
import glob
import json
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mini_trainer.options.command_line import suggest
from mini_trainer.options.option_files import Loader, read_yaml
from mini_trainer.options.problems.finding import require
from mini_trainer.options.reading import hash_file, read_object
from mini_trainer.options.tools import EvaluateOptions
from mini_trainer.use.evaluation.comparison import gather_scores
from mini_trainer.use.evaluation.results import Measured, is_made_by, write_made
from mini_trainer.use.inference.hf_engine import HFEngine
from mini_trainer.use.inference.loading import FoundModel

FUNCTION = "!function"
DATA_KEYS = ("dataset_path", "dataset_name", "dataset_kwargs")  # their values may be paths


class TaskLoader(Loader):
    """Reads `!function a.b` as {"!function": "a.b"}."""


TaskLoader.add_constructor(FUNCTION, lambda loader, node: {FUNCTION: loader.construct_scalar(node)})


def is_task_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def read_config(path: Path, including: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Path]]:
    """A file's keys, with those of the files that it includes, and the files read. ValueError names a broken file."""
    path = path.resolve()
    if path in including:
        raise ValueError(f"{path}: includes itself")
    config = read_yaml(path, named=str(path), loader=TaskLoader)
    included = config.pop("include", [])
    merged: dict[str, Any] = {}
    files = [path]
    for name in included if isinstance(included, list) else [included]:
        found, below = read_config(path.parent / str(name), (*including, path))
        found.pop("task_list", None)
        merged |= found
        files += below
    return merged | config, files


def name_task(path: Path) -> str:
    """The task that a file defines; ValueError for groups, whose tasks are measured one by one anyway."""
    config, _ = read_config(path)
    name = config.get("task")
    if "group" in config or isinstance(name, list):
        raise ValueError(f"{path}: is a group: name the files of its tasks instead")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path}: names no 'task'")
    return name


def describe_task_file(path: Path) -> dict[str, Any]:
    """A task's name, and the digests of all files that its results depend on."""
    config, files = read_config(path)
    found = {*files, *find_modules(config, files), *find_data(config)}
    digests = {os.path.relpath(file, path.parent): hash_file(file)["sha256"] for file in found}
    return {"name": name_task(path), "files": dict(sorted(digests.items()))}


def find_modules(config: dict[str, Any], files: Sequence[Path]) -> Iterator[Path]:
    """The Python files whose functions a task names, and those in the same folders, which they may import."""
    names = [value[FUNCTION] for value in walk(config) if isinstance(value, dict) and FUNCTION in value]
    for name in names:
        module = name.rpartition(".")[0].replace(".", "/") + ".py"
        for folder in {file.parent for file in files}:
            if (folder / module).is_file():
                yield from (folder / module).parent.glob("*.py")


def find_data(config: dict[str, Any]) -> Iterator[Path]:
    """The local files that a task's data set is read from."""
    for value in walk([config.get(key) for key in DATA_KEYS]):
        for name in glob.glob(value, recursive=True) if isinstance(value, str) else []:
            path = Path(name).resolve()
            yield from (found for found in ([path] if path.is_file() else path.rglob("*")) if found.is_file())


def walk(value: Any) -> Iterator[Any]:
    """Yields a value and all values nested in it."""
    yield value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        yield from walk(item)


HARNESS = "--lm-eval"
MAX_SHOWN = 4000  # characters of a prompt kept for the page


def check_harness(tasks: Sequence[str]) -> None:
    """ValueError if the harness is needed and not installed, if a task's file is missing or defines no task, or if the
    harness does not know a name."""
    if not tasks:
        return
    require("lm_eval", flag="--lm-eval")
    for task in tasks:
        if is_task_file(task):
            try:
                name_task(Path(task))
            except ValueError as error:
                raise ValueError(f"--lm-eval {error}") from None
        elif task not in (known := open_tasks(tuple(tasks))[0].task_index):
            raise ValueError(
                f"--lm-eval {task}: not a task or group of lm_eval {version('lm_eval')}{suggest(task, known, most=3)}"
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
        engine = HFEngine(found, found.name, options.engines, options.sampling, device=device)
        write_made(path, json.dumps(call_harness(engine, options.lm_eval)), made_by)
    return read_object(path)


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
def open_tasks(tasks: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The harness's index of tasks, and the key of each task there: its name, or its file's path."""
    from lm_eval.tasks import TaskManager

    names = [str(Path(task).absolute()) if is_task_file(task) else task for task in tasks]
    # Indexing all of the harness's own tasks takes from seconds to minutes.
    return TaskManager(include_defaults=not all(map(is_task_file, tasks))), names


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
    measured = []
    for task in outcomes[0] or ():
        samples = [sorted(outcome[task], key=lambda sample: sample["index"]) for outcome in outcomes]
        first = samples[0]
        shown = [
            {"place": f"document {sample['index']}", "prompt": sample["prompt"], "references": [sample["reference"]]}
            for sample in first
        ]
        scores = gather_scores(samples, first[0]["scores"])
        measured.append(Measured(task, "harness", shown, samples, scores, [{} for _ in samples]))
    return measured
