"""Less memory for activations.

Offloading: recomputed blocks' inputs stay in CPU memory until backward, copied while the GPU computes.
Tiling: MLPs, experts and norms run on a tile of the row at a time, since their intermediate activations dominate the
memory of long rows. Each tile is a torch checkpoint: it keeps its part of the input and is recomputed in backward.
Routers are not tiled, so their statistics are unchanged.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mini_trainer.distributed.devices import OFFLOADED, memory_kind
from mini_trainer.model.activation_checkpointing import inside_tiles
from mini_trainer.model.method import MetaModel


class Waiting:
    """A tensor in CPU memory. `arriving` is its copy on the device, once that has started."""

    def __init__(self, host: Tensor, previous: "Waiting | None"):
        self.host = host
        self.previous = weakref.ref(previous) if previous is not None else lambda: None
        self.arriving: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None


class Offloader:
    """Copies the blocks' inputs between device and CPU on a separate stream.

    Device memory is allocated and freed in the order of the compute stream, which waits for a copy before it frees the
    source or reads the result, so the allocator needs to know about no other stream. At any time one tensor is being
    copied to the CPU while the next block computes, and in backward one is prefetched.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.hidden_storage = 0  # address of the running block's input
        self.leaving: Tensor | None = None  # kept until its copy is complete
        self.left: torch.cuda.Event | None = None
        self.last: Callable[[], Waiting | None] = lambda: None

    def pack(self, tensor: Tensor) -> Waiting | Tensor:
        """Forward: offloads the block's hidden states; tensors shared by all blocks, such as masks, stay."""
        if tensor.untyped_storage()._cdata != self.hidden_storage:
            return tensor
        self.release()
        with memory_kind(OFFLOADED):
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.stream is not None)
        self.left = self.copy(host, tensor)
        self.leaving = tensor.detach()
        waiting = Waiting(host, self.last())
        self.last = weakref.ref(waiting)
        return waiting

    def unpack(self, kept: Waiting | Tensor) -> Tensor:
        """Backward, last block first: returns the block's input, and starts to fetch that of the block before it."""
        if isinstance(kept, Tensor):
            return kept
        self.release()
        for waiting in (kept, kept.previous()):
            if waiting is not None and waiting.arriving is None:
                waiting.arriving = torch.empty_like(waiting.host, device=self.device)
                waiting.arrived = self.copy(waiting.arriving, waiting.host)
        if kept.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.arrived)
        arrived, kept.arriving = kept.arriving, None
        return arrived

    def copy(self, target: Tensor, source: Tensor) -> "torch.cuda.Event | None":
        """Starts a copy once all work queued so far is computed; returns the event that marks its completion."""
        if self.stream is None:
            target.copy_(source.detach())
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source.detach(), non_blocking=True)
        return self.stream.record_event()

    def release(self) -> None:
        """Releases the tensor that was being offloaded."""
        if self.left is not None:
            torch.cuda.current_stream(self.device).wait_event(self.left)
        self.leaving = self.left = None


def check_offloading(device: torch.device) -> None:
    """ValueError on the CPU, where there is nothing to offload from."""
    if device.type == "cpu":
        raise ValueError(
            "--offload-activations moves activations from GPU to CPU memory, but this run is on the CPU: remove the"
            " option"
        )


def apply_offloading(blocks: nn.ModuleList, device: torch.device) -> None:
    """Offloads the inputs of checkpointed blocks; the blocks' hooks, including FSDP's, stay outside."""
    offloader = Offloader(device)
    for block in blocks:
        block.forward = functools.partial(run_offloaded, offloader, block.forward)


def run_offloaded(offloader: Offloader, forward: Callable, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    offloader.hidden_storage = hidden_states.untyped_storage()._cdata
    with saved_tensors_hooks(offloader.pack, offloader.unpack):
        return forward(hidden_states, *args, **kwargs)


MOST_TILES = 16  # tiles per row: each tile's contribution to a weight gradient is rounded to the compute dtype
LEAST_TOKENS = 1024  # tokens per tile: enough rows to keep a GPU busy
LINEAR = (nn.Linear, Conv1D)


def find_tiled(model: PreTrainedModel, blocks: nn.ModuleList) -> tuple[str, ...]:
    """Names of the blocks' modules that process each token separately. ValueError if no MLP is among them.
    Call this before a method inserts its layers, which may disguise a module."""
    modules = [module for block in blocks for module in list_tiled(block)]
    if all(map(is_norm, modules)):
        raise ValueError(
            f"--tiled-mlp: model type {model.config.model_type!r} has no MLP modules that take only hidden states, so"
            " nothing can be tiled: remove the option"
        )
    names = {module: name for name, module in model.named_modules()}
    return tuple(names[module] for module in modules)


def list_tiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules inside `module` that can be tiled."""
    for child in module.children():
        # Fused experts take hidden states, each token's experts, and their weights.
        has_experts = count_inputs(child) == 3 and any(param.ndim == 3 for param in child.parameters(recurse=False))
        if is_mlp(child) or has_experts or is_norm(child):
            yield child
        else:
            yield from list_tiled(child)


def is_mlp(module: nn.Module) -> bool:
    """Whether the module takes only hidden states, and all its parameters belong to linear layers."""
    parts = list(module.modules())
    linear = [part for part in parts if isinstance(part, LINEAR)]
    num_held = sum(len(list(layer.parameters())) for layer in linear)
    has_choice = any(isinstance(part, nn.ModuleList) for part in parts)  # a list of experts, with their router
    is_whole = num_held == len(list(module.parameters())) and not has_choice
    return count_inputs(module) == 1 and len(linear) > 1 and is_whole


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm that takes only hidden states and has at most one-dimensional parameters."""
    is_named = "norm" in type(module).__name__.lower()
    return is_named and count_inputs(module) == 1 and all(param.ndim == 1 for param in module.parameters())


def count_inputs(module: nn.Module) -> int | None:
    """Number of parameters of the module's forward; None if that is variable."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    has_any = any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters)
    return None if has_any else len(parameters)


def apply_tiling(meta: MetaModel) -> None:
    """Makes modules run a tile at a time, including layers that a method has put in or around them."""
    for name in meta.tiled:
        module = meta.model.get_submodule(name)
        module.forward = functools.partial(run_in_tiles, module.forward)


def run_in_tiles(forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:  # each (1, T, ...) or (T, ...)
    shape = inputs[0].shape
    dim = next((i for i, size in enumerate(shape[:-1]) if size > 1), 0)
    size = max(LEAST_TOKENS, -(-shape[dim] // MOST_TILES))
    if shape[dim] <= size:
        return forward(*inputs)
    tiles = zip(*(tensor.split(size, dim) for tensor in inputs), strict=True)
    with inside_tiles():
        return torch.cat([checkpoint(forward, *tile, use_reentrant=False) for tile in tiles], dim)
