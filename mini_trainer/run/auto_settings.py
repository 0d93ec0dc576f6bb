"""Resolves "auto": the largest micro-batch that fits, and how much of it has to be recomputed.

One decision for plans, which simulate, and for runs: there it is probed on the built model, the same on all ranks, and
kept when the run is resumed. A `Measure` gives the memory of a micro-batch of some tokens.
"""

import contextlib
import functools
import itertools
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mini_trainer.data.tokenized.by_row import CHUNK, find_top_row
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed import devices
from mini_trainer.distributed.devices import GIB, OFFLOADED, describe_device, memory_limit, resident_memory
from mini_trainer.distributed.ending import FEWER_TOKENS, log
from mini_trainer.distributed.world import call_on_rank0, count_sharing
from mini_trainer.model.activation_checkpointing import set_activation_checkpointing
from mini_trainer.model.optim.optimizers import count_state_bytes
from mini_trainer.model.sharding import choose_resharding, count_gathered_bytes, prepare_backward
from mini_trainer.options import ShardingOptions, flag_name
from mini_trainer.options.doors import CHECKPOINTING, KERNELS
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.step import StepOptions, TrainState
from mini_trainer.sampler import RunPosition

NUM_BATCHES = 50  # global batches to look ahead when choosing a micro-batch size
TOKEN_MULTIPLE = 64  # the chosen number of tokens is a multiple of this
MOST_PROBES = 8
FIRST_TOKENS = 1024  # the most of a first probe, so that the attempt itself has room
# A choice from before a resume is kept only if all of these options are unchanged.
DECIDING_OPTIONS = (
    "max_tokens_per_gpu", "max_image_tokens_per_gpu", "activation_checkpointing", "tiled_mlp", "offload_activations",
    "memory_budget_gb", "attention", "compile", "float8", "sharding", "shard_size", "context_parallel",
    "reshard_after_forward", "reshard_after_backward", "prefetch_blocks", "micro_batch_grad_sync", "cpu_offload",
    "kernels",
)  # fmt: skip
ENOUGH_TOKENS = 8192  # more recomputation is not tried with a mode in which this many fit
KERNEL_TOKENS = 4096  # at most, of the micro-batch by which kernels are compared
MOST_SECONDS = 10.0  # of forward and backward passes, after which no other mode and no larger micro-batch is tried
TIE = 0.03  # what is tried first wins if it takes at most this share of its time more
PLACE_WORDS = {  # of what a choice holds for
    "device": "the device", "world_size": "the number of ranks", "given": "options", "attention": "attention",
    "has_kernels": "whether there are fused kernels",
}  # fmt: skip
PLENTY = 0.5  # with this share of the memory left over, the search ends
SHORT_QUANTILE = 0.1  # samples up to this quantile of the lengths count as short


@dataclass(frozen=True)
class Probe:
    """Requirements of micro-batches of some tokens: the maximum over ranks."""

    tokens: int
    bytes: int
    activation_bytes: int  # what the micro-batch adds to what is there without it
    excess_bytes: int  # bytes that are missing; below 0: bytes left over
    seconds: float | None = None  # of forward and backward, if measured
    bytes_per_token: float | None = None  # by how much each extra token raises the bytes, where one probe shows it


Measure = Callable[[int], Probe]


@dataclass(frozen=True)
class Room:
    """Number of tokens of a micro-batch that fit, 0 if too few, and the probes that show it."""

    num_tokens: int
    probes: list[Probe]

    @property
    def seconds(self) -> float:
        """Duration of their forward and backward passes, if measured."""
        return max(0.0, extrapolate(self.probes, "seconds", self.num_tokens))


def choose_mode(find: Callable[[str], Room], modes: Sequence[str], *, enough: int, is_timed: bool) -> tuple[str, Room]:
    """The mode of activation checkpointing to use, and its room. `modes` are in order of recomputation; the search ends
    at one that fits `enough` tokens. If times are measured, the mode whose largest micro-batch is fastest per token
    wins, otherwise the last one tried. If none fits, the last one.
    """
    rooms: dict[str, Room] = {}
    for mode in modes:
        rooms[mode] = find(mode)
        if rooms[mode].num_tokens >= enough:
            break
    if is_timed:
        usable = {mode: room.seconds / room.num_tokens for mode, room in rooms.items() if room.num_tokens > 0}
        mode = find_fastest(usable) if usable else mode
    return mode, rooms[mode]


def find_fastest(seconds: dict[str, float]) -> str:
    """The first that takes hardly longer than the fastest."""
    least = min(seconds.values())
    return next(name for name, each in seconds.items() if each * (1 - TIE) <= least)


def has_room_gathered(room: Room, sharding: ShardingOptions, *, weights_bytes: int) -> bool:
    """Whether all weights can stay gathered, beside the largest micro-batch. Its peak contains them, `weights_bytes`,
    only with --reshard-after-forward never."""
    more = 0 if sharding.reshard_after_forward == "never" else weights_bytes
    return room.num_tokens > 0 and extrapolate(room.probes, "excess_bytes", room.num_tokens) + more <= 0


def find_room(
    measure: Measure, *, first: int, least: int, most: int, plenty: float, is_late: Callable[[], bool] = lambda: False
) -> Room:
    """The most tokens up to `most` that fit, or 0 if fewer than `least` do. As no sequence is longer than the longest
    sample, memory grows evenly, so that each probe, from `first` tokens on, shows how far the next may go. With more
    than `plenty` bytes left at `most` no more is tried, nor after the second probe if it `is_late`."""
    num_tokens, probes = first, []
    while True:
        probes.append(measure(num_tokens))
        largest = find_largest(probes, least=least, most=most)
        if len(probes) > 2 and extrapolate(probes, "excess_bytes", most) < -plenty:
            return Room(most, probes)
        is_last = len(probes) == MOST_PROBES or (len(probes) > 1 and is_late())
        if num_tokens == most or largest <= num_tokens or is_last:
            return Room(largest if largest >= least else 0, probes)
        num_tokens = min(2 * num_tokens, largest)


def find_largest(probes: list[Probe], *, least: int, most: int) -> int:
    """The most tokens that fit: a multiple of `TOKEN_MULTIPLE`, `least`, `most`, or a number below `least`.
    Extrapolates the line through the two largest probes. After a single probe without a slope, assumes that activations
    grow in proportion, which overestimates them, and at most doubles its tokens.
    """
    last = probes[-1]
    if len(probes) == 1 and last.bytes_per_token is None:
        room = -last.excess_bytes / max(1, last.activation_bytes) * last.tokens
        return min(most, int(last.tokens + min(room, last.tokens)))
    slope = extrapolate(probes, "excess_bytes", last.tokens + 1) - last.excess_bytes
    room = -last.excess_bytes / slope if slope > 0 else most
    largest = min(most, int(last.tokens + room))
    return largest if largest <= least or largest == most else max(least, largest // TOKEN_MULTIPLE * TOKEN_MULTIPLE)


def extrapolate(probes: list[Probe], key: str, num_tokens: int) -> float:
    """Estimates `key` at `num_tokens`, by the line through the last two probes, or by the last one's own slope."""
    before, last = probes[max(0, len(probes) - 2)], probes[-1]
    if last.bytes_per_token is not None and key in ("bytes", "excess_bytes"):
        slope = last.bytes_per_token
    else:
        slope = (getattr(last, key) - getattr(before, key)) / max(1, last.tokens - before.tokens)
    return getattr(last, key) + slope * (num_tokens - last.tokens)


def count_useful_tokens(inputs: RunInputs, start: RunPosition, *, world_size: int) -> tuple[int, int]:
    """Tokens of the longest sample, and those beyond which a larger micro-batch would not save one. Of the next
    `NUM_BATCHES` global batches the largest, dealt out evenly, and a sample more, since samples are whole."""
    batches = itertools.islice(inputs.draw_batches(start), NUM_BATCHES)
    largest = max(int(inputs.data.lengths[rows].sum()) for rows in batches)
    longest = inputs.longest_set.longest
    return longest, max(longest, min(largest, -(-largest // world_size) + longest))


def refuse_longest(data: Mixture, room: Room) -> str:
    """Error message if not even the longest sample fits, with advice."""
    longest = data.longest
    path, row = data.locate(find_top_row(data.lengths, data.kept))
    needed = extrapolate(room.probes, "bytes", longest)
    limit = int(needed - extrapolate(room.probes, "excess_bytes", longest))
    return (
        f"--max-tokens-per-gpu auto: the longest sample, row {row} of {path} with {longest:,} tokens, needs about"
        f" {needed / GIB:,.2f} GiB, and {limit / GIB:,.2f} GiB may be used: use more GPUs,"
        " --activation-checkpointing full, --tiled-mlp, --offload-activations, a larger --memory-budget-gb, or drop"
        " long samples with process_data.py --max-sample-num-tokens"
    )


class Prober:
    """Runs micro-batches forward and backward on the built model; measures their memory and time. All ranks agree."""

    def __init__(self, state: TrainState, inputs: RunInputs, options: StepOptions, *, progress: Callable[[str], None]):
        self.state, self.objective, self.progress = state, inputs.objective, progress
        data = inputs.data
        self.longest = data.longest
        lengths = data.list_sequences(data.kept[:: 1 + len(data.kept) // CHUNK]).lengths
        self.lengths = (max(2, int(np.quantile(lengths, SHORT_QUANTILE))), data.longest_sequence)
        self.sharding = options.sharding
        device = state.world.device
        self.is_cuda = device.type == "cuda"
        limit = torch.tensor(memory_limit(options.compute.memory_budget_gb, device))
        dist.all_reduce(limit, op=dist.ReduceOp.MIN, group=state.world.control)  # it decides how often all ranks probe
        self.limit = int(limit)
        shards = [
            (name, param.to_local())
            for name, param in state.model.named_parameters()
            if param.requires_grad and param.device.type == device.type
        ]
        self.state_bytes = count_state_bytes(shards, state.model, options.optimization)
        self.mode = options.compute.activation_checkpointing
        self.probes: dict[str, list[dict[str, Any]]] = {}  # by mode
        self.seconds = 0.0  # of all micro-batches so far, the same on all ranks
        self.resident = 0 if self.is_cuda else resident_memory()
        self.counter = MemoryCounter()

    def measure(self, num_tokens: int) -> Probe:
        """Measures micro-batches of this many tokens, every token trained. Once in sequences as long as the longest one
        and once in short ones. Gradients exist and are counted, the optimizer's state is added."""
        self.progress(f"auto, trying micro-batches of {num_tokens:,} tokens")
        model, world = self.state.model, self.state.world
        device = world.device
        micro_batches = [
            self.objective.make_probe(
                num_tokens, num_tokens, longest=min(length, num_tokens), row_group=world.row_group
            )
            for length in self.lengths
        ]
        prepare_backward(model, self.sharding, is_last=False)
        for micro_batch in micro_batches:
            model(model.prepare(micro_batch.to(device))).loss.backward()  # to make the gradients, and to warm up
        self.counter.reset_peak()
        before = self.counter.num_live
        if self.is_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        begin = time.perf_counter()
        for micro_batch in micro_batches:
            model(model.prepare(micro_batch.to(device))).loss.backward()
        if self.is_cuda:
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - begin) / len(micro_batches)
        peak = torch.cuda.max_memory_allocated(device) if self.is_cuda else self.counter.num_peak

        # The most that any rank needs.
        needed = self.resident + peak + self.state_bytes
        most = torch.tensor([needed - self.limit, needed, peak - before, seconds], dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=world.control)
        excess, needed, activations, seconds = most.tolist()
        self.seconds += 2 * len(micro_batches) * seconds
        return Probe(num_tokens, int(needed), int(activations), int(excess), seconds)

    def set_mode(self, mode: str) -> None:
        """Changes the recomputation mode; compiled blocks cannot be changed."""
        if mode != self.mode:
            set_activation_checkpointing(self.state.model, self.state.method, mode)
            self.mode = mode

    def find_room(self, mode: str, *, least: int, most: int) -> Room:
        """Number of tokens, from `least` to `most`, that fit in this mode."""
        self.set_mode(mode)
        with contextlib.nullcontext() if self.is_cuda else self.counter:
            room = find_room(
                self.measure,
                first=self.find_first(least),
                least=least,
                most=most,
                plenty=PLENTY * self.limit,
                is_late=lambda: self.seconds > MOST_SECONDS,
            )
        found = map(asdict, room.probes)
        self.probes[mode] = [{name: value for name, value in one.items() if value is not None} for one in found]
        return room

    def find_first(self, least: int) -> int:
        """Tokens of a first probe, which certainly has room."""
        return min(least, max(2, self.longest // 8), FIRST_TOKENS)

    def choose_kernels(self, *, least: int, most: int) -> str:
        """The faster kernels, at one size, which has room."""
        first = self.measure(self.find_first(least))
        num_tokens = max(first.tokens, find_largest([first], least=least, most=min(most, KERNEL_TOKENS)))
        seconds = {}
        for name in KERNELS:
            self.state.model.kernels.is_on = name == "fused"
            seconds[name] = self.measure(num_tokens).seconds
        self.probes["kernels"] = [dict(kernels=name, tokens=num_tokens, seconds=each) for name, each in seconds.items()]
        fastest = find_fastest(seconds)
        self.state.model.kernels.is_on = fastest == "fused"
        return fastest

    def clean_up(self) -> None:
        # Gradients that FSDP still keeps for itself would come out in the first step: hand them over, and drop them.
        state = self.state
        prepare_backward(state.model, self.sharding, is_last=True)
        probe = self.objective.make_probe(2, 2, longest=2, row_group=state.world.row_group)
        state.model(probe.to(state.world.device)).loss.backward()
        state.optimizer.zero_grad()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(state.world.device)


def measure_auto_options(
    state: TrainState,
    inputs: RunInputs,
    options: StepOptions,
    names: list[str],
    *,
    start: RunPosition,
    previous: dict[str, Any] | None,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values in place of "auto" for the options `names`, and the measurements behind them, as JSON. All ranks call
    this and agree. A choice from before the run was resumed, `previous`, is kept on the same number of the same
    devices, since it affects rounding. ValueError if not even the longest sample has room."""
    values, world = inputs.values, state.world
    place = dict(
        device=describe_device(world.device),
        world_size=world.world_size,
        given={name: values[name] for name in DECIDING_OPTIONS},
        attention=state.model.backend,
        has_kernels=bool(state.model.kernels.num_modules),
    )
    num_sharing = count_sharing(world.row_group)
    num_rows = world.world_size // num_sharing
    longest, most = count_useful_tokens(inputs, start, world_size=num_rows)
    chosen = dict(previous or {})
    is_known = all(chosen.get(key) == value for key, value in place.items())
    is_known = is_known and chosen.get("max_tokens_per_gpu", longest) * num_sharing >= longest
    if not call_on_rank0(world, lambda: is_known):  # ranks may have devices of different names
        if changed := [key for key, value in place.items() if previous and previous.get(key) != value]:
            log.info(f"auto: chosen again, since these changed: {', '.join(PLACE_WORDS[key] for key in changed)}")
        prober = Prober(state, inputs, options, progress=progress)
        found = probe_settings(prober, options, inputs.longest_set, most=most)
        chosen = place | {name: found[name] for name in names}
        chosen |= dict(limit_bytes=prober.limit, seconds=found["seconds"], probes=prober.probes)
    else:  # what the prober would have done
        if "activation_checkpointing" in names:
            set_activation_checkpointing(state.model, state.method, chosen["activation_checkpointing"])
        if "kernels" in names:
            state.model.kernels.is_on = chosen["kernels"] == "fused"
    if "max_tokens_per_gpu" in names and (most := os.environ.get(FEWER_TOKENS)):
        chosen["max_tokens_per_gpu"] = min(chosen["max_tokens_per_gpu"], int(most))
    settled = {name: chosen[name] for name in names}
    if settled.get("reshard_after_forward") == "never" and not state.model.is_whole:
        state.model.set_reshard_after_forward(False)
    log.info(describe_choice(settled, chosen))
    return settled, chosen


def describe_choice(settled: dict[str, Any], chosen: dict[str, Any]) -> str:
    """What was chosen, and what each that was tried gave."""
    values = ", ".join(f"{flag_name(name)} {value}" for name, value in settled.items() if value != "auto")
    tried = [
        f"{probe.get('kernels', name)} {probe['tokens']:,} tokens in {probe['seconds']:.3f} s"
        + (f" and {probe['bytes'] / GIB:,.2f} GiB" if "bytes" in probe else "")
        for name, probes in chosen["probes"].items()
        for probe in (probes if name == "kernels" else probes[-1:])
    ]
    return f"auto: {values} ({', '.join(tried)}, of {chosen['limit_bytes'] / GIB:,.2f} GiB)"


def probe_settings(prober: Prober, options: StepOptions, data: Mixture, *, most: int) -> dict[str, Any]:
    """The mode and the number of tokens that the prober finds, and their duration in seconds."""
    given, mode = options.data.max_tokens_per_gpu, options.compute.activation_checkpointing
    longest, num_sharing = data.longest, count_sharing(prober.state.world.row_group)
    least = longest
    if given != "auto":
        least = most = max(longest, min(most, given * num_sharing))

    kernels = options.compute.kernels
    if kernels == "auto" and prober.state.model.kernels.num_modules:
        if mode == "auto":
            prober.set_mode(CHECKPOINTING[-1])
        kernels = prober.choose_kernels(least=least, most=most)

    find = functools.partial(prober.find_room, least=least, most=most)
    enough = min(most, max(longest, ENOUGH_TOKENS * num_sharing))
    mode, room = choose_mode(find, CHECKPOINTING if mode == "auto" else (mode,), enough=enough, is_timed=True)
    prober.set_mode(mode)
    if room.num_tokens == 0 and given == "auto":
        raise ValueError(refuse_longest(data, room))
    prober.clean_up()
    cap = -(-room.num_tokens // num_sharing)
    model = prober.state.model
    weights_bytes = count_gathered_bytes(model.model, model.compute_dtype, model.kept)
    has_room = model.is_whole or has_room_gathered(room, options.sharding, weights_bytes=weights_bytes)
    found = dict(kernels=kernels, activation_checkpointing=mode, max_tokens_per_gpu=cap, seconds=room.seconds)
    return found | choose_resharding(options.sharding, has_room=has_room)


class MemoryCounter(TorchDispatchMode):
    """While active, counts the memory of every tensor created, by its `memory_kind`.
    Existing tensors are counted once passed to `count`. The scratch memory of a single operation is not seen."""

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
            _, kind = counter._storages.get(storage._cdata, (0, devices.current_kind))
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
            self._set(storage._cdata, storage.nbytes(), kind or devices.current_kind)
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
