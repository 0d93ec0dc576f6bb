"""Resolves "auto" in a run: probed on the built model, the same on all ranks, kept when the run is resumed."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mini_trainer.data.tokenized.by_row import CHUNK
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.devices import GIB, MemoryCounter, describe_device, memory_limit, resident_memory
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import call_on_rank0, count_sharing
from mini_trainer.model.activation_checkpointing import set_activation_checkpointing
from mini_trainer.model.optim.optimizers import count_state_bytes
from mini_trainer.model.sharding import choose_resharding, count_gathered_bytes, prepare_backward
from mini_trainer.options import flag_name
from mini_trainer.options.doors import CHECKPOINTING
from mini_trainer.run.auto_choice import (
    Probe,
    Room,
    choose_mode,
    count_useful_tokens,
    find_room,
    has_room_gathered,
    refuse_longest,
)
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.step import StepOptions, TrainState
from mini_trainer.sampler import RunPosition

FIRST_TOKENS = 1024  # the most of a first probe, so that the attempt itself has room
# A choice from before a resume is kept only if all of these options are unchanged.
DECIDING_OPTIONS = (
    "max_tokens_per_gpu", "max_image_tokens_per_gpu", "activation_checkpointing", "tiled_mlp", "offload_activations",
    "memory_budget_gb", "attention", "compile", "float8", "sharding", "shard_size", "context_parallel",
    "reshard_after_forward", "reshard_after_backward", "prefetch_blocks", "micro_batch_grad_sync", "cpu_offload",
    "use_liger_kernels",
)  # fmt: skip
PLENTY = 0.5  # with this share of the memory left over, the search ends
SHORT_QUANTILE = 0.1  # samples up to this quantile of the lengths count as short


class Prober:
    """Runs forward and backward of micro-batches on the built model, and measures their memory and time. All ranks
    agree."""

    def __init__(
        self,
        state: TrainState,
        inputs: RunInputs,
        options: StepOptions,
        *,
        progress: Callable[[str], None],
    ):
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
        self.resident = 0 if self.is_cuda else resident_memory()
        self.counter = MemoryCounter()

    def measure(self, num_tokens: int) -> Probe:
        """Measures micro-batches of this many tokens, every token trained.

        Once in sequences as long as the longest one and once in short ones. Gradients exist and are counted, the
        optimizer's state is added.
        """
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
        log.info(f"  {num_tokens:,} tokens need {needed / GIB:,.2f} GiB and {seconds:.3f} s")
        return Probe(num_tokens, int(needed), int(activations), int(excess), seconds)

    def set_mode(self, mode: str) -> None:
        """Changes the recomputation mode; compiled blocks cannot be changed."""
        if mode != self.mode:
            set_activation_checkpointing(self.state.model, self.state.method, mode)
            self.mode = mode

    def find_room(self, mode: str, *, least: int, most: int) -> Room:
        """Number of tokens, from `least` to `most`, that fit in this mode."""
        self.set_mode(mode)
        first = min(least, max(2, self.longest // 8), FIRST_TOKENS)
        with contextlib.nullcontext() if self.is_cuda else self.counter:
            room = find_room(self.measure, first=first, least=least, most=most, plenty=PLENTY * self.limit)
        self.probes[mode] = [probe.to_json() for probe in room.probes]
        return room

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
    """The values in place of "auto" for the options `names`, and the measurements behind them, as JSON.

    All ranks call this and agree. A choice from before the run was resumed, `previous`, is kept on the same number of
    the same devices, since it affects rounding. ValueError if not even the longest sample has room.
    """
    values, world = inputs.values, state.world
    place = dict(
        device=describe_device(world.device),
        world_size=world.world_size,
        given={name: values[name] for name in DECIDING_OPTIONS},
    )
    num_sharing = count_sharing(world.row_group)
    num_rows = world.world_size // num_sharing
    longest, most = count_useful_tokens(inputs.data, inputs.draw_batches(start), world_size=num_rows)
    chosen = dict(previous or {})
    is_known = all(chosen.get(key) == value for key, value in place.items())
    is_known = is_known and chosen.get("max_tokens_per_gpu", longest) * num_sharing >= longest
    if not call_on_rank0(world, lambda: is_known):  # ranks may have devices of different names
        prober = Prober(state, inputs, options, progress=progress)
        found = probe_settings(prober, options, inputs.data, most=most)
        chosen = place | {name: found[name] for name in names}
        chosen |= dict(limit_bytes=prober.limit, seconds=found["seconds"], probes=prober.probes)
    elif "activation_checkpointing" in names:  # else the prober has done so
        set_activation_checkpointing(state.model, state.method, chosen["activation_checkpointing"])
    settled = {name: chosen[name] for name in names}
    if settled.get("reshard_after_forward") == "never" and state.model.whole_weights is None:
        state.model.set_reshard_after_forward(False)
    log.info("auto: " + ", ".join(f"{flag_name(name)} {value}" for name, value in settled.items() if value != "auto"))
    return settled, chosen


def probe_settings(prober: Prober, options: StepOptions, data: Mixture, *, most: int) -> dict[str, Any]:
    """The mode and the number of tokens that the prober finds, and their duration in seconds."""
    given, mode = options.data.max_tokens_per_gpu, options.compute.activation_checkpointing
    longest, num_sharing = data.longest, count_sharing(prober.state.world.row_group)
    least = longest
    if given != "auto":
        least = most = max(longest, min(most, given * num_sharing))

    def find(mode: str) -> Room:
        if options.compute.activation_checkpointing == "auto":
            log.info(f"auto: --activation-checkpointing {mode}")
        return prober.find_room(mode, least=least, most=most)

    mode, room = choose_mode(find, CHECKPOINTING if mode == "auto" else (mode,), enough=most, is_timed=True)
    prober.set_mode(mode)
    if room.num_tokens == 0 and given == "auto":
        raise ValueError(refuse_longest(data, room))
    prober.clean_up()
    takes = f"; one of {room.num_tokens:,} takes {room.seconds:.3f} s" if room.num_tokens else ""
    log.info(
        f"auto: {prober.limit / GIB:,.2f} GiB may be used, the longest sample has {longest:,} tokens, and more than"
        f" {most:,} in a micro-batch would not save one{takes}"
    )
    cap = -(-room.num_tokens // num_sharing)
    model = prober.state.model
    weights_bytes = count_gathered_bytes(model, model.compute_dtype)
    has_room = model.whole_weights is not None or has_room_gathered(room, options.sharding, weights_bytes=weights_bytes)
    resharding = choose_resharding(options.sharding, has_room=has_room)
    return dict(activation_checkpointing=mode, max_tokens_per_gpu=cap, seconds=room.seconds) | resharding
