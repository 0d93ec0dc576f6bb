"""Running a layer once per sequence of a packed row, on the matching slices of the row's arguments.

T tokens in the packed row, L in one of its sequences, H hidden size, D head size.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_trainer.model.blocks import HeldRow

# Arguments that describe the whole row, which are not passed to a layer that runs on one sequence.
OF_THE_ROW = frozenset({"micro_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
OF_PAIRS = ("mask", "alibi", "bias")  # parts of the names of arguments with a value per key, or per query and key


class OfEach(list[Tensor]):
    """A layer's output per sequence, passed unchanged to the next layer: indices of selected keys."""


@dataclass(frozen=True)
class Span:
    """A sequence's place in its row."""

    index: int
    start: int
    length: int
    longest: int  # length of the row's longest sequence
    row_length: int

    def cut(self, name: str, value: Any) -> Any:
        """Slices an argument, or each item of a tuple or dict, to this sequence; returns other values unchanged.

        Masks and biases are the same for every sequence: those of the row's first tokens.
        """
        if isinstance(value, OfEach):
            return value[self.index]
        if isinstance(value, dict):
            return {key: self.cut(f"{name} {key}", item) for key, item in value.items()}
        if isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value):
            return type(value)(self.cut(name, item) for item in value)
        if not isinstance(value, Tensor):
            return value
        if any(word in name for word in OF_PAIRS):
            return self.cut_pairs(value)
        if value.ndim == 4 and value.shape[2] == self.row_length:  # (1, 1, T, D): positions computed by the model
            return value[:, :, : self.length]
        if value.ndim >= 2 and value.shape[:2] == (1, self.row_length):
            return value[:, self.start : self.start + self.length]
        return value

    def cut_pairs(self, value: Tensor) -> Tensor:  # (..., T or 1, T) -> (..., L or 1, L)
        for dim in (value.ndim - 2, value.ndim - 1):
            if value.shape[dim] in (self.row_length, self.longest):
                value = value.narrow(dim, 0, self.length)
        return value


@torch.compiler.disable  # a loop over lengths that differ in every micro-batch would recompile each time
def run_by_sequence(forward: Callable, row: HeldRow, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer on each sequence (1, L, H) of a packed row (1, T, H); joins the outputs, or the first of several."""
    if row.micro_batch is None:  # the model's own forward pass over one sequence
        return forward(*args, **kwargs)
    lengths = row.micro_batch.row.seq_lengths
    named = {name: value for name, value in kwargs.items() if name not in OF_THE_ROW}
    names = list(inspect.signature(forward).parameters)[: len(args)]
    outputs, start = [], 0
    for i, length in enumerate(lengths):
        span = Span(i, start, length, max(lengths), sum(lengths))
        parts = [span.cut(name, value) for name, value in zip(names, args, strict=True)]
        outputs.append(forward(*parts, **{name: span.cut(name, value) for name, value in named.items()}))
        start += length
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, dim=1)
    first, *others = zip(*outputs, strict=True)
    return type(outputs[0])((torch.cat(first, dim=1), *map(join_output, others)))


@torch.compiler.disable  # kernels from packages may not be traceable
def run_with_borders(forward: Callable, row: HeldRow, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Runs a layer on a packed row (1, T, H) in one call; arguments `names` give its kernels the ends of sequences."""
    micro_batch = row.micro_batch
    if micro_batch is None:  # the model's own forward pass over one sequence
        return forward(*args, **kwargs)
    cu_seqlens = micro_batch.row.cu_seqlens
    index = torch.arange(micro_batch.row.input_ids.shape[1], device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    borders = {
        "seq_idx": torch.bucketize(index, cu_seqlens[1:], right=True, out_int32=True)[None],  # (1, T) sequence index
        "cu_seqlens": cu_seqlens,
        "cu_seq_lens_q": cu_seqlens,
    }
    named = {name: value for name, value in kwargs.items() if name not in OF_THE_ROW}
    return forward(*args, **named, **{name: borders[name] for name in names})


def join_output(values: tuple) -> Any:
    """Combines an additional output of all sequences; None for attention weights, which are not used."""
    if all(value is values[0] for value in values):  # such as a bias
        return values[0]
    is_index = all(isinstance(value, Tensor) and not value.dtype.is_floating_point for value in values)
    return OfEach(values) if is_index else None
