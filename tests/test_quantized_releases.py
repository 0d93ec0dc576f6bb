"""Quantized releases are read as their own libraries dequantize them, and train and export like any other model."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from forked import succeed
from in_process import train_here
from processes import flags
from quantizing import (
    QWEN3,
    RELEASES,
    load_dequantized,
    rewrite,
    save_bf16,
    save_bitsandbytes,
    save_fp8,
    save_release,
    spoil_release,
)
from safetensors.torch import load_file, save_file
from small_runs import NUM_SAMPLES, OPTIONS
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE, change_json, load_source, save_tokenizer
from transformers import GPT2Config

from mini_trainer.model.weights import read_weights
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.options.tools import MergeAdapterOptions
from mini_trainer.tools.merge_adapter import merge_adapter

STEPS = 3


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # to dequantize
@pytest.mark.parametrize("kind", [kind for kind in RELEASES if kind != "bitsandbytes int8"])
def test_every_kind_is_read_as_its_library_dequantizes_it(kind, tmp_path, never_whole):
    save_release(kind, tmp_path)
    expected = load_dequantized(kind, tmp_path)
    readers = read_weights(load_source(tmp_path), TextFamily())
    assert expected.keys() <= readers.keys()
    for name, weight in expected.items():
        read = readers[name]()
        assert read.shape == weight.shape and (read.dtype == torch.bfloat16 or "experts" in name), name
        assert torch.equal(read.to(torch.bfloat16), weight), name


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_last_block_of_a_matrix_may_be_cut_off(scale_type, tmp_path, never_whole):
    """As in DeepSeek V3, whose 576 rows are four and a half blocks; scales in uint8 are exponents."""
    rows, columns = 24, 40  # of blocks, which divide neither 64 nor 96 nor 32

    def quantize(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith("proj.weight"):
            return {name: weight}
        grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        scale = torch.randint(120, 130, grid, dtype=torch.uint8) if scale_type == torch.uint8 else torch.rand(grid)
        return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.to(scale_type)}

    save_bf16(QWEN3, tmp_path)
    rewrite(tmp_path, {"quant_method": "fp8", "weight_block_size": [rows, columns]}, quantize)
    stored = load_file(tmp_path / "model.safetensors")
    readers = read_weights(load_source(tmp_path), TextFamily())
    for name in [name for name in stored if name.endswith("proj.weight")]:
        scale, weight, read = stored[f"{name}_scale_inv"], stored[name].float(), readers[name]()
        scale = 2.0 ** (scale.float() - 127) if scale_type == torch.uint8 else scale.float()
        for i, j in [(0, 0), (23, 39), (24, 39), (weight.shape[0] - 1, weight.shape[1] - 1)]:
            assert read[i, j] == (weight[i, j] * scale[i // rows, j // columns]).to(torch.bfloat16)
        assert read.dtype == torch.bfloat16 and read.shape == weight.shape


def test_rows_of_4_bits_may_end_within_a_block(tmp_path, never_whole):
    """bitsandbytes' kernel for processors misreads them, its own quantization does not: blocks span rows."""
    save_bitsandbytes(tmp_path, QWEN3, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    stored, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    codes = stored[name].flatten()
    numbers = torch.stack((codes >> 4, codes & 15), dim=1).flatten()
    expected = stored[f"{name}.quant_map"][numbers.long()] * stored[f"{name}.absmax"].repeat_interleave(64)
    read = read_weights(load_source(tmp_path), TextFamily())[name]()
    assert read.shape == (64, 96) and torch.equal(read.flatten(), expected.to(torch.bfloat16))


def make_inputs(kind: str, root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The release with data, as options; and the same with what transformers dequantizes the release to."""
    release = save_tokenizer(save_release(kind, root / "release"))
    plain = shutil.copytree(release, root / "plain")
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    weights = {name: weight.detach().contiguous() for name, weight in load_dequantized(kind, release).items()}
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    data = str(write_samples(root / "data.arrow", make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)))
    return tuple(dict(model_name_or_path=str(model), data_path=data) for model in (release, plain))


def train(world, inputs: dict[str, str], output_dir: Path, **options: object) -> Path:
    """The run's last export."""
    train_here(world, **(OPTIONS | inputs | dict(output_dir=str(output_dir), max_steps=STEPS) | options))
    return output_dir / "hf_format" / f"samples_{STEPS * OPTIONS['batch_size']}"


def assert_same_files(one: Path, other: Path) -> None:
    tensors = [load_file(path) for path in (one, other)]
    assert tensors[0].keys() == tensors[1].keys() and tensors[0]
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())


@pytest.mark.long
def test_all_methods_start_from_the_dequantized_weights(world, tmp_path):
    sources = make_inputs("fp8", tmp_path)
    cache = dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_cache_dir=str(tmp_path / "cache"))
    exports = {
        name: [train(world, source, tmp_path / f"{name}{i}", **options) for i, source in enumerate(sources)]
        for name, options in {
            "lora": dict(lora=True, lora_rank=4, base_quantization="nf4", lora_export="both"),
            "osft": cache,
            "full": {},
        }.items()
    }
    for released, plain in exports.values():
        assert_same_files(released / "model.safetensors", plain / "model.safetensors")
        assert "quantization_config" not in json.loads((released / "config.json").read_text())
    adapters = [export / "adapter" for export in exports["lora"]]
    assert_same_files(*(adapter / "adapter_model.safetensors" for adapter in adapters))

    # Merged into the dequantized weights.
    options = MergeAdapterOptions(adapter=str(adapters[0]), output_dir=str(tmp_path / "merged"), export_dtype="float32")
    merge_adapter(options, world)
    assert_same_files(tmp_path / "merged" / "model.safetensors", exports["lora"][0] / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


@pytest.mark.wide
def test_a_plan_knows_the_sizes_of_what_is_read(tmp_path):
    plans = []
    for source in make_inputs("mxfp4", tmp_path):
        run = dict(output_dir=tmp_path / "run", max_steps=STEPS, activation_checkpointing="none")
        options = OPTIONS | source | run | dict(dry_run=True, plan_for="2")
        result = succeed(0, "train.py", *flags(**options))
        plans.append(re.findall(r"(?:weights that|model:|export of)[^;]*", result.stdout))
    assert plans[0] == plans[1] and plans[0]


def drop(key: str):
    return lambda weights, config: weights.pop(key)


def replace(key: str, tensor: torch.Tensor):
    return lambda weights, config: weights.update({key: tensor})


def configure(**settings: object):
    return lambda weights, config: config.update({"quantization_config": config["quantization_config"] | settings})


EXPERTS, MLP = "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.down_proj"
HOSTILE = [
    ("mxfp4", drop(f"{EXPERTS}_scales"), f"{EXPERTS}_scales is missing"),
    ("mxfp4", drop(f"{EXPERTS}_blocks"), "missing_keys"),
    ("mxfp4", replace(f"{EXPERTS}_scales", torch.zeros(4, 64, 1, dtype=torch.uint8)), "[4, 64, 1] U8: MXFP4 needs"),
    ("mxfp4", replace(f"{EXPERTS}_scales", torch.zeros(4, 64, 3)), "[4, 64, 3] F32: MXFP4 needs U8"),
    ("fp8", drop(f"{MLP}.weight_scale_inv"), f"{MLP}.weight_scale_inv is missing"),
    ("fp8", drop(f"{MLP}.weight"), "missing_keys"),
    ("fp8", replace(f"{MLP}.weight_scale_inv", torch.ones(4, 4)), "[4, 4]; blocks of [16, 32]"),
    ("fp8", configure(weight_block_size=[128]), "weight_block_size is [128]"),
    ("fp8", configure(weight_block_size=[0, 16]), "weight_block_size is [0, 16]"),
    ("fp8", configure(weight_block_size=[128, 128]), "[128, 128] need [1, 1]"),
    ("fp8", lambda weights, config: config.pop("quantization_config"), "stored as F8_E4M3"),
    ("fp8", configure(quant_method="hqq"), "quantized by 'hqq'"),
    ("fp8", configure(quant_method="gptq"), "quantized by 'gptq'"),
    ("fp8", configure(quant_method=None), "quantized by 'None'"),
    ("fp8", lambda weights, config: config.update(quantization_config="fp8"), "quantization_config is 'fp8'"),
    ("bitsandbytes nf4", drop(f"{MLP}.weight.absmax"), f"{MLP}.weight.absmax is missing"),
    ("bitsandbytes nf4", drop(f"{MLP}.weight.quant_state.bitsandbytes__nf4"), "stored as U8"),
    ("bitsandbytes nf4", replace(f"{MLP}.weight", torch.zeros(7, 1, dtype=torch.uint8)), "has 7 bytes"),
    ("bitsandbytes int8", lambda weights, config: None, "stored as I8"),
    ("compressed int4", drop(f"{MLP}.weight_scale"), "missing_keys"),
    ("compressed int4", drop(f"{MLP}.weight_packed"), f"{MLP}.weight_packed is missing"),
    ("compressed int4", replace(f"{MLP}.weight_scale", torch.ones(64, 2)), "[64, 2], not [64, 3]"),
    ("compressed int4", replace(f"{MLP}.weight_g_idx", torch.zeros(96, dtype=torch.int32)), f"{MLP}.weight_g_idx: "),
    ("compressed int4",
     lambda weights, config: config["quantization_config"]["config_groups"]["group_0"].update(format="marlin-24"),
     "format marlin-24 "),
    ("compressed int4", configure(transform_config={"config_groups": {"u": {}}}), "rotated (transform_config)"),
    ("compressed int4", configure(config_groups={"group_0": {"weights": 3}}), "config_groups.group_0."),
    ("compressed fp8", drop(f"{MLP}.weight_scale"), "stored as F8_E4M3"),
]  # fmt: skip


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("releases")
    return {kind: save_release(kind, root / kind) for kind in {kind for kind, _, _ in HOSTILE}}


@pytest.mark.parametrize(("kind", "spoil", "message"), HOSTILE)
def test_a_release_that_is_not_whole_is_refused_before_anything_large_is_read(kind, spoil, message, releases, tmp_path):
    path = spoil_release(releases[kind], tmp_path / "release", spoil)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_weights(load_source(path), TextFamily())


@pytest.mark.parametrize(
    ("kind", "package"), [("bitsandbytes int8", "bitsandbytes"), ("compressed fp8", "compressed-tensors")]
)
def test_a_package_that_is_not_installed_is_named(kind, package, releases, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"pip install {package}$"):
        load_source(releases[kind])


def test_bitsandbytes_transposed_weights_are_refused(tmp_path):
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=64, dtype="bfloat16")
    save_bf16(config, tmp_path)
    rewrite(tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda name, weight: {name: weight})
    with pytest.raises(ValueError, match=r"Conv1D"):
        read_weights(load_source(tmp_path), TextFamily())


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        *((kind, "or dequantize it with GPTQModel") for kind in ("gptq", "awq")),
        ("modelopt", r"made from, or one in fp8 blocks or compressed-tensors$"),
    ],
)
def test_kinds_that_are_not_dequantized_here_are_refused_with_what_to_use(kind, advice, tmp_path):
    path = tmp_path / "model-FP8"
    save_fp8(path)
    change_json(path / "config.json", quantization_config={"quant_method": kind})
    with pytest.raises(ValueError, match=f"quantized by '{kind}'.*bf16 release.*{advice}"):
        load_source(path)
