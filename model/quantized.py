"""Quantized releases: each tensor of the files is dequantized when it is read, so that nobody ever holds the model.

Several stored tensors (packed numbers, scales, shapes) stand for one weight. Here they become one entry with the name
and the shape of that weight (model.dequantizing); what reads models never learns that it was quantized.
"""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from disk import read_object
from model.dequantizing import (
    FP8,
    Settings,
    name_format,
    open_bitsandbytes,
    open_compressed,
    open_fp8,
    open_mxfp4,
    read_compression,
)
from pretrained.stored import Stored

QUANTIZED_TYPES = (*FP8, "U8", "I8")  # that no weight is stored as which has not been quantized

# Scales of activations and of keys and values, which say how inference rounds, and nothing of the weights.
OF_ACTIVATIONS = re.compile(
    r"\.(activation_scale|(input|output|q|k|v)_(scale|zero_point|global_scale)|input_activation_scale)$"
)
# What a release's name has in addition to that of the model before quantization.
OF_QUANTIZED_NAMES = re.compile(
    r"[-_.](gptq|awq|hqq|aqlm|exl\d|eetq|quark|torchao|bnb|nvfp4|mxfp4|fp8|w\da\d+|(int|fp|q)?[348][-_]?bits?|int[348]"
    r"|dynamic|quantized)\b.*$",
    re.IGNORECASE,
)
COMPRESSED_FORMATS = {
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized",
}  # fmt: skip
KINDS: dict[str, Callable[[dict[str, Stored], Settings, torch.dtype], dict[str, Stored]]] = {
    "mxfp4": open_mxfp4,
    "fp8": open_fp8,
    "mxfp8": open_fp8,
    "bitsandbytes": open_bitsandbytes,
    "compressed-tensors": open_compressed,
}
PACKAGES = {"bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors"}


def find_quantization(model_dir: str | Path) -> Settings | None:
    """What a model's config says of its quantization; ValueError if that is nothing that can be understood."""
    config = read_object(Path(model_dir) / "config.json")
    texts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    found = [part[key] for part in texts for key in ("quantization_config", "compression_config") if part.get(key)]
    if not found:
        return None
    if not isinstance(found[0], dict):
        raise ValueError(f"{model_dir}/config.json: quantization_config is {found[0]!r:.80}, not a JSON object")
    return found[0]


def forget_quantization(config: PreTrainedConfig) -> None:
    """Takes the quantization out of a config, whose model is as if it had never been quantized."""
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            vars(part).pop(key, None)


def name_kind(settings: Settings) -> str:
    old = settings.get("load_in_4bit") or settings.get("load_in_8bit")  # bitsandbytes' before it wrote quant_method
    return str(settings.get("quant_method") or ("bitsandbytes" if old else None))


def check_quantization(settings: Settings, model_dir: str) -> str:
    """In words, what the release is quantized by; ValueError unless it can be dequantized here."""
    kind = name_kind(settings)
    if kind not in KINDS:
        base = guess_base(model_dir)
        raise ValueError(
            f"--model-name-or-path {model_dir}: the weights are quantized by {kind!r}, which cannot be dequantized here"
            f" ({', '.join(KINDS)} can): give the release in bf16"
            + (f", whose name may be {base}" if base else ", from which this one was made")
        )
    package = PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"--model-name-or-path {model_dir}: the weights are quantized by {kind}, and to dequantize them needs the"
            f" package {kind}, which is not installed: pip install {kind}"
        )
    if kind == "compressed-tensors":
        check_compression(settings)
    return kind


def guess_base(model_dir: str) -> str | None:
    """The name of the model before quantization, as far as the release's own name tells."""
    names = [part for part in Path(model_dir).parts if part.startswith("models--")]  # of the hub's cache
    name = names[-1].removeprefix("models--").replace("--", "/") if names else Path(model_dir).name
    base = OF_QUANTIZED_NAMES.sub("", name)
    return base if base and base != name else None


def choose_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The type that weights are dequantized to: what the config names, and bf16 if that is none to compute in."""
    named = getattr(config, "dtype", None)
    return named if named in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16


def check_modules(settings: Settings, model: nn.Module) -> None:
    """ValueError if the model has layers whose weights bitsandbytes stores the other way round."""
    if name_kind(settings) == "bitsandbytes" and any(isinstance(module, Conv1D) for module in model.modules()):
        raise ValueError(
            "bitsandbytes stores some of this model's weights (of Conv1D) transposed, and does not say which: give the"
            " release in bf16"
        )


def open_dequantized(stored: dict[str, Stored], settings: Settings, dtype: torch.dtype) -> dict[str, Stored]:
    """Whole weights of `dtype` in the place of the tensors that stand for them; all others as they are.

    Nothing large is read. ValueError for a part that is missing or has the wrong shape.
    """
    parts = {key: tensor for key, tensor in stored.items() if not OF_ACTIVATIONS.search(key)}
    return KINDS[name_kind(settings)](parts, settings, dtype)


def check_compression(settings: Settings) -> None:
    """ValueError for what changes more than the numbers of single weights, or is stored in a way of its own."""
    config = read_compression(settings)
    formats = {name_format(scheme, config) for scheme in config.config_groups.values()}
    if unknown := sorted(formats - COMPRESSED_FORMATS):
        raise ValueError(
            f"quantization_config: compressed-tensors' format {', '.join(unknown)} cannot be dequantized here"
            f" ({', '.join(sorted(COMPRESSED_FORMATS))} can): give the release in bf16"
        )
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if settings.get("transform_config") or sparsity != "dense":
        raise ValueError(
            "quantization_config: the weights are rotated (transform_config) or stored sparsely (sparsity_config)"
            " besides, which cannot be undone here: give the release in bf16"
        )
