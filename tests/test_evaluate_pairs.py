"""Models measured on pairs: reward models by their rewards, language models by log-probabilities, as transformers has
them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from evaluations import evaluate_here, list_means
from tiny_classifiers import save_classifier
from tiny_models import FAMILIES, save_model, save_tokenizer
from tiny_pairs import NUM_PAIRS, sum_plainly, write_pairs
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mini_trainer.data.columns.base import list_sequences
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData


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
