"""evaluate_model.py in the process of the test, and what it writes."""

import json
from pathlib import Path

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
