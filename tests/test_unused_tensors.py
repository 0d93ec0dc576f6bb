"""Tensors of a model's files that transformers' class has no place for: reported, and kept by exports byte by byte."""

import json
from pathlib import Path

import pytest
import torch
from exports import MODELS, export
from in_process import train_here
from peft_runs import LORA
from quantizing import save_fp8
from safetensors.torch import load_file, save_file
from small_runs import NUM_SAMPLES, OPTIONS
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, SHAPE, VOCAB_SIZE, load_source, save_model, save_tokenizer
from transformers import AutoModelForCausalLM

from mini_trainer.model.weights import list_left_out
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.options.tools import MergeAdapterOptions
from mini_trainer.tools.merge_adapter import merge_adapter

HIDDEN = SHAPE["hidden_size"]
# As releases call them: a whole layer behind the last one, or a module of its own.
BEHIND_THE_LAST = {
    "model.layers.2.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
    "model.layers.2.enorm.weight": (HIDDEN,),
    "model.layers.2.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
    "model.layers.2.mlp.experts.0.up_proj.weight": (16, HIDDEN),
    "model.layers.2.mlp.gate.e_score_correction_bias": (4,),
    "model.layers.2.shared_head.head.weight": (VOCAB_SIZE, HIDDEN),
}
A_MODULE = {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN), "mtp.layers.0.self_attn.q_proj.weight": (32, HIDDEN)}
CASES = [("deepseek_v3", BEHIND_THE_LAST), ("glm4_moe", BEHIND_THE_LAST), ("qwen3", A_MODULE), ("llama", A_MODULE)]
NUM_PREDICTED = dict(num_nextn_predict_layers=1)


def save_with(path: Path, family: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A model with tensors in bfloat16 of a file of their own beside its weights; those tensors."""
    save_tokenizer(save_model((FAMILIES | MODELS)[family], path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | NUM_PREDICTED))
    return add_file(path, {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()})


def add_file(path: Path, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moves to two files and an index."""
    own = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    save_file(more, path / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(own, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(more, "model-00002-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return more


def read_all(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def make_data(path: Path) -> str:
    return str(write_samples(path, make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)))


@pytest.mark.parametrize(("family", "shapes"), CASES)
def test_a_run_reports_and_exports_them(family, shapes, world, tmp_path, caplog):
    more = save_with(tmp_path / "model", family, shapes)
    given = dict(model_name_or_path=str(tmp_path / "model"), data_path=make_data(tmp_path / "data.arrow"))
    with caplog.at_level("INFO", logger="mini_trainer"):
        train_here(world, **OPTIONS | given, output_dir=str(tmp_path / "run"), max_steps=1)
    (line,) = [line for line in caplog.messages if f"hold {len(shapes)} tensors" in line]
    assert "exports " in line and "unchanged" in line
    assert ".".join(min(shapes).split(".")[:3]) in line
    (exported,) = (tmp_path / "run" / "hf_format").glob("samples_*")
    found = read_all(exported)
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in more.items())
    assert json.loads((exported / "config.json").read_text())["num_nextn_predict_layers"] == 1
    own = read_all(tmp_path / "model")
    assert found.keys() == own.keys()
    assert not torch.equal(found["model.norm.weight"], own["model.norm.weight"])
    report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)[1]
    assert not report["missing_keys"] and not report["mismatched_keys"]
    again = export(exported, tmp_path / "again", world)  # an export is a model like any other
    assert read_all(again).keys() == own.keys()


def test_a_merged_adapter_has_them(world, tmp_path):
    more = save_with(tmp_path / "model", "llama", A_MODULE)
    given = dict(model_name_or_path=str(tmp_path / "model"), data_path=make_data(tmp_path / "data.arrow"))
    run = dict(output_dir=str(tmp_path / "run"), max_steps=1, checkpoint_every_steps=1)
    train_here(world, **OPTIONS | LORA | given | run)
    (exported,) = (tmp_path / "run" / "hf_format").glob("samples_*")
    merge_adapter(MergeAdapterOptions(adapter=str(exported / "adapter"), output_dir=str(tmp_path / "merged")), world)
    for directory in (exported, tmp_path / "merged"):
        found = read_all(directory)
        assert all(torch.equal(found[name], tensor) for name, tensor in more.items())


def test_those_of_a_quantized_release_are_dequantized(tmp_path):
    path = tmp_path / "model"
    save_fp8(path)
    stored = load_file(path / "model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    extra = {name: tensor for name, tensor in stored.items() if name.startswith(f"{layer}.")}
    assert len(extra) == 2
    add_file(path, {name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in extra.items()})
    left_out = list_left_out(load_source(path), TextFamily())
    assert left_out.keys() == {"model.layers.2.mlp.down_proj.weight"}
    weight, scale = extra[f"{layer}.weight"].float(), extra[f"{layer}.weight_scale_inv"]
    rows, columns = (size // parts for size, parts in zip(weight.shape, scale.shape, strict=True))
    expected = weight * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    torch.testing.assert_close(
        left_out["model.layers.2.mlp.down_proj.weight"].read().float(), expected, rtol=1e-2, atol=0
    )


def test_an_embedding_among_them_grows_with_the_vocabulary(tmp_path):
    more = save_with(tmp_path / "model", "deepseek_v3", BEHIND_THE_LAST)
    source = load_source(tmp_path / "model")
    source.config.vocab_size = VOCAB_SIZE + 16
    left_out = list_left_out(source, TextFamily())
    assert left_out.keys() == more.keys()
    for name, tensor in more.items():
        read = left_out[name].read()
        assert read.dtype == torch.bfloat16 and read.shape == left_out[name].shape
        assert torch.equal(read[: len(tensor)], tensor)
        assert len(read) == len(tensor) + (16 if len(tensor) == VOCAB_SIZE else 0)
    rows = left_out["model.layers.2.embed_tokens.weight"].read()
    expected = more["model.layers.2.embed_tokens.weight"].float().mean(0)
    torch.testing.assert_close(rows[-1].float(), expected, rtol=1e-2, atol=1e-3)
