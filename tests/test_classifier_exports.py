"""A classifier's head: begun anew where the model's files have none, trained by every method, and in every export."""

import json
import re
from pathlib import Path

import pytest
import torch
from card_usage import run_usage
from forked import run_forked
from in_process import train_here
from peft import PeftModel
from processes import flags
from safetensors.torch import load_file, save_file
from tiny_classifiers import CLASSIFIERS, make_class_samples, save_base, save_classifier, write_classified
from tiny_models import save_model, save_tokenizer
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from mini_trainer.distributed.ending import RunError

OPTIONS = dict(batch_size=8, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=2, export_dtype="float32")
NAMES = {0: "class 0", 1: "class 1", 2: "class 2"}


def train(world, model: Path, root: Path, *, of_tokens: bool = False, **options: object) -> Path:
    """The export of a short run."""
    data = write_classified(
        root / "data.arrow", make_class_samples(16, of_tokens=of_tokens), model, of_tokens=of_tokens
    )
    objective = "token-classification" if of_tokens else "sequence-classification"
    train_here(world, model_name_or_path=str(model), data_path=str(data), objective=objective,
               output_dir=str(root / "run"), **OPTIONS | options)  # fmt: skip
    return root / "run" / "hf_format" / "samples_16"


def read_step(export: Path, number: int = 0) -> dict:
    return json.loads((export.parents[1] / "training_metrics_0.jsonl").read_text().splitlines()[number])


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
    options = OPTIONS | run | dict(objective="sequence-classification", dry_run=True, plan_for="2")
    result = run_forked(0, "train.py", *flags(**options))
    assert result.returncode == 0, result.stderr
    assert "modernbert" in result.stdout and not (tmp_path / "run").exists()
