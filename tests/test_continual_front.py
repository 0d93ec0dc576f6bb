"""The continual-learning example: its files are settings of the driver, and its tests ask for what was not trained."""

import subprocess
from pathlib import Path

import pytest
from make_continual import TASKS, ContinualDataOptions, write_data
from processes import ROOT
from tiny_data import read_chats

from mini_trainer.continual.settings import read_settings


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("front")
    write_data(ContinualDataOptions(output_dir="", num_train=300, num_test=20, num_pretraining=600), directory)
    return directory


@pytest.mark.parametrize("name", ["continual", "continual_small"])
def test_every_method_is_accepted(name):
    methods = read_settings(ROOT / "examples" / "recipes" / f"{name}.yaml")
    assert {task.name for task in methods[0].tasks} == {verb.lower() for verb in TASKS}


def test_numbers_of_tests_are_in_no_other_file(directory):
    numbers = {
        path.stem: {question.split()[1] for question, _ in read_chats(path) if question.split()[1].isdigit()}
        for path in directory.glob("*.jsonl")
    }
    tests = [name for name in numbers if name.endswith("_test") or name == "digits"]
    assert len(tests) == 4 and all(numbers[name] for name in tests)
    for name in tests:
        assert all(numbers[name].isdisjoint(numbers[other]) for other in numbers if other != name), name


@pytest.mark.parametrize(("name", "expected"), [("reverse", "3821"), ("sort", "1238"), ("increase", "2394")])
def test_answers_are_those_of_the_shell(directory, name, expected):
    answer = TASKS[name.capitalize()]
    assert answer("1283") == expected
    question, found = read_chats(directory / f"{name}_test.jsonl")[0]
    number = question.split()[1]
    by_shell = {
        "reverse": f"printf {number} | rev",
        "sort": f"printf {number} | fold -w1 | sort | tr -d '\\n'",
        "increase": f"printf {number} | tr 0-9 1-90",
    }
    assert found == subprocess.run(by_shell[name], shell=True, capture_output=True, text=True, check=True).stdout
