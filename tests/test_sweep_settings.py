"""The settings of a sweep: what is read, and what is refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import ROOT

from mini_trainer.options import TrainOptions, group_options
from mini_trainer.tools.sweep import settings as sweeps
from mini_trainer.tools.sweep.settings import Parameter, SweepSettings, check_trials, list_grid, read_settings

TRAIN = dict(model_name_or_path="M", data_path="d.arrow", validation_data_path="v.arrow", max_steps=100)
GIVEN = {"output_dir": "D", "train": TRAIN, "parameters": {"learning_rate": [1e-5, 1e-4]}}
RANDOM = GIVEN | {"search": "random", "num_trials": 3}


def read(given: dict[str, Any], folder: Path) -> SweepSettings:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(given))
    return read_settings(path)


def test_options_of_files_and_presets_are_overridden_by_the_files_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", "elsewhere")
    base = {"output_dir": "other", "batch-size": 4, "max_steps": 7, "data_path": "${SCRATCH}.arrow", "lr": 1}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({k: v for k, v in base.items() if k != "lr"}))
    train = {"config": str(tmp_path / "base.yaml"), "preset": "toy", "max_steps": 9, "model_name_or_path": "M"}
    settings = read(GIVEN | {"train": train}, tmp_path)
    expected = dict(subset="1%", max_steps=9, data_path=("elsewhere.arrow",), batch_size=4, model_name_or_path="M")
    assert settings.train == expected
    given = {"learning_rate": 1.0}
    kept = {"export_best": False, "save_final_checkpoint": False}
    assert settings.options_of(given) == expected | given | kept
    assert read_settings(tmp_path / "sweep.yaml", output_dir="E").output_dir == "E"
    varied = read(GIVEN | {"train": train, "parameters": {"batch_size": [2, 4]}}, tmp_path)
    assert varied.train == {name: value for name, value in expected.items() if name != "batch_size"}


def test_the_recipe_is_a_sweep_of_the_quickstart(monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = read_settings(Path("examples/recipes/sweep.yaml"))
    check_trials(settings, [{"learning_rate": 1e-3, "batch_size": 16}])
    assert settings.num_trials == 6 and settings.train["lr_scheduler"] == "cosine"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_rate", ["1e-5", 1], dict(choices=(1e-5, 1.0))),
        ("learning-rate", {"low": "1e-5", "high": 1, "log": True}, dict(low=1e-5, high=1.0, log=True)),
        ("num_warmup_steps", {"low": 0, "high": 0.5}, dict(low=0.0, high=0.5)),
        ("batch_size", {"low": 8, "high": 64, "step": 8}, dict(low=8, high=64, step=8)),
        ("lora", [True, False], dict(choices=(True, False))),
        ("max_grad_norm", [1.0, None], dict(choices=(1.0, None))),
        ("lora_target_modules", [["q_proj"], ["q_proj", "v_proj"]], dict(choices=(("q_proj",), ("q_proj", "v_proj")))),
    ],
)
def test_values_are_those_of_the_options_types(name, value, expected, tmp_path):
    (one,) = read(RANDOM | {"parameters": {name: value}, "num_trials": 2}, tmp_path).parameters
    assert one == Parameter(name=name.replace("-", "_"), **expected)
    assert all(type(value) is type(expected[key]) for key, value in vars(one).items() if key in expected)


def test_ranges_with_steps_have_a_grid(tmp_path):
    parameters = {"batch_size": {"low": 2, "high": 5}, "num_warmup_steps": {"low": 0.1, "high": 0.35, "step": 0.1}}
    settings = read(GIVEN | {"parameters": parameters}, tmp_path)
    grid = [tuple(values.values()) for values in list_grid(settings)]
    assert [size for size, _ in grid] == [size for size in (2, 3, 4, 5) for _ in range(3)]
    assert [share for _, share in grid[:3]] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_dir": "D"}, "train, parameters: required"),
        (GIVEN | {"train": TRAIN | {"max_time": "90"}}, "train: max_time: "),
        (GIVEN | {"train": TRAIN | {"preset": "tiny"}}, "train: preset: given 'tiny'"),
        (GIVEN | {"train": TRAIN | {"config": "gone.yaml"}}, "train: config: gone.yaml: "),
        (RANDOM | {"parameters": {"seed": {"low": 1, "high": 10**12}}, "num_trials": 10**6}, "num_trials 1000000: "),
        (GIVEN | {"train": TRAIN | {"learning_rate": 1}}, "learning_rate: in train"),
        (GIVEN | {"parameters": {}}, "parameters: given {}"),
        (GIVEN | {"parameters": {"batch_size": [1, 2], "batch-size": [3, 4]}}, "batch_size: is given"),
        (GIVEN | {"parameters": {"resume": ["a", "b"]}}, "parameters: resume: is set"),
        (GIVEN | {"parameters": {"learning_rate": [1, "1.0"]}}, "learning_rate: given [1, '1.0']"),
        (GIVEN | {"parameters": {"optimizer": ["adamw", "adam"]}}, "parameters: optimizer cannot be 'adam'"),
        (GIVEN | {"parameters": {"seed": {"low": 1}}}, "seed: high: required"),
        (GIVEN | {"parameters": {"seed": {"low": 1, "high": 2, "by": 1}}}, "seed: unknown option 'by'; allowed: low, "),
        (GIVEN | {"parameters": {"seed": {"low": 0, "high": 2, "log": True}}}, "log: true"),
        (GIVEN | {"parameters": {"seed": {"low": 0, "high": 2, "step": 5}}}, "step: given 5"),
        (GIVEN | {"parameters": {"learning_rate": {"low": 0, "high": 1}}}, "learning_rate: a range"),
        (GIVEN | {"num_trials": 3}, "num_trials has no effect with search grid, only with random"),
        (RANDOM, "num_trials: given 3, allowed: at most 2"),
    ],
)
def test_wrong_settings_are_refused_by_key(given, message, tmp_path):
    with pytest.raises(ValueError) as refused:
        read(given, tmp_path)
    assert message in str(refused.value) and str(refused.value).startswith(f"{tmp_path}/sweep.yaml: ")


def test_all_problems_are_found_at_once(tmp_path):
    given = GIVEN | {"train": {"lr": 1, "seed": "x"}, "parameters": {"sed": [1, 2], "lora": [1, 2]}, "search": "all"}
    with pytest.raises(ValueError) as refused:
        read(given, tmp_path)
    for named in ("train: unknown option 'lr'", "train: seed cannot be 'x'", "parameters: unknown option 'sed'",
                  "parameters: lora: given 1, ", "search cannot be 'all', allowed: grid, random"):  # fmt: skip
        assert f"{tmp_path}/sweep.yaml: {named}" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "parameters", "named"),
    [
        ({"max_steps": None}, {"seed": [1, 2]}, ("give max_steps, ",)),
        ({"validation_data_path": []}, {"seed": [1, 2]}, ("train: no validation data ", "(all trials)")),
        ({"batch_size": 0}, {"seed": [1, 2]}, ("--batch-size 0: ", "(all trials)")),
    ],
)
def test_trials_that_train_would_refuse_are_found_before_any_runs(changes, parameters, named, tmp_path):
    settings = read(GIVEN | {"train": TRAIN | changes, "parameters": parameters}, tmp_path)
    with pytest.raises(ValueError) as refused:
        check_trials(settings, list(list_grid(settings)))
    assert all(name in str(refused.value) for name in named)


def test_missing_options_and_files_are_named(tmp_path):
    train = {name: value for name, value in TRAIN.items() if name != "model_name_or_path"}
    settings = read(GIVEN | {"train": train}, tmp_path)
    with pytest.raises(ValueError, match="train: model_name_or_path: required"):
        check_trials(settings, list(list_grid(settings)))
    with pytest.raises(ValueError, match=r"data_path: d\.arrow .*\n  validation_data_path: v\.arrow "):
        sweeps.list_files(settings, [{}])


def test_what_decides_results_is_recorded(tmp_path):
    settings = read(GIVEN | {"num_processes": 2, "num_parallel": 3}, tmp_path)
    again = read(GIVEN | {"output_dir": "E"}, tmp_path)
    assert sweeps.describe_settings(settings) == sweeps.describe_settings(again)
    other = read(GIVEN | {"train": TRAIN | {"batch_size": 4}}, tmp_path)
    assert sweeps.describe_settings(settings) != sweeps.describe_settings(other)
    assert group_options(TrainOptions, output_dir="D", **settings.options_of({})).data.data_path == ("d.arrow",)
