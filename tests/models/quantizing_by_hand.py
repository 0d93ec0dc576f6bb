"""Tiny releases in GPTQ, AWQ and fp8, packed by the formats' published definitions, which no package here reads.

GPTQ: AutoGPTQ's `qlinear_cuda_old.py` and GPTQModel's second format; AWQ: AutoAWQ's `gemm.py`; fp8: transformers'
`FbgemmFp8Linear` and NVIDIA Model Optimizer's `convert_hf_config.py`. Settings are those of published releases.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from quantizing import QWEN3, Weights, is_layer, rewrite, save_bf16
from torch import Tensor
from transformers import PreTrainedConfig

GPTQ = {  # Qwen2.5-7B-Instruct-GPTQ-Int4
    "bits": 4, "damp_percent": 0.01, "desc_act": False, "group_size": 128, "model_file_base_name": None,
    "model_name_or_path": None, "quant_method": "gptq", "static_groups": False, "sym": True, "true_sequential": True,
}  # fmt: skip
GPTQ_MODEL = {  # of GPTQModel
    "bits": 4, "checkpoint_format": "gptq", "desc_act": True, "group_size": 128, "lm_head": False, "meta": {
        "damp_auto_increment": 0.0025, "damp_percent": 0.1, "quantizer": ["gptqmodel:1.7.4"], "static_groups": False,
        "true_sequential": True, "uri": "https://github.com/modelcloud/gptqmodel",
    }, "pack_dtype": "int32", "quant_method": "gptq", "sym": True,
}  # fmt: skip
AWQ = {  # Qwen2.5-7B-Instruct-AWQ
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
    "zero_point": True,
}  # fmt: skip
FBGEMM = {  # Llama-3.1-405B-Instruct-FP8
    "activation_scale_ub": 1200.0, "modules_to_not_convert": ["model.layers.0.mlp.down_proj", "lm_head"],
    "quant_method": "fbgemm_fp8",
}  # fmt: skip
MODELOPT = {  # Llama-3.1-8B-Instruct-FP8 since Model Optimizer 0.29
    "config_groups": {"group_0": {
        "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        "weights": {"dynamic": False, "num_bits": 8, "type": "float"}, "targets": ["Linear"],
    }}, "ignore": ["lm_head"], "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.29.0"}, "quant_method": "modelopt",
}  # fmt: skip
MODELOPT_FILE = {  # hf_quant_config.json of older ones
    "producer": {"name": "modelopt", "version": "0.19.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
Packer = Callable[[str, Tensor], tuple[Weights, Tensor]]  # layer and weight -> stored tensors, and what they mean


def save_by_hand(
    path: Path, settings: dict, pack: Packer, *, config: PreTrainedConfig = QWEN3, dtype: str = "bfloat16"
) -> Weights:
    """Writes a release whose layers are packed; returns the weights that they stand for, by name."""
    expected: Weights = {}

    def change(name: str, weight: Tensor) -> Weights:
        if not is_layer(name):
            return {name: weight}
        layer = name.removesuffix(".weight")
        stored, meant = pack(layer, weight)
        expected[name] = meant.to(getattr(torch, dtype))
        return {f"{layer}.{kind}": tensor for kind, tensor in stored.items()}

    save_bf16(config, path)
    rewrite(path, settings, change)
    return expected


def pack_gptq(bits: int, size: int, *, version: int = 1, is_sorted: bool = True, has_groups: bool = True) -> Packer:
    """Random numbers, zero points and scales; unless `is_sorted`, inputs are in random groups (desc_act)."""

    def pack(layer: str, weight: Tensor) -> tuple[Weights, Tensor]:
        num_outputs, num_inputs = weight.shape
        size_here = num_inputs if size == -1 else size
        num_groups = -(-num_inputs // size_here)
        random = np.random.default_rng(len(layer) + num_inputs)
        numbers = random.integers(0, 2**bits, (num_inputs, num_outputs))
        zeros = random.integers(1 if version == 1 else 0, 2**bits, (num_groups, num_outputs))
        scales = (random.random((num_groups, num_outputs)) * 0.02 + 0.001).astype(np.float16)
        groups = np.arange(num_inputs) // size_here
        groups = groups if is_sorted else random.permutation(groups)
        meant = (numbers - zeros[groups]) * scales[groups].astype(np.float64)
        stored = {
            "qweight": put_in_words(numbers, bits),
            "qzeros": put_in_words((zeros - (version == 1)).T, bits).T,
            "scales": scales,
        } | ({"g_idx": groups.astype(np.int32)} if has_groups else {})
        return {kind: torch.from_numpy(array) for kind, array in stored.items()}, torch.from_numpy(meant.T)

    return pack


def put_in_words(numbers: np.ndarray, bits: int) -> np.ndarray:  # (n, m) -> (n * bits / 32, m)
    """Each 32 numbers of a column in `bits` words. Of 3 bits, the 11th and the 22nd lie in two words."""
    if bits == 3:
        places = [[(j, 3 * j) for j in range(11)], [(10, -2), *((11 + j, 1 + 3 * j) for j in range(11))],
                  [(21, -1), *((22 + j, 2 + 3 * j) for j in range(10))]]  # fmt: skip
        of_words = [(0, places[0]), (0, places[1]), (0, places[2])]
    else:
        of_words = [(i * 32 // bits, [(j, bits * j) for j in range(32 // bits)]) for i in range(bits)]
    words = np.zeros((len(numbers) // 32, bits, numbers.shape[1]), dtype=np.uint64)
    for block, own in zip(words, numbers.reshape(-1, 32, numbers.shape[1]).astype(np.uint64), strict=True):
        for word, (first, fields) in zip(block, of_words, strict=True):
            for number, shift in fields:
                value = own[first + number]
                word |= value << np.uint64(shift) if shift >= 0 else value >> np.uint64(-shift)
    return (words & np.uint64(2**32 - 1)).astype(np.uint32).view(np.int32).reshape(-1, numbers.shape[1])


def pack_awq(size: int) -> Packer:
    def pack(layer: str, weight: Tensor) -> tuple[Weights, Tensor]:
        num_outputs, num_inputs = weight.shape
        random = np.random.default_rng(len(layer) + num_inputs)
        numbers = random.integers(0, 16, (num_inputs, num_outputs))
        zeros = random.integers(0, 16, (num_inputs // size, num_outputs))
        scales = (random.random((num_inputs // size, num_outputs)) * 0.02 + 0.001).astype(np.float16)
        groups = np.arange(num_inputs) // size
        meant = (numbers - zeros[groups]) * scales[groups].astype(np.float64)
        stored = {"qweight": interleave(numbers), "qzeros": interleave(zeros), "scales": scales}
        return {kind: torch.from_numpy(array) for kind, array in stored.items()}, torch.from_numpy(meant.T)

    return pack


def interleave(numbers: np.ndarray) -> np.ndarray:  # (n, m) -> (n, m / 8)
    """Packs each eight neighbours of a row into a word, the even ones in its lower half."""
    words = np.zeros((len(numbers), numbers.shape[1] // 8), dtype=np.uint32)
    for column in range(numbers.shape[1]):
        even, place = column % 2 == 0, column % 8 // 2
        words[:, column // 8] |= numbers[:, column].astype(np.uint32) << np.uint32(4 * (place if even else 4 + place))
    return words.view(np.int32)


def pack_fp8(*, by_row: bool, shape: tuple[int, ...], more: Weights) -> Packer:
    """Scales by row, of `shape` (rows, *shape), or one of `shape`; `more` concerns activations only."""

    def pack(layer: str, weight: Tensor) -> tuple[Weights, Tensor]:
        largest = weight.float().abs().amax(dim=1, keepdim=True) if by_row else weight.float().abs().max().view(1, 1)
        scale = largest / 448
        packed = (weight.float() / scale).to(torch.float8_e4m3fn)
        stored = {"weight": packed, "weight_scale": scale.reshape((len(weight), *shape) if by_row else shape)}
        return stored | {kind: scale.clone() for kind, scale in more.items()}, packed.double() * scale.double()

    return pack
