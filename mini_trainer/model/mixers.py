"""Finding layers that run once per sequence of a packed row (model/by_sequence.py).

These are layers with a recurrent state (Mamba, gated delta nets, short convolutions), which would leak from one
sequence into the next, and attention that no backend of model/attention.py can replace.
"""

from torch import nn
from transformers import PreTrainedConfig

# Parameters, buffers and modules that only layers with a recurrent state have; the last one is xLSTM's.
STATEFUL = frozenset({"A_log", "A", "dt_bias", "slope_rate", "igate_preact"})
STATELESS_KINDS = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp"})  # in config.layer_types


def find_mixers(block: nn.Module) -> list[nn.Module]:
    """A block's layers with a recurrent state, recognized by a convolution or by `STATEFUL` attributes."""

    def has_state(module: nn.Module) -> bool:
        return isinstance(module, nn.Conv1d) or any(hasattr(module, name) for name in STATEFUL)

    return [child for child in block.children() if any(map(has_state, child.modules()))]


def needs_own_attention(blocks: nn.ModuleList, config: PreTrainedConfig) -> bool:
    """Whether attention has a feature that no backend supports: a state (Zaya), or key selection (DeepSeek V3.2)."""
    kinds = getattr(config, "layer_types", None) or ()
    known = STATELESS_KINDS | ({"chunked_attention"} if getattr(config, "attention_chunk_size", None) else set())
    return any(
        any(hasattr(mixer, "num_key_value_groups") for mixer in mixers)
        or (not mixers and i < len(kinds) and kinds[i] not in known)
        for i, mixers in enumerate(map(find_mixers, blocks))
    )
