"""Devices: names, peak FLOP/s, and memory: its limit, its use, and tensors' memory by purpose."""

import contextlib
import ctypes
import os
import re
import resource
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mini_trainer.distributed.process import count_local_ranks
from mini_trainer.options.doors import DTYPES as NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES}
# Dense bf16 matrix multiplication, FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "A6000": 155e12, "A10G": 70e12, "L4": 121e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12,
}  # fmt: skip


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def find_peak_flops(name: str) -> float | None:
    """Dense bf16 peak, in FLOP/s, of a device with this name; None if unknown."""
    return next((peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name)), None)


def peak_flops(device: torch.device, compute_dtype: torch.dtype) -> float | None:
    """`find_peak_flops` of a device; None for dtypes other than bf16."""
    is_known = device.type == "cuda" and compute_dtype == torch.bfloat16
    return find_peak_flops(describe_device(device)) if is_known else None


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: allocated on a CUDA device, or resident in this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_duration(seconds: float) -> str:
    """Formats seconds as H:MM:SS."""
    seconds = round(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


is_eager = False  # inside `run_eagerly`


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Inside the context, or the function that it decorates, compiled functions run uncompiled."""
    global is_eager
    before, is_eager = is_eager, True
    try:
        yield
    finally:
        is_eager = before


GIB = 2**30
MARGIN = 0.1  # share of the memory left free for communication buffers and fragmentation
CPU_SHARE = 0.8  # share of the available memory that all processes of a machine without GPUs may use together
M_MMAP_THRESHOLD = -3  # the option's number in glibc's malloc.h
SMALL_BLOCK = 2**16  # bytes from which an allocation gets its own mapping, which is returned when freed
ACTIVATIONS = "activations"  # default kind of memory
OFFLOADED = "offloaded"  # kind of tensors in CPU memory while all others are on a GPU; excluded from sums


def memory_limit(memory_budget_gb: float | None, device: torch.device, *, is_here: bool = True) -> int:
    """Bytes that one rank may use on `device`: the budget, or the device's memory, less `MARGIN`.

    `is_here`: the device belongs to this machine, so its free memory is a limit as well.
    """
    if memory_budget_gb is not None:
        size = memory_budget_gb * GIB
    elif device.type == "cuda":
        size = torch.cuda.mem_get_info(device)[1]
    else:  # this process's resident memory counts as available to it
        size = CPU_SHARE * (available_memory() / count_local_ranks() + resident_memory())
    if device.type == "cuda" and is_here:
        # Other processes may use the device as well.
        size = min(size, torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return int(size * (1 - MARGIN))


def available_memory() -> int:
    """Bytes still available to processes on this machine or in this container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(counts.get("inactive_file", 0))  # page cache, which is reclaimed when memory is needed
        return available if limit == "max" else min(available, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # no control groups, or older ones
        return available


def resident_memory() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back_freed_memory() -> None:
    """Makes glibc's malloc return freed memory to the system: slower, but by default it can keep half as much again."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, SMALL_BLOCK)


current_kind = ACTIVATIONS


@contextmanager
def memory_kind(kind: str) -> Iterator[None]:
    """Sets the kind of tensors created in this block, for a `MemoryCounter`; almost free without one."""
    global current_kind
    outer, current_kind = current_kind, kind
    try:
        yield
    finally:
        current_kind = outer


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
            _, kind = counter._storages.get(storage._cdata, (0, current_kind))
            counter._set(storage._cdata, size, kind)

        torch.UntypedStorage.resize_ = resize_  # pyrefly: ignore[bad-assignment]
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
            self._set(storage._cdata, storage.nbytes(), kind or current_kind)
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
