"""The recipe for TRACE: each task trains and is measured as it says, on invented rows of the benchmark's format."""

import json
from pathlib import Path

import pytest
import yaml
from data_runs import options_for
from evaluations import evaluate_here, list_means
from program import ROOT
from tiny_data import read_lines
from tiny_models import FAMILIES, save_model, save_tokenizer
from trace_rows import ROWS, write_trace
from transformers import AutoTokenizer

from mini_trainer.data.rows.prompts import read_prompts
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.process_data import process_data
from mini_trainer.use.evaluation.metrics import score_answer

RECIPE = yaml.safe_load((ROOT / "examples" / "recipes" / "trace.yaml").read_text(encoding="utf-8"))
TASKS = {Path(task["input_file"]).parent.name: task for task in RECIPE["tasks"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("trace")
    write_trace(root / "TRACE")
    save_tokenizer(save_model(FAMILIES["llama"], root / "model"))
    return root


def test_the_recipe_has_the_benchmarks_tasks_in_its_order():
    assert list(TASKS) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_task_trains_on_its_answers(name, root):
    task, output = TASKS[name], root / f"{name}.jsonl"
    options = options_for(root / "model", root / task["input_file"], output, **RECIPE["process_data"])
    assert find_problems(options) == []
    process_data(options)
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    rows = json.loads((root / task["input_file"]).read_text(encoding="utf-8"))
    for row, line in zip(rows, read_lines(output), strict=True):
        trained = [token for token, label in zip(line["input_ids"], line["labels"], strict=True) if label != -100]
        assert tokenizer.decode(line["input_ids"], skip_special_tokens=True) == row["prompt"] + row["answer"]
        assert tokenizer.decode(trained) == row["answer"] + tokenizer.eos_token
    given = dict(model_name_or_path="", data_path=str(output), output_dir="") | RECIPE["train"] | task["train"]
    assert find_problems(group_options(TrainOptions, **given)) == []


@pytest.mark.parametrize("name", ROWS)
def test_a_task_is_measured_by_its_metric(name, root, world):
    task = TASKS[name]
    options = RECIPE["evaluate"] | task.get("evaluate", {}) | {"max_new_tokens": 4}
    test = str(root / task["test"])
    results = evaluate_here(
        world, root / "measured" / name, model=str(root / "model"), task=test, metrics=task["metric"], **options
    )
    ((metric, (mean,)),) = list_means(results["sets"][0]).items()
    assert metric == task["metric"] and 0 <= mean <= 1
    for prompt in read_prompts([test], None):
        (reference,) = prompt.references
        assert score_answer(metric, reference, prompt.references) == pytest.approx(1)
