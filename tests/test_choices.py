"""Batch size, epochs and learning rate of runs that do not name them."""

import json

import pytest
from in_process import train_here
from small_runs import OPTIONS, make_inputs, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE
from transformers import LlamaConfig

from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.run import choices
from mini_trainer.run.choices import choose_batch_size, choose_epochs, choose_rate, estimate_size


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "epochs"),
    [(1, 4, 10), (60, 4, 10), (96, 4, 9), (200, 8, 8), (1_000, 16, 4), (10_000, 64, 2), (1_000_000, 64, 1)],
)
def test_small_data_make_few_updates_or_large_data_many_epochs(num_samples, batch_size, epochs):
    assert choose_batch_size(num_samples) == batch_size
    assert choose_epochs(num_samples / batch_size) == epochs


def test_a_rate_does_not_depend_on_method_and_size():
    asked = [("lora", 1e6), ("lora", 1.5e9), ("full", 1.5e9), ("full", 70e9)]
    assert [choose_rate(*each) for each in asked] == [1e-3, 2e-4, 2e-5, 3e-6]
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, vocab_size=32_000, intermediate_size=11_008)
    assert estimate_size(config) == pytest.approx(6.7e9, rel=0.05)


@pytest.mark.parametrize(
    ("num_held_out", "given", "stops"),
    [(20, {}, True), (19, {}, False), (20, {"validate_every_steps": 5}, False), (20, {"max_epochs": 2}, False)],
)
def test_enough_held_out_data_do_not_stop_a_run_or_few_do(num_held_out, given, stops, world, tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "LEAST_HELD_OUT", 20)
    options = {name: value for name, value in OPTIONS.items() if name != "max_steps"} | make_inputs(tmp_path, "llama")
    data = write_samples(tmp_path / "held_out.arrow", make_samples(num_held_out, vocab_size=VOCAB_SIZE))
    options |= dict(validation_data_path=str(data), learning_rate=9.0, output_dir=str(tmp_path / "run"))
    train_here(world, **options | given)
    recorded = json.loads((tmp_path / "run" / "training_params.json").read_text())["options"]
    expected = (2, True) if stops else (None, False)
    assert (recorded["early_stopping_patience"], recorded["validate_at_epoch"]) == expected
    assert (read_rows(tmp_path / "run")[-1]["epoch"] < recorded["max_epochs"]) == stops


def test_a_value_that_is_not_given_is_not_chosen_or_recorded_or_a_given_one_is_changed(world, tmp_path):
    named = {"batch_size", "max_steps", "learning_rate"}
    options = {name: value for name, value in OPTIONS.items() if name not in named} | make_inputs(tmp_path, "llama")
    assert find_problems(group_options(TrainOptions, **options, output_dir="run", lr_scheduler="cosine")) == []
    train_here(world, **options, output_dir=str(tmp_path / "run"), max_epochs=1)
    recorded = json.loads((tmp_path / "run" / "training_params.json").read_text())["options"]
    assert (recorded["batch_size"], recorded["max_epochs"], recorded["learning_rate"]) == (4, 1, 1e-3)
    steps = read_rows(tmp_path / "run")
    assert len(steps) == 5 and {step["num_samples"] for step in steps} == {4} and steps[-1]["lr"] == 1e-3


def test_a_chosen_value_is_another_option_to_a_resumed_run(world, tmp_path):
    options = {name: value for name, value in OPTIONS.items() if name not in ("batch_size", "learning_rate")}
    options |= make_inputs(tmp_path, "llama") | dict(output_dir=str(tmp_path / "run"))
    for max_steps in (2, 4):
        train_here(world, **options, max_steps=max_steps)
    assert [step["num_samples"] for step in read_rows(tmp_path / "run")] == [4] * 4
