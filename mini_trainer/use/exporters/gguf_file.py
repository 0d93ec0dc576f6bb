"""Writes a model directory as one GGUF file, tensor by tensor: memory use is twice that of the largest one."""

import math
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from mini_trainer.data.stores.disk import describe_failed_write, make_parent, sync_file, written_aside
from mini_trainer.data.stores.model_files import MODEL_FLAG, find_model, find_weights
from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.distributed.messages import show_progress
from mini_trainer.model.config import ModelSource, load_config, load_generation_config
from mini_trainer.model.quantized import name_kind
from mini_trainer.model.stored_tensors import Reader, find_quantization
from mini_trainer.model.weights import read_weights
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.use.exporters.gguf_architectures import (
    Architecture,
    add_hyperparameters,
    convert_tensor,
    find_architecture,
    make_rope_factors,
    split_parameter,
)
from mini_trainer.use.exporters.gguf_tokenizer import add_tokenizer

# Type of the file and of its matrices.
TYPES = {
    "f32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
    "f16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}
F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
ROUTER = ".ffn_gate_inp."  # of experts: llama.cpp keeps it in fp32
LARGEST_F16 = 65520  # rounds to infinity
ROW_BYTES = 64 << 20  # fp32 bytes of the rows that are converted at once


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the file before it is read."""

    name: str
    origin: str  # its name in transformers
    read: Reader
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType

    @property
    def num_bytes(self) -> int:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block_size * block_bytes


def write_gguf(model_dir: Path, target: Path, dtype: str) -> tuple[int, list[str]]:
    """Writes the model in `model_dir` to `target`, under a temporary name until it is complete.

    `dtype`, a key of `TYPES`, is that of matrices; vectors are in fp32. Returns the number of bytes and notes for the
    user. ValueError if llama.cpp cannot run the model as transformers does.
    """
    name, (file_type, matrix_type) = str(model_dir), TYPES[dtype]
    config = load_unquantized_config(name)
    try:
        architecture = find_architecture(config)
        writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture.arch])
        notes = add_hyperparameters(writer, config, architecture)
        generation = load_generation_config(name, config)
        notes += add_tokenizer(writer, load_tokenizer(name), generation, vocab_size=config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{MODEL_FLAG} {name}: {error}") from None
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(target.stem)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    planned = plan_tensors(name, config, architecture, matrix_type)
    num_in_f16 = sum(tensor.type not in (F32, matrix_type) for tensor in planned)
    if num_in_f16:
        notes.append(f"{num_in_f16} matrices are in f16: their rows are not a multiple of {dtype}'s block size")
    make_parent(target)
    with written_aside(target) as (aside,):
        try:
            write_tensors(writer, aside, planned, config, architecture)
        except OSError as error:
            num_bytes = sum(tensor.num_bytes for tensor in planned)
            raise OSError(describe_failed_write(f"the file {target}", error, aside, num_bytes)) from None
    return target.stat().st_size, notes


def load_unquantized_config(model_dir: str) -> PreTrainedConfig:
    """The config of a complete and safe model directory; ValueError for adapters and quantized checkpoints."""
    find_model(model_dir, revision=None, trust_remote_code=False)
    settings = find_quantization(model_dir)
    if settings is not None:
        raise ValueError(
            f"{MODEL_FLAG} {model_dir}: is quantized ({name_kind(settings)}): export the model that it was made from"
        )
    find_weights(model_dir, model_dir)
    return load_config(model_dir, TextFamily())


def write_tensors(
    writer: gguf.GGUFWriter,
    path: Path,
    planned: list[PlannedTensor],
    config: PreTrainedConfig,
    architecture: Architecture,
) -> None:
    """Writes the file: header, sizes of all tensors, then each tensor."""
    for tensor in planned:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.type)
    writer.write_header_to_file(path)
    try:
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in show_progress(planned, "writing", unit="tensor"):
            converted = convert_tensor(tensor.read(), tensor.name, config, architecture)
            writer.write_tensor_data(quantize(tensor, converted))
    finally:
        writer.close()
    sync_file(path)


def plan_tensors(
    model_dir: str, config: PreTrainedConfig, architecture: Architecture, kind: gguf.GGMLQuantizationType
) -> list[PlannedTensor]:
    """All tensors of the file in order."""
    family = TextFamily()
    with torch.device("meta"):
        model = family.make_model(config, dtype=torch.float32, trust_remote_code=False)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    names = gguf.get_tensor_name_map(architecture.arch, config.num_hidden_layers)
    planned = []
    for origin, read in read_weights(ModelSource(model_dir, config), family).items():
        if origin not in shapes:
            continue  # rotary frequencies in the files of old models
        for part, shape, read_part in split_parameter(origin, shapes[origin], read):
            name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert name is not None, f"gguf has no name for {part}"
            name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"  # of experts
            planned.append(PlannedTensor(name, origin, read_part, shape, choose_type(name, shape, kind)))
    factors = make_rope_factors(config)
    if factors is not None:
        name = f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]}.weight"
        planned.insert(0, PlannedTensor(name, name, lambda: factors, tuple(factors.shape), F32))
    return planned


def choose_type(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if len(shape) == 1 or ROUTER in name:
        return F32
    block_size, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if shape[-1] % block_size == 0 else F16


def quantize(planned: PlannedTensor, tensor: Tensor) -> np.ndarray:
    """The numbers in the file's type, some rows at a time; ValueError for those beyond its range."""
    num_rows = max(1, ROW_BYTES * len(tensor) // (4 * tensor.numel()))
    return np.concatenate([quantize_rows(planned, rows) for rows in tensor.split(num_rows)])


def quantize_rows(planned: PlannedTensor, rows: Tensor) -> np.ndarray:
    numbers = np.ascontiguousarray(rows.float().numpy())
    if planned.type == F16 and max(numbers.max(), -numbers.min()) >= LARGEST_F16:
        raise ValueError(f"{planned.origin} has numbers beyond the range of f16: use --dtype bf16")
    return gguf.quants.quantize(numbers, planned.type)
