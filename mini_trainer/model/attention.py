"""Attention over packed sequences, causal or bidirectional: one row of tokens in which no sequence sees another.

T tokens in the row, Hq query heads, Hkv key/value heads, D head size. `register_backend` registers a function with
transformers; a model then calls the one that its config names, once per layer, with the row's `micro_batch`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from mini_trainer.objectives.families.family import MicroBatch, Row
from mini_trainer.options.doors import ATTENTION, open_door


@dataclass(frozen=True)
class Backend:
    """What a backend can do."""

    features: frozenset[str] = frozenset()  # beyond causal or bidirectional attention with sliding windows
    find_obstacle: str | None = None  # "module:function" that says why it cannot be used here; None: it always can
    is_automatic: bool = True  # whether "auto" may choose it
    is_compiled: bool = True  # else torch.compile skips its loop over sequences
    stores_scores: bool = False


ON_GPU = "mini_trainer.model.attention_kernels:find_kernel_obstacle"
# By the names of ATTENTION (options.doors), in order of preference.
BACKENDS: dict[str, Backend] = {
    "flash_attn": Backend(frozenset({"dropout", "softcap"}), ON_GPU),
    "varlen": Backend(find_obstacle=ON_GPU),
    "varlen_fa3": Backend(find_obstacle=ON_GPU, is_automatic=False),  # since no GPU has measured it yet
    "sdpa": Backend(frozenset({"dropout", "blocks"}), is_compiled=False),
    "eager": Backend(frozenset({"dropout", "softcap", "sinks", "blocks"}), is_compiled=False, stores_scores=True),
}
SHORT = 128  # tokens up to which CPUs attend in fp32 for bfloat16, whose backward pass takes 2 to 3 times as long there
OWN = "own"  # the model's own attention, one sequence at a time, if no backend supports its features
UNCOMPILED = frozenset({OWN, "padded", *(name for name, backend in BACKENDS.items() if not backend.is_compiled)})
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # names in configs


class Rule(NamedTuple):
    """A layer's attention settings, apart from its queries, keys and values."""

    scaling: float
    window: int | None = None  # tokens that a token sees, itself included; None: all of its sequence
    is_two_sided: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None  # (Hq,) logits that take a share of each softmax
    blocks: Tensor | None = None  # (T,) index of each token's image, -1 for none

    @property
    def features(self) -> set[str]:
        """Features that a backend must support beyond those that all do."""
        asked = {"dropout": self.dropout or None, "softcap": self.softcap, "sinks": self.sinks, "blocks": self.blocks}
        return {name for name, value in asked.items() if value is not None}

    @property
    def reach(self) -> tuple[int, int]:
        """Window size (left, right) in FlashAttention's convention; -1: unlimited."""
        before = -1 if self.window is None else self.window - 1
        return before, before if self.is_two_sided else 0


def registered_name(backend: str) -> str:
    """The backend's name in transformers, which treats names containing "flash" or "sdpa" as its own."""
    return f"packed_{list(BACKENDS).index(backend)}"


def register_backend(name: str) -> None:
    """Registers the backend with transformers as an attention implementation."""
    AttentionInterface.register(registered_name(name), make_interface(name, ATTENTION[name]))


def make_interface(name: str, attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Wraps `attend` in the signature that transformers calls; refuses features that the backend would ignore."""

    def attention(
        module: nn.Module,
        query: Tensor,  # (1, Hq, T, D)
        key: Tensor,  # (1, Hkv, T, D)
        value: Tensor,  # (1, Hkv, T, D)
        attention_mask: None,
        *,
        micro_batch: MicroBatch | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,  # (Hq,) attention sinks
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        **_not_about_attention,  # position_ids, cache flags and the like
    ) -> tuple[Tensor, None]:
        if micro_batch is None:
            raise ValueError(f"{type(module).__name__} gets no micro-batch: its model does not forward arguments")
        row = micro_batch.row
        has_blocks = row.blocks is not None and (row.blocks.are_everywhere or sliding_window is not None)
        blocks = row.blocks.of if has_blocks else None
        looks_back = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_two_sided = row.is_two_sided and not looks_back
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        rule = Rule(scaling, sliding_window, is_two_sided, dropout, softcap, s_aux, blocks)
        dropped = rule.features - BACKENDS[name].features
        if attention_mask is not None or position_bias is not None or (is_causal is False and not is_two_sided):
            dropped |= {"attention masks, position biases or attention that is not causal"}
        if dropped:
            raise ValueError(f"attention backend {name!r} does not support this model's {', '.join(sorted(dropped))}")
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            query = correct_temperature(module, query, row.position_ids)
        if getattr(module, "attends_in_chunks", False):
            row = row.chunks
        row_group, num_heads = row.row_group, query.shape[1]
        if row_group is not None:
            from mini_trainer.model.context_parallel import choose_own, give_heads_back, take_heads

            query, key, value = take_heads(query, key, value, row_group)
            if s_aux is not None:
                rule = rule._replace(sinks=choose_own(s_aux, row_group))
        output = attend(query, key, value, row, rule)
        return output if row_group is None else give_heads_back(output, num_heads, row_group), None

    return attention


@torch.compiler.disable  # a loop over lengths that differ in every micro-batch would recompile each time
def attend_sdpa(query: Tensor, key: Tensor, value: Tensor, row: Row, rule: Rule) -> Tensor:  # (1, T, Hq, D)
    """torch's scaled_dot_product_attention, one sequence at a time: bitwise equal to the sequence alone."""
    outputs = []
    for q, k, v, own in split_sequences(query, key, value, row, rule.blocks):
        length = q.shape[2]
        is_plain = own is None and (rule.window is None or length <= rule.window)
        mask = None if is_plain else make_mask(length, rule, q.device, own)
        is_causal = mask is None and not rule.is_two_sided
        if length <= SHORT and q.device.type == "cpu" and q.dtype == torch.bfloat16:
            q, k, v = q.float(), k.float(), v.float()
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=rule.scaling, dropout_p=rule.dropout, enable_gqa=True
        )
        outputs.append(output.transpose(1, 2).to(query.dtype))
    return torch.cat(outputs, dim=1)  # contiguous, since some models take views of it


@torch.compiler.disable
def attend_eager(query: Tensor, key: Tensor, value: Tensor, row: Row, rule: Rule) -> Tensor:  # (1, T, Hq, D)
    """Eager attention, one sequence at a time: softmax over [softcap(q·k), sink], the sink's share discarded."""
    outputs = []
    for q, k, v, own in split_sequences(query, key, value, row, rule.blocks):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * rule.scaling  # (1, Hq, length, length)
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        scores = scores.masked_fill(~make_mask(q.shape[2], rule, q.device, own), float("-inf"))
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)[..., : q.shape[2]]
        outputs.append((torch.dropout(probabilities, rule.dropout, train=rule.dropout > 0) @ v).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def split_sequences(query: Tensor, key: Tensor, value: Tensor, row: Row, blocks: Tensor | None) -> zip:
    """Yields (q, k, v), each (1, heads, length, D), and the blocks (length,) of each packed sequence."""
    own = [None] * len(row.seq_lengths) if blocks is None else blocks.split(row.seq_lengths)
    return zip(*(t.split(row.seq_lengths, dim=2) for t in (query, key, value)), own, strict=True)


def make_mask(length: int, rule: Rule, device: torch.device, blocks: Tensor | None) -> Tensor:
    """Makes a (length, length) mask, True where query i sees key j: 0 <= i - j (< window), bidirectional: |i - j|.
    `blocks` (length,): tokens with the same index >= 0 see each other both ways; the window limits past keys."""
    if blocks is not None:
        is_one = (blocks[:, None] == blocks) & (blocks >= 0)
        seen = is_one | torch.ones_like(is_one).tril_()
        return seen if rule.window is None else seen.triu(1 - rule.window)
    before, after = (length if reach == -1 else reach for reach in rule.reach)
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_(after).triu_(-before)


def choose_backend(
    requested: str, *, model: nn.Module, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> str:
    """Returns the backend `requested`, or for "auto" the first in `BACKENDS` that supports this model and device.
    ValueError, with the reason for each candidate, if none can be used."""
    needed = find_features(model, config)
    automatic = [name for name, backend in BACKENDS.items() if backend.is_automatic]
    candidates = automatic if requested == "auto" else [requested]
    reasons = {name: find_obstacle(name, needed, config=config, device=device, dtype=dtype) for name in candidates}
    usable = [name for name, obstacle in reasons.items() if obstacle is None]
    if not usable:
        raise ValueError("; ".join(f"--attention {name}: {obstacle}" for name, obstacle in reasons.items()))
    return usable[0]


def find_features(model: nn.Module, config: PreTrainedConfig) -> set[str]:
    """Features of the model's attention beyond causal attention with sliding windows."""
    features = set()
    if any(getattr(config, name, 0.0) for name in ATTENTION_DROPOUTS):
        features.add("dropout")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        features.add("softcap")
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        features.add("sinks")
    return features


def list_heads(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """(number of heads, head size) of each layer; a single pair if all layers are alike, none without attention."""
    # Gemma 4 has a config per layer, and its main config has no head_dim.
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [
        (layer.num_attention_heads, getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
        for layer in layers
        if getattr(layer, "num_attention_heads", None)  # Mamba has none
    ]


def find_obstacle(
    name: str, needed: set[str], *, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why backend `name` cannot be used; None if it can."""
    backend = BACKENDS[name]
    if missing := needed - backend.features:
        return f"does not support this model's attention {', '.join(sorted(missing))}"
    if backend.find_obstacle is None:
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    head_sizes = [size for _, size in list_heads(config)]
    return open_door(backend.find_obstacle)(name, config=config, head_sizes=head_sizes, device=device, dtype=dtype)


def mark_chunked(model: nn.Module, config: PreTrainedConfig) -> None:
    """Marks the layers whose attention is limited to chunks of a sequence (Llama 4).
    This is done in advance because torch.compile would recompile for every layer if attention looked at `layer_idx`."""
    layer_types = getattr(config, "layer_types", None) or ()
    for module in model.modules() if "chunked_attention" in layer_types else ():
        index = getattr(module, "layer_idx", None)
        if index is not None and layer_types[index] == "chunked_attention":
            module.attends_in_chunks = True


def correct_temperature(module: nn.Module, query: Tensor, position_ids: Tensor) -> Tensor:
    """Corrects the temperature of queries (1, Hq, T, D) to positions in sequences instead of the row (Llama 4)."""
    in_row = torch.arange(query.shape[2], device=query.device)
    wanted, used = (
        torch.log1p(torch.floor((positions + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for positions in (position_ids[0].float(), in_row.float())
    )
    return (query * (wanted / used)[:, None]).to(query.dtype)
