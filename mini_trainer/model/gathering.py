"""Gathering a sharded model's tensors on rank 0, one at a time."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mini_trainer.distributed.world import World

PINNED_BYTES = 1 << 30  # of a tensor; torch keeps pinned memory, in powers of two, for later tensors


@dataclass(frozen=True)
class WeightGroup:
    """Tensors of an export that are gathered together: their shapes, and a function that gathers them."""

    shapes: dict[str, Tensor]  # on the meta device, by name
    gather: Callable[[], dict[str, Tensor]]  # unsharded, on rank 0's CPU; empty on other ranks. All ranks call it.


def gather_parameters(
    model: PreTrainedModel, dtype: torch.dtype, *, world: World, leave_out: Collection[str] = ()
) -> list[WeightGroup]:
    """A group for each parameter, unsharded and in `dtype` (tied ones once), and each persistent buffer, unchanged."""
    saved = model.state_dict().keys()
    params = [(name, param.detach(), dtype) for name, param in model.named_parameters()]
    buffers = [(name, buffer, buffer.dtype) for name, buffer in model.named_buffers() if name in saved]
    return [
        gather_one(name, tensor.shape, kept_dtype, functools.partial(gather_tensor, tensor, kept_dtype, world=world))
        for name, tensor, kept_dtype in params + buffers
        if name not in leave_out
    ]


def gather_all(groups: Iterable[WeightGroup]) -> dict[str, Tensor]:
    """Gathers the tensors of all groups at once. All ranks call this."""
    return {name: tensor for group in groups for name, tensor in group.gather().items()}


def gather_one(name: str, shape: Sequence[int], dtype: torch.dtype, gather: Callable[[], Tensor | None]) -> WeightGroup:
    """Makes a group of one tensor from a function that returns None on other ranks."""

    def gather_named() -> dict[str, Tensor]:
        tensor = gather()
        return {} if tensor is None else {name: tensor}

    return WeightGroup({name: torch.empty(shape, dtype=dtype, device="meta")}, gather_named)


def gather_tensor(tensor: Tensor, dtype: torch.dtype, *, world: World) -> Tensor | None:
    """The unsharded parameter or buffer on rank 0's CPU; None on other ranks. All ranks call this."""
    whole = tensor.to(world.device, dtype)
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return copy_to_cpu(whole) if world.rank == 0 else None


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """The tensor in CPU memory: pinned unless it is very large, since GPUs copy there several times as fast.

    Waits for the copy. A separate stream would gain nothing: an export writes its files more slowly than this.
    """
    if not tensor.is_cuda or tensor.nbytes > PINNED_BYTES:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
