"""What is "auto": how much memory there is, the largest micro-batch that it takes, and what has to be recomputed."""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from chat.labels import IGNORED
from corpus.reader import TokenizedData
from lifecycle.training_log import describe_device
from model.build import PackedCausalLM, set_activation_checkpointing, set_gradient_sync
from objectives.micro_batch import MicroBatch, pack_samples
from optim.optimizers import moment_bytes
from options import TrainOptions, flatten_options, replace_options
from ranks.ending import log
from ranks.memory import MemoryCounter
from ranks.world import World, call_on_rank0
from sampler import RunPosition, draw_samples

GIB = 2**30
MARGIN = 0.1  # of the memory that stays free: for communication buffers and fragmentation
NUM_BATCHES = 50  # that are looked at
ROUNDING = 64  # tokens of which the choice is a multiple
FIRST_TOKENS = 1024  # most of a first micro-batch, so that the attempt itself has room
# A choice that was made before a resume is kept only where all these are as they were given.
DECIDING_OPTIONS = (
    "max_tokens_per_gpu", "activation_checkpointing", "memory_budget_gb", "attention", "compile", "float8", "sharding",
    "shard_size", "reshard_after_forward", "prefetch_blocks", "micro_batch_grad_sync", "cpu_offload",
    "use_liger_kernels",
)  # fmt: skip
MODES = ("none", "selective", "full")  # of activation checkpointing, by how much is computed twice
MOST_PROBES = 8
PLENTY = 0.5  # share of the memory that nobody would need: no more has to be tried
NUM_TOKEN_IDS = 64  # that probes consist of: several, so that a mixture of experts uses several
SHORT = 0.1  # quantile of the lengths that counts as short
M_MMAP_THRESHOLD = -3  # in glibc's malloc.h
SMALL_BLOCK = 2**16  # bytes from which on an allocation is one of its own
CPU_SHARE = 0.8  # of the available memory that all processes of a machine without GPUs count with


def memory_limit(memory_budget_gb: float | None, device: torch.device, *, is_here: bool = True) -> int:
    """Bytes that one rank may use on `device`: the budget, or what is there, without `MARGIN`.

    `is_here`: the device is this machine's, so that there is no more than it has.
    """
    if memory_budget_gb is not None:
        size = memory_budget_gb * GIB
    elif device.type == "cuda":
        size = torch.cuda.mem_get_info(device)[1]
    else:  # what this process has already is its own
        size = CPU_SHARE * (available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) + resident_memory())
    if device.type == "cuda" and is_here:
        size = min(size, torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))  # others use it too
    return int(size * (1 - MARGIN))


def available_memory() -> int:
    """Bytes that processes can still be given on this machine, or in this container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(counts.get("inactive_file", 0))  # of files, given back when it is needed
        return available if limit == "max" else min(available, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # no control groups, or older ones
        return available


def resident_memory() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keeps_to_budget(options: TrainOptions) -> bool:
    """Whether --memory-budget-gb is more than a plan's: a run takes it where something is auto."""
    is_auto = "auto" in (options.data.max_tokens_per_gpu, options.compute.activation_checkpointing)
    return options.compute.memory_budget_gb is not None and is_auto


def give_back_freed_memory() -> None:
    """Has glibc's malloc return what is freed, which is slower; what it keeps by default can be half as much again."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, SMALL_BLOCK)


def count_useful_tokens(
    data: TokenizedData, *, batch_size: int, seed: int, start: RunPosition, world_size: int
) -> tuple[int, int]:
    """Tokens of the longest sample, and those beyond which a larger micro-batch would not save one.

    Of the next `NUM_BATCHES` global batches the largest, dealt out evenly, and a sample more, since samples are whole.
    """
    count = NUM_BATCHES * batch_size
    drawn = data.lengths[draw_samples(data, seed=seed, start=start.num_samples, count=count)].reshape(-1, batch_size)
    largest = int(drawn.sum(axis=1).max())
    longest = data.longest
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


@dataclass(frozen=True)
class Room:
    """How many tokens of a micro-batch have room, 0 if too few, and the probes that say so."""

    num_tokens: int
    probes: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """What forward and backward of them take."""
        return max(0.0, extrapolate(self.probes, "seconds", self.num_tokens))


class Prober:
    """Runs forward and backward of micro-batches on the built model, and measures what they take. All ranks agree."""

    def __init__(
        self,
        options: TrainOptions,
        model: PackedCausalLM,
        *,
        longest: int,
        short: int,
        world: World,
        progress: Callable[[str], None],
    ):
        self.model, self.world, self.progress = model, world, progress
        self.longest, self.short = longest, short  # tokens of a sample
        self.grad_sync = options.sharding.micro_batch_grad_sync
        self.is_cuda = world.device.type == "cuda"
        limit = torch.tensor(memory_limit(options.compute.memory_budget_gb, world.device))
        dist.all_reduce(limit, op=dist.ReduceOp.MIN, group=world.control)  # it decides how often all ranks probe
        self.limit = int(limit)
        params = [p for p in model.parameters() if p.requires_grad and p.device.type == world.device.type]
        self.state_bytes = sum(moment_bytes(param.to_local(), options.optimization.optimizer) for param in params)
        self.mode = options.compute.activation_checkpointing
        self.probes: dict[str, list[dict[str, Any]]] = {}  # by mode
        self.resident = 0 if self.is_cuda else resident_memory()
        self.counter = MemoryCounter()

    def probe(self, num_tokens: int) -> dict[str, Any]:
        """What micro-batches of this many tokens need, every token trained, as JSON: the most of any rank.

        Once in sequences as long as the longest sample and once in short ones. Gradients are there and counted, the
        optimizer's state is added. `excess_bytes`: what is needed and not there.
        """
        self.progress(f"auto, trying micro-batches of {num_tokens:,} tokens")
        device = self.world.device
        micro_batches = [
            make_micro_batch(num_tokens, num_tokens, longest=min(length, num_tokens))
            for length in (self.short, self.longest)
        ]
        set_gradient_sync(self.model, self.grad_sync, is_last=False)
        for micro_batch in micro_batches:
            self.model(micro_batch.to(device)).backward()  # to make the gradients, and to warm up
        self.counter.reset_peak()
        before = self.counter.num_live
        if self.is_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        begin = time.perf_counter()
        for micro_batch in micro_batches:
            self.model(micro_batch.to(device)).backward()
        if self.is_cuda:
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - begin) / len(micro_batches)
        peak = torch.cuda.max_memory_allocated(device) if self.is_cuda else self.counter.num_peak
        needed = self.resident + peak + self.state_bytes
        most = torch.tensor([needed - self.limit, needed, peak - before, seconds], dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.world.control)
        excess, needed, activations, seconds = most.tolist()
        probe = dict(tokens=num_tokens, bytes=int(needed), activation_bytes=int(activations), excess_bytes=int(excess),
                     seconds=seconds)  # fmt: skip
        log.info(f"  {num_tokens:,} tokens need {needed / GIB:,.2f} GiB and {seconds:.3f} s")
        return probe

    def set_mode(self, mode: str) -> None:
        """Changes what is recomputed; blocks that are compiled cannot be changed."""
        if mode != self.mode:
            set_activation_checkpointing(self.model, mode)
            self.mode = mode

    def find_room(self, mode: str, *, least: int, most: int) -> Room:
        """The most tokens up to `most` that have room, or 0 if fewer than `least` have it.

        As no sequence is longer than the longest sample, memory grows evenly, so that each probe tells how far the
        next may go.
        """
        self.set_mode(mode)
        num_tokens = min(least, max(2, self.longest // 8), FIRST_TOKENS)
        probes = self.probes[mode] = []
        with contextlib.nullcontext() if self.is_cuda else self.counter:
            while True:
                probes.append(self.probe(num_tokens))
                largest = find_largest(probes, least=least, most=most)
                if len(probes) > 2 and extrapolate(probes, "excess_bytes", most) < -PLENTY * self.limit:
                    return Room(most, probes)
                if num_tokens == most or largest <= num_tokens or len(probes) == MOST_PROBES:
                    return Room(largest if largest >= least else 0, probes)
                num_tokens = min(2 * num_tokens, largest)

    def clean_up(self, optimizer: torch.optim.Optimizer) -> None:
        # Gradients that FSDP still keeps for itself would come out in the first step: hand them over, and drop them.
        set_gradient_sync(self.model, self.grad_sync, is_last=True)
        self.model(make_micro_batch(2, 2, longest=2).to(self.world.device)).backward()
        optimizer.zero_grad()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.world.device)


def settle_auto_options(
    options: TrainOptions,
    model: PackedCausalLM,
    optimizer: torch.optim.Optimizer,
    data: TokenizedData,
    *,
    start: RunPosition,
    previous: dict[str, Any] | None,
    world: World,
    progress: Callable[[str], None],
) -> tuple[TrainOptions, dict[str, Any] | None]:
    """The options with what the model takes in the place of every "auto", and what was measured for it, as JSON.

    All ranks call this and agree. What was chosen before the run was resumed, `previous`, is kept on as many of the
    same devices: it decides the rounding. ValueError if not even the longest sample has room.
    """
    values = flatten_options(options)
    names = [name for name in ("activation_checkpointing", "max_tokens_per_gpu") if values[name] == "auto"]
    if not names:
        return options, None
    given = {name: values[name] for name in DECIDING_OPTIONS}
    place = dict(device=describe_device(world.device), world_size=world.world_size, given=given)
    longest, most = count_useful_tokens(
        data, batch_size=options.data.batch_size, seed=options.data.seed, start=start, world_size=world.world_size
    )
    chosen = dict(previous or {})
    is_known = all(chosen.get(key) == value for key, value in place.items())
    is_known = is_known and chosen.get("max_tokens_per_gpu", longest) >= longest
    if not call_on_rank0(world, lambda: is_known):  # ranks may have devices of different names
        short = max(2, int(np.quantile(data.lengths[data.kept], SHORT)))
        prober = Prober(options, model, longest=longest, short=short, world=world, progress=progress)
        if "max_tokens_per_gpu" in names:
            least = longest
        else:
            least = most = max(longest, min(most, options.data.max_tokens_per_gpu))
        modes = MODES if "activation_checkpointing" in names else (options.compute.activation_checkpointing,)
        mode, found = choose_fastest(prober, modes, least=least, most=most)
        if found.num_tokens == 0 and "max_tokens_per_gpu" in names:
            excess = extrapolate(found.probes, "excess_bytes", longest)
            needed = extrapolate(found.probes, "bytes", longest)
            raise ValueError(refuse_longest(data, longest=longest, needed=needed, limit=int(needed - excess)))
        best = dict(activation_checkpointing=mode, max_tokens_per_gpu=found.num_tokens)
        chosen = place | {name: best[name] for name in names}
        chosen |= dict(limit_bytes=prober.limit, seconds=found.seconds, probes=prober.probes)
        prober.clean_up(optimizer)
        takes = f"; one of {found.num_tokens:,} takes {found.seconds:.3f} s" if found.num_tokens else ""
        log.info(
            f"auto: {prober.limit / GIB:,.2f} GiB may be used, the longest sample has {longest:,} tokens, and more than"
            f" {most:,} in a micro-batch would not save one{takes}"
        )
    elif "activation_checkpointing" in names:  # else the prober has done so
        set_activation_checkpointing(model, chosen["activation_checkpointing"])
    settled = {name: chosen[name] for name in names}
    log.info("auto: " + ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in settled.items()))
    return replace_options(options, **settled), chosen


def choose_fastest(prober: Prober, modes: Sequence[str], *, least: int, most: int) -> tuple[str, Room]:
    """The mode, in the order of what is computed twice, whose largest micro-batch takes least time for a token.

    Where `least` tokens have room with none of them, the last one and 0 tokens.
    """
    rooms = {}
    for mode in modes:
        if len(modes) > 1:
            log.info(f"auto: --activation-checkpointing {mode}")
        rooms[mode] = prober.find_room(mode, least=least, most=most)
        if rooms[mode].num_tokens == most:
            break  # to compute more twice would win nothing
    usable = {mode: room.seconds / room.num_tokens for mode, room in rooms.items() if room.num_tokens > 0}
    mode = min(usable, key=usable.__getitem__, default=mode)
    prober.set_mode(mode)
    return mode, rooms[mode]


def find_largest(probes: list[dict[str, Any]], *, least: int, most: int) -> int:
    """The most tokens that have room: a multiple of `ROUNDING`, `least`, `most`, or what is below `least`.

    By the line through the two largest probes. After one as if its activations grew in proportion, which is more than
    they do, and at most twice its tokens.
    """
    last = probes[-1]
    if len(probes) == 1:
        room = -last["excess_bytes"] / max(1, last["activation_bytes"]) * last["tokens"]
        return min(most, int(last["tokens"] + min(room, last["tokens"])))
    slope = extrapolate(probes, "excess_bytes", last["tokens"] + 1) - last["excess_bytes"]
    room = -last["excess_bytes"] / slope if slope > 0 else most
    largest = min(most, int(last["tokens"] + room))
    return largest if largest <= least or largest == most else round_tokens(largest, longest=least, most=most)


def extrapolate(probes: list[dict[str, Any]], key: str, num_tokens: int) -> float:
    """What `key` would be with `num_tokens`, by the line through the last two probes; of one probe, what it is."""
    before, last = probes[max(0, len(probes) - 2)], probes[-1]
    slope = (last[key] - before[key]) / max(1, last["tokens"] - before["tokens"])
    return last[key] + slope * (num_tokens - last["tokens"])
