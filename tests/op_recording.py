"""Every operation that torch dispatches, recorded: what it was, and how large what it returned."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OpRecorder(TorchDispatchMode):
    """While it is entered: names of all operations in their order, and the memory that they allocated."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.allocated: dict[int, tuple[StorageWeakRef, int]] = {}  # what is still held of it
        self.largest = 0  # bytes of the largest tensor that was allocated
        self.peak = 0  # most bytes that were held at once after an operation

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = {reference.cdata for reference, _ in list_storages((args, kwargs))}
        outputs = operation(*args, **(kwargs or {}))
        self.names.append(operation.name())
        for reference, num_bytes in list_storages(outputs):
            if reference.cdata not in given:
                self.allocated[reference.cdata] = (reference, num_bytes)
                self.largest = max(self.largest, num_bytes)
        self.allocated = {key: entry for key, entry in self.allocated.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.live_bytes())
        return outputs

    def live_bytes(self) -> int:
        """Bytes of all memory that was allocated and is still held by anything."""
        return sum(num_bytes for reference, num_bytes in self.allocated.values() if not reference.expired())


def list_storages(tree: Any) -> list[tuple[StorageWeakRef, int]]:
    """The memory behind all tensors in `tree`, and its bytes."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]
