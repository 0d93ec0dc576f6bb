"""Devices: names, peak FLOP/s, and memory: its limit, its use, and the kind of tensors that are created."""

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mini_trainer.distributed.process import count_local_ranks
from mini_trainer.options.doors import DTYPES as NAMES
from mini_trainer.options.reading import read_text

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


@contextmanager
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
    """Bytes that one rank may use on `device`: the budget, or the device's memory, less `MARGIN`. `is_here`: the device
    belongs to this machine, so its free memory is a limit as well."""
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
    lines = read_text(Path("/proc/meminfo")).splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (read_text(group / name).strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
        cached = int(counts.get("inactive_file", 0))  # page cache, which is reclaimed when memory is needed
        return available if limit == "max" else min(available, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # no control groups, or older ones
        return available


def resident_memory() -> int:
    """Resident memory of this process, in bytes."""
    return int(read_text(Path("/proc/self/statm")).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back_freed_memory() -> None:
    """Makes glibc's malloc return freed memory to the system: slower, but by default it can keep half as much again."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, SMALL_BLOCK)


current_kind = ACTIVATIONS


@contextmanager
def memory_kind(kind: str) -> Iterator[None]:
    """Sets the kind of tensors created in this block, for the counter of run/auto_settings.py; almost free without."""
    global current_kind
    outer, current_kind = current_kind, kind
    try:
        yield
    finally:
        current_kind = outer
