"""Classifiers train as a plain loop of transformers does: encoders and decoders, packed, on any number of ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import long, wide
from in_process import train_on
from plain_loop import train_plainly
from safetensors.torch import load_file
from tiny_classifiers import CLASSIFIERS, make_class_samples, save_classifier, write_classified
from tiny_models import FAMILIES
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.sampler import draw_samples

NUM_SAMPLES, BATCH_SIZE, STEPS, LEARNING_RATE, SEED = 24, 7, 3, 1e-3, 5
OPTIONS = dict(batch_size=BATCH_SIZE, max_tokens_per_gpu=64, max_steps=STEPS, learning_rate=LEARNING_RATE, seed=SEED,
               weight_decay=0.1, max_grad_norm=1.0, export_dtype="float32", adam_eps=1e-4)  # fmt: skip
ALWAYS = ("bert", "modernbert", "llama")  # families of which no case is left out of `make test`


def make_inputs(root: Path, family: str, *, of_tokens: bool = False, **data: object) -> dict[str, str]:
    """A model with a head and a data set, as options; pairs of texts where the model knows them."""
    config = CLASSIFIERS[family]
    model = save_classifier(config, root / "model", of_tokens=of_tokens, num_labels=data.get("num_labels", 3))
    has_types = getattr(config, "type_vocab_size", 0) > 1
    samples = make_class_samples(NUM_SAMPLES, of_tokens=of_tokens, has_types=has_types, **data)
    path = write_classified(root / "data.arrow", samples, model, of_tokens=of_tokens, **data)
    objective = "token-classification" if of_tokens else "sequence-classification"
    return dict(model_name_or_path=str(model), data_path=str(path), objective=objective)


def pad_batch(samples: list, *, of_tokens: bool, label_type: str, pad_token_id: int) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def pad(values, filler: int) -> torch.Tensor:
        return torch.tensor([[*map(int, row), *[filler] * (longest - len(row))] for row in values])

    batch = dict(
        input_ids=pad([sample["input_ids"] for sample in samples], pad_token_id),
        attention_mask=pad([[1] * len(sample["input_ids"]) for sample in samples], 0),
    )
    if "token_type_ids" in samples[0]:
        batch["token_type_ids"] = pad([sample["token_type_ids"] for sample in samples], 0)
    if of_tokens:
        return batch | dict(labels=pad([sample["labels"] for sample in samples], IGNORED))
    targets = torch.stack([torch.from_numpy(sample["target"].copy()) for sample in samples])
    return batch | dict(labels=targets[:, 0].long() if label_type == "single" else targets)


def train_with_transformers(inputs: dict, *, label_type: str = "single", loss=None) -> tuple[list, list, dict]:
    """The run as it is written with transformers, padding and AdamW alone: losses, norms, weights."""
    of_tokens = inputs["objective"] == "token-classification"
    data = Mixture([TokenizedData(inputs["data_path"])])
    problem = {"single": "single_label_classification", "multi": "multi_label_classification"}
    auto_class = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    model = auto_class.from_pretrained(
        inputs["model_name_or_path"], problem_type=problem.get(label_type, label_type), attn_implementation="eager"
    ).train()
    model.config.pad_token_id = pad_token_id = 0 if model.config.pad_token_id is None else model.config.pad_token_id

    def backward(rows: list[int], start: int) -> float:
        samples = [data.read(row) for row in rows]
        batch = pad_batch(samples, of_tokens=of_tokens, label_type=label_type, pad_token_id=pad_token_id)
        outputs = model(**batch)
        mean = outputs.loss if loss is None else loss(outputs.logits, batch["labels"])
        mean.backward()
        return mean.item()

    sizes = dict(num_steps=STEPS, batch_size=BATCH_SIZE, seed=SEED)
    losses, norms = train_plainly(model, data, backward, **sizes, learning_rate=LEARNING_RATE, eps=1e-4)
    return losses, norms, dict(model.named_parameters())


def read_rows(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "training_metrics_0.jsonl").read_text().splitlines()]


def assert_equal_to(output_dir: Path, expected: tuple[list, list, dict]) -> None:
    losses, norms, weights = expected
    rows = read_rows(output_dir)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-6, abs=1e-6)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
    exported = load_file(output_dir / "hf_format" / f"samples_{STEPS * BATCH_SIZE}" / "model.safetensors")
    for name, weight in weights.items():
        if name in exported:  # all but what is tied
            torch.testing.assert_close(exported[name], weight, rtol=0, atol=1e-6)
    assert exported.keys() & weights.keys()


def test_experts_have_no_auxiliary_loss_just_as_in_transformers(world, tmp_path, monkeypatch):
    """Even if the config asks for one: the classes of transformers compute it only for language models."""
    config = type(FAMILIES["mixtral"]).from_dict(FAMILIES["mixtral"].to_dict() | dict(output_router_logits=True))
    monkeypatch.setitem(CLASSIFIERS, "mixtral", config)
    inputs = make_inputs(tmp_path, "mixtral")
    train_on(1, world, **inputs, **OPTIONS, output_dir=str(tmp_path / "run"))
    assert_equal_to(tmp_path / "run", train_with_transformers(inputs))


@pytest.mark.parametrize("family", [family if family in ALWAYS else long(family) for family in CLASSIFIERS])
def test_a_packed_run_is_the_plain_loop(family, world, tmp_path):
    inputs = make_inputs(tmp_path, family)
    train_on(1, world, **inputs, **OPTIONS, output_dir=tmp_path / "run")
    assert_equal_to(tmp_path / "run", train_with_transformers(inputs))


@pytest.mark.parametrize("family", ["bert", "deberta_v2", "modernbert", "qwen3"])
def test_tokens_are_classified_as_in_the_plain_loop(family, world, tmp_path):
    inputs = make_inputs(tmp_path, family, of_tokens=True)
    train_on(1, world, **inputs, **OPTIONS, output_dir=tmp_path / "run", activation_checkpointing="selective")
    assert_equal_to(tmp_path / "run", train_with_transformers(inputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "family"),
    [(2, "bert"), wide(4, "deberta_v2"), wide(2, "modernbert"), long(4, "llama"), wide(2, "gemma3")],
)
def test_any_number_of_ranks_is_the_plain_loop(num_ranks, family, world, tmp_path):
    inputs = make_inputs(tmp_path, family)
    train_on(num_ranks, world, **inputs, **OPTIONS, output_dir=tmp_path / "run")
    assert_equal_to(tmp_path / "run", train_with_transformers(inputs))


def weigh_classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([0.5, 2.0, 1.25])
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), weight=weights, label_smoothing=0.1, ignore_index=IGNORED
    )


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        (dict(label_type="multi"), None),
        (dict(label_type="regression", num_labels=1), None),
        (dict(label_type="regression", num_labels=2), None),
        (dict(class_weights=("0.5", "2", "1.25"), label_smoothing=0.1), weigh_classes),
        (dict(of_tokens=True, class_weights=("0.5", "2", "1.25"), label_smoothing=0.1), weigh_classes),
    ],
)
def test_every_loss_is_torchs_mean_over_the_global_batch(options, loss, world, tmp_path):
    data = {name: value for name, value in options.items() if name in ("label_type", "num_labels", "of_tokens")}
    inputs = make_inputs(tmp_path, "electra", **data)
    run = {name: value for name, value in options.items() if name not in data}
    train_on(1, world, **inputs, **run, **OPTIONS, output_dir=tmp_path / "run", activation_checkpointing="none")
    assert_equal_to(
        tmp_path / "run", train_with_transformers(inputs, label_type=data.get("label_type", "single"), loss=loss)
    )


def test_what_each_of_several_sets_had_is_told_by_its_own_weights(world, tmp_path):
    inputs = make_inputs(tmp_path, "electra")
    model = Path(inputs["model_name_or_path"])
    more = write_classified(tmp_path / "more.arrow", make_class_samples(9, seed=1, longest=2), model)
    inputs["data_path"] = (inputs["data_path"], str(more))
    train_on(1, world, **inputs, **OPTIONS, class_weights=("0.5", "2", "1.25"), output_dir=tmp_path / "run")
    weights = np.array([0.5, 2.0, 1.25])
    data = Mixture([TokenizedData(path) for path in inputs["data_path"]])
    for step, row in enumerate(read_rows(tmp_path / "run")):
        rows = draw_samples(data, seed=SEED, start=step * BATCH_SIZE, count=BATCH_SIZE)
        divisors = np.zeros(2)
        np.add.at(
            divisors, data.numbers.source_of(rows), [weights[int(data.read(r)["target"][0])] for r in rows.tolist()]
        )
        losses = [source["loss"] or 0.0 for source in row["sources"].values()]
        assert (losses * divisors).sum() / divisors.sum() == pytest.approx(row["loss"], rel=1e-5)


def test_texts_longer_than_the_models_positions_are_refused(world, tmp_path):
    inputs = make_inputs(tmp_path, "roberta")
    write_classified(Path(inputs["data_path"]), make_class_samples(24, longest=95), Path(inputs["model_name_or_path"]))
    with pytest.raises(ValueError, match=r" 78 tokens, .* 9[0-9]: .*--drop-overlong"):
        train_on(1, world, **inputs, **OPTIONS | dict(max_tokens_per_gpu=99), output_dir=tmp_path / "run")
