"""Counts tensors' memory by purpose, for plans and probes."""

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mini_trainer.distributed import memory
from mini_trainer.distributed.memory import OFFLOADED


class MemoryCounter(TorchDispatchMode):
    """While active, counts the memory of every tensor created, by its `memory_kind`.

    Existing tensors are counted once passed to `count`. The scratch memory of a single operation is not seen.
    """

    def __init__(self):
        super().__init__()
        self.live: Counter[str] = Counter()  # bytes by kind
        self.peak: Counter[str] = Counter()  # `live` at the time its sum was largest
        self.num_live = self.num_peak = 0
        self.most_offloaded = 0
        self._storages: dict[int, tuple[int, str]] = {}  # address of a storage -> bytes, kind

    def __enter__(self) -> "MemoryCounter":
        self._resize = torch.UntypedStorage.resize_  # FSDP frees memory with it, invisibly to dispatch modes
        counter = self

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            counter._resize(storage, size)
            if storage._cdata not in counter._storages:  # made and freed before
                weakref.finalize(storage, counter._drop, storage._cdata)
            _, kind = counter._storages.get(storage._cdata, (0, memory.current_kind))
            counter._set(storage._cdata, size, kind)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = {storage_of(value)._cdata for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
        is_new = function is torch.ops.aten.lift_fresh.default  # by which torch.tensor hands on what it made
        result = function(*args, **kwargs)
        for value in tree_iter(result):
            if isinstance(value, Tensor) and (is_new or storage_of(value)._cdata not in given):  # a view is not new
                self.count(value)
        return result

    def count(self, tensor: Tensor, kind: str | None = None) -> Tensor:
        """Counts the tensor's memory unless already counted; a `kind` replaces its kind. Returns the tensor."""
        storage = storage_of(tensor)
        is_known = storage._cdata in self._storages
        if not is_known or kind is not None:
            self._set(storage._cdata, storage.nbytes(), kind or memory.current_kind)
        if not is_known:
            weakref.finalize(storage, self._drop, storage._cdata)
        return tensor

    def reset_peak(self) -> None:
        self.peak, self.num_peak = self.live.copy(), self.num_live

    def _set(self, address: int, size: int, kind: str) -> None:
        if address in self._storages:
            self._forget(address)
        self._storages[address] = (size, kind)
        self.live[kind] += size
        if kind == OFFLOADED:
            self.most_offloaded = max(self.most_offloaded, self.live[kind])
            return
        self.num_live += size
        if self.num_live > self.num_peak:
            self.reset_peak()

    def _drop(self, address: int) -> None:
        self._forget(address)
        del self._storages[address]

    def _forget(self, address: int) -> None:
        size, kind = self._storages[address]
        self.live[kind] -= size
        self.num_live -= size if kind != OFFLOADED else 0


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory of a tensor, or of this rank's shard of it."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
