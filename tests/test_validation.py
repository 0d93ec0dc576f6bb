"""Validation: the model's own losses on other data, on any ranks, without a trace in training; the best, and enough."""

import json
import math
import shutil
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from breadth import long
from forked import succeed
from hand_made import read_triple
from in_process import train_here, train_on, train_once
from processes import flags
from safetensors.torch import load_file
from small_runs import OPTIONS, forget_since, make_inputs, read_rows
from tiny_data import make_samples, read_lines, to_row, write_rows, write_samples
from tiny_models import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.run.start import open_inputs
from mini_trainer.run.validation import Progress, Validations
from mini_trainer.sampler import RunPosition

STEPS, SIZES = 6, dict(held_out=13, other=5)
SAVES = dict(min_samples_per_checkpoint=8, keep_checkpoints=9)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    """Few samples to learn by heart, and others to be measured on: the loss on these rises."""
    root = tmp_path_factory.mktemp("inputs")
    paths = []
    for i, (name, size) in enumerate(SIZES.items()):
        samples = make_samples(size, vocab_size=VOCAB_SIZE, max_len=90, seed=10 + i)
        paths.append(str(write_samples(root / f"{name}.arrow", samples)))
    # a set with weights, and a sample longer than --max-tokens-per-gpu
    rows = [to_row(sample) | dict(loss_weights=[0.25] * len(sample[0])) for sample in make_samples(4, vocab_size=160)]
    weighted = write_rows(root / "weighted.arrow", [*rows, to_row(make_samples(30, vocab_size=160, max_len=90)[7])])
    given = make_inputs(root, "gemma2_softcaps") | OPTIONS
    return given | dict(validation_data_path=(*paths, str(weighted)), validate_every_steps=2, max_steps=STEPS)


@pytest.fixture(scope="module")
def run(inputs, world, tmp_path_factory) -> Path:
    """On one rank."""
    return train_once(tmp_path_factory, world, **inputs | SAVES)


def read_validation(output_dir: Path) -> list[dict]:
    rows = read_lines(output_dir / "validation_metrics_0.jsonl")
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@torch.no_grad()
def measure_plainly(model_dir: Path, data_path: str) -> tuple[float, int, int]:
    """By transformers, one sample at a time: the summed loss, targets that were most likely, and targets."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    data, loss_sum, num_right, num_targets = TokenizedData(data_path), 0.0, 0, 0
    for row in range(len(data.lengths)):
        input_ids, labels, weights = read_triple(data, row)
        logits = model(input_ids=torch.tensor(input_ids.astype(int))[None], use_cache=False).logits[0, :-1]
        targets = torch.tensor(labels[1:].astype(int))
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")  # 0 where the label is -100
        loss_sum += (losses * torch.tensor(1.0 if weights is None else weights[1:])).sum().item()
        num_right += int((logits.argmax(-1) == targets).sum())
        num_targets += int((targets != -100).sum())
    return loss_sum, num_right, num_targets


@pytest.mark.slow
def test_scores_are_the_models_own(inputs, run):
    """Before the first step and after the last, of each set and of all together."""
    exported = run / "hf_format" / f"samples_{STEPS * OPTIONS['batch_size']}"
    rows = read_validation(run)
    for model_dir, row in ((inputs["model_name_or_path"], rows[0]), (exported, rows[-1])):
        found = [measure_plainly(model_dir, path) for path in inputs["validation_data_path"]]
        sums = [sum(values) for values in zip(*found, strict=True)]
        for (loss_sum, num_right, num_targets), scores in zip(
            (*found, sums), (*row["sets"].values(), row), strict=True
        ):
            assert scores["loss"] == pytest.approx(loss_sum / num_targets, rel=1e-5)
            assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
            assert scores["token_accuracy"] == pytest.approx(num_right / num_targets)
            assert scores["num_loss_counted_tokens"] == num_targets
    assert list(rows[0]["sets"]) == ["held_out", "other", "weighted"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "cap"), [(2, 50), long(4, 41)])
def test_scores_do_not_depend_on_ranks_and_caps(num_ranks, cap, inputs, run, world, tmp_path):
    options = inputs | SAVES | dict(max_tokens_per_gpu=cap)
    train_on(num_ranks, world, **options, output_dir=tmp_path / "run")
    rows, expected_rows = read_validation(tmp_path / "run"), read_validation(run)
    assert [row["step"] for row in expected_rows] == [0, 2, 4, 6]
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert row["token_accuracy"] == pytest.approx(expected["token_accuracy"], abs=1e-3)
        assert row["is_best"] == expected["is_best"]


@pytest.mark.slow
def test_training_is_what_it_is_without(inputs, run, world, tmp_path):
    without = {key: value for key, value in inputs.items() if not key.startswith("validat")}
    train_here(world, **without, output_dir=str(tmp_path / "run"))
    assert read_rows(tmp_path / "run") == read_rows(run)


@pytest.mark.slow
def test_the_best_export_is_the_lowest_point_of_the_curve(run):
    rows = read_validation(run)
    best = min(rows[1:], key=lambda row: row["loss"])
    lowest = math.inf
    for row in rows[1:]:
        assert row["is_best"] == (row["loss"] < lowest)
        lowest = min(lowest, row["loss"])
    export_dir = run / "hf_format" / "best"
    note = json.loads((export_dir / "validation.json").read_text())
    assert (note["step"], note["loss"]) == (best["step"], best["loss"])
    there = load_file(export_dir / "model.safetensors")
    then = load_file(run / "hf_format" / f"samples_{8 * best['step']}" / "model.safetensors")
    assert all(torch.equal(weight, then[name]) for name, weight in there.items())
    assert "validation.json" in (export_dir / "manifest.json").read_text()


def test_the_best_and_what_does_not_improve_on_it():
    """The best is better by more than 0.1, comes after a step, and is a number, which NaN is not."""
    progress = Progress(data="d")
    for step, loss in enumerate((1.0, math.nan, 2.0, 1.95, 1.8, 1.75)):
        progress = progress.after(loss, step=step, more_is_better=False, least=0.1)
    assert (progress.best_step, progress.best_value, progress.num_worse, progress.num_validations) == (4, 1.8, 1, 6)
    assert progress.after(1.95, step=6, more_is_better=True, least=0.1).best_step == 6


def test_a_validation_is_no_waiting_for_data(inputs, world, tmp_path, monkeypatch):
    """The clock moves on by a second whenever it is read, and by a minute in a validation."""
    clock, measure = count(), Validations.measure

    def take_a_minute(*given: object, **named: object) -> bool:
        return [next(clock) for _ in range(60)] and measure(*given, **named)

    monkeypatch.setattr(Validations, "measure", take_a_minute)
    monkeypatch.setattr("mini_trainer.train.time", SimpleNamespace(monotonic=clock.__next__))
    train_here(world, **inputs | dict(max_steps=3, validate_every_steps=1), output_dir=str(tmp_path / "run"))
    rows = read_lines(tmp_path / "run" / "training_metrics_0.jsonl")
    assert [row["data_wait_seconds"] for row in rows] == [1, 1, 1]


def test_enough_is_the_end_and_a_kill_changes_nothing(inputs, world, tmp_path):
    """--early-stopping-patience where nothing is learned, uninterrupted and from checkpoints before and at its end."""
    options = inputs | dict(validate_every_steps=1, early_stopping_patience=2, max_steps=50, learning_rate=0.0)
    whole, last = tmp_path / "whole", 3
    train_here(world, **options, output_dir=str(whole))
    rows = read_validation(whole)
    assert [row["step"] for row in read_rows(whole)] == [row["step"] for row in rows[1:]] == [1, 2, 3]
    assert (whole / "hf_format" / f"samples_{8 * last}").exists()
    assert json.loads((whole / "training_params.json").read_text())["finished"]
    for kept in (2, last):
        again = Path(shutil.copytree(whole, tmp_path / f"from_{kept}"))
        for path in (again / "checkpoints").iterdir():
            if int(path.name.removeprefix("step_")) > kept:
                shutil.rmtree(path)
        shutil.rmtree(again / "hf_format" / f"samples_{8 * last}")
        train_here(world, **options, output_dir=str(again))
        assert read_rows(again) == read_rows(whole) and read_validation(again) == rows
        exports = sorted(path.name for path in (again / "hf_format").iterdir())
        assert exports == ["best", "latest", f"samples_{8 * last}"]


@pytest.mark.long
@pytest.mark.slow
def test_how_an_early_end_is_told(inputs, tmp_path):
    options = inputs | dict(validate_every_steps=1, early_stopping_patience=1, max_steps=50, export_best=False)
    result = succeed(0, "train.py", *flags(**options, output_dir=tmp_path / "run"))
    message = json.loads((tmp_path / "run" / "exit.json").read_text())["message"]
    assert "--early-stopping-patience: 1 validations" in message
    assert "step 0: loss" in result.stderr and "  held_out: loss" in result.stderr
    assert not (tmp_path / "run" / "hf_format" / "best").exists()


@pytest.mark.long
def test_a_start_from_zero_takes_the_first_validation_again(inputs, world, tmp_path):
    """As after a kill before the first checkpoint; and what a kill left of a line is cut off."""
    options = inputs | dict(output_dir=str(tmp_path / "run"), max_steps=2)
    train_here(world, **options)
    rows, path = read_validation(tmp_path / "run"), tmp_path / "run" / "validation_metrics_0.jsonl"
    forget_since(tmp_path / "run", 0)
    path.write_text(path.read_text() + '{"step": 4, "lo')
    train_here(world, **options)
    assert read_validation(tmp_path / "run") == rows
    train_here(
        world, **{name: value for name, value in options.items() if not name.startswith("validat")} | dict(max_steps=4)
    )
    assert read_validation(tmp_path / "run") == rows


def test_other_validation_data_starts_anew(inputs, world, tmp_path, caplog):
    options = inputs | dict(output_dir=str(tmp_path / "run"), max_steps=2)
    train_here(world, **options)
    with caplog.at_level("WARNING", logger="mini_trainer"):
        changed = dict(validation_data_path=inputs["validation_data_path"][:1], max_steps=4)
        train_here(world, **options | changed)
    assert "the validation data" in caplog.text
    assert [(row["step"], row["is_best"], len(row["sets"])) for row in read_validation(tmp_path / "run")] == [
        (0, False, 3), (2, True, 3), (2, True, 1), (4, True, 1)
    ]  # fmt: skip


def test_a_set_that_is_trained_on_is_told(inputs, tmp_path):
    options = inputs | dict(validation_data_path=inputs["data_path"], output_dir=str(tmp_path), max_steps=1)
    given = group_options(TrainOptions, **options)
    found = open_inputs(given, device=torch.device("cpu"), world_size=1, start=RunPosition())
    (warning,) = found.warnings
    assert warning.startswith(f"--validation-data-path {inputs['data_path']} ")


def test_sets_that_cannot_be_measured_are_named(inputs, world, tmp_path):
    options = inputs | dict(output_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"--validation-data-path none\.arrow: "):
        train_here(world, **options | dict(validation_data_path="none.arrow"))
    masked = write_samples(tmp_path / "masked.arrow", [([5, 6, 7], [-100] * 3)])
    with pytest.raises(ValueError, match=r"--validation-data-path \S*masked\.arrow: .*no loss"):
        train_here(world, **options | dict(validation_data_path=str(masked)))
    foreign = write_samples(tmp_path / "foreign.arrow", [([5, 6, 999], [-100, -100, 999])])
    with pytest.raises(ValueError, match=r"foreign\.arrow: row 1: .*vocabulary"):
        train_here(world, **options | dict(validation_data_path=str(foreign)))
