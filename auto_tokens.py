"""--max-tokens-per-gpu auto: how much memory there is, and the largest micro-batch that it takes."""

import os
from pathlib import Path

import torch

from sampler import RunPosition, TokenizedData, draw_samples

GIB = 2**30
MARGIN = 0.1  # of the memory that stays free: for communication buffers and fragmentation
NUM_BATCHES = 50  # that are looked at
ROUNDING = 64  # tokens of which the choice is a multiple
CPU_SHARE = 0.8  # of the available memory that all processes of a machine without GPUs count with


def memory_limit(memory_budget_gb: float | None, device: torch.device) -> int:
    """Bytes that one rank may use on `device`: the budget, or what is there, without `MARGIN`."""
    if memory_budget_gb is not None:
        size = memory_budget_gb * GIB
    elif device.type == "cuda":
        size = torch.cuda.mem_get_info(device)[1]
    else:
        size = CPU_SHARE * available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda" and torch.cuda.is_available():
        size = min(size, torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))  # others use it too
    return int(size * (1 - MARGIN))


def available_memory() -> int:
    """Bytes that processes can still be given on this machine, or in this container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return available if limit == "max" else min(available, int(limit) - int(used))
    except (OSError, ValueError):  # no control groups, or older ones
        return available


def resident_memory() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_useful_tokens(
    data: TokenizedData, *, batch_size: int, seed: int, start: RunPosition, world_size: int
) -> tuple[int, int]:
    """Tokens of the longest sample, and those beyond which a larger micro-batch would not save one.

    Of the next `NUM_BATCHES` global batches the largest, dealt out evenly, and a sample more, since samples are whole.
    """
    longest = int(data.lengths[data.kept].max())
    count = NUM_BATCHES * batch_size
    drawn = data.lengths[draw_samples(data, seed=seed, start=start.num_samples, count=count)].reshape(-1, batch_size)
    largest = int(drawn.sum(axis=1).max())
    return longest, min(largest, -(-largest // world_size) + longest)


def round_tokens(num_tokens: float, *, longest: int, most: int) -> int:
    """`num_tokens` as a multiple of `ROUNDING`, but at least the longest sample and at most `most`."""
    return max(longest, min(most, int(num_tokens) // ROUNDING * ROUNDING))


def refuse_longest(data: TokenizedData, *, longest: int, needed: float, limit: int) -> str:
    """Why not even the longest sample can be trained, and what to change."""
    row = int(data.kept[data.lengths[data.kept].argmax()])
    return (
        f"--max-tokens-per-gpu auto: the longest sample, row {row + 1} of {data.path} with {longest:,} tokens, needs"
        f" about {needed / GIB:,.2f} GiB, and {limit / GIB:,.2f} GiB may be used: use more GPUs,"
        " --activation-checkpointing full, a larger --memory-budget-gb, or drop long samples with process_data.py"
        " --max-sample-num-tokens"
    )
