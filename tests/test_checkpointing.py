"""An untouched model is exported as it was loaded, whatever its family and however it was stored."""

import json

import pytest
import torch
from exports import MODELS, export
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, VOCAB_SIZE, build, load_source, save_model, save_tokenizer
from transformers import AutoModelForCausalLM

from mini_trainer.distributed.ending import RunError


@pytest.mark.parametrize("family", MODELS)
def test_an_export_gives_the_logits_of_the_model_it_was_loaded_from(family, world, tmp_path):
    path = save_tokenizer(save_model(MODELS[family], tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = torch.randn_like(weights[name])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    export_dir = export(path, tmp_path / "export", world)
    source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    exported, report = AutoModelForCausalLM.from_pretrained(export_dir, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    prompt = torch.randint(3, VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(0))
    assert torch.equal(exported.eval()(prompt).logits, source(prompt).logits)
    assert load_file(export_dir / "model.safetensors").keys() == weights.keys()


def test_weights_stored_wider_than_the_config_says_are_not_rounded(world, tmp_path):
    path = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    exported = load_file(export(path, tmp_path / "export", world) / "model.safetensors")
    for name, weight in load_file(path / "model.safetensors").items():
        assert torch.equal(exported[name], weight), name


def test_a_sharded_bf16_model_is_read_whole(world, tmp_path):
    path = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    exported = load_file(
        export(save_tokenizer(sharded), tmp_path / "export", world, dtype=torch.bfloat16) / "model.safetensors"
    )
    for name, weight in model.state_dict().items():
        assert torch.equal(exported[name], weight), name


def test_a_failed_write_is_one_message_and_leaves_nothing(world, tmp_path):
    path = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    (tmp_path / "hf_format").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot write .*samples_1"):
        export(path, tmp_path / "hf_format" / "samples_1", world)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf_format", "model"]


def change_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_models_that_would_be_read_wrongly_are_refused(world, tmp_path):
    tied = save_model(FAMILIES["llama"], tmp_path / "tied")
    change_config(tied, tie_word_embeddings=True)
    with pytest.raises(RunError, match=r"tied: .*tie_word_embeddings"):
        build(tied, world)
    quantized = save_model(FAMILIES["llama"], tmp_path / "quantized")
    change_config(quantized, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ValueError, match=r"quantized: .*'hqq'"):
        load_source(quantized)
    incomplete = save_model(FAMILIES["llama"], tmp_path / "incomplete")
    weights = load_file(incomplete / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, incomplete / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"incomplete: .*model\.norm\.weight"):
        build(incomplete, world)
    (incomplete / "model.safetensors").write_bytes((tied / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(RunError, match=r"incomplete: .*header"):
        build(incomplete, world)
