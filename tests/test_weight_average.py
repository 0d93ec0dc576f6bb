"""--weight-average: exact over the steps, through checkpoints and on any number of ranks; exported and validated."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import long, wide
from in_process import train_on
from safetensors.torch import load_file
from small_runs import OPTIONS, load_checkpoint, read_rows

MODEL = "llama_tied_bias"
STEPS = 5


def train(world, inputs: dict, output_dir: Path, *, num_ranks: int = 1, **changes) -> Path:
    options = inputs | OPTIONS | dict(max_steps=STEPS, output_dir=output_dir, save_final_checkpoint=True)
    train_on(num_ranks, world, **options | changes)
    return output_dir


def read_steps(run: Path) -> list[dict[str, np.ndarray]]:
    """All tensors after each step, from the run's checkpoints."""
    return [
        {name: tensor.numpy() for name, tensor in load_checkpoint(run / "checkpoints" / f"step_{step}").items()}
        for step in range(1, STEPS + 1)
    ]


def average_of(weights: list[np.ndarray], start: np.ndarray, shares: list[float]) -> np.ndarray:
    average = start.copy()
    for weight, share in zip(weights, shares, strict=True):
        average = weight.copy() if share == 1 else average + (weight - average) * np.float32(share)
    return average


CASES = {
    "half-life": (dict(weight_average="ema", average_over=16), [1 - 0.5 ** (8 / 16)] * STEPS),
    "half-life, by tokens": (dict(weight_average="ema", average_over=16, batch_size=None, batch_tokens=90), None),
    "tail": (dict(weight_average="tail", average_over=3), [0, 0, 1, 1 / 2, 1 / 3]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "num_ranks"), [*((case, 1) for case in CASES), long("tail", 2), wide("half-life", 2)])
def test_it_is_numpys_over_the_weights_of_all_steps_to_the_bit(case, num_ranks, inputs, world, tmp_path):
    options, shares = CASES[case]
    run = train(world, inputs, tmp_path, num_ranks=num_ranks, **options)
    steps = read_steps(run)
    if shares is None:  # of the samples of each step
        shares = [1 - 0.5 ** (row["num_samples"] / 16) for row in read_rows(run)]
        assert len(set(shares)) > 1
    start = load_file(Path(inputs["model_name_or_path"]) / "model.safetensors")
    (export,) = (run / "hf_format").glob("average_samples_*")
    exported = load_file(export / "model.safetensors")
    names = [name.removeprefix("average/model.") for name in steps[-1] if name.startswith("average/")]
    assert sorted(names) == sorted(exported)
    for name in names:
        weights = [step[f"model/model.{name}"] for step in steps]
        expected = average_of(weights, start[name].numpy(), shares)
        assert np.array_equal(steps[-1][f"average/model.{name}"], expected), name
        assert np.array_equal(exported[name].numpy(), expected), name
    (plain,) = (run / "hf_format").glob("samples_*")
    assert all(np.array_equal(load_file(plain / "model.safetensors")[name], steps[-1][f"model/model.{name}"])
               for name in names)  # fmt: skip


@pytest.mark.long
@pytest.mark.slow
def test_it_changes_nothing_and_a_resumed_run_on_another_number_of_ranks_goes_on_with_it(inputs, world, tmp_path):
    plain = train(world, inputs, tmp_path / "plain")
    whole = train(world, inputs, tmp_path / "whole", **CASES["half-life"][0])
    assert read_rows(whole) == read_rows(plain)
    train(world, inputs, tmp_path / "parts", num_ranks=2, max_steps=2, **CASES["half-life"][0])
    parts = train(world, inputs, tmp_path / "parts", **CASES["half-life"][0])
    start = load_checkpoint(parts / "checkpoints" / "step_2")
    steps = read_steps(parts)
    for name in (name for name in steps[-1] if name.startswith("average/")):
        weights = [step[name.replace("average/", "model/")] for step in steps[2:]]
        expected = average_of(weights, start[name].numpy(), CASES["half-life"][1][2:])
        assert np.array_equal(steps[-1][name], expected)


def test_of_lora_only_the_factors_are_kept(inputs, world, tmp_path):
    options = dict(lora=True, lora_rank=2, lora_export="adapter", weight_average="ema", average_over=8)
    run = train(world, inputs, tmp_path, **options)
    steps = read_steps(run)
    names = [name for name in steps[-1] if name.startswith("average/")]
    assert names
    assert all("lora_" in name for name in names)
    (average,) = (run / "hf_format").glob("average_samples_*")
    (plain,) = (run / "hf_format").glob("samples_*")
    of_average, of_plain = (load_file(path / "adapter_model.safetensors") for path in (average, plain))
    assert of_average.keys() == of_plain.keys()
    assert any(not torch.equal(of_average[name], of_plain[name]) for name in of_plain)


def test_of_osft_the_weights_enter_that_each_step_has_constrained(inputs, world, tmp_path):
    run = train(world, inputs, tmp_path, osft=True, osft_unfreeze_rank_ratio=0.5, **CASES["half-life"][0])
    steps = read_steps(run)
    names = [name for name in steps[-1] if name.startswith("average/")]
    assert any(name.endswith("coefficients") for name in names)
    for before, after in pairwise(steps):
        for name in names:
            weight = after[name.replace("average/", "model/")]
            assert np.array_equal(after[name], average_of([weight], before[name], [1 - 0.5 ** (8 / 16)])), name


def test_its_validation_is_that_of_its_export(inputs, world, tmp_path):
    validation = dict(validation_data_path=[inputs["data_path"]], validate_every_steps=STEPS, export_best=False)
    run = train(world, inputs, tmp_path / "run", **validation, **CASES["half-life"][0])
    first, last = map(json.loads, (run / "validation_metrics_0.jsonl").read_text().splitlines())
    assert first["average_loss"] == first["loss"]
    assert last["average_loss"] != last["loss"]
    (export,) = (run / "hf_format").glob("average_samples_*")
    again = train(world, inputs | dict(model_name_or_path=export), tmp_path / "again", max_steps=1, **validation)
    of_export = json.loads((again / "validation_metrics_0.jsonl").read_text().splitlines()[0])
    for name in ("loss", "token_accuracy"):
        assert of_export[name] == pytest.approx(last[f"average_{name}"], rel=1e-6)


def test_old_averages_go_with_their_exports_and_later_ones_stay(inputs, world, tmp_path):
    exports = dict(keep_exports=1, min_samples_per_checkpoint=8, weight_average="ema", average_over=8)
    run = train(world, inputs, tmp_path, **exports)
    assert sorted(path.name for path in (run / "hf_format").iterdir()) == ["average_samples_40", "latest", "samples_40"]
    (run / "hf_format" / "samples_99").mkdir()  # of before a resume from an earlier step
    train(world, inputs, tmp_path, **exports, max_steps=STEPS + 1)
    names = ["average_samples_48", "latest", "samples_48", "samples_99"]
    assert sorted(path.name for path in (run / "hf_format").iterdir()) == names


def test_one_that_is_switched_on_at_a_resume_begins_at_the_restored_weights(inputs, world, tmp_path):
    """With tail, inside its window: the restored weights stand for the step that it has missed."""
    for name, shares in (
        ("half-life", CASES["half-life"][1][2:]),
        ("tail", [1, 1 / 2, 1 / 3]),
        ("late tail", [1 / 2, 1 / 3, 1 / 4]),
    ):
        options = CASES[name.removeprefix("late ")][0] | ({"average_over": 4} if name == "late tail" else {})
        run = train(world, inputs, tmp_path / name, max_steps=2)
        train(world, inputs, tmp_path / name, **options, allow_changed_options=True)
        steps = read_steps(run)
        for key in (key for key in steps[-1] if key.startswith("average/")):
            weights = [step[key.replace("average/", "model/")] for step in steps]
            assert np.array_equal(steps[-1][key], average_of(weights[2:], weights[1], shares)), key


def test_an_early_stop_before_the_last_steps_is_said_to_leave_no_average(inputs, world, tmp_path, caplog):
    options = dict(validation_data_path=[inputs["data_path"]], validate_every_steps=1, early_stopping_patience=1,
                   export_best=False, learning_rate=0.0, weight_average="tail", average_over=3)  # fmt: skip
    run = train(world, inputs, tmp_path, **options)
    assert [path.name for path in (run / "hf_format").glob("*samples_*")] == ["samples_16"]
    (warning,) = (record.message for record in caplog.records if "--weight-average" in record.message)
    assert "no average" in warning and "last 3 steps" in warning and "after step 2." in warning
