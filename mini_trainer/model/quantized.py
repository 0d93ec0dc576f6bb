"""Quantized releases: each tensor is dequantized when it is read, so that no process ever holds the whole model.

Several stored tensors (packed numbers, scales, shapes) represent one weight. Here they become one entry with the name
and shape of that weight; the code that reads models does not see the quantization. The libraries do the arithmetic:
transformers for MXFP4, bitsandbytes and compressed-tensors for their own formats. fp8 blocks are multiplied here, since
transformers rejects matrices whose last block is incomplete, as some of DeepSeek V3's are. Every `open_*` takes all
tensors of the files, checks names and shapes, and reads nothing large.
"""

import importlib.util
import json
import math
import re
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from mini_trainer.model.stored_tensors import FP8, Settings, Stored

EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)  # dtypes of power-of-two scales, stored as exponents
EXPONENT_BIAS = 127
MXFP4_BYTES = 16  # bytes of the 32 weights that share a scale
ROWS_AT_A_TIME = 1024  # rows of an fp8 matrix converted at once, which limits memory in fp32
BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}  # sizes of dtypes that 4-bit weights are stored in
COMPRESSED_FORMATS = {
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized",
}  # fmt: skip
COMPRESSED_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
                    "weight_global_scale")  # fmt: skip


def take_part(parts: dict[str, Stored], key: str, *, of: str) -> Stored:
    """Removes and returns a part of the quantized weight `of`."""
    if key not in parts:
        raise ValueError(f"{of} is quantized, but {key} is missing")
    return parts.pop(key)


# MXFP4


def open_mxfp4(parts: dict[str, Stored], settings: Settings, dtype: torch.dtype) -> dict[str, Stored]:
    """Opens gpt-oss' experts: every 32 inputs of an output share a scale; weights are (experts, inputs, outputs)."""
    for key in [key for key in parts if key.endswith("_blocks")]:
        name = key.removesuffix("_blocks")
        blocks, scales = take_part(parts, key, of=name), take_part(parts, f"{name}_scales", of=name)
        fits = len(blocks.shape) == 4 and blocks.shape[-1] == MXFP4_BYTES and blocks.shape[:-1] == scales.shape
        if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            raise ValueError(
                f"{key} {list(blocks.shape)} {blocks.dtype} and {name}_scales {list(scales.shape)} {scales.dtype}:"
                f" MXFP4 needs U8, [experts, outputs, inputs / 32, {MXFP4_BYTES}] and the same without the last size"
            )
        num_experts, num_outputs, num_groups, _ = blocks.shape
        shape = (num_experts, num_groups * 2 * MXFP4_BYTES, num_outputs)
        parts[name] = Stored(partial(read_mxfp4, blocks, scales, shape, dtype), shape, "")
    return parts


def read_mxfp4(blocks: Stored, scales: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Converts expert by expert, since transformers' function needs several copies of its input."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = torch.empty(shape, dtype=dtype)
    for own, packed, exponents in zip(weight, blocks.read(), scales.read(), strict=True):
        own.copy_(convert_moe_packed_tensors(packed[None], exponents[None], dtype=dtype)[0])
    return weight


# fp8 in blocks


def open_fp8(parts: dict[str, Stored], settings: Settings, dtype: torch.dtype) -> dict[str, Stored]:
    """Opens fp8 weights with a scale per block of `weight_block_size`, or a single scale."""
    size = settings.get("weight_block_size")
    is_size = isinstance(size, (list, tuple)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if size is not None and not is_size:
        raise ValueError(f"quantization_config: weight_block_size is {size!r}, expected null or two positive integers")
    for key in [key for key, tensor in parts.items() if tensor.dtype in FP8]:
        scale = take_part(parts, f"{key}_scale_inv", of=key)
        shape = parts[key].shape
        block = tuple(size) if size is not None and math.prod(scale.shape) != 1 else shape[-2:]
        grid = tuple(-(-length // step) for length, step in zip(shape[-2:], block, strict=True))
        is_one = math.prod(scale.shape) == math.prod(shape[:-2]) and grid == (1, 1)
        if len(shape) < 2 or (scale.shape != (*shape[:-2], *grid) and not is_one):
            raise ValueError(
                f"{key} {list(shape)} has scales {list(scale.shape)}; blocks of {size} need {[*shape[:-2], *grid]}"
            )
        parts[key] = Stored(partial(read_fp8, parts[key], scale, block, dtype), shape, "")
    return parts


def read_fp8(quantized: Stored, scale: Stored, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Dequantizes a weight in fp32; the last block of a row or column may be incomplete."""
    scales = scale.read()
    scales = (scales.view(torch.uint8).float() - EXPONENT_BIAS).exp2() if scales.dtype in EXPONENTS else scales.float()
    rows, columns = quantized.shape[-2:]
    weight = torch.empty(quantized.shape, dtype=dtype)
    grids = scales.reshape(-1, -(-rows // block[0]), -(-columns // block[1]))
    step = block[0] * max(1, ROWS_AT_A_TIME // block[0])
    for own, packed, grid in zip(weight.view(-1, rows, columns), quantized.read().view(-1, rows, columns), grids,
                                 strict=True):  # fmt: skip
        for start in range(0, rows, step):
            part = packed[start : start + step].float()
            of_rows = grid[start // block[0] : (start + step) // block[0]].repeat_interleave(block[0], dim=0)
            part *= of_rows[: len(part)].repeat_interleave(block[1], dim=1)[:, :columns]
            own[start : start + step] = part
    return weight


# bitsandbytes


def open_bitsandbytes(parts: dict[str, Stored], settings: Settings, dtype: torch.dtype) -> dict[str, Stored]:
    """Opens nf4 and fp4 weights, also with quantized scales."""
    names = {key.partition(".quant_state.")[0] for key in parts if ".quant_state.bitsandbytes__" in key}
    states: dict[str, dict[str, Stored]] = {name: {} for name in sorted(names)}
    for key in list(parts):
        name, mark, kind = key.partition(".quant_state.")
        if not mark:
            name, _, kind = key.rpartition(".")
        if name in states:
            states[name][f"quant_state.{kind}" if mark else kind] = parts.pop(key)
    for name, own in states.items():
        open_4bit(parts, name, own, dtype)
    return parts


def open_4bit(parts: dict[str, Stored], name: str, own: dict[str, Stored], dtype: torch.dtype) -> None:
    """Adds the weight `name` to `parts`; `own` are its state's tensors, of which the small one is read here."""
    packed = take_part(parts, name, of=f"{name}.quant_state")
    (state_key,) = [key for key in own if key.startswith("quant_state.")] or [""]
    state = json.loads(bytes(own[state_key].read().tolist()))
    shape, blocksize = tuple(state["shape"]), state["blocksize"]
    needed = ["absmax", "quant_map"] + (["nested_absmax", "nested_quant_map"] if "nested_offset" in state else [])
    for part in needed:
        if part not in own:
            raise ValueError(f"{name} is quantized, but {name}.{part} is missing")
    num_scales = -(-math.prod(shape) // blocksize)
    num_bytes = math.prod(packed.shape) * BYTES.get(packed.dtype, 0)
    if num_bytes != -(-math.prod(shape) // 2) or math.prod(own["absmax"].shape) != num_scales:
        raise ValueError(
            f"{name} {list(shape)} has {num_bytes} bytes and {math.prod(own['absmax'].shape)} scales; 4 bits and"
            f" blocks of {blocksize} need {-(-math.prod(shape) // 2)} and {num_scales}"
        )
    parts[name] = Stored(partial(read_4bit, packed, own, dtype), shape, "")


def read_4bit(packed: Stored, own: dict[str, Stored], dtype: torch.dtype) -> Tensor:
    """Unpacks as rows of one block each, since bitsandbytes' CPU kernel misreads rows that end within a block."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState.from_dict({key: stored.read() for key, stored in own.items()}, device=torch.device("cpu"))
    shape, numel = state.shape, math.prod(state.shape)
    state.shape = torch.Size((-(-numel // state.blocksize), state.blocksize))
    codes = torch.zeros(state.shape.numel() // 2, 1, dtype=torch.uint8)
    codes[: -(-numel // 2)] = packed.read().view(torch.uint8).view(-1, 1)
    return dequantize_4bit(codes, state).flatten()[:numel].view(shape).to(dtype)


# compressed-tensors


def read_compression(settings: Settings) -> Any:
    """Converts the settings to the package's own class."""
    from compressed_tensors.quantization import QuantizationConfig

    known = {key: value for key, value in settings.items() if key in QuantizationConfig.model_fields}
    try:
        return QuantizationConfig.model_validate(known)
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"quantization_config: not valid for compressed-tensors: {reason:.300}") from None


def open_compressed(parts: dict[str, Stored], settings: Settings, dtype: torch.dtype) -> dict[str, Stored]:
    """Opens weights in fp8, int8, packed integers and fp4, each dequantized by its layer's scheme."""
    config = read_compression(settings)
    for key in [key for key in parts if key.endswith(".weight_scale")]:
        layer = key.removesuffix(".weight_scale")
        scheme = find_scheme(layer, config)
        kind = name_format(scheme, config)
        own = {name: parts.pop(f"{layer}.{name}") for name in COMPRESSED_PARTS if f"{layer}.{name}" in parts}
        if "weight_g_idx" in own:
            raise ValueError(f"{layer}.weight_g_idx: its columns are quantized out of order: use the bf16 release")
        packed = "weight_packed" if kind.endswith("pack-quantized") else "weight"
        for part in (packed, *(["weight_shape"] if kind == "pack-quantized" else [])):
            if part not in own:
                raise ValueError(f"{layer} is quantized ({kind}), but {layer}.{part} is missing")
        shape = find_compressed_shape(own, packed)
        check_scales(layer, scheme.weights, shape, own["weight_scale"].shape)
        parts[f"{layer}.weight"] = Stored(partial(read_compressed, own, scheme, kind, shape, dtype), shape, "")
    return parts


def find_scheme(layer: str, config: Any) -> Any:
    """Finds a layer's scheme: one whose targets name it, else the first one for a whole class of layers."""
    from compressed_tensors.utils.match import match_name

    schemes = [scheme for scheme in config.config_groups.values() if scheme.weights is not None]
    named = [scheme for scheme in schemes if any(match_name(layer, target) for target in scheme.targets)]
    of_class = [scheme for scheme in schemes if any(re.fullmatch(r"[A-Z]\w*", target) for target in scheme.targets)]
    if not named and not of_class:
        raise ValueError(f"{layer} is quantized, but no group of quantization_config matches it")
    return (named or of_class)[0]


def name_format(scheme: Any, config: Any) -> str:
    """The package's name for the storage format of a scheme's weights."""
    chosen = scheme.format or config.format
    return chosen.value if isinstance(chosen, Enum) else str(chosen)


def find_compressed_shape(own: dict[str, Stored], packed: str) -> tuple[int, ...]:
    """The weight's shape before packing; reads the stored shape if there is one."""
    if "weight_shape" in own:
        return tuple(own["weight_shape"].read().tolist())
    *rows, columns = own[packed].shape
    return (*rows, 2 * columns) if packed == "weight_packed" else (*rows, columns)


def check_scales(layer: str, weights: Any, shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> None:
    """ValueError unless there is a scale per tensor, row, group or block."""
    if len(shape) != 2:
        raise ValueError(f"{layer}.weight {list(shape)}: not a matrix")
    from compressed_tensors.quantization import QuantizationStrategy

    rows, columns = shape
    steps = {"tensor": shape, "channel": (1, columns), "block": tuple(weights.block_structure or shape)}
    step = steps.get(QuantizationStrategy(weights.strategy).value, (1, weights.group_size or columns))
    grid = (-(-rows // step[0]), -(-columns // step[1]))
    if math.prod(scale_shape) != math.prod(grid) or (len(scale_shape) == 2 and scale_shape != grid):
        raise ValueError(f"{layer}.weight {list(shape)} has scales {list(scale_shape)}, not {list(grid)}")


def read_compressed(
    own: dict[str, Stored], scheme: Any, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    from compressed_tensors.compressors import BaseCompressor

    state = {name: stored.read() for name, stored in own.items()}
    weight = BaseCompressor.get_value_from_registry(kind).decompress(state, scheme)["weight"].to(dtype)
    assert weight.shape == shape, f"{tuple(weight.shape)} instead of {shape}"
    return weight


def check_compression(settings: Settings) -> None:
    """ValueError for unsupported formats, and for transforms or sparsity."""
    config = read_compression(settings)
    formats = {name_format(scheme, config) for scheme in config.config_groups.values()}
    if unknown := sorted(formats - COMPRESSED_FORMATS):
        raise ValueError(
            f"quantization_config: compressed-tensors' format {', '.join(unknown)} cannot be dequantized here"
            f" ({', '.join(sorted(COMPRESSED_FORMATS))} can): use the bf16 release"
        )
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if settings.get("transform_config") or sparsity != "dense":
        raise ValueError(
            "quantization_config: the weights are also rotated (transform_config) or stored sparsely (sparsity_config),"
            " which cannot be undone here: use the bf16 release"
        )


# Scales of activations, keys and values, which affect rounding in inference but not the weights.
OF_ACTIVATIONS = re.compile(
    r"\.(activation_scale|(input|output|q|k|v)_(scale|zero_point|global_scale)|input_activation_scale|input_scale_ub)$"
)
# Turns the stored tensors into whole weights of a dtype, by the kind of quantization.
KINDS: dict[str, Callable[[dict[str, Stored], Settings, torch.dtype], dict[str, Stored]]] = {
    "mxfp4": open_mxfp4,
    "fp8": open_fp8,
    "mxfp8": open_fp8,
    "bitsandbytes": open_bitsandbytes,
    "compressed-tensors": open_compressed,
}
REMOVED = ("gptq", "awq", "modelopt", "fbgemm_fp8")  # kinds whose models also come in other forms
PACKAGES = {"bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors"}


def forget_quantization(config: PreTrainedConfig) -> None:
    """Removes the quantization settings from a config, as if its model had never been quantized."""
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            vars(part).pop(key, None)


def name_kind(settings: Settings) -> str:
    old = settings.get("load_in_4bit") or settings.get("load_in_8bit")  # old bitsandbytes wrote no quant_method
    return str(settings.get("quant_method") or ("bitsandbytes" if old else None))


def check_quantization(settings: Settings, model_dir: str) -> str:
    """Returns the release's kind of quantization; ValueError if it cannot be dequantized here."""
    kind = name_kind(settings)
    if kind not in KINDS:
        raise ValueError(
            f"--model-name-or-path {model_dir}: the weights are quantized by {kind!r}, which cannot be dequantized here"
            f" ({', '.join(KINDS)} can): use the bf16 release that this one was made from"
            + (", or one in fp8 blocks or compressed-tensors" if kind in REMOVED else "")
            + (", or dequantize it with GPTQModel (gptqmodel.utils.model_dequant)" if kind in ("gptq", "awq") else "")
        )
    package = PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"--model-name-or-path {model_dir}: the weights are quantized by {kind}, and dequantizing them needs the"
            f" package {kind}, which is not installed: pip install {kind}"
        )
    if kind == "compressed-tensors":
        check_compression(settings)
    return kind


def check_modules(settings: Settings, model: nn.Module) -> None:
    """ValueError if the model has layers whose weights this kind of quantization stores transposed."""
    if name_kind(settings) == "bitsandbytes" and any(isinstance(module, Conv1D) for module in model.modules()):
        raise ValueError(
            "bitsandbytes stores some of this model's weights (of Conv1D) transposed, and does not record which: use"
            " the bf16 release"
        )


def open_dequantized(stored: dict[str, Stored], settings: Settings, dtype: torch.dtype) -> dict[str, Stored]:
    """Replaces the tensors that represent quantized weights with whole weights of `dtype`; keeps all others.
    Reads nothing large. ValueError if a part is missing or has the wrong shape."""
    parts = {key: tensor for key, tensor in stored.items() if not OF_ACTIVATIONS.search(key)}
    return KINDS[name_kind(settings)](parts, settings, dtype)
