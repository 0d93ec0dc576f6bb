"""Models mixed tensor by tensor: what torch makes of whole state dicts, whatever the files; and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.tools import MergeModelsOptions
from mini_trainer.tools.merge_models import merge_models


def make(path: Path, family: str, *, seed: int, dtype: torch.dtype, shard: str = "5GB") -> Path:
    model = AutoModelForCausalLM.from_pretrained(save_model(FAMILIES[family], path, seed=seed), dtype=dtype)
    shutil.rmtree(path)
    model.save_pretrained(path, max_shard_size=shard)
    return save_tokenizer(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Three of a kind: in one file, and in several; and the base that they are taken to be trained from."""
    root = tmp_path_factory.mktemp("models")
    kinds = dict(a="5GB", b="30KB", base="20KB")
    return {
        name: make(root / name, "llama_tied_bias", seed=seed, dtype=torch.bfloat16, shard=shard)
        for seed, (name, shard) in enumerate(kinds.items())
    }


def mix(output_dir: Path, **options: object) -> Path:
    given = MergeModelsOptions(output_dir=str(output_dir), **options)
    assert find_problems(given) == []
    merge_models(given)
    return output_dir


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("weights", [(0.25, 0.75), (1.5, -0.5), ()])
def test_a_weighted_mean_is_what_torch_makes_of_whole_models(weights, models, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mini_trainer.model.merging.SHARD_BYTES", 15_000
    )  # several files, and several pieces of a tensor
    monkeypatch.setattr("mini_trainer.model.merging.ROW_BYTES", 1000)
    path = mix(tmp_path / "mixed", model=(str(models["b"]), str(models["a"])), weights=weights)
    first, second = read_tensors(models["b"]), read_tensors(models["a"])
    w, v = weights or (0.5, 0.5)
    mixed = read_tensors(path)
    assert mixed.keys() == first.keys() and len(list(path.glob("*.safetensors"))) > 2
    for name, tensor in mixed.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, (w * first[name].float() + v * second[name].float()).bfloat16()), name
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    logits = model(**tokenizer("Hi", return_tensors="pt")).logits
    expected = AutoModelForCausalLM.from_pretrained(models["b"], dtype=torch.bfloat16)
    expected.load_state_dict(mixed, strict=False)
    expected.tie_weights()
    assert torch.equal(logits, expected(**tokenizer("Hi", return_tensors="pt")).logits)
    recipe = json.loads((path / "merge.json").read_text())
    assert [part["weight"] for part in recipe["models"]] == [w, v]


def test_task_vectors_are_added_to_their_base(models, tmp_path):
    names = dict(model=(str(models["a"]), str(models["b"])), base=str(models["base"]), weights=(0.4, 0.7))
    mixed = read_tensors(mix(tmp_path / "mixed", **names))
    a, b, base = (read_tensors(models[name]) for name in ("a", "b", "base"))
    for name, tensor in mixed.items():
        start = base[name].float()
        expected = start + 0.4 * (a[name].float() - start) + 0.7 * (b[name].float() - start)
        assert torch.equal(tensor, expected.bfloat16()), name
    alone = read_tensors(mix(tmp_path / "alone", model=(str(models["a"]),), base=str(models["base"]), weights=(1.0,)))
    assert all(torch.allclose(alone[name].float(), a[name].float(), rtol=1e-2, atol=1e-3) for name in a)


def test_no_more_is_held_than_a_file_that_is_written(models, tmp_path, monkeypatch):
    wide = AutoModelForCausalLM.from_pretrained(models["a"])
    big = {name: torch.randn(8, *tensor.shape) for name, tensor in wide.state_dict().items() if tensor.ndim == 2}
    for name in ("one", "two"):  # files of weights, whatever the config says of them
        shutil.copytree(models["a"], tmp_path / name)
        save_file(big, tmp_path / name / "model.safetensors")
    total = sum(tensor.nbytes for tensor in big.values())
    monkeypatch.setattr("mini_trainer.model.merging.SHARD_BYTES", total // 8)
    monkeypatch.setattr("mini_trainer.model.merging.ROW_BYTES", total // 50)
    saved = []
    monkeypatch.setattr(
        "mini_trainer.model.merging.save_file",
        lambda tensors, path, metadata: (
            saved.append(sum(t.nbytes for t in tensors.values())) or save_file(tensors, path)
        ),
    )
    mix(tmp_path / "mixed", model=(str(tmp_path / "one"), str(tmp_path / "two")))
    largest = max(tensor.nbytes for tensor in big.values())
    assert max(saved) <= max(total // 8, largest) and sum(saved) == total


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(hidden_act="gelu"), "their configs differ: hidden_act gelu and silu"),
        (dict(vocab_size=300), "their configs differ: vocab_size 300 and 288"),
        ("tensor", "it has no model.norm.weight"),
        ("shape", "model.norm.weight is [7], not [32]"),
        ("tokenizer", "their tokenizers differ"),
        ("pickle", "no weights"),
    ],
)
def test_models_that_are_not_of_one_kind_are_refused_by_name(change, reason, models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models["a"], other)
    if isinstance(change, dict):
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | change))
    elif change == "tokenizer":
        tokenizer = AutoTokenizer.from_pretrained(other)
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(other)
    elif change == "pickle":
        (other / "model.safetensors").rename(other / "pytorch_model.bin")
    else:
        tensors = load_file(other / "model.safetensors")
        norm = tensors.pop("model.norm.weight")
        save_file(tensors | ({"model.norm.weight": norm[:7].clone()} if change == "shape" else {}),
                  other / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(ValueError) as error:
        mix(tmp_path / "mixed", model=(str(other), str(models["b"])) if isinstance(change, dict) else
            (str(models["b"]), str(other)))  # fmt: skip
    assert reason in str(error.value)
    assert not (tmp_path / "mixed").exists() and list(tmp_path.glob(".writing*")) == []


def test_nothing_is_written_over(models, tmp_path):
    with pytest.raises(ValueError, match="already exists"):
        mix(tmp_path, model=(str(models["a"]), str(models["b"])))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(model=("a",)), "give at least two models"),
        (dict(model=("a", "b"), weights=(1.0,)), "given 1 for 2 models"),
        (dict(model=("a", "b"), weights=(0.5, 0.6)), "sum to 1.1, but without --base must sum to 1"),
        (dict(model=("a",), base="c"), "--base needs --weights"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, reason):
    problems = find_problems(MergeModelsOptions(output_dir="o", **options))
    assert any(reason in problem for problem in problems), problems
