"""Classifiers measured side by side: scores by transformers and scikit-learn.

Reward models are measured on pairs by their rewards, language models by log-probabilities, as transformers has them.
"""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_classifiers
import torch
from evaluations import evaluate_here, list_means
from in_process import train_here
from sklearn import metrics
from tiny_classifiers import CLASSIFIERS, make_class_samples, predict_plainly, save_classifier, write_classified
from tiny_data import make_samples, read_lines, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from tiny_pairs import NUM_PAIRS, sum_plainly, write_pairs
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mini_trainer.data.columns.base import SEQUENCES, TOKENS, DataTask, list_sequences
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.objectives.classes import make_labels

NUM_SAMPLES, NUM_LABELS = 24, 3
KINDS = {
    "single": dict(label_type="single"),
    "multi": dict(label_type="multi"),
    "regression": dict(label_type="regression"),
    "tokens": dict(of_tokens=True),
}
NAMES = tuple(f"class {i}" for i in range(NUM_LABELS))


def make_inputs(root: Path, kind: str) -> dict[str, str]:
    """Two classifiers and a set for them."""
    config, names = copy.deepcopy(CLASSIFIERS["bert"]), () if kind == "regression" else NAMES
    label_type, data_kind = KINDS[kind].get("label_type", "single"), TOKENS if kind == "tokens" else SEQUENCES
    make_labels(DataTask(data_kind, label_type, names, NUM_LABELS)).write_into(config)
    models = [
        save_classifier(config, root / name, num_labels=NUM_LABELS, of_tokens=kind == "tokens", seed=seed)
        for seed, name in enumerate(("first", "second"))
    ]
    data = write_classified(
        root / "data.arrow", make_class_samples(NUM_SAMPLES, **KINDS[kind]), models[0], **KINDS[kind]
    )
    return dict(first=str(models[0]), second=str(models[1]), data=str(data))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, dict[str, str]]:
    root = tmp_path_factory.mktemp("classes")
    for kind in KINDS:
        (root / kind).mkdir()
    return {kind: make_inputs(root / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers_and_scikit_learn(kind, world, inputs, tmp_path):
    files = inputs[kind]
    models, samples = (files["first"], files["second"]), make_class_samples(NUM_SAMPLES, **KINDS[kind])
    found = evaluate_here(world, tmp_path, model=models, data=files["data"])
    (measured,) = found["sets"]
    assert measured["kind"] == "classes"
    means = list_means(measured)
    for i, model in enumerate(models):
        targets, logits, loss = predict_plainly(model, samples, **KINDS[kind])
        lines = read_lines(tmp_path / "samples" / Path(model).name / "data.predictions.jsonl")
        np.testing.assert_allclose([line["logits"] for line in lines], logits, atol=1e-5)
        assert means["loss"][i] == pytest.approx(loss, rel=1e-5)
        extras = measured["extras"][i]["classification"]
        if kind == "regression":
            assert list(means) == ["loss", "mae"]
            assert means["mae"][i] == pytest.approx(metrics.mean_absolute_error(targets, logits), rel=1e-5)
            assert extras["mse"] == pytest.approx(means["loss"][i])
            continue
        predicted = (logits > 0).astype(int) if kind == "multi" else logits.argmax(1)
        assert list(means) == ["accuracy", "loss"]
        assert means["accuracy"][i] == pytest.approx(metrics.accuracy_score(targets, predicted))
        assert extras["f1"] == pytest.approx(metrics.f1_score(targets, predicted, average="macro", zero_division=0))
    page = (tmp_path / "results.html").read_text()
    assert "sample 3" in page
    # What is there is read, and gives the same.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "samples").rglob("*")}
    assert evaluate_here(world, tmp_path, model=models, data=files["data"]) == found
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "samples").rglob("*")} == before


@pytest.mark.parametrize("method", ["full", "lora"])
def test_scores_of_an_export_are_those_of_the_runs_validation(method, world, inputs, tmp_path):
    adapter = dict(lora=True, lora_rank=2) if method == "lora" else {}
    model, data = tiny_classifiers.save_base(CLASSIFIERS["distilbert"], tmp_path / "base"), inputs["single"]["data"]
    train_here(
        world, **adapter, model_name_or_path=str(model), data_path=data, validation_data_path=data, max_steps=2,
        objective=SEQUENCES, batch_size=8, max_tokens_per_gpu=64, learning_rate=1e-2, export_dtype="float32",
        output_dir=str(tmp_path / "run"), export_best=False,
    )  # fmt: skip
    last = read_lines(tmp_path / "run" / "validation_metrics_0.jsonl")[-1]
    (export,) = map(str, (tmp_path / "run" / "hf_format").glob("samples_*"))
    (measured,) = evaluate_here(world, tmp_path / "found", model=export, data=data)["sets"]
    for name, (mean,) in list_means(measured).items():
        assert mean == pytest.approx(last[name], rel=1e-6), name
    assert measured["extras"][0]["classification"]["confusion_matrix"] == last["confusion_matrix"]


def test_sets_that_are_not_for_a_model_are_refused(world, inputs, tmp_path):
    single, chats = inputs["single"], tmp_path / "chats.arrow"
    language_model = str(save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "llama")))
    base = str(tiny_classifiers.save_base(CLASSIFIERS["bert"], tmp_path / "base"))
    write_samples(chats, make_samples(3, vocab_size=VOCAB_SIZE))
    sidecar = json.loads(Path(f"{single['data']}.meta.json").read_text())
    other = tmp_path / "other.arrow"
    other.write_bytes(Path(single["data"]).read_bytes())
    Path(f"{other}.meta.json").write_text(json.dumps(sidecar | dict(label_names=["a", "class 1", "class 2"])))
    (tmp_path / "task.jsonl").write_text('{"question": "Hi", "answer": "Ho"}\n')
    for given, reason in (
        (dict(model=language_model, data=single["data"]), "llama for causal-lm"),
        (dict(model=base, data=single["data"]), "base for causal-lm"),
        (dict(model=single["first"], data=str(chats)), "first for sequence-classification"),
        (dict(model=single["first"], data=inputs["tokens"]["data"]), "first for sequence-classification"),
        (dict(model=single["first"], data=str(other)), "the labels a, class 1, class 2, but the labels of --model"),
        (dict(model=single["first"], data=inputs["multi"]["data"]), "for single_label_classification"),
        (dict(model=single["first"], task=str(tmp_path / "task.jsonl")), "is a classifier"),
    ):
        with pytest.raises(ValueError, match=reason):
            evaluate_here(world, tmp_path / "out", **given)
        assert not (tmp_path / "out" / "results.json").exists()


@pytest.fixture(scope="module")
def languages(tmp_path_factory) -> tuple[Path, Path]:
    """Two language models with one tokenizer."""
    root = tmp_path_factory.mktemp("languages")
    return tuple(
        save_tokenizer(save_model(FAMILIES["llama"], root / name, seed=seed)) for seed, name in enumerate("ab")
    )


@torch.no_grad()
def measure_plainly(model: torch.nn.Module, data: Path) -> dict[str, np.ndarray]:
    """Each pair's two numbers, (pairs, 2), its weight, and its margin."""
    found, numbers, weights, margins = Mixture([TokenizedData(data)]), [], [], []
    for row in range(NUM_PAIRS):
        sample = found.read(row)
        for ids, labels in zip(
            list_sequences(sample), np.split(sample["labels"], sample["sequence_lengths"][:1]), strict=True
        ):
            if hasattr(model, "score"):
                numbers.append(float(model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 0]))
            else:
                numbers.append(float(sum_plainly(model, ids, labels)) / (labels != -100).sum())
        weights.append(float(sample["pair_weight"][0]))
        margins.append(float(sample["margin"][0]))
    return {"numbers": np.array(numbers).reshape(-1, 2), "weights": np.array(weights), "margins": np.array(margins)}


@pytest.mark.parametrize("kind", ["language", "reward"])
def test_scores_are_those_of_a_plain_loop(kind, languages, world, tmp_path):
    data = write_pairs(tmp_path / "pairs.arrow", languages[0], numbers=True)
    models, auto_class = languages, AutoModelForCausalLM
    if kind == "reward":
        auto_class = AutoModelForSequenceClassification
        models = [save_classifier(FAMILIES["llama"], tmp_path / f"reward{i}", num_labels=1, seed=i) for i in range(2)]
    found = evaluate_here(world, tmp_path / "out", model=tuple(map(str, models)), data=str(data))
    (measured,) = found["sets"]
    assert measured["kind"] == "pairs"
    means = list_means(measured)
    for i, path in enumerate(models):
        expected = measure_plainly(auto_class.from_pretrained(path, dtype=torch.float32).eval(), data)
        (chosen, rejected), weights = expected["numbers"].T, expected["weights"]
        losses = -logsigmoid(torch.from_numpy(chosen - rejected - expected["margins"])).numpy()
        for name, values in (("accuracy", chosen > rejected), ("margin", chosen - rejected), ("loss", losses)):
            assert means[name][i] == pytest.approx(np.average(values, weights=weights), rel=1e-4, abs=1e-6), name
    assert "--- or ---" in (tmp_path / "out/results.html").read_text()


def test_models_of_another_kind_are_refused(languages, world, tmp_path):
    data = write_pairs(tmp_path / "pairs.arrow", languages[0])
    classifier = save_classifier(FAMILIES["llama"], tmp_path / "classes", num_labels=3)
    with pytest.raises(ValueError, match=r"--model .*3 outputs"):
        evaluate_here(world, tmp_path / "out", model=(str(classifier),), data=str(data))
    feedback = write_pairs(tmp_path / "feedback.arrow", languages[0], good=True)
    with pytest.raises(ValueError, match=r"feedback, but --model .* causal-lm"):
        evaluate_here(world, tmp_path / "out", model=(str(languages[0]),), data=str(feedback))
