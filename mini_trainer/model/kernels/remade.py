"""Selective checkpointing of blocks with fused kernels, which costs the host less than looking at each operation.

Without any checkpointing such a block keeps what selective checkpointing keeps, and the outputs of its norms and gated
activations. In place of these it keeps how to make them again, from what it keeps anyway.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mini_trainer.objectives.objective import KernelSwitch

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


class Call:
    """A call that backward makes again, once for all that read its results."""

    def __init__(self, compute: Callable, given: tuple):
        self.compute, self.given = compute, [pack(each) if isinstance(each, Tensor) else each for each in given]
        self.num_readers = 0
        self.results: tuple[Tensor, ...] = ()

    def take(self, index: int) -> Tensor:
        if not self.results:
            results = self.compute(*map(unpack, self.given))
            self.results = (results,) if isinstance(results, Tensor) else results
        result = self.results[index]
        self.num_readers -= 1
        if not self.num_readers:
            self.results = ()
        return result


class View(NamedTuple):
    """In place of a kept tensor: which result of a call it is, and how it lies in that."""

    call: Call
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


# The running block's results by the address of their storage, which no other has while a weak reference to it lives.
results: dict[int, tuple[Call, int, StorageWeakRef]] | None = None


def note(result: Result, compute: Callable[..., Result], *given: Any) -> Result:
    """Lets backward make `result`, which it returns, again as compute(*given)."""
    if results is not None:
        call = Call(compute, given)
        for index, each in enumerate((result,) if isinstance(result, Tensor) else result):
            place = StorageWeakRef(each.untyped_storage())
            results[place.cdata] = (call, index, place)
    return result


def is_noted(tensor: Tensor) -> bool:
    return results is not None and tensor.untyped_storage()._cdata in results


def pack(tensor: Tensor) -> Tensor | View:
    found = results and results.get(tensor.untyped_storage()._cdata)
    if not found:
        return tensor.detach()
    call, index, _ = found
    call.num_readers += 1
    return View(call, index, tensor.shape, tensor.stride(), tensor.storage_offset())


def unpack(kept: Any) -> Any:
    if not isinstance(kept, View):
        return kept
    return kept.call.take(kept.index).as_strided(kept.size, kept.stride, kept.offset)


class Remaking:
    """A block's forward method: as described above where `is_covered` says that it can be, else `recompute`."""

    def __init__(self, recompute: functools.partial, switch: KernelSwitch, is_covered: Callable[[torch.dtype], bool]):
        """`recompute`: the method with torch's checkpoints around it."""
        self.recompute, self.switch, self.is_covered = recompute, switch, functools.cache(is_covered)

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        global results
        if not (self.switch.is_on and torch.is_grad_enabled() and self.is_covered(hidden.dtype)):
            return self.recompute(hidden, *args, **kwargs)
        results = {}
        try:
            with saved_tensors_hooks(pack, unpack):
                return self.recompute.args[0](hidden, *args, **kwargs)
        finally:
            results = None
