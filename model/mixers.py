"""Which layers of a block run once for each sequence of a packed row (see model/by_sequence.py).

Layers with a state (Mamba, gated delta nets, short convolutions), which would leak from one sequence into the next, and
attention that no backend of model/attention.py can replace.
"""

import functools
import importlib.util
import inspect
from types import CodeType

import torch
from torch import nn
from transformers import PreTrainedConfig

from model.blocks import HeldRow
from model.by_sequence import run_by_sequence, run_with_borders

# Parameters, buffers and parts that only such layers have; the last one is xLSTM's.
STATEFUL = frozenset({"A_log", "A", "dt_bias", "slope_rate", "igate_preact"})
STATELESS_KINDS = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp"})  # of config.layer_types

# The functions of transformers' mixers that keep a row's sequences apart where this package is installed.
KERNELS = {
    "causal_conv1d_fn": "causal_conv1d",
    "mamba2_chunk_scan": "mamba_ssm",
    "mamba2_split_conv1d_scan_combined": "mamba_ssm",
    "torch_chunk_gated_delta_rule": "fla",
    "chunk_kimi_delta_attention": "fla",
}
WITHOUT_BORDERS = frozenset({"mamba_selective_scan", "mamba_inner_fn"})  # Mamba 1's


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


def use_kernels(blocks: nn.ModuleList, device: torch.device) -> bool:
    """Lets mixers take whole rows if their kernels take the ends of sequences; returns whether.

    The start check tries them, and `use_loop` takes it back. A mixer reads either cu_seq_lens_q (gated delta nets) or
    hands cu_seqlens on (KDA); all hand seq_idx on, and kernels are given what they take.
    """
    mixers = [mixer for block in blocks for mixer in find_mixers(block)]
    if not mixers or device.type != "cuda" or not all(map(has_kernels, mixers)):
        return False
    for mixer in mixers:
        forward, row = mixer.forward.args
        reads = any("cu_seq_lens_q" in code.co_consts for code in list_code(mixer))
        names = ("seq_idx", "cu_seq_lens_q" if reads else "cu_seqlens")
        mixer.forward = functools.partial(run_with_borders, forward, row, names)
    return True


def use_loop(blocks: nn.ModuleList) -> None:
    """Makes the mixers that take whole rows run once a sequence again."""
    for mixer in list_with_kernels(blocks):
        forward, row, _ = mixer.forward.args
        mixer.forward = functools.partial(run_by_sequence, forward, row)


def list_with_kernels(blocks: nn.ModuleList) -> list[nn.Module]:
    """The mixers that take whole rows."""
    forwards = {mixer: mixer.forward for block in blocks for mixer in find_mixers(block)}
    return [mixer for mixer, forward in forwards.items() if getattr(forward, "func", None) is run_with_borders]


def has_kernels(mixer: nn.Module) -> bool:
    """Whether all kernels that the mixer calls know borders, and their packages are installed."""
    names = {name for code in list_code(mixer) for name in code.co_names}
    packages = {package for name, package in KERNELS.items() if name in names}
    if not packages or not WITHOUT_BORDERS.isdisjoint(names):
        return False
    return all(importlib.util.find_spec(package) is not None for package in packages)


def list_code(module: nn.Module) -> list[CodeType]:
    """The code of the functions that the module's class defines."""
    functions = [inspect.unwrap(value) for value in vars(type(module)).values() if inspect.isroutine(value)]
    return [function.__code__ for function in functions if inspect.isfunction(function)]
