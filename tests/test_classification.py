"""Classifiers train as a plain loop of transformers does: encoders and decoders, packed, on any number of ranks.

A head is begun where the model's files have none, trained by every method, and in every export.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import long
from card_usage import run_usage
from forked import succeed
from in_process import train_here, train_on
from peft import PeftModel
from plain_loop import train_plainly
from processes import flags
from safetensors.torch import load_file, save_file
from small_runs import read_rows
from tiny_classifiers import CLASSIFIERS, make_class_samples, save_base, save_classifier, write_classified
from tiny_models import FAMILIES, save_model, save_tokenizer
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import RunError
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


def on_ranks(num_ranks: int, family: str, *marks: pytest.MarkDecorator):
    return pytest.param(num_ranks, family, False, marks=[pytest.mark.slow, *marks])


@pytest.mark.parametrize(
    ("num_ranks", "family", "of_tokens"),
    [
        *((1, family, False) if family in ALWAYS else long(1, family, False) for family in CLASSIFIERS),
        *((1, family, True) for family in ("bert", "deberta_v2", "modernbert", "qwen3")),
        *(on_ranks(2, "bert"), on_ranks(4, "llama", pytest.mark.long), on_ranks(4, "deberta_v2", pytest.mark.wide)),
        *(on_ranks(2, family, pytest.mark.wide) for family in ("modernbert", "gemma3")),
    ],
)
def test_a_packed_run_is_the_plain_loop(num_ranks, family, of_tokens, world, tmp_path):
    inputs = make_inputs(tmp_path, family, of_tokens=of_tokens)
    recompute = dict(activation_checkpointing="selective") if of_tokens else {}
    train_on(num_ranks, world, **inputs, **OPTIONS, **recompute, output_dir=tmp_path / "run")
    assert_equal_to(tmp_path / "run", train_with_transformers(inputs))


def weigh_classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([0.05, 0.2, 0.125])  # of a batch less than 1
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), weight=weights, label_smoothing=0.1, ignore_index=IGNORED
    )


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        (dict(label_type="multi"), None),
        (dict(label_type="regression", num_labels=1), None),
        (dict(label_type="regression", num_labels=2), None),
        (dict(class_weights=("0.05", "0.2", "0.125"), label_smoothing=0.1), weigh_classes),
        (dict(of_tokens=True, class_weights=("0.05", "0.2", "0.125"), label_smoothing=0.1), weigh_classes),
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


EXPORTING = dict(batch_size=8, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=2, export_dtype="float32")
NAMES = {0: "class 0", 1: "class 1", 2: "class 2"}


def train(world, model: Path, root: Path, *, of_tokens: bool = False, **options: object) -> Path:
    """The export of a short run."""
    data = write_classified(
        root / "data.arrow", make_class_samples(16, of_tokens=of_tokens), model, of_tokens=of_tokens
    )
    objective = "token-classification" if of_tokens else "sequence-classification"
    train_here(world, model_name_or_path=str(model), data_path=str(data), objective=objective,
               output_dir=str(root / "run"), **EXPORTING | options)  # fmt: skip
    return root / "run" / "hf_format" / "samples_16"


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta_v2", "llama"])
def test_a_head_that_is_not_there_begins_as_transformers_would_begin_it(family, world, tmp_path, caplog):
    """From the checkpoint of a language model, whose own head is left out; the same whenever it is begun."""
    config = CLASSIFIERS[family]
    if family == "llama":
        model = save_model(config, tmp_path / "model")
    else:
        torch.manual_seed(0)
        AutoModelForMaskedLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
        model = tmp_path / "model"
    save_tokenizer(model)
    with caplog.at_level("INFO", logger="mini_trainer"):
        export = train(world, model, tmp_path, learning_rate=0.0)
    stored, exported = load_file(model / "model.safetensors"), load_file(export / "model.safetensors")
    made = exported.keys() - stored.keys()
    assert all(name in caplog.text for name in made) and "newly initialized" in caplog.text
    assert all(torch.equal(weight, stored[name]) for name, weight in exported.items() if name in stored)
    _, report = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3, output_loading_info=True)
    assert made == set(report["missing_keys"])
    for name in made:
        weight = exported[name]
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name.lower():
            assert weight.eq(1).all(), name
        else:
            assert 0.02 < weight.std() < 0.5 and abs(weight.mean()) < 0.1, f"{name}: {weight.std()}"
    again = tmp_path / "again"
    again.mkdir()
    other = load_file(train(world, model, again, learning_rate=0.0) / "model.safetensors")
    assert all(torch.equal(weight, other[name]) for name, weight in exported.items())


@pytest.mark.wide
def test_a_head_for_other_labels_is_begun_anew_and_one_for_as_many_is_kept(world, tmp_path, caplog):
    for num_labels in (5, 3):
        root = tmp_path / str(num_labels)
        model = save_classifier(CLASSIFIERS["electra"], root / "model", num_labels=num_labels)
        caplog.clear()
        with caplog.at_level("INFO", logger="mini_trainer"):
            exported = load_file(train(world, model, root, learning_rate=0.0) / "model.safetensors")
        stored = load_file(model / "model.safetensors")
        assert torch.equal(exported["classifier.dense.weight"], stored["classifier.dense.weight"])
        if num_labels == 5:
            assert exported["classifier.out_proj.weight"].shape == (3, 32)
            assert re.search(r"classifier\.out_proj\.weight .*other labels", caplog.text)
        else:
            assert torch.equal(exported["classifier.out_proj.weight"], stored["classifier.out_proj.weight"])


def test_what_else_is_missing_is_refused(world, tmp_path):
    model = save_base(CLASSIFIERS["bert"], tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"missing_keys: \['bert\.encoder\.layer\.1\.output\.dense\.weight'\]"):
        train(world, model, tmp_path)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", {}),
        ("qwen3", dict(osft=True, osft_unfreeze_rank_ratio=0.5)),
        ("roberta", dict(lora=True, lora_export="merged")),
        ("distilbert", dict(osft=True, osft_unfreeze_rank_ratio=0.5, activation_checkpointing="selective")),
    ],
)
def test_an_export_is_loaded_by_pipelines_with_its_labels_and_its_trained_head(
    family, options, world, tmp_path, monkeypatch
):
    model = save_classifier(CLASSIFIERS[family], tmp_path / "model")
    if "osft" in options:
        options = options | dict(osft_cache_dir=str(tmp_path / "cache"))
    export = train(world, model, tmp_path, **options)
    start, end = (load_file(path / "model.safetensors") for path in (model, export))
    heads = [name for name in end if name.startswith(("classifier", "score", "pre_classifier"))]
    assert heads and all(not torch.equal(start[name], end[name]) for name in heads)
    classify = pipeline("text-classification", model=str(export), top_k=None)
    assert classify.model.config.id2label == NAMES
    assert classify.model.config.problem_type == "single_label_classification"
    scores = classify(["a", "a longer text"])  # a batch: the model knows what is padding
    assert [sorted(score["label"] for score in of_text) for of_text in scores] == [sorted(NAMES.values())] * 2
    assert "pipeline_tag: text-classification" in (export / "README.md").read_text()
    templates = [AutoTokenizer.from_pretrained(path).chat_template for path in (model, export)]
    assert templates[0] and templates[1] is None  # sentence-transformers would render the texts by it
    run_usage(export, monkeypatch)


def test_a_token_classifier_is_loaded_by_pipelines(world, tmp_path, monkeypatch):
    model = save_base(CLASSIFIERS["electra"], tmp_path / "model")
    export = train(world, model, tmp_path, of_tokens=True)
    tag = pipeline("token-classification", model=str(export))
    assert {found["entity"] for found in tag("some words")} <= set(NAMES.values()) and len(tag("some words")) > 1
    assert AutoModelForTokenClassification.from_pretrained(export).config.id2label == NAMES
    run_usage(export, monkeypatch)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_an_adapter_brings_its_head_along(family, world, tmp_path):
    """QLoRA of the decoder: peft's model on the same weights gives the logits of the merged export."""
    packs = dict(base_quantization="nf4") if family == "llama" else {}
    model = save_base(CLASSIFIERS[family], tmp_path / "model")
    export = train(world, model, tmp_path, lora=True, lora_rank=4, lora_export="both", **packs)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3).eval()
    with_adapter = PeftModel.from_pretrained(base, export / "adapter").eval()
    merged = AutoModelForSequenceClassification.from_pretrained(export).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(export)("some words")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(
            with_adapter(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-5, atol=1e-5
        )
    config = json.loads((export / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"


@pytest.mark.long
@pytest.mark.slow
def test_a_plan_counts_a_classifier(tmp_path):
    model = save_base(CLASSIFIERS["modernbert"], tmp_path / "model")
    data = write_classified(tmp_path / "data.arrow", make_class_samples(16), model)
    run = dict(model_name_or_path=model, data_path=data, output_dir=tmp_path / "run", activation_checkpointing="none")
    options = EXPORTING | run | dict(objective="sequence-classification", dry_run=True, plan_for="2")
    result = succeed(0, "train.py", *flags(**options))
    assert "modernbert" in result.stdout and not (tmp_path / "run").exists()
