"""Writes a model directory as one GGUF file, tensor by tensor: memory use is twice that of the largest one.

How llama.cpp's tensors and metadata differ from those of transformers is in llama.cpp's own converter
(conversion/llama.py, qwen.py, gemma.py) and its loader (src/models/). A model that llama.cpp would load, but compute
differently, is refused.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mini_trainer.data.stores.disk import make_parent, naming_failed_writes, sync_file, write_text, written_aside
from mini_trainer.data.stores.model_files import MODEL_FLAG, find_model, find_weights
from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.distributed.messages import show_progress
from mini_trainer.model.config import ModelSource, load_config, load_generation_config
from mini_trainer.model.quantized import name_kind
from mini_trainer.model.stored_tensors import Reader, find_quantization
from mini_trainer.model.weights import read_weights
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.use.exporters.gguf_tokenizer import add_tokenizer, make_modelfile

# Parameters that llama.cpp reads, by the kind of rotary embedding; transformers writes the first line's for every kind.
ROPE_KEYS = {"rope_type", "type", "rope_theta"}
KEYS_OF_ROPE = {
    "default": set(),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}
WINDOW_PERIOD = 6  # in Gemma 3 every sixth layer has full attention: llama.cpp's default
NO_ROPE_PERIOD = 4  # in SmolLM3 every fourth layer has no rotary embedding: a constant of llama.cpp
LAYERS_OF_27B = 62  # lets llama.cpp recognise the Gemma 3 whose attention is not scaled by the head size


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, for a model type of transformers."""

    arch: gguf.MODEL_ARCH
    supported: dict[str, Sequence[Any]] = field(default_factory=dict)  # values of config keys
    ropes: Sequence[str] = ("default", "linear", "yarn")
    interleaves_rope: bool = False  # rotates neighbouring numbers of a head; transformers rotates its halves
    norm_offset: float = 0.0  # is added to transformers' norm weights
    has_windows: bool = False


SILU, NO_BIAS = {"hidden_act": ("silu",)}, {"attention_bias": (False,)}
LLAMA = Architecture(gguf.MODEL_ARCH.LLAMA, SILU, ropes=tuple(KEYS_OF_ROPE), interleaves_rope=True)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture(gguf.MODEL_ARCH.QWEN2, SILU),
    "qwen3": Architecture(gguf.MODEL_ARCH.QWEN3, SILU | NO_BIAS),
    "qwen3_moe": Architecture(
        gguf.MODEL_ARCH.QWEN3MOE,
        SILU | NO_BIAS | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    ),
    "smollm3": Architecture(gguf.MODEL_ARCH.SMOLLM3, SILU | NO_BIAS | {"mlp_bias": (False,)}, interleaves_rope=True),
    "gemma3_text": Architecture(
        gguf.MODEL_ARCH.GEMMA3,
        NO_BIAS
        | {"hidden_activation": ("gelu_pytorch_tanh",), "attn_logit_softcapping": (None,)}
        | {"use_bidirectional_attention": (None, False)},
        ropes=("default", "linear"),
        norm_offset=1.0,
        has_windows=True,
    ),
}


def find_architecture(config: PreTrainedConfig) -> Architecture:
    """Returns llama.cpp's architecture for a config; ValueError if there is none that computes the same."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"the architecture {kind} cannot be exported to GGUF here, only {', '.join(ARCHITECTURES)}; llama.cpp's"
            " convert_hf_to_gguf.py may support it"
        )
    architecture = ARCHITECTURES[kind]
    if problems := [*find_unsupported(config, architecture), *find_rope_problems(config, architecture)]:
        raise ValueError(f"llama.cpp does not compute what this {kind} model does: {'; '.join(problems)}")
    return architecture


def find_unsupported(config: PreTrainedConfig, architecture: Architecture) -> list[str]:
    problems = [
        f"{key} is {getattr(config, key)!r}, supported: {', '.join(map(repr, allowed))}"
        for key, allowed in architecture.supported.items()
        if getattr(config, key) not in allowed
    ]
    num_heads, size = config.num_attention_heads, get_head_size(config)
    if architecture.arch is gguf.MODEL_ARCH.QWEN2 and num_heads * size != config.hidden_size:
        problems.append(f"{num_heads} heads of {size} do not make the hidden_size of {config.hidden_size}")
    if architecture.arch is gguf.MODEL_ARCH.SMOLLM3:
        rotated = [bool(value) for value in config.no_rope_layers[: config.num_hidden_layers]]
        if rotated != [(i + 1) % NO_ROPE_PERIOD != 0 for i in range(config.num_hidden_layers)]:
            problems.append(f"no_rope_layers is {config.no_rope_layers}, supported: 0 for every fourth layer")
    if architecture.arch is gguf.MODEL_ARCH.GEMMA3:
        scale = config.hidden_size // num_heads if config.num_hidden_layers == LAYERS_OF_27B else size
        if config.query_pre_attn_scalar != scale:
            problems.append(f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, supported: {scale}")
    return problems


def find_rope_problems(config: PreTrainedConfig, architecture: Architecture) -> list[str]:
    problems = []
    for layers, rope in split_ropes(config).items():
        kind = rope["rope_type"]
        supported = architecture.ropes if layers == "full_attention" else ("default",)
        if kind not in supported:
            problems.append(f"rope_type of {layers} is {kind!r}, supported: {', '.join(map(repr, supported))}")
            continue
        given = {
            key for key, value in rope.items() if value is not None and (key, value) != ("partial_rotary_factor", 1)
        }
        if unread := given - ROPE_KEYS - KEYS_OF_ROPE[kind]:
            problems.append(f"rope_parameters of {layers} have {', '.join(sorted(unread))}, which it does not read")
    return problems


def split_ropes(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Parameters of the rotary embedding by kind of layer, in most models of "full_attention" alone."""
    parameters = config.rope_parameters
    return parameters if "full_attention" in parameters else {"full_attention": parameters}


def get_head_size(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def add_hyperparameters(writer: gguf.GGUFWriter, config: PreTrainedConfig, architecture: Architecture) -> list[str]:
    """Adds the model's shape and constants; returns notes for the user."""
    size, layer_types = get_head_size(config), getattr(config, "layer_types", None)
    has_sliding = not layer_types or "sliding_attention" in layer_types
    window = getattr(config, "sliding_window", None) if has_sliding else None
    context, notes = config.max_position_embeddings, []
    if window is not None and not architecture.has_windows and window < context:
        # Within one window, sliding and full attention are the same.
        notes.append(f"context length {window:,}, not {context:,}: llama.cpp has no sliding window for this model")
        context = window
    writer.add_context_length(context)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if architecture.arch is gguf.MODEL_ARCH.QWEN3MOE:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if window is not None and architecture.has_windows:
        writer.add_sliding_window(window)
        has_window = [kind == "sliding_attention" for kind in config.layer_types]
        if has_window != [(i + 1) % WINDOW_PERIOD != 0 for i in range(len(has_window))]:
            writer.add_sliding_window_pattern(has_window)
            notes.append("layers with a sliding window are not those of Gemma 3's releases: needs llama.cpp of 2026")
    if getattr(config, "final_logit_softcapping", None) is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_ropes(writer, split_ropes(config))
    return notes


def add_ropes(writer: gguf.GGUFWriter, ropes: dict[str, dict[str, Any]]) -> None:
    rope = ropes["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if rope.get("beta_slow") is not None:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def make_rope_factors(config: PreTrainedConfig) -> Tensor | None:
    """Divisors of the rotary frequencies, (head size / 2,): llama.cpp has Llama 3's scaling as a tensor."""
    rope = split_ropes(config)["full_attention"]
    if rope["rope_type"] != "llama3":
        return None
    size = get_head_size(config)
    plain = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return plain / scaled


def split_parameter(name: str, shape: tuple[int, ...], read: Reader) -> Iterator[tuple[str, tuple[int, ...], Reader]]:
    """A parameter under names that gguf knows: in transformers' experts, `gate_up_proj` has the rows of two tensors."""
    if not name.endswith(".experts.gate_up_proj"):
        yield name, shape, read
        return
    num_experts, num_rows, width = shape
    half = (num_experts, num_rows // 2, width)
    for i, part in enumerate(("gate_proj", "up_proj")):
        yield name.replace("gate_up_proj", part), half, lambda i=i: read().chunk(2, dim=1)[i]


def convert_tensor(tensor: Tensor, name: str, config: PreTrainedConfig, architecture: Architecture) -> Tensor:
    """Returns a tensor of transformers as llama.cpp expects it; `name` is llama.cpp's."""
    part = name.split(".")[-2]
    if part.endswith("norm"):
        return tensor.float() + architecture.norm_offset
    if architecture.interleaves_rope and part in ("attn_q", "attn_k"):
        num_heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])  # (heads, half, number, ...)
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


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
        return math.prod(gguf.quant_shape_to_byte_shape(self.shape, self.type))


def write_gguf(model_dir: Path, target: Path, dtype: str, *, modelfile: Path | None = None) -> tuple[int, list[str]]:
    """Writes the model in `model_dir` to `target`, under a temporary name until it is complete, and its Modelfile.
    `dtype`, a key of `TYPES`, is that of matrices; vectors are in fp32. Returns the number of bytes and notes for the
    user. ValueError if llama.cpp cannot run the model as transformers does."""
    name, (file_type, matrix_type) = str(model_dir), TYPES[dtype]
    find_model(name, revision=None, trust_remote_code=False)
    if (settings := find_quantization(name)) is not None:
        reason = f"is quantized ({name_kind(settings)}): export the model that it was made from"
        raise ValueError(f"{MODEL_FLAG} {name}: {reason}")
    find_weights(name, name)
    config = load_config(name, TextFamily())
    try:
        architecture = find_architecture(config)
        writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture.arch])
        notes = add_hyperparameters(writer, config, architecture)
        generation, tokenizer = load_generation_config(name, config), load_tokenizer(name)
        notes += add_tokenizer(writer, tokenizer, generation, vocab_size=config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{MODEL_FLAG} {name}: {error}") from None
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(target.stem)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    planned = plan_tensors(name, config, architecture, matrix_type)
    if num_in_f16 := sum(tensor.type not in (F32, matrix_type) for tensor in planned):
        notes.append(f"{num_in_f16} matrices are in f16: their rows are not a multiple of {dtype}'s block size")
    make_parent(target)
    num_bytes = sum(tensor.num_bytes for tensor in planned)
    with written_aside(target) as parts, naming_failed_writes(target, parts=parts, needed_bytes=num_bytes):
        write_tensors(writer, parts[0], planned, config, architecture)
    if modelfile is not None:
        write_text(modelfile, make_modelfile(target.name, tokenizer, generation))
    return target.stat().st_size, notes


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
            writer.write_tensor_data(quantize(tensor, convert_tensor(tensor.read(), tensor.name, config, architecture)))
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
    block_size, _ = gguf.GGML_QUANT_SIZES[kind]
    planned = []
    for origin, read in read_weights(ModelSource(model_dir, config), family).items():
        if origin not in shapes:
            continue  # rotary frequencies in the files of old models
        for part, shape, read_part in split_parameter(origin, shapes[origin], read):
            name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert name is not None, f"gguf has no name for {part}"
            name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"  # of experts
            is_matrix, fits = len(shape) > 1 and ROUTER not in name, shape[-1] % block_size == 0
            own_kind = (kind if fits else F16) if is_matrix else F32
            planned.append(PlannedTensor(name, origin, read_part, shape, own_kind))
    if (factors := make_rope_factors(config)) is not None:
        name = f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]}.weight"
        planned.insert(0, PlannedTensor(name, name, lambda: factors, tuple(factors.shape), F32))
    return planned


def quantize(planned: PlannedTensor, tensor: Tensor) -> np.ndarray:
    """The numbers in the file's type, some rows at a time; ValueError for those beyond its range."""
    num_rows, converted = max(1, ROW_BYTES * len(tensor) // (4 * tensor.numel())), []
    for rows in tensor.split(num_rows):
        numbers = np.ascontiguousarray(rows.float().numpy())
        if planned.type == F16 and max(numbers.max(), -numbers.min()) >= LARGEST_F16:
            raise ValueError(f"{planned.origin} has numbers beyond the range of f16: use --dtype bf16")
        converted.append(gguf.quants.quantize(numbers, planned.type))
    return np.concatenate(converted)
