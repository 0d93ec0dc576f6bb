"""Releases in GPTQ, AWQ and fp8 by row or tensor: read by their published definitions, trained, and exported whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from in_process import train_here
from quantizing import QWEN3_MOE, spoil_release
from quantizing_by_hand import (
    AWQ,
    FBGEMM,
    GPTQ,
    GPTQ_MODEL,
    MODELOPT,
    MODELOPT_FILE,
    pack_awq,
    pack_fp8,
    pack_gptq,
    save_by_hand,
)
from safetensors.torch import load_file, save_file
from small_runs import NUM_SAMPLES, OPTIONS, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE, load_source, save_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config

from mini_trainer.model.packed_integers import unpack_words
from mini_trainer.model.stored_tensors import find_quantization
from mini_trainer.model.weights import read_weights
from mini_trainer.objectives.families.text import TextFamily

MLP = "model.layers.0.mlp.down_proj"
OF_INPUTS = {"input_scale": torch.tensor(0.5), "input_scale_ub": torch.tensor([1200.0])}
RELEASES = {
    "gptq": (GPTQ | {"group_size": 32}, pack_gptq(4, 32), {}),
    "gptq, no groups": (GPTQ | {"group_size": -1}, pack_gptq(4, -1), {}),
    "gptq, last group shorter": (GPTQ | {"group_size": 40}, pack_gptq(4, 40, has_groups=False), {}),
    "gptq, desc_act": (GPTQ_MODEL | {"group_size": 32}, pack_gptq(4, 32, is_sorted=False), {}),
    "gptq_v2": (GPTQ_MODEL | {"checkpoint_format": "gptq_v2", "sym": False}, pack_gptq(4, 32, version=2), {}),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, pack_gptq(8, 32), {}),
    "gptq, 2 bits": (GPTQ | {"bits": 2}, pack_gptq(2, 32), {}),
    "gptq, 3 bits": (GPTQ | {"bits": 3}, pack_gptq(3, 32), {}),
    "gptq_v2, 3 bits": (GPTQ_MODEL | {"bits": 3, "format": "gptq_v2", "checkpoint_format": "gptq_v2"},
                        pack_gptq(3, 32, version=2, is_sorted=False), {}),
    "gptq, experts": (GPTQ, pack_gptq(4, 32), dict(config=QWEN3_MOE)),
    "awq": (AWQ | {"group_size": 32}, pack_awq(32), {}),
    "awq, half": (AWQ | {"group_size": 16}, pack_awq(16), dict(dtype="float16")),
    "fbgemm": (FBGEMM, pack_fp8(by_row=True, shape=(1,), more=OF_INPUTS), {}),
    "modelopt": (MODELOPT, pack_fp8(by_row=False, shape=(), more=OF_INPUTS), {}),
    "modelopt, rows": (MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, pack_fp8(by_row=True, shape=(), more={}),
                       {}),
}  # fmt: skip


def save(kind: str, path: Path) -> dict[str, torch.Tensor]:
    """Writes a release; returns the weights that its layers stand for."""
    settings, pack, options = RELEASES[kind]
    expected = save_by_hand(path, settings, pack, **options)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": options.get("dtype", "bfloat16")}))
    return expected


@pytest.mark.parametrize("kind", RELEASES)
def test_weights_are_those_that_the_format_defines(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_trainer.model.weights.read_whole", None)  # never the model as a whole
    expected = save(kind, tmp_path)
    readers = read_weights(load_source(tmp_path), TextFamily())
    assert len(expected) > 10
    if "experts" in kind:
        gate, up = (expected.pop(f"model.layers.0.mlp.experts.3.{name}_proj.weight") for name in ("gate", "up"))
        assert torch.equal(readers["model.layers.0.mlp.experts.gate_up_proj"]()[3], torch.cat([gate, up]))
    for name, weight in expected.items():
        if "experts" not in name:
            read = readers[name]()
            assert read.dtype == weight.dtype and torch.equal(read, weight), name


def test_zero_points_of_zero_borrow_from_their_neighbours_in_the_first_format(tmp_path):
    """GPTQModel subtracts one from each number of a word at once, in 32-bit arithmetic."""
    expected = save_by_hand(tmp_path, GPTQ | {"sym": False, "meta": {}}, pack_gptq(4, 32, version=2))
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith("qzeros")]:
        weights[name] -= 0x11111111
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    readers = read_weights(load_source(tmp_path), TextFamily())
    for name, weight in expected.items():
        assert torch.equal(readers[name](), weight), name


def test_words_hold_numbers_from_their_lowest_bits():
    words = torch.tensor([[0x76543210], [-1]], dtype=torch.int32)
    assert unpack_words(words, 4).flatten().tolist() == [*range(8), *[15] * 8]
    assert unpack_words(words, 8).flatten().tolist() == [0x10, 0x32, 0x54, 0x76, *[255] * 4]


def test_settings_in_a_file_of_their_own_are_read(tmp_path):
    for name, settings, kind in (
        ("hf_quant_config.json", MODELOPT_FILE, "modelopt"),
        ("quantize_config.json", {key: value for key, value in GPTQ.items() if key != "quant_method"}, "gptq"),
    ):
        path = tmp_path / kind
        expected = save(kind, path)
        config = json.loads((path / "config.json").read_text())
        del config["quantization_config"]
        (path / "config.json").write_text(json.dumps(config))
        (path / name).write_text(json.dumps(settings))
        assert find_quantization(path)["quant_method"] == kind
        readers = read_weights(load_source(path), TextFamily())
        assert torch.equal(readers[f"{MLP}.weight"](), expected[f"{MLP}.weight"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gptq, desc_act", pytest.param("awq", marks=pytest.mark.wide)])
def test_they_train_and_are_exported_as_the_models_that_they_stand_for(kind, world, tmp_path):
    release, plain = tmp_path / "release", tmp_path / "plain"
    save(kind, release)
    save_tokenizer(release)
    readers = read_weights(load_source(release), TextFamily())
    shutil.copytree(release, plain)
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    tensors = {name: read().contiguous() for name, read in readers.items() if "inv_freq" not in name}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    data = str(write_samples(tmp_path / "data.arrow", make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)))
    methods = {"full": {}, "lora": dict(lora=True, lora_rank=4, base_quantization="nf4", lora_export="merged")}
    for method, options in methods.items():
        exports = []
        for source in (release, plain):
            run = tmp_path / f"{method}_{source.name}"
            inputs = dict(model_name_or_path=str(source), data_path=data, output_dir=str(run), max_steps=2)
            train_here(world, **OPTIONS | inputs | options)
            exports.append(run / "hf_format/samples_16")
        ours, theirs = (load_file(export / "model.safetensors") for export in exports)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert read_rows(tmp_path / f"{method}_release") == read_rows(tmp_path / f"{method}_plain")
        assert "quantization_config" not in json.loads((exports[0] / "config.json").read_text())
        AutoModelForCausalLM.from_pretrained(exports[0])


def drop(key: str):
    return lambda weights, config: weights.pop(key)


def replace(key: str, tensor: torch.Tensor):
    return lambda weights, config: weights.update({key: tensor})


def configure(**settings: object):
    return lambda weights, config: config["quantization_config"].update(settings)


def make_words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


HOSTILE = [
    ("gptq", drop(f"{MLP}.scales"), f"{MLP} .*{MLP}.scales is missing"),
    ("gptq", drop(f"{MLP}.qweight"), f"{MLP}.g_idx, {MLP}.qzeros, {MLP}.scales .*missing"),
    ("gptq", replace(f"{MLP}.scales", torch.ones(3, 64, dtype=torch.int8)), rf"{MLP}.scales \[3, 64\] I8"),
    ("gptq", replace(f"{MLP}.qzeros", make_words(3, 5)), f"{MLP}.qzeros .*160 bits .*64 outputs"),
    ("gptq", replace(f"{MLP}.qzeros", make_words(2, 8)), rf"{MLP}.qzeros .*\[2, 8\], .*\[3, 8\]"),
    ("gptq", replace(f"{MLP}.g_idx", torch.zeros(8, dtype=torch.int32)), rf"{MLP}.g_idx .*\[8\], .*\[96\]"),
    ("gptq", configure(bits=5), "GPTQ's bits is 5,"),
    ("gptq", configure(checkpoint_format="marlin"), "GPTQ's checkpoint_format is 'marlin',"),
    ("gptq", configure(is_marlin_format=True), "GPTQ's checkpoint_format is 'marlin',"),
    ("gptq", configure(pack_dtype="int16"), "GPTQ's pack_dtype is 'int16',"),
    ("awq", drop(f"{MLP}.qzeros"), f"{MLP} .*{MLP}.qzeros is missing"),
    ("awq", replace(f"{MLP}.qweight", make_words(96, 7)), rf"{MLP}.qweight .*\[96, 7\],"),
    ("awq", configure(version="gemv_fast"), "AWQ's version is 'gemv_fast',"),
    ("awq", configure(backend="llm-awq"), "AWQ's version is 'llm-awq',"),
    ("awq", configure(bits=8), "AWQ's bits is 8,"),
    ("awq", configure(zero_point=False), "AWQ's zero_point is False,"),
    ("fbgemm", drop(f"{MLP}.weight_scale"), f"{MLP}.weight .*{MLP}.weight_scale is missing"),
    ("fbgemm", replace(f"{MLP}.weight_scale", torch.ones(3)), rf"{MLP}.weight \[64, 96\] .*\[3\] F32"),
    ("modelopt", configure(quant_algo="NVFP4"), "quant_algo is 'NVFP4',"),
]  # fmt: skip


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("releases")
    for kind in {kind for kind, _, _ in HOSTILE}:
        save(kind, root / kind)
    return root


@pytest.mark.parametrize(("kind", "spoil", "message"), HOSTILE)
def test_a_release_that_is_not_whole_or_in_another_layout_is_refused_by_name(kind, spoil, message, releases, tmp_path):
    path = spoil_release(releases / kind, tmp_path / "release", spoil)
    with pytest.raises(ValueError, match=message):
        read_weights(load_source(path), TextFamily())


def test_groups_that_do_not_exist_are_refused_when_a_weight_is_read(tmp_path):
    save("gptq", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[f"{MLP}.g_idx"][5] = 9
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{MLP}.g_idx .*group 9, .*3 groups"):
        read_weights(load_source(tmp_path), TextFamily())[f"{MLP}.weight"]()


def test_transposed_weights_are_refused(tmp_path):
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=64, dtype="bfloat16")
    save_by_hand(tmp_path, GPTQ, pack_gptq(4, 32), config=config)
    with pytest.raises(ValueError, match=r"gptq .*Conv1D"):
        read_weights(load_source(tmp_path), TextFamily())
