"""Records of what torch does: operations and the memory that they allocate, collectives, waits for the device."""

import sys
from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::allgather_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::alltoall_base_": "all-to-all",
    "c10d::barrier": "barrier",
}
# On a GPU each of these waits until it has computed what they read.
WAITING_CALLS = {f"torch.Tensor.{name}" for name in ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "__bool__",
                 "__int__", "__float__", "__index__", "__array__", "__contains__", "masked_select")}  # fmt: skip
WAITING_OPERATIONS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::_unique2",
                      "aten::masked_select", "aten::unique_dim", "aten::repeat_interleave.Tensor"}  # fmt: skip


class CollectiveCounter(TorchDispatchMode):
    """While it is entered: how many collectives this rank starts, and the bytes of whole tensors, by kind."""

    def __init__(self):
        super().__init__()
        self.num_collectives: Counter[str] = Counter()
        self.collective_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name()
        if name.startswith("c10d::"):
            kind = COLLECTIVES[name]
            self.num_collectives[kind] += 1
            self.collective_bytes[kind] += max(map(count_bytes, args))
        return operation(*args, **(kwargs or {}))


class OpRecorder(CollectiveCounter):
    """While it is entered: names of all operations in their order, and the memory that they allocated."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.allocated: dict[int, tuple[StorageWeakRef, int]] = {}  # what is still held of it
        self.num_allocations = 0
        self.largest = 0  # bytes of the largest tensor that was allocated
        self.peak = 0  # most bytes that were held at once after an operation

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = {reference.cdata for reference, _ in list_storages((args, kwargs))}
        outputs = super().__torch_dispatch__(operation, types, args, kwargs)
        self.names.append(operation.name())
        for reference, num_bytes in list_storages(outputs):
            if reference.cdata not in given:
                self.allocated[reference.cdata] = (reference, num_bytes)
                self.num_allocations += 1
                self.largest = max(self.largest, num_bytes)
        self.allocated = {key: entry for key, entry in self.allocated.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.live_bytes())
        return outputs

    def live_bytes(self) -> int:
        """Bytes of all memory that was allocated and is still held by anything."""
        return sum(num_bytes for reference, num_bytes in self.allocated.values() if not reference.expired())


def count_bytes(tree: Any) -> int:
    """Bytes of all tensors in `tree`."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def list_storages(tree: Any) -> list[tuple[StorageWeakRef, int]]:
    """The memory behind all tensors in `tree`, and its bytes."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]


class WaitRecorder:
    """What waits, in the thread that trains, in its order: whether it is called by reduce_step, and its name."""

    def __init__(self):
        self.events: list[tuple[bool, str]] = []
        recorder = self

        class Calls(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                name = resolve_name(function)
                if name in WAITING_CALLS:
                    recorder.add(name)
                return function(*args, **(kwargs or {}))

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                masks = operation.name() in ("aten::index.Tensor", "aten::index_put_") and any(
                    isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in tree_leaves(args[1])
                )
                if operation.name() in WAITING_OPERATIONS or masks:
                    recorder.add(operation.name())
                return operation(*args, **(kwargs or {}))

        self.modes = (Calls(), Operations())

    def add(self, name: str) -> None:
        frame, names = sys._getframe(1), []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        self.events.append(("reduce_step" in names, name))

    def __enter__(self) -> "WaitRecorder":
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*error)
