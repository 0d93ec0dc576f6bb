"""Counts the bytes of tensors, live and at their peak: of a real step on the CPU, or of one that is only simulated."""

import sys
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# What the code that allocates is part of, by a piece of its file's name; the innermost call that matches tells.
KINDS = {
    "token_loss.py": "loss",
    "/fsdp/_fully_shard/": "gathered",
    "/torch/optim/": "optimizer",
    "compact_adamw.py": "optimizer",
}
OTHER = "activations"


class MemoryCounter(TorchDispatchMode):
    """While it is entered, counts the memory of every tensor that is made, and gives it a kind.

    What exists before counts once it is given to `count`. The scratch memory of a single operation is not seen.
    """

    def __init__(self):
        super().__init__()
        self.live: Counter[str] = Counter()  # bytes by kind
        self.peak: Counter[str] = Counter()  # as `live` was when its sum was largest
        self.num_live = self.num_peak = 0
        self._storages: dict[int, tuple[int, str]] = {}  # address of a storage -> bytes, kind

    def __enter__(self) -> "MemoryCounter":
        self._resize = torch.UntypedStorage.resize_  # which no dispatch mode sees, and FSDP frees with
        counter = self

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            counter._resize(storage, size)
            if storage._cdata in counter._storages:
                _, kind = counter._storages[storage._cdata]
                counter._set(storage._cdata, size, kind)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.count(value)
        return result

    def count(self, tensor: Tensor, kind: str | None = None) -> None:
        """Counts the tensor's memory, unless it does already; with `kind`, as that from now on."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        is_known = storage._cdata in self._storages
        if is_known and kind is None:
            return
        self._set(storage._cdata, storage.nbytes(), kind or find_kind())
        if not is_known:
            weakref.finalize(storage, self._drop, storage._cdata)

    def reset_peak(self) -> None:
        self.peak, self.num_peak = self.live.copy(), self.num_live

    def _set(self, address: int, size: int, kind: str) -> None:
        if address in self._storages:
            self._forget(address)
        self._storages[address] = (size, kind)
        self.live[kind] += size
        self.num_live += size
        if self.num_live > self.num_peak:
            self.reset_peak()

    def _drop(self, address: int) -> None:
        self._forget(address)
        del self._storages[address]

    def _forget(self, address: int) -> None:
        size, kind = self._storages[address]
        self.live[kind] -= size
        self.num_live -= size


def find_kind() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        for piece, kind in KINDS.items():
            if piece in frame.f_code.co_filename:
                return kind
        frame = frame.f_back
    return OTHER
