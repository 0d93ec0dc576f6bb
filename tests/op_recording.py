"""Every operation that torch dispatches, recorded: what it was, and how large what it returned."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OpRecorder(TorchDispatchMode):
    """While it is entered: names of all operations in their order, and the memory that they returned."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0  # bytes of the largest tensor that an operation returned

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        outputs = operation(*args, **(kwargs or {}))
        self.names.append(operation.name())
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self.storages[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return outputs

    def live_bytes(self) -> int:
        """Bytes of all memory that was returned and is still held by anything."""
        return sum(num_bytes for reference, num_bytes in self.storages.values() if not reference.expired())
