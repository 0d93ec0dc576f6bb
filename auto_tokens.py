"""--max-tokens-per-gpu auto: how much memory there is, and the largest micro-batch that it takes."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from memory_counter import MemoryCounter
from model_setup import PackedCausalLM, set_gradient_sync
from optimization import moment_bytes
from process_group import World, log
from run_control import is_out_of_memory
from sampler import IGNORED, MicroBatch, RunPosition, TokenizedData, draw_samples, pack_samples
from training_log import describe_device

GIB = 2**30
MARGIN = 0.1  # of the memory that stays free: for communication buffers and fragmentation
NUM_BATCHES = 50  # that are looked at
ROUNDING = 64  # tokens of which the choice is a multiple
MOST_PROBES = 5
NUM_TOKEN_IDS = 64  # that probes consist of: several, so that a mixture of experts uses several
SHORT = 0.1  # quantile of the lengths that counts as short
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


def make_micro_batch(num_tokens: int, num_trained: int, *, longest: int) -> MicroBatch:
    """Sequences of `longest` tokens, and one with the rest; about `num_trained` of the tokens are trained."""
    samples = []
    for start in range(0, num_tokens, longest):
        length = min(longest, num_tokens - start)
        labels = np.full(length, IGNORED)
        labels[1 : 1 + -(-num_trained * length // num_tokens)] = 1
        samples.append((np.arange(length) % NUM_TOKEN_IDS, labels, None))
    return pack_samples(samples)


def choose_max_tokens(
    model: PackedCausalLM,
    optimizer: torch.optim.Optimizer,
    data: TokenizedData,
    *,
    batch_size: int,
    seed: int,
    start: RunPosition,
    optimizer_name: str,
    grad_sync: str,
    memory_budget_gb: float | None,
    previous: dict[str, Any] | None,
    world: World,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The largest micro-batch that the model takes, and what was measured, as JSON. All ranks call this and agree.

    Forward and backward of micro-batches that grow, every token trained, once in the longest and once in short
    sequences. As no sequence is longer than the longest sample, memory grows evenly from there on, so that each probe
    tells how far the next may go. Gradients are there and counted, the optimizer's state is added. The choice of the
    run that is resumed, `previous`, is kept where it was made for as many of the same devices: it decides the rounding.
    """
    device = describe_device(world.device)
    longest, most = count_useful_tokens(
        data, batch_size=batch_size, seed=seed, start=start, world_size=world.world_size
    )
    same = previous is not None and (previous["device"], previous["world_size"]) == (device, world.world_size)
    if same and previous["max_tokens_per_gpu"] >= longest:
        log.info(f"--max-tokens-per-gpu auto: {previous['max_tokens_per_gpu']:,}, as before")
        return previous
    limit = memory_limit(memory_budget_gb, world.device)
    trained = [param for param in model.parameters() if param.requires_grad and param.device.type == world.device.type]
    state_bytes = sum(moment_bytes(param.to_local(), optimizer_name) for param in trained)
    short = max(2, int(np.quantile(data.lengths[data.kept], SHORT)))
    is_cuda = world.device.type == "cuda"
    resident = 0 if is_cuda else resident_memory()
    counter = MemoryCounter()
    probes: list[dict[str, Any]] = []
    num_tokens = longest
    with contextlib.nullcontext() if is_cuda else counter:
        while True:
            progress(f"--max-tokens-per-gpu auto, trying {num_tokens:,} tokens")
            micro_batches = [make_micro_batch(num_tokens, num_tokens, longest=length) for length in (short, longest)]
            try:
                set_gradient_sync(model, grad_sync, is_last=False)
                for micro_batch in micro_batches:
                    model(micro_batch.to(world.device)).backward()  # to make the gradients, and to warm up
                counter.reset_peak()
                before = counter.num_live
                if is_cuda:
                    torch.cuda.reset_peak_memory_stats(world.device)
                    before = torch.cuda.memory_allocated(world.device)
                for micro_batch in micro_batches:
                    begin = time.perf_counter()
                    model(micro_batch.to(world.device)).backward()
                if is_cuda:
                    torch.cuda.synchronize(world.device)
            except RuntimeError as error:
                if not is_out_of_memory(error) or probes:
                    raise
                raise ValueError(refuse_longest(data, longest=longest, needed=limit, limit=limit)) from None
            peak = torch.cuda.max_memory_allocated(world.device) if is_cuda else counter.num_peak
            needed = resident + peak + state_bytes
            seconds = time.perf_counter() - begin
            worst = torch.tensor([needed - limit, needed, peak - before, seconds], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=world.control)
            excess, needed, activations, seconds = worst.tolist()
            probes.append(
                {
                    "tokens": num_tokens,
                    "bytes": int(needed),
                    "activation_bytes": int(activations),
                    "excess_bytes": int(excess),
                    "seconds": seconds,
                }
            )
            if excess > 0 and len(probes) == 1:
                raise ValueError(refuse_longest(data, longest=longest, needed=needed, limit=int(needed - excess)))
            largest = find_largest(probes, longest=longest, most=most)
            if num_tokens == most or largest <= num_tokens or len(probes) == MOST_PROBES:
                break
            num_tokens = min(2 * num_tokens, largest)
    # Gradients that FSDP still keeps for itself would come out in the first step: hand them over, and drop them.
    set_gradient_sync(model, grad_sync, is_last=True)
    model(make_micro_batch(2, 2, longest=2).to(world.device)).backward()
    optimizer.zero_grad()
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    choice = min(largest, most)
    for probe in probes:
        log.info(
            f"--max-tokens-per-gpu auto: {probe['tokens']:,} tokens need {probe['bytes'] / GIB:,.2f} GiB and"
            f" {probe['seconds']:.3f} s"
        )
    log.info(
        f"--max-tokens-per-gpu auto: {choice:,}; {limit / GIB:,.2f} GiB may be used, the longest sample has"
        f" {longest:,} tokens, and more than {most:,} would not save a micro-batch"
    )
    return {"max_tokens_per_gpu": choice, "world_size": world.world_size, "device": device, "limit_bytes": limit,
            "probes": probes}  # fmt: skip


def find_largest(probes: list[dict[str, Any]], *, longest: int, most: int) -> int:
    """The most tokens that have room, on the line through the two largest probes.

    After one probe as if its activations grew in proportion, which is more than they do, and at most twice its tokens.
    """
    last = probes[-1]
    if len(probes) == 1:
        room = -last["excess_bytes"] / last["activation_bytes"] * last["tokens"]
        return max(longest, min(most, int(last["tokens"] + min(room, last["tokens"]))))
    slope = (last["excess_bytes"] - probes[-2]["excess_bytes"]) / (last["tokens"] - probes[-2]["tokens"])
    room = -last["excess_bytes"] / slope if slope > 0 else most
    return round_tokens(last["tokens"] + room, longest=longest, most=most)
