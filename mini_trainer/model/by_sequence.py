"""Running a layer once per sequence of a packed row, on the matching slices of the row's arguments.

T tokens in the packed row, L in one of its sequences, H hidden size, D head size.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from mini_trainer.model.blocks import HeldRow, find_mixers

# Functions in transformers' mixers that keep a row's sequences apart if the package is installed.
KERNELS = {
    "causal_conv1d_fn": "causal_conv1d",
    "mamba2_chunk_scan": "mamba_ssm",
    "mamba2_split_conv1d_scan_combined": "mamba_ssm",
    "torch_chunk_gated_delta_rule": "fla",
    "chunk_kimi_delta_attention": "fla",
}
WITHOUT_BORDERS = frozenset({"mamba_selective_scan", "mamba_inner_fn"})  # Mamba 1's

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
        Masks and biases are the same for every sequence: those of the row's first tokens."""
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


def takes_mask(layer: nn.Module) -> bool:
    """Whether the layer of a block is its attention."""
    return any("mask" in name for name in inspect.signature(type(layer).forward).parameters)


def split_layers(blocks: nn.ModuleList, held: list[HeldRow], *, has_own_attention: bool) -> None:
    """Makes every mixer run once per sequence, and also all attention if it is the model's own.
    `held`: each block's holder of its micro-batch."""
    for block, row in zip(blocks, held, strict=True):
        layers = find_mixers(block)
        if has_own_attention:
            layers += [layer for layer in block.children() if takes_mask(layer) and layer not in layers]
        for layer in layers:
            layer.forward = functools.partial(run_by_sequence, layer.forward, row)


def use_kernels(blocks: nn.ModuleList, device: torch.device) -> bool:
    """Runs mixers on whole rows if their kernels take sequence borders; returns whether they do. The start-up check
    tests them, and `use_loop` reverts this. A mixer either reads cu_seq_lens_q (gated delta nets) or forwards
    cu_seqlens (KDA); all forward seq_idx, and each kernel gets the arguments that it accepts."""
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
