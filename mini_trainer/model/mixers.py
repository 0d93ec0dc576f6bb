"""Finding and wrapping layers that run once per sequence of a packed row (see model/by_sequence.py).

These are layers with a recurrent state (Mamba, gated delta nets, short convolutions), which would leak from one
sequence into the next, and attention that no backend of model/attention.py can replace.
"""

import functools
import importlib.util
import inspect
from types import CodeType

import torch
from torch import nn
from transformers import PreTrainedConfig

from mini_trainer.model.blocks import HeldRow
from mini_trainer.model.by_sequence import run_by_sequence, run_with_borders

# Parameters, buffers and modules that only layers with a recurrent state have; the last one is xLSTM's.
STATEFUL = frozenset({"A_log", "A", "dt_bias", "slope_rate", "igate_preact"})
STATELESS_KINDS = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp"})  # in config.layer_types

# Functions in transformers' mixers that keep a row's sequences apart if the package is installed.
KERNELS = {
    "causal_conv1d_fn": "causal_conv1d",
    "mamba2_chunk_scan": "mamba_ssm",
    "mamba2_split_conv1d_scan_combined": "mamba_ssm",
    "torch_chunk_gated_delta_rule": "fla",
    "chunk_kimi_delta_attention": "fla",
}
WITHOUT_BORDERS = frozenset({"mamba_selective_scan", "mamba_inner_fn"})  # Mamba 1's


def find_mixers(block: nn.Module) -> list[nn.Module]:
    """A block's layers with a recurrent state, recognized by a convolution or by `STATEFUL` attributes."""

    def has_state(module: nn.Module) -> bool:
        return isinstance(module, nn.Conv1d) or any(hasattr(module, name) for name in STATEFUL)

    return [child for child in block.children() if any(map(has_state, child.modules()))]


def find_masked(block: nn.Module) -> list[nn.Module]:
    """A block's layers that take a mask: its attention."""
    return [
        child
        for child in block.children()
        if any("mask" in name for name in inspect.signature(type(child).forward).parameters)
    ]


def needs_own_attention(blocks: nn.ModuleList, config: PreTrainedConfig) -> bool:
    """Whether attention has a feature that no backend supports: a state (Zaya), or key selection (DeepSeek V3.2)."""
    kinds = getattr(config, "layer_types", None) or ()
    known = STATELESS_KINDS | ({"chunked_attention"} if getattr(config, "attention_chunk_size", None) else set())
    return any(
        any(hasattr(mixer, "num_key_value_groups") for mixer in mixers)
        or (not mixers and i < len(kinds) and kinds[i] not in known)
        for i, mixers in enumerate(map(find_mixers, blocks))
    )


def split_layers(blocks: nn.ModuleList, held: list[HeldRow], *, has_own_attention: bool) -> None:
    """Makes every mixer run once per sequence, and also all attention if it is the model's own.

    `held`: each block's holder of its micro-batch.
    """
    for block, row in zip(blocks, held, strict=True):
        layers = find_mixers(block)
        if has_own_attention:
            layers += [layer for layer in find_masked(block) if layer not in layers]
        for layer in layers:
            layer.forward = functools.partial(run_by_sequence, layer.forward, row)


def use_kernels(blocks: nn.ModuleList, device: torch.device) -> bool:
    """Runs mixers on whole rows if their kernels take sequence borders; returns whether they do.

    The start-up check tests them, and `use_loop` reverts this. A mixer either reads cu_seq_lens_q (gated delta nets) or
    forwards cu_seqlens (KDA); all forward seq_idx, and each kernel gets the arguments that it accepts.
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
    """Makes mixers that run on whole rows run once per sequence again."""
    for mixer in list_with_kernels(blocks):
        forward, row, _ = mixer.forward.args
        mixer.forward = functools.partial(run_by_sequence, forward, row)


def list_with_kernels(blocks: nn.ModuleList) -> list[nn.Module]:
    """The mixers that run on whole rows."""
    forwards = {mixer: mixer.forward for block in blocks for mixer in find_mixers(block)}
    return [mixer for mixer, forward in forwards.items() if getattr(forward, "func", None) is run_with_borders]


def has_kernels(mixer: nn.Module) -> bool:
    """Whether all kernels that the mixer calls support sequence borders, and their packages are installed."""
    names = {name for code in list_code(mixer) for name in code.co_names}
    packages = {package for name, package in KERNELS.items() if name in names}
    if not packages or not WITHOUT_BORDERS.isdisjoint(names):
        return False
    return all(importlib.util.find_spec(package) is not None for package in packages)


def list_code(module: nn.Module) -> list[CodeType]:
    """Code objects of the functions that the module's class defines."""
    functions = [inspect.unwrap(value) for value in vars(type(module)).values() if inspect.isroutine(value)]
    return [function.__code__ for function in functions if inspect.isfunction(function)]
