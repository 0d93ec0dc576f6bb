"""Layers with a state (Mamba, gated delta nets, short convolutions) in packed rows: run once for each sequence.

Their state and their convolution would go on from one sequence into the next. T tokens in the packed row, L in one of
its sequences, H hidden size.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from model.blocks import HeldRow, hold_row

STATEFUL = frozenset({"A_log", "A", "dt_bias", "slope_rate"})  # parameters and buffers that only such layers have
STATELESS_KINDS = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp"})  # of config.layer_types
# What a mixer is not told: of the whole row, while it sees one sequence.
OF_THE_ROW = frozenset(
    {"micro_batch", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)


def find_mixers(block: nn.Module) -> list[nn.Module]:
    """The layers of a block that have a state: those with a convolution, or with parameters that tell."""

    def has_state(module: nn.Module) -> bool:
        names = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        return isinstance(module, nn.Conv1d) or not STATEFUL.isdisjoint(names)

    return [child for child in block.children() if any(map(has_state, child.modules()))]


def split_mixers(blocks: nn.ModuleList, config: PreTrainedConfig) -> None:
    """Makes every mixer run once a sequence; ValueError for a kind of layer that is not known here."""
    kinds = getattr(config, "layer_types", None) or ()
    known = STATELESS_KINDS | ({"chunked_attention"} if getattr(config, "attention_chunk_size", None) else set())
    for i, block in enumerate(blocks):
        mixers = find_mixers(block)
        if not mixers and i < len(kinds) and kinds[i] not in known:
            raise ValueError(
                f"model type {config.model_type!r} has layers of type {kinds[i]}; packed sequences are kept apart only"
                " in attention and in layers with a state, so this model cannot be trained here"
            )
        if mixers:
            row = HeldRow()
            block.forward = functools.partial(hold_row, block.forward, row)
            for mixer in mixers:
                if "position_ids" in inspect.signature(type(mixer).forward).parameters:  # RecurrentGemma: not exact
                    raise ValueError(
                        f"model type {config.model_type!r} cannot be trained here: its {type(mixer).__name__} has a"
                        " state and asks for positions, and is not the same in a packed row"
                    )
                mixer.forward = functools.partial(run_by_sequence, mixer.forward, row)


@torch.compiler.disable  # a loop over lengths that differ in every micro-batch would recompile each time
def run_by_sequence(forward: Callable, row: HeldRow, *args: Any, **kwargs: Any) -> Any:
    """The mixer's output for a packed row (1, T, H), each sequence (1, L, H) by itself; of a tuple the first, too."""
    if row.micro_batch is None:  # the model's own forward pass over one sequence
        return forward(*args, **kwargs)
    lengths = row.micro_batch.seq_lengths
    arguments = [split_argument(value, lengths) for value in args]
    named = {name: split_argument(value, lengths) for name, value in kwargs.items() if name not in OF_THE_ROW}
    outputs = [
        forward(*(parts[i] for parts in arguments), **{name: parts[i] for name, parts in named.items()})
        for i in range(len(lengths))
    ]
    if isinstance(outputs[0], tuple):
        return (torch.cat([output[0] for output in outputs], dim=1), *(None for _ in outputs[0][1:]))
    return torch.cat(outputs, dim=1)


def split_argument(value: Any, lengths: list[int]) -> list[Any]:
    """What each sequence is given: its part of a tensor (1, T, ...) or of each in a tuple, else the same for all."""
    if isinstance(value, Tensor):
        return list(value.split(lengths, dim=1))
    if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        return list(zip(*(split_argument(item, lengths) for item in value), strict=True))
    return [value] * len(lengths)
