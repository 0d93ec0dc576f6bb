"""What validations say of classifiers: scikit-learn's numbers, each target once, on any number of ranks."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from in_process import train_on
from scipy import stats
from sklearn import metrics
from small_runs import forget_since
from tiny_classifiers import CLASSIFIERS, make_class_samples, predict_plainly, save_base, write_classified
from tiny_data import read_lines

from mini_trainer.data.columns.base import DataTask
from mini_trainer.objectives.classes import summarize_classes

BATCH_SIZE = 6
OPTIONS = dict(batch_size=BATCH_SIZE, max_tokens_per_gpu=64, max_steps=4, learning_rate=1e-2, keep_checkpoints=9,
               export_dtype="float32", validate_every_steps=1, checkpoint_every_steps=1)  # fmt: skip


def make_inputs(root: Path, family: str = "distilbert", **data: object) -> dict[str, object]:
    """A model without a head, and two sets to measure on."""
    model = save_base(CLASSIFIERS[family], root / "model")
    counts = {"train": 20, "small": 3, "large": 37}
    paths = {}
    for seed, (name, count) in enumerate(counts.items()):
        samples = make_class_samples(count, seed=seed, **data)
        paths[name] = str(write_classified(root / f"{name}.arrow", samples, model, **data))
    objective = "token-classification" if data.get("of_tokens") else "sequence-classification"
    return dict(model_name_or_path=str(model), objective=objective, data_path=paths["train"],
                validation_data_path=(paths["small"], paths["large"]))  # fmt: skip


def predict(export: Path, **data: object) -> tuple[np.ndarray, np.ndarray, float]:
    """Targets, logits and loss of both sets, by transformers."""
    samples = [sample for seed, count in ((1, 3), (2, 37)) for sample in make_class_samples(count, seed=seed, **data)]
    return predict_plainly(export, samples, **{name: value for name, value in data.items() if name != "num_labels"})


def read_validations(run: Path) -> list[dict]:
    return [{**row, "seconds": None} for row in read_lines(run / "validation_metrics_0.jsonl")]


@pytest.mark.parametrize("of_tokens", [False, True])
def test_the_scores_are_scikit_learns_of_transformers_own_predictions(of_tokens, world, tmp_path):
    inputs, run = make_inputs(tmp_path, of_tokens=of_tokens), tmp_path / "run"
    train_on(1, world, **inputs, **OPTIONS, output_dir=run)
    targets, logits, loss = predict(run / "hf_format" / "samples_24", of_tokens=of_tokens)
    targets, predicted = targets.reshape(-1).astype(int), logits.argmax(1)
    row = read_validations(run)[-1]
    assert (
        row["num_targets"] == len(targets) == row["sets"]["small"]["num_targets"] + row["sets"]["large"]["num_targets"]
    )
    assert row["accuracy"] == pytest.approx(metrics.accuracy_score(targets, predicted))
    assert row["f1"] == pytest.approx(metrics.f1_score(targets, predicted, average="macro"))
    assert row["f1_weighted"] == pytest.approx(metrics.f1_score(targets, predicted, average="weighted"))
    assert row["matthews"] == pytest.approx(metrics.matthews_corrcoef(targets, predicted))
    assert row["confusion_matrix"] == metrics.confusion_matrix(targets, predicted, labels=range(3)).tolist()
    report = metrics.classification_report(targets, predicted, output_dict=True, zero_division=0, labels=range(3))
    for i, of_class in enumerate(row["classes"].values()):
        expected = report[str(i)]
        assert of_class["f1"] == pytest.approx(expected["f1-score"])
        assert of_class["precision"] == pytest.approx(expected["precision"])
        assert of_class["num_targets"] == expected["support"]
    assert row["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.wide
@pytest.mark.slow
def test_ranks_and_kills_change_no_score_and_no_best(world, tmp_path):
    inputs = make_inputs(tmp_path)
    options = inputs | OPTIONS | dict(best_metric="f1", early_stopping_patience=9, validate_every_steps=2)
    whole = tmp_path / "whole"
    train_on(1, world, **options, output_dir=whole)
    rows = read_validations(whole)
    best = max(rows[1:], key=lambda row: row["f1"])
    note = json.loads((whole / "hf_format" / "best" / "validation.json").read_text())
    assert (note["step"], note["f1"]) == (best["step"], best["f1"])
    train_on(4, world, **options, output_dir=tmp_path / "four")  # more ranks than samples of the one set
    for ours, expected in zip(read_validations(tmp_path / "four"), rows, strict=True):
        assert ours["confusion_matrix"] == expected["confusion_matrix"] and ours["is_best"] == expected["is_best"]
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    killed = Path(shutil.copytree(whole, tmp_path / "killed"))
    forget_since(killed, 2)
    shutil.rmtree(killed / "hf_format" / "samples_24")
    train_on(1, world, **options, output_dir=killed)
    assert read_validations(killed) == rows
    names = ("model.safetensors", "config.json")
    there, then = (
        [(path / "hf_format" / "samples_24" / name).read_bytes() for name in names] for path in (killed, whole)
    )
    assert there == then


@pytest.mark.parametrize(("label_type", "num_labels"), [("multi", 3), ("regression", 2)])
def test_several_labels_and_values_are_scored_and_the_best_is_chosen(
    label_type, num_labels, world, tmp_path, monkeypatch
):
    data = dict(label_type=label_type, num_labels=num_labels)
    inputs, run = make_inputs(tmp_path, **data), tmp_path / "run"
    metric, choose = ("f1_micro", max) if label_type == "multi" else ("mae", min)
    latest = []
    monkeypatch.setattr("mini_trainer.run.exports.link_beside", lambda export, name: latest.append(export.name))
    train_on(1, world, **inputs, **OPTIONS, best_metric=metric, output_dir=run)
    assert latest == ["samples_24"]  # and never the best one
    targets, logits, _ = predict(run / "hf_format" / "samples_24", **data)
    *rows, row = read_validations(run)[1:]
    best = json.loads((run / "hf_format" / "best" / "validation.json").read_text())
    assert best[metric] == choose(each[metric] for each in (*rows, row))
    if label_type == "multi":
        predicted = logits > 0
        assert row["accuracy"] == pytest.approx(metrics.accuracy_score(targets, predicted))
        assert row["f1"] == pytest.approx(metrics.f1_score(targets, predicted, average="macro", zero_division=0))
        assert row["f1_micro"] == pytest.approx(metrics.f1_score(targets, predicted, average="micro"))
    else:
        assert row["mse"] == pytest.approx(row["loss"]) == pytest.approx(np.square(targets - logits).mean(), rel=1e-5)
        assert row["mae"] == pytest.approx(np.abs(targets - logits).mean(), rel=1e-5)
        pearson = np.mean([stats.pearsonr(targets[:, i], logits[:, i]).statistic for i in range(2)])
        assert row["pearson"] == pytest.approx(pearson, abs=1e-5)


@pytest.mark.parametrize("num_labels", [1, 2])
def test_without_a_class_is_no_class_of_its_own(num_labels):
    rng = np.random.default_rng(0)
    targets = (rng.random((40, num_labels)) < 0.3).astype(int)
    logits = rng.normal(size=targets.shape) + targets
    task = DataTask("sequence-classification", "multi", ("spam", "toxic")[:num_labels], num_labels)
    found, has, says = summarize_classes(task, targets, logits), targets == 1, logits > 0
    right, wrong, missed = (pairs.sum(0) for pairs in (has & says, ~has & says, has & ~says))
    f1 = 2 * right / (2 * right + wrong + missed)
    expected = dict(
        f1=f1.mean(), f1_weighted=np.average(f1, weights=has.sum(0)), precision=np.mean(right / says.sum(0))
    )
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["f1_micro"] == pytest.approx(2 * right.sum() / (has.sum() + says.sum()))
    of_classes = [(one["f1"], one["num_targets"]) for one in found["classes"].values()]
    assert np.array(of_classes) == pytest.approx(np.column_stack([f1, has.sum(0)]))
    counts = zip(40 - right - wrong - missed, wrong, missed, right, strict=True)
    assert np.array(found["confusion_matrix"]).reshape(-1, 4).tolist() == [list(one) for one in counts]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (dict(best_metric="perplexity"), "--best-metric perplexity: validations of this objective and data have loss"),
        (dict(objective="causal-lm"), "the data was tokenized for sequence-classification"),
        (dict(objective="token-classification"), "the data was tokenized for sequence-classification"),
        (dict(validation_data_path="four"), "--labels-from"),
        (dict(class_weights=("1", "2")), "a number of at least 0 for each of the 3 classes"),
        (dict(class_weights=("much",)), "--class-weights much: give balanced"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(changes, problem, world, tmp_path):
    options = make_inputs(tmp_path) | OPTIONS | dict(output_dir=str(tmp_path / "run")) | changes
    if options["validation_data_path"] == "four":
        samples = make_class_samples(4, num_labels=4)
        path = write_classified(tmp_path / "four.arrow", samples, tmp_path / "model", num_labels=4)
        options["validation_data_path"] = str(path)
    with pytest.raises(ValueError, match=problem):
        train_on(1, world, **options)
