"""Quantized releases: each tensor is dequantized when it is read, so that no process ever holds the whole model.

Several stored tensors (packed numbers, scales, shapes) represent one weight. Here they become one entry with the name
and shape of that weight (model.dequantizing); the code that reads models does not see the quantization.
"""

import importlib.util
import re
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from mini_trainer.model.stored_tensors import Settings, Stored
from mini_trainer.options.doors import Doors

# Scales of activations, keys and values, which affect rounding in inference but not the weights.
OF_ACTIVATIONS = re.compile(
    r"\.(activation_scale|(input|output|q|k|v)_(scale|zero_point|global_scale)|input_activation_scale|input_scale_ub)$"
)
# Turns the stored tensors into whole weights of a dtype, by the kind of quantization.
KINDS: Doors[Callable[[dict[str, Stored], Settings, torch.dtype], dict[str, Stored]]] = Doors(
    {
        "mxfp4": "mini_trainer.model.dequantizing:open_mxfp4",
        "fp8": "mini_trainer.model.dequantizing:open_fp8",
        "mxfp8": "mini_trainer.model.dequantizing:open_fp8",
        "bitsandbytes": "mini_trainer.model.dequantizing:open_bitsandbytes",
        "compressed-tensors": "mini_trainer.model.dequantizing:open_compressed",
    }
)
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
        from mini_trainer.model.dequantizing import check_compression

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

    Reads nothing large. ValueError if a part is missing or has the wrong shape.
    """
    parts = {key: tensor for key, tensor in stored.items() if not OF_ACTIVATIONS.search(key)}
    return KINDS[name_kind(settings)](parts, settings, dtype)
