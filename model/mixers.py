"""Which layers of a block run once for each sequence of a packed row (see model/by_sequence.py).

Those with a state (Mamba, gated delta nets, short convolutions), which would go on from one sequence into the next, and
attention that no backend of model/attention.py can take the place of.
"""

import functools
import inspect

from torch import nn
from transformers import PreTrainedConfig

from model.blocks import HeldRow
from model.by_sequence import run_by_sequence

# Parameters, buffers and parts that only such layers have; the last one is xLSTM's.
STATEFUL = frozenset({"A_log", "A", "dt_bias", "slope_rate", "igate_preact"})
STATELESS_KINDS = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp"})  # of config.layer_types


def find_mixers(block: nn.Module) -> list[nn.Module]:
    """The layers of a block that have a state: those with a convolution, or with parameters that tell."""

    def has_state(module: nn.Module) -> bool:
        return isinstance(module, nn.Conv1d) or any(hasattr(module, name) for name in STATEFUL)

    return [child for child in block.children() if any(map(has_state, child.modules()))]


def find_masked(block: nn.Module) -> list[nn.Module]:
    """The layers of a block that are given a mask: its attention."""
    return [
        child
        for child in block.children()
        if any("mask" in name for name in inspect.signature(type(child).forward).parameters)
    ]


def needs_own_attention(blocks: nn.ModuleList, config: PreTrainedConfig) -> bool:
    """Whether attention does what no backend does: it has a state (Zaya), or chooses among the keys (DeepSeek V3.2)."""
    kinds = getattr(config, "layer_types", None) or ()
    known = STATELESS_KINDS | ({"chunked_attention"} if getattr(config, "attention_chunk_size", None) else set())
    return any(
        any(hasattr(mixer, "num_key_value_groups") for mixer in mixers)
        or (not mixers and i < len(kinds) and kinds[i] not in known)
        for i, mixers in enumerate(map(find_mixers, blocks))
    )


def split_layers(blocks: nn.ModuleList, held: list[HeldRow], *, has_own_attention: bool) -> None:
    """Makes every mixer run once a sequence; all attention, too, where it is the model's own.

    `held`: where each block holds its row.
    """
    for block, row in zip(blocks, held, strict=True):
        layers = find_mixers(block)
        if has_own_attention:
            layers += [layer for layer in find_masked(block) if layer not in layers]
        for layer in layers:
            layer.forward = functools.partial(run_by_sequence, layer.forward, row)
