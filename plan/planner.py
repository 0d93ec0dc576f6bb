"""The plan of a run: what it would need and take, and every problem that can be found before it. Writes nothing.

    python train.py --config run.yaml --dry-run --plan-world-size 8 --plan-device H100 --memory-budget-gb 80

Memory comes from a simulated step (step_simulation.py), time from a few real micro-batches where the plan is for this
machine, else from FLOPs.
"""

import functools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from batch_packer import cost_samples, pack_batch
from disk import SPARE_BYTES, read_json
from lifecycle.checkpoint_files import STATE, find_checkpoints
from lifecycle.checkpointing import check_state
from lifecycle.record import check_output_dir, check_same_run, check_unused
from lifecycle.start import RunInputs, build_run_model, is_export_due, open_inputs
from lifecycle.training_log import PEAK_FLOPS, count_flops, describe_device
from model.files import find_weights
from optim.optimizers import build_optimizer
from options import TrainOptions, replace_options
from plan.auto_settings import (
    GIB,
    MARGIN,
    MODES,
    NUM_BATCHES,
    count_useful_tokens,
    keeps_to_budget,
    memory_limit,
    refuse_longest,
    resident_memory,
    round_tokens,
)
from plan.simulation import ShapedModel, StepMemory, shape_run_model, simulate_step
from ranks.ending import ExitCode
from ranks.world import World, call_on_rank0, count_shards, init_world, setup_logging
from sampler import RunPosition, draw_samples, iterate_batches

RANKS_PER_NODE = 8  # of machines that are not this one, for --sharding hybrid
NUM_TIMED = 3  # micro-batches, after one to warm up
ENOUGH_TOKENS = 4096  # of a micro-batch, so that its fixed costs are small
ASSUMED_MFU = 0.4  # where nothing can be measured

KINDS = {  # of StepMemory.peak, in words
    "weights": "weights that train, sharded",
    "frozen": "weights and buffers that do not train",
    "gradients": "gradients, sharded",
    "optimizer": "optimizer state, sharded",
    "gathered": "units that FSDP gathers and reduces",
    "activations": "activations",
    "loss": "loss: a chunk of logits, gradient of the head",
}
Result = TypeVar("Result")


class Problems(list[str]):
    """What is wrong with a run, as far as it can be seen."""

    def attempt(self, function: Callable[[], Result]) -> Result | None:
        """The function's result, or None and one problem more."""
        try:
            return function()
        except (ValueError, OSError) as error:
            self.append(str(error))
            return None


@dataclass(frozen=True)
class Target:
    """The machine that is planned for."""

    world_size: int
    num_shards: int  # ranks that hold one copy of the model
    device: torch.device
    name: str
    peak_flops: float | None
    limit: int | None  # bytes that a rank may use
    is_here: bool  # these are the ranks that this start has
    offloads: bool  # what is sharded is in the host's memory
    keeps_freed: bool  # a process keeps memory that it does not need any more


@dataclass(frozen=True)
class Packing:
    """How the next batches fall into micro-batches; all of them arrays (batches,)."""

    num_micro_batches: np.ndarray
    fill: np.ndarray  # tokens / (micro-batches x ranks x cap)
    idle: np.ndarray  # share of the ranks' time spent on waiting for the slowest
    flops: np.ndarray
    num_tokens: int  # of the largest micro-batch
    num_trained: int  # most in one micro-batch


@dataclass(frozen=True)
class PlannedRun:
    """What could be found out of a run from its files; None where something is wrong."""

    inputs: RunInputs
    start: RunPosition
    shape: Callable[[TrainOptions], ShapedModel] | None
    shaped: ShapedModel | None

    def count_useful_tokens(self, options: TrainOptions, world_size: int) -> tuple[int, int]:
        """Tokens of the longest sample, and the most that a micro-batch can use."""
        return count_useful_tokens(
            self.inputs.data,
            batch_size=options.data.batch_size,
            seed=options.data.seed,
            start=self.start,
            world_size=world_size,
        )


def plan_run(options: TrainOptions) -> ExitCode:
    """Prints the plan; BAD_INPUT if there are problems. Under torchrun every rank calls this."""
    setup_logging("WARNING")
    num_here = int(os.environ.get("WORLD_SIZE", 1))
    world_size = options.plan.plan_world_size or num_here
    is_here = world_size == num_here and options.plan.plan_device is None
    is_rank0 = os.environ.get("RANK", "0") == "0"
    problems, warnings, lines = Problems(), [], []
    if is_rank0:
        target = find_target(options, world_size, is_here=is_here, problems=problems)
        run = look_at_run(options, target, problems, warnings)
        options = choose_checkpointing(options, target, run, problems)
        cap, packing, memory = plan_memory(options, target, run, problems, lines)
        plan_disk(options, run, problems, lines)
    speed = None
    if is_here:
        try:
            world = init_world(options.sharding)
            checkpointing = call_on_rank0(world, lambda: options.compute.activation_checkpointing)
            options = replace_options(options, activation_checkpointing=checkpointing)
            if call_on_rank0(world, lambda: memory is not None and not problems and not options.osft.osft):
                speed = measure_speed(options, world, cap=call_on_rank0(world, lambda: cap))
            dist.destroy_process_group()
        except (ValueError, OSError) as error:  # of the model itself, on every rank
            problems.append(str(error))
    if is_rank0:
        plan_time(options, target, run, packing, speed, lines)
        print("\n".join(lines))
        for warning in warnings:
            print(f"warning: {warning}")
        print(f"\n{len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'} found")
        for problem in problems:
            print(f"  - {problem}")
        sys.stdout.flush()
    return ExitCode.BAD_INPUT if problems else ExitCode.DONE


def find_target(options: TrainOptions, world_size: int, *, is_here: bool, problems: Problems) -> Target:
    """What the options say of the machine to plan for, and this machine otherwise."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu or options.plan.plan_device is not None else "cpu")
    name = options.plan.plan_device or describe_device(device)
    peak = next((peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name)), None)
    if options.plan.plan_device is not None and peak is None:
        problems.append(f"--plan-device {name}: not known; known are {', '.join(PEAK_FLOPS)}")
    is_known = options.compute.memory_budget_gb is not None or is_here or (has_gpu and options.plan.plan_device is None)
    limit = (
        memory_limit(options.compute.memory_budget_gb, device, is_here=options.plan.plan_device is None)
        if is_known
        else None
    )
    num_shards = world_size
    if options.sharding.sharding == "hybrid":
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if is_here else min(world_size, RANKS_PER_NODE)
        found = problems if not is_here else Problems()  # init_world says it, too
        num_shards = (
            found.attempt(lambda: count_shards(world_size, ranks_per_node, options.sharding.shard_size)) or world_size
        )
    gives_back = keeps_to_budget(options) or "MALLOC_MMAP_THRESHOLD_" in os.environ
    return Target(
        world_size,
        num_shards,
        device,
        name,
        peak,
        limit,
        is_here,
        offloads=options.sharding.cpu_offload and device.type == "cuda",
        keeps_freed=device.type == "cpu" and not gives_back,
    )


def look_at_run(options: TrainOptions, target: Target, problems: Problems, warnings: list[str]) -> PlannedRun:
    """Reads what a run reads, in the same order, and goes on after what is wrong."""
    attempt = problems.attempt
    num_before = len(problems)
    attempt(lambda: check_output_dir(Path(options.output_dir)))
    checkpoint = None if options.checkpoints.resume == "none" else attempt(lambda: find_checkpoint(options))
    start = checkpoint.position if checkpoint else RunPosition()
    inputs = open_inputs(
        options,
        device=target.device,
        world_size=target.world_size,
        start=start,
        attempt=attempt,
        warn=warnings.append,
    )
    is_here = Path(options.model.model_name_or_path).is_dir()  # from the hub the weights would be downloaded
    if inputs.model_dir is not None and is_here:
        attempt(lambda: find_weights(options.model.model_name_or_path, inputs.model_dir))
        if len(problems) == num_before:
            attempt(lambda: check_identity(options, checkpoint, inputs))
    if inputs.config is None:
        return PlannedRun(inputs, start, None, None)
    # Simulated on a CPU: a GPU's kernels keep what SDPA keeps; only eager attention holds more.
    attention = (
        options.compute.attention if target.device.type == "cpu" or options.compute.attention == "eager" else "auto"
    )
    shape = functools.partial(
        shape_run_model, config=inputs.config, compute_dtype=inputs.compute_dtype, attention=attention
    )
    return PlannedRun(inputs, start, shape, attempt(lambda: shape(options)))


@dataclass(frozen=True)
class FoundCheckpoint:
    """As Checkpoint, but nothing of it has been verified."""

    path: Path
    state: dict[str, Any]

    @property
    def position(self) -> RunPosition:
        return RunPosition(**self.state["position"])


def find_checkpoint(options: TrainOptions) -> FoundCheckpoint | None:
    """What --resume would most likely go on from."""
    is_path = options.checkpoints.resume not in ("auto", "strict")
    paths = (
        [Path(options.checkpoints.resume)] if is_path else find_checkpoints(Path(options.output_dir) / "checkpoints")
    )
    if not paths:
        return None
    state = read_json(paths[0] / STATE)
    check_state(state, paths[0].name)
    return FoundCheckpoint(paths[0], state)


def check_identity(options: TrainOptions, checkpoint: FoundCheckpoint | None, inputs: RunInputs) -> None:
    """ValueError if the output directory or the checkpoint is another run's."""
    identity = inputs.identify(options)
    output_dir = Path(options.output_dir)
    if checkpoint is None or checkpoint.path.absolute().parent != (output_dir / "checkpoints").absolute():
        check_unused(output_dir, identity, resume=options.checkpoints.resume)
    if checkpoint is not None:
        check_same_run(checkpoint, identity, allow_changes=options.checkpoints.allow_changed_options)


def plan_memory(
    options: TrainOptions, target: Target, run: PlannedRun, problems: Problems, lines: list[str]
) -> tuple[int | None, Packing | None, StepMemory | None]:
    """Adds what the run is and what memory it needs; returns the cap, the packing and the memory."""
    lines.append(
        f"plan for {target.world_size} x {target.name}"
        + (
            ""
            if target.limit is None
            else f", {target.limit / GIB / (1 - MARGIN):,.1f} GiB each, of which {MARGIN:.0%} stay free"
        )
    )
    data, num_steps, shaped = run.inputs.data, run.inputs.num_steps, run.shaped
    if data is not None:
        steps = "no end" if num_steps is None else f"{num_steps:,} steps"
        done = f", {run.start.step:,} of them done" if run.start.step else ""
        lines.append(
            f"data: {len(data.kept):,} samples, {data.lengths[data.kept].sum(dtype=np.int64):,} tokens, the longest"
            f" {run.inputs.data.longest:,}\nrun: {steps} of {options.data.batch_size} samples{done}"
        )
    if shaped is None:
        return None, None, None
    dtype = str(shaped.compute_dtype).removeprefix("torch.")
    lines.append(
        f"model: {shaped.model.config.model_type}, {shaped.num_params:,} parameters, {shaped.num_trainable:,} numbers"
        f" train; {dtype} compute, {options.compute.activation_checkpointing} activation checkpointing"
        f"{', OSFT' if options.osft.osft else ''}"
    )
    if data is None:
        return None, None, None
    base = resident_memory() if target.device.type == "cpu" else 0
    try:
        cap = choose_cap(options, target, run, base, problems)
        packing = cap and pack_batches(options, run, target.world_size, cap=cap)
        memory = packing and simulate_step(
            options,
            run.shape(options),
            world_size=target.world_size,
            num_shards=target.num_shards,
            num_tokens=packing.num_tokens,
            num_trained=packing.num_trained,
            longest=run.inputs.data.longest,
            accumulates=bool(packing.num_micro_batches.max() > 1),
            offloads=target.offloads,
        )
    except RuntimeError as error:  # torch's, of an operation that needs more than shapes
        lines.append(f"memory: not known, since a step of this model cannot be simulated: {error}")
        return cap, packing, None
    if memory is None:
        return cap, packing, None
    describe_packing(cap, packing, lines)
    describe_memory(target, packing, memory, base, lines)
    needed = base + memory.total
    if target.limit is None:
        lines.append("  whether that fits is not known: give --memory-budget-gb")
    elif needed > target.limit:
        problems.append(
            f"a step needs {needed / GIB:,.1f} GiB on each rank, and of {target.limit / GIB / (1 - MARGIN):,.1f} GiB"
            f" {1 - MARGIN:.0%} may be used: lower --max-tokens-per-gpu (auto finds the largest), use"
            " --activation-checkpointing full, or more GPUs"
        )
    return cap, packing, memory


def choose_checkpointing(options: TrainOptions, target: Target, run: PlannedRun, problems: Problems) -> TrainOptions:
    """The options with what --activation-checkpointing auto would come to by simulation, with every token trained.

    With --max-tokens-per-gpu auto, where a run goes by the time that it measures: what computes least twice of those
    that have room for `ENOUGH_TOKENS`.
    """
    if options.compute.activation_checkpointing != "auto":
        return options
    if target.limit is None:
        problems.append("--activation-checkpointing auto cannot be planned without --memory-budget-gb")
    elif run.inputs.data is not None and run.shaped is not None:
        longest, most = run.count_useful_tokens(options, target.world_size)
        cap = ENOUGH_TOKENS if options.data.max_tokens_per_gpu == "auto" else options.data.max_tokens_per_gpu
        goal = max(longest, min(most, cap))
        base = resident_memory() if target.device.type == "cpu" else 0
        for mode in MODES[:-1]:
            settled = replace_options(options, activation_checkpointing=mode)
            try:
                memory = simulate_worst_step(settled, target, run, num_tokens=goal, longest=longest)
            except RuntimeError:
                break  # plan_memory says so
            if base + memory.total <= target.limit:
                return settled
    return replace_options(options, activation_checkpointing=MODES[-1])


def simulate_worst_step(
    options: TrainOptions, target: Target, run: PlannedRun, *, num_tokens: int, longest: int
) -> StepMemory:
    """A step of micro-batches of `num_tokens`, every one trained."""
    return simulate_step(
        options,
        run.shape(options),
        world_size=target.world_size,
        num_shards=target.num_shards,
        num_tokens=num_tokens,
        num_trained=num_tokens,
        longest=longest,
        accumulates=True,
        offloads=target.offloads,
    )


def choose_cap(options: TrainOptions, target: Target, run: PlannedRun, base: int, problems: Problems) -> int | None:
    """--max-tokens-per-gpu; for auto what it would come to by simulation, with every token trained."""
    if options.data.max_tokens_per_gpu != "auto":
        return max(options.data.max_tokens_per_gpu, run.inputs.data.longest)
    if target.limit is None:
        problems.append("--max-tokens-per-gpu auto cannot be planned without --memory-budget-gb")
        return None
    longest, most = run.count_useful_tokens(options, target.world_size)
    memory = simulate_worst_step(options, target, run, num_tokens=most, longest=longest)
    if base + memory.at(longest) > target.limit:
        needed = base + memory.at(longest)
        problems.append(refuse_longest(run.inputs.data, longest=longest, needed=needed, limit=target.limit))
        return longest
    return round_tokens(most + (target.limit - base - memory.total) / memory.per_token, longest=longest, most=most)


def pack_batches(options: TrainOptions, run: PlannedRun, world_size: int, *, cap: int) -> Packing:
    """The next `NUM_BATCHES` global batches, or as many as the run has, in micro-batches."""
    data, num_steps, flops = run.inputs.data, run.inputs.num_steps, run.shaped.flops
    num_left = NUM_BATCHES if num_steps is None else num_steps - run.start.step
    rows = []
    for i in range(max(1, min(NUM_BATCHES, num_left))):
        start = run.start.num_samples + i * options.data.batch_size
        ids = draw_samples(data, seed=options.data.seed, start=start, count=options.data.batch_size)
        lengths, trained = data.lengths[ids], data.num_loss_tokens[ids]
        table = pack_batch(lengths, cap, world_size, flops.attention_cost)
        costs = cost_samples(lengths, flops.attention_cost)
        loads = np.array([[costs[indices].sum() for indices in row] for row in table])  # (micro-batches, ranks)
        cells = [indices for row in table for indices in row]
        rows.append(
            (
                len(table),
                lengths.sum() / (len(cells) * cap),
                1 - loads.mean(axis=1).sum() / loads.max(axis=1).sum(),
                flops.of_batch(lengths, int(trained.sum())),
                max(lengths[indices].sum() for indices in cells),
                max(trained[indices].sum() for indices in cells),
            )
        )
    num_micro_batches, fill, idle, batch_flops, num_tokens, num_trained = map(np.array, zip(*rows, strict=True))
    return Packing(num_micro_batches, fill, idle, batch_flops, int(num_tokens.max()), int(num_trained.max()))


def describe_packing(cap: int, packing: Packing, lines: list[str]) -> None:
    counts = packing.num_micro_batches
    lines.append(
        f"micro-batches of at most {cap:,} tokens, in the next {len(counts)} batches: {counts.mean():.1f} a step on"
        f" each rank ({counts.min()} to {counts.max()}), {packing.fill.mean():.0%} full; ranks idle"
        f" {packing.idle.mean():.2%} of the time for lack of balance, at most {packing.idle.max():.2%}"
    )


def describe_memory(target: Target, packing: Packing, memory: StepMemory, base: int, lines: list[str]) -> None:
    lines.append(
        f"memory of a rank, at the peak of its largest micro-batch: {packing.num_tokens:,} tokens,"
        f" {packing.num_trained:,} of them trained"
    )
    items = {words: memory.peak[kind] for kind, words in KINDS.items()}
    items["interpreter and libraries"] = base
    lines += [f"  {words:<48}{size / GIB:9.3f} GiB" for words, size in items.items() if size >= 2**20]
    if target.offloads:
        lines.append("  what is sharded is in the host's memory and not counted")
    lines.append(f"  {'together':<48}{(base + memory.total) / GIB:9.3f} GiB")
    lines.append(f"  {'one token more in a micro-batch':<48}{memory.per_token / 1024:9.1f} KiB")
    if target.keeps_freed:
        lines.append("  glibc's malloc keeps up to half as much again, unless MALLOC_MMAP_THRESHOLD_=65536 is set")


def plan_disk(options: TrainOptions, run: PlannedRun, problems: Problems, lines: list[str]) -> None:
    """Adds the sizes of checkpoints and exports; a problem where the disk has no room for them."""
    if run.shaped is None:
        return
    output_dir = Path(options.output_dir)
    checkpoint_bytes, num_checkpoints = (
        run.shaped.state_bytes,
        options.checkpoints.keep_checkpoints + 1,
    )  # and one being written
    export_bytes = run.shaped.num_params * getattr(torch, options.exports.export_dtype).itemsize
    num_exports = 1 if run.inputs.num_steps is None else count_exports(options, run)
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    used = sum(file.stat().st_size for file in output_dir.glob("checkpoints/step_*/*"))  # will make room
    needed = num_checkpoints * checkpoint_bytes + num_exports * export_bytes + SPARE_BYTES
    or_more = " or more" if run.inputs.num_steps is None else ""
    exports = f"{num_exports}{or_more} export{'' if num_exports == 1 else 's'}"
    lines.append(
        f"disk: {num_checkpoints} checkpoints of {checkpoint_bytes / 1e9:,.2f} GB ({options.checkpoints.keep_checkpoints} kept, one"
        f" being written), {exports} of {export_bytes / 1e9:,.2f} GB: {needed / 1e9:,.2f} GB;"
        f" {free / 1e9:,.2f} GB free at {existing}"
    )
    if needed > free + used:
        problems.append(
            f"--output-dir {output_dir}: checkpoints and exports need {needed / 1e9:,.2f} GB, and {free / 1e9:,.2f} GB"
            " are free: free some, lower --keep-checkpoints, or export less often"
        )


def count_exports(options: TrainOptions, run: PlannedRun) -> int:
    """How many models the run will still have exported at its end."""
    position, count = run.start, 0
    for step in range(run.start.step, run.inputs.num_steps):
        position = RunPosition(step + 1, position.num_samples + options.data.batch_size)
        is_last = step + 1 == run.inputs.num_steps
        count += is_export_due(options, position, epoch_length=len(run.inputs.data.kept), is_last=is_last)
    return count


def plan_time(
    options: TrainOptions,
    target: Target,
    run: PlannedRun,
    packing: Packing | None,
    speed: tuple[float, float] | None,
    lines: list[str],
) -> None:
    """Adds how long a step and the run take, and how that is known."""
    if packing is None:
        return
    flops = packing.flops.mean()
    if speed is not None:
        seconds, how = flops * speed[0] + speed[1], f"measured here, on {NUM_TIMED} micro-batches"
    elif target.peak_flops is not None:
        seconds = flops / (ASSUMED_MFU * target.peak_flops * target.world_size)
        how = f"assumed: {ASSUMED_MFU:.0%} of {target.peak_flops / 1e12:,.0f} TFLOP/s"
    else:
        lines.append(f"time: {flops / 1e12:,.2f} TFLOP a step; not measured")
        return
    text = f"time: {flops / 1e12:,.2f} TFLOP a step, {seconds:,.2f} s ({how})"
    if run.inputs.num_steps is None:
        text += "; the run has no end"
    else:
        left = round(seconds * max(0, run.inputs.num_steps - run.start.step))
        text += f"; {left // 3600}:{left // 60 % 60:02}:{left % 60:02} for the steps that are left"
    lines.append(text)


def measure_speed(options: TrainOptions, world: World, *, cap: int) -> tuple[float, float]:
    """Seconds for each FLOP of a micro-batch on all ranks, and seconds of an update, of the real model.

    The model is thrown away. All ranks call this.
    """
    inputs = open_inputs(
        options,
        device=world.device,
        world_size=world.world_size,
        start=RunPosition(),
        warn=lambda text: None,
    )
    model = build_run_model(options, inputs, world, progress=lambda where: None)
    flops = count_flops(model.model, inputs.config)
    optimizer = build_optimizer(
        model,
        optimizer=options.optimization.optimizer,
        learning_rate=0.0,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        eps=options.optimization.adam_eps,
    )
    batches = iterate_batches(
        inputs.data,
        batch_size=options.data.batch_size,
        seed=options.data.seed,
        num_steps=1 + NUM_TIMED,
        max_tokens_per_gpu=cap,
        attention_cost=flops.attention_cost,
        rank=world.rank,
        world_size=world.world_size,
        vocab_size=inputs.config.vocab_size,
        pin_memory=False,
    )
    num_done, seconds, timed_flops = 0, 0.0, 0.0
    for batch in batches:
        for row, micro_batch in zip(batch.table, batch.micro_batches, strict=True):
            ids = np.concatenate([np.array(indices, dtype=int) for indices in row])
            begin = now(world)
            (model(micro_batch.to(world.device)) / max(1, batch.num_loss_tokens)).backward()
            if 1 <= num_done <= NUM_TIMED:
                seconds += now(world) - begin
                num_trained = int(inputs.data.num_loss_tokens[batch.sample_ids[ids]].sum())
                timed_flops += flops.of_batch(batch.lengths[ids], num_trained)
            num_done += 1
            if num_done > NUM_TIMED:
                break
        if num_done > NUM_TIMED:
            break
    optimizer.step()  # makes its state
    begin = now(world)
    optimizer.step()
    return seconds / timed_flops, now(world) - begin


def now(world: World) -> float:
    """The time when all ranks have got here."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    dist.barrier(group=world.control)
    return time.perf_counter()
