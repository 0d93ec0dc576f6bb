"""Devices: name, peak FLOP/s and peak memory; also formatting of durations."""

import contextlib
import re
import resource
from collections.abc import Iterator

import torch

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
