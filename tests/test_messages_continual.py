"""The whole texts of messages about experiments of continual learning; DIR stands for the directory of a test."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import read_refusal

from mini_trainer.continual.matrix import read_experiment
from mini_trainer.continual.measuring import read_cell
from mini_trainer.continual.settings import SetSettings
from mini_trainer.continual.settings_file import read_settings
from mini_trainer.options.tools import ContinualOptions
from mini_trainer.run.stages import Stage
from mini_trainer.tools.continual import continual
from mini_trainer.use.evaluation.comparison import cut

A = {"name": "a", "input_file": "a.jsonl", "test": "test.jsonl", "metric": "exact_match"}
GOOD = {"model": "M", "output_dir": "out", "train": {"max_epochs": 1, "batch_size": 4}, "tasks": [A, A | {"name": "b"}]}


def measure(directory: Path) -> None:
    (directory / "samples" / "last").mkdir(parents=True)
    (directory / "samples" / "last" / "a.scores.jsonl").write_text("{}")
    read_cell(directory, SetSettings(name="a", test="a.jsonl", metric="exact_match"), "score", root=directory)


def resume(directory: Path) -> None:
    (directory / "train.done").write_text("{}")
    _ = Stage(program="train", folder=directory, options={}).is_done


def compare(directory: Path) -> None:
    (directory / "file").touch()
    continual(ContinualOptions(paths=("a", "b"), compare=True, output=str(directory / "file" / "x.html")))


# Settings that differ from good ones, text.
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"modle": "M"}, "unknown option 'modle'; did you mean 'model'?"),
    ({"orders": 3}, "orders: given 3, allowed: 1 to 2, the orders of the tasks"),
    ({"tasks": []}, "tasks: none is given; give a list of tasks, each with a name and rows"),
    ({"tasks": [A, A]}, "tasks, probes: name 'a': is given twice"),
    ({"probes": [{"name": "p"}]}, "probes: p: nothing to measure by; give test, lm_eval or held_out"),
    ({"train": {"learningrate": 1}}, "train: unknown option 'learningrate'; did you mean 'learning_rate'?"),
    (
        {"train": {"batch_size": 4}},
        "tasks: a: train: no end is given; give max_epochs, max_steps, max_samples or max_tokens",
    ),
    ({"train": {"max_epochs": 1, "batch_size": 0}}, "tasks: a: train: --batch-size 0: must be at least 1"),
    ({"replay": {"kind": "rows", "share": 1}}, "replay: share 1.0: must be above 0 and below 1"),
    ({"methods": ["full"]}, "methods: given ['full'], allowed: two or more names, each with its settings"),
]
# Name, what fails in a directory, text.
ROWS = [
    (
        "no results",
        lambda path: read_experiment(path / "gone"),
        "DIR/gone/results.json: cannot be read: [Errno 2] No such file or directory: 'DIR/gone/results.json'",
    ),
    (
        "damaged scores",
        measure,
        "DIR/samples/last/a.scores.jsonl: line 1 is damaged: see scores; remove DIR to measure again",
    ),
    (
        "damaged record",
        resume,
        "DIR/train.done: not as mini-trainer writes it (see options); remove it to run train again, which keeps "
        "what is complete",
    ),
    (
        "nothing is read before a page that cannot be written",
        compare,
        "--output DIR/file/x.html: DIR/file is a file, not a directory",
    ),
    ("rounds", lambda path: cut([{}, {}], 3), "self_distillation: rounds: given 3, allowed: at most one for each of 2"),
]


@pytest.mark.parametrize(("changes", "text"), SETTINGS, ids=[str(changes) for changes, _ in SETTINGS])
def test_messages_about_settings(changes, text, tmp_path):
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(GOOD | changes))
    message = read_refusal(lambda: read_settings(tmp_path / "tasks.yaml"), folder=tmp_path)
    assert message == f"DIR/tasks.yaml: {text}"


@pytest.mark.parametrize(("fail", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_messages(fail, text, tmp_path):
    assert read_refusal(lambda: fail(tmp_path), folder=tmp_path) == text
