"""Tiny quantized releases, made by the libraries that make the real ones, and loaded by them to compare."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from tiny_models import SHAPE, save_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    GptOssConfig,
    Mxfp4Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.integrations.mxfp4 import FP4_VALUES

WIDE = SHAPE | dict(hidden_size=64, intermediate_size=96, dtype="bfloat16")
QWEN3 = Qwen3Config(**WIDE, head_dim=16)
QWEN3_64 = Qwen3Config(**WIDE | dict(intermediate_size=128), head_dim=16)  # whose rows are whole blocks of 64
QWEN3_MOE = Qwen3MoeConfig(**WIDE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
GPT_OSS = GptOssConfig(
    **WIDE, head_dim=16, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
Weights = dict[str, Tensor]


def save_release(kind: str, path: Path) -> Path:
    """Writes a release of the kind, with its tokenizer left out."""
    RELEASES[kind](path)
    return path


def load_dequantized(kind: str, path: Path, *, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """The parameters as transformers itself dequantizes them, in memory."""
    configs = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config, "compressed": CompressedTensorsConfig}
    if kind.startswith("bitsandbytes"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map="cpu").dequantize(dtype=dtype)
    else:
        config = configs[kind.split()[0]](dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config, device_map="cpu")
    return dict(model.named_parameters())


def rewrite(path: Path, settings: dict, change: Callable[[str, Tensor], Weights]) -> None:
    """Each weight becomes what `change` makes of it; the config says so."""
    weights: Weights = {}
    for name, weight in load_file(path / "model.safetensors").items():
        weights |= change(name, weight)
    save_file({name: w.contiguous() for name, w in weights.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def save_bf16(config: PreTrainedConfig, path: Path) -> None:
    save_model(config, path)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)


def is_layer(name: str) -> bool:
    return name.endswith("proj.weight")


def save_mxfp4(path: Path) -> None:
    def pack(name: str, weight: Tensor) -> Weights:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: weight}
        blocks, scales = quantize_mxfp4(weight.float().transpose(1, 2))
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    save_bf16(GPT_OSS, path)
    rewrite(path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, pack)


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(..., inputs) -> blocks (..., inputs / 32, 16) and scales (..., inputs / 32), by the OCP specification of MX."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2  # 2: of FP4's largest number, 6
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def save_fp8(path: Path, config: PreTrainedConfig = QWEN3, size: tuple[int, int] | None = (16, 32), **more) -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size} | more
    quantizer = type("Holder", (), {"quantization_config": FineGrainedFP8Config(weight_block_size=size, **more)})
    operation = Fp8Quantize(quantizer)

    def quantize(name: str, weight: Tensor) -> Weights:
        return operation.convert({name: weight}) if is_layer(name) else {name: weight}

    save_bf16(config, path)
    rewrite(path, settings, quantize)


def save_fp8_whole(path: Path) -> None:
    """One scale a matrix, and one for what it is multiplied by, as Mistral's releases have."""

    def quantize(name: str, weight: Tensor) -> Weights:
        if not is_layer(name):
            return {name: weight}
        scale = weight.abs().max().float() / 448
        layer = name.removesuffix(".weight")
        return {
            name: (weight.float() / scale).to(torch.float8_e4m3fn),
            f"{layer}.weight_scale_inv": scale.to(torch.bfloat16),
            f"{layer}.activation_scale": torch.tensor(0.5, dtype=torch.bfloat16),
        }

    save_bf16(QWEN3, path)
    rewrite(path, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, quantize)


def save_bitsandbytes(path: Path, config: PreTrainedConfig = QWEN3_64, **settings: object) -> None:
    save_bf16(config, path)
    quantization = BitsAndBytesConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=quantization, device_map="cpu"
    )
    model.save_pretrained(path)


def save_compressed(path: Path, preset: str, form: str, config: PreTrainedConfig = QWEN3) -> None:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = form
    if form == "pack-quantized":
        scheme.weights.group_size = 32
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantize(name: str, weight: Tensor) -> Weights:
        if not is_layer(name):
            return {name: weight}
        layer = name.removesuffix(".weight")
        state = {"weight": weight} | choose_scales(weight, scheme)
        return {f"{layer}.{key}": tensor for key, tensor in compressor.compress(state, scheme).items()}

    save_bf16(config, path)
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    rewrite(path, settings, quantize)


def choose_scales(weight: Tensor, scheme: QuantizationScheme) -> Weights:
    """Scales and zero points from the largest and smallest number of each tensor, row, block or group."""
    args = scheme.weights
    strategy = QuantizationStrategy(args.strategy).value
    steps = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": args.block_structure}
    rows, columns = steps.get(strategy, (1, args.group_size))
    blocks = weight.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    more = {}
    if strategy == "tensor_group" and args.group_size == 16:
        more["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero_point = calculate_qparams(low, high, args, more.get("weight_global_scale"))
    if strategy == "tensor":
        scale = scale.reshape(1)
    scale = scale.to(weight.dtype) if scale.dtype == torch.float32 and not more else scale
    return {"weight_scale": scale, **({} if args.symmetric else {"weight_zero_point": zero_point}), **more}


RELEASES: dict[str, Callable[[Path], None]] = {
    "mxfp4": save_mxfp4,
    "fp8": save_fp8,
    "fp8 experts": lambda path: save_fp8(path, QWEN3_MOE),
    "fp8 exponents": lambda path: save_fp8(path, scale_fmt="ue8m0"),
    "fp8 whole": save_fp8_whole,
    "bitsandbytes nf4": lambda path: save_bitsandbytes(path, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes nf4 twice": lambda path: save_bitsandbytes(
        path, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage="bfloat16", bnb_4bit_compute_dtype="bfloat16",
    ),
    "bitsandbytes fp4": lambda path: save_bitsandbytes(path, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes int8": lambda path: save_bitsandbytes(path, load_in_8bit=True),
    "compressed fp8": lambda path: save_compressed(path, "FP8", "float-quantized"),
    "compressed fp8 rows": lambda path: save_compressed(path, "FP8_DYNAMIC", "float-quantized"),
    "compressed int8": lambda path: save_compressed(path, "W8A8", "int-quantized"),
    "compressed int4": lambda path: save_compressed(path, "W4A16", "pack-quantized"),
    "compressed int4 zero points": lambda path: save_compressed(path, "W4A16_ASYM", "pack-quantized"),
    "compressed int4 experts": lambda path: save_compressed(path, "W4A16", "pack-quantized", QWEN3_MOE),
    "compressed nvfp4": lambda path: save_compressed(path, "NVFP4A16", "nvfp4-pack-quantized"),
}  # fmt: skip


def spoil_release(release: Path, path: Path, spoil: Callable[[dict[str, Tensor], dict], None]) -> Path:
    """Copies a release to `path`, with the weights and the config that `spoil` has changed."""
    shutil.copytree(release, path)
    weights, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    spoil(weights, config)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path
