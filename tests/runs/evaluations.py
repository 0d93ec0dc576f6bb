"""evaluate_model.py in the process of the test, and what it writes."""

import json
from pathlib import Path

from tiny_data import write_jsonl

from mini_trainer.distributed.world import World
from mini_trainer.evaluate_model import evaluate
from mini_trainer.options import group_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.tools import EvaluateOptions

NUM_RESAMPLES = 200


def evaluate_here(world: World, output_dir: Path, **options: object) -> dict:
    """results.json of an evaluation."""
    grouped = group_options(EvaluateOptions, **dict(output_dir=str(output_dir), num_resamples=NUM_RESAMPLES) | options)
    assert find_problems(grouped) == []
    evaluate(grouped, world)
    return json.loads((output_dir / "results.json").read_text())


def list_means(measured: dict) -> dict[str, list[float]]:
    """Each measure's means, of all models."""
    return {metric["name"]: [value["mean"] for value in metric["values"]] for metric in measured["metrics"]}


HARNESS_TASK = """dataset_path: json
dataset_kwargs:
  data_files: {rows}
test_split: train
output_type: multiple_choice
doc_to_text: '{{{{q}}}}'
doc_to_choice: '{{{{c}}}}'
doc_to_target: a
metric_list:
  - metric: acc
  - metric: acc_norm
"""
HARNESS_ROWS = [
    dict(q="1 2 3", c=["4", "x y"], a=0),
    dict(q="a b c", c=["z", "d"], a=1),
    dict(q="?", c=["yes", "n"], a=1),
]


def write_task(folder: Path, *, name: str, file: str, rows: list[dict] = HARNESS_ROWS) -> Path:
    """A multiple-choice task of EleutherAI's harness and its rows; the file to name."""
    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "rows.jsonl", rows)
    (folder / "common.yml").write_text(HARNESS_TASK.format(rows=folder / "rows.jsonl"))
    (folder / file).write_text(f"task: {name}\ninclude: common.yml\n")
    return folder / file
