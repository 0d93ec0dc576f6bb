"""A model's metadata in a GGUF file, and how llama.cpp's tensors differ from those of transformers.

Sources: llama.cpp's own converter (conversion/llama.py, qwen.py, gemma.py) and its loader (src/models/). A model that
llama.cpp would load, but compute differently, is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mini_trainer.model.stored_tensors import Reader

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


SILU = {"hidden_act": ("silu",)}
LLAMA = Architecture(gguf.MODEL_ARCH.LLAMA, SILU, ropes=tuple(KEYS_OF_ROPE), interleaves_rope=True)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture(gguf.MODEL_ARCH.QWEN2, SILU),
    "qwen3": Architecture(gguf.MODEL_ARCH.QWEN3, SILU | {"attention_bias": (False,)}),
    "qwen3_moe": Architecture(
        gguf.MODEL_ARCH.QWEN3MOE,
        SILU
        | {
            "attention_bias": (False,),
            "norm_topk_prob": (True,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
    ),
    "smollm3": Architecture(
        gguf.MODEL_ARCH.SMOLLM3, SILU | {"attention_bias": (False,), "mlp_bias": (False,)}, interleaves_rope=True
    ),
    "gemma3_text": Architecture(
        gguf.MODEL_ARCH.GEMMA3,
        {
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (None, False),
        },
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
    problems = [*find_unsupported(config, architecture), *find_rope_problems(config, architecture)]
    if problems:
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
        given = {key for key, value in rope.items() if value is not None}
        if rope.get("partial_rotary_factor") == 1:
            given.remove("partial_rotary_factor")
        unread = given - ROPE_KEYS - KEYS_OF_ROPE[kind]
        if unread:
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
    size, window = get_head_size(config), get_window(config)
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


def get_window(config: PreTrainedConfig) -> int | None:
    """Number of tokens that a layer with a sliding window sees; None if there is no such layer."""
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        return None
    return getattr(config, "sliding_window", None)


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
        for key, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(rope[key])


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
    for i, part in enumerate(("gate_proj", "up_proj")):
        yield (
            name.replace("gate_up_proj", part),
            (num_experts, num_rows // 2, width),
            lambda i=i: read().chunk(2, dim=1)[i],
        )


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
