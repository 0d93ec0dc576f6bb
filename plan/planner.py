"""The plan of a run: what it would need and take, and every problem that can be found before it. Writes nothing.

    python train.py --config run.yaml --dry-run --plan-world-size 8 --plan-device H100 --memory-budget-gb 80

Memory comes from a simulated step (simulation.py), time from a few real micro-batches where the plan is for this
machine, else from FLOPs.
"""

import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from disk import SPARE_BYTES, read_json
from lifecycle.checkpoint_files import STATE, find_checkpoints
from lifecycle.checkpointing import check_state
from lifecycle.due import is_export_due
from lifecycle.raw_rows import find_data
from lifecycle.record import check_output_dir, check_same_run, check_unused, is_checkpoint_of
from lifecycle.start import Errors, RunInputs, keeps_to_budget, open_inputs, weigh_images
from model.files import find_weights
from options import ComputeOptions, TrainOptions, replace_options
from plan.choice import MODES, Probe, Room, choose_mode, count_useful_tokens, find_room, refuse_longest
from plan.packing import Packing, pack_next_batches
from plan.simulation import Load, PlannedModel, Ranks, StepMemory, lay_out_model, simulate_step
from plan.speed import NUM_TIMED, Speed, measure_speed
from ranks.devices import PEAK_FLOPS, describe_device, describe_duration, find_peak_flops
from ranks.ending import ExitCode
from ranks.memory import GIB, MARGIN, memory_limit, resident_memory
from ranks.row_group import check_sharing
from ranks.world import call_on_rank0, count_shards, init_world, setup_logging
from sampler import RunPosition

RANKS_PER_NODE = 8  # what --sharding hybrid is planned with for machines that are not this one
ENOUGH_TOKENS = 4096  # in a micro-batch of this size the fixed costs are small
LONG_ROW = 8192  # tokens from which on a plan tries what makes room for long rows
ASSUMED_MFU = 0.4  # what a step's time is planned with where nothing can be measured

KINDS = {  # the kinds of StepMemory.peak in words
    "weights": "weights that train, sharded",
    "frozen": "weights and buffers that do not train",
    "gradients": "gradients, sharded",
    "optimizer": "optimizer state, sharded",
    "gathered": "units that FSDP gathers and reduces",
    "activations": "activations",
    "loss": "loss: a chunk of logits, gradient of the head",
}
Result = TypeVar("Result")


@dataclass
class Findings:
    """What a plan prints."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: Errors = field(default_factory=Errors)

    def add_problem(self, text: str) -> None:
        self.problems.append(ValueError(text))

    def print(self) -> None:
        count = len(self.problems)
        print("\n".join(self.lines))
        for warning in self.warnings:
            print(f"warning: {warning}")
        print(f"\n{count or 'no'} problem{'' if count == 1 else 's'} found")
        for problem in self.problems:
            print(f"  - {problem}")
        sys.stdout.flush()


@dataclass(frozen=True)
class Target:
    """The machine that is planned for."""

    ranks: Ranks
    device: torch.device
    name: str
    peak_flops: float | None
    limit: int | None  # bytes that a rank may use
    is_here: bool  # these are the ranks that this start has
    keeps_freed: bool  # a process keeps memory that it does not need any more

    @property
    def base(self) -> int:
        """Bytes of a rank beside its tensors."""
        return resident_memory() if self.device.type == "cpu" else 0


@dataclass(frozen=True)
class PlannedRun:
    """What could be found out of a run from its files; None where something is wrong."""

    inputs: RunInputs
    start: RunPosition
    model: PlannedModel | None


def plan_run(options: TrainOptions) -> ExitCode:
    """Prints the plan; BAD_INPUT if there are problems. Under torchrun every rank calls this."""
    setup_logging("WARNING")
    num_here = int(os.environ.get("WORLD_SIZE", 1))
    world_size = options.plan.plan_world_size or num_here
    is_here = world_size == num_here and options.plan.plan_device is None
    is_rank0 = os.environ.get("RANK", "0") == "0"
    findings = Findings()
    if is_rank0:
        found = findings.problems.attempt(lambda: find_data(options))
        if found is None:
            findings.print()
            return ExitCode.BAD_INPUT
        options = replace_options(options, **found)
        target = find_target(options, world_size, findings, is_here=is_here)
        run = look_at_run(options, target, findings)
        options, packing, is_simulated = plan_memory(options, target, run, findings)
        plan_disk(options, run, findings)
    speed = None
    if is_here:
        try:
            world = init_world(options.sharding)
            options = replace_options(options, **call_on_rank0(world, lambda: list_settled(options)))
            if call_on_rank0(world, lambda: is_simulated and not findings.problems and not run.model.method.takes_long):
                speed = measure_speed(options, world)
            dist.destroy_process_group()
        except (ValueError, OSError) as error:  # of the model itself, on every rank
            findings.problems.append(error)
    if is_rank0:
        plan_time(target, run, packing, speed, findings)
        findings.print()
    return ExitCode.BAD_INPUT if findings.problems else ExitCode.DONE


def list_settled(options: TrainOptions) -> dict[str, Any]:
    """What rank 0 alone has found: for options that may have been auto, and where rows became data sets."""
    mode, cap = options.compute.activation_checkpointing, options.data.max_tokens_per_gpu
    paths = dict(data_path=options.data.data_path, validation_data_path=options.validation.validation_data_path)
    return dict(activation_checkpointing=mode, max_tokens_per_gpu=cap) | paths


def find_target(options: TrainOptions, world_size: int, findings: Findings, *, is_here: bool) -> Target:
    """What the options say of the machine to plan for, and this machine otherwise."""
    has_gpu, given, budget = torch.cuda.is_available(), options.plan.plan_device, options.compute.memory_budget_gb
    device = torch.device("cuda" if has_gpu or given is not None else "cpu")
    name = given or describe_device(device)
    peak = find_peak_flops(name)
    if given is not None and peak is None:
        findings.add_problem(f"--plan-device {name}: not known; known are {', '.join(PEAK_FLOPS)}")
    is_known = budget is not None or is_here or (has_gpu and given is None)
    limit = memory_limit(budget, device, is_here=given is None) if is_known else None
    found = findings if not is_here else Findings()  # init_world says it, too
    num_shards, shard_size = world_size, options.sharding.shard_size
    if options.sharding.sharding == "hybrid":
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if is_here else min(world_size, RANKS_PER_NODE)
        num_shards = found.problems.attempt(lambda: count_shards(world_size, ranks_per_node, shard_size)) or world_size
    num_sharing = options.sharding.context_parallel
    if found.problems.attempt(lambda: check_sharing(world_size, num_sharing) or True) is None:
        num_sharing = None
    offloads = options.sharding.cpu_offload and device.type == "cuda"
    gives_back = keeps_to_budget(options) or "MALLOC_MMAP_THRESHOLD_" in os.environ
    return Target(
        Ranks(world_size, num_shards, num_sharing, offloads),
        device,
        name,
        peak,
        limit,
        is_here,
        keeps_freed=device.type == "cpu" and not gives_back,
    )


def look_at_run(options: TrainOptions, target: Target, findings: Findings) -> PlannedRun:
    """Reads what a run reads, in the same order, and goes on after what is wrong."""
    name, num_before = options.model.model_name_or_path, len(findings.problems)
    findings.problems.attempt(lambda: check_output_dir(Path(options.output_dir)))
    resumes = options.checkpoints.resume != "none"
    checkpoint = findings.problems.attempt(lambda: find_checkpoint(options)) if resumes else None
    start = checkpoint.position if checkpoint else RunPosition()
    inputs = open_inputs(options, device=target.device, world_size=target.ranks.world_size, start=start)
    findings.problems += inputs.errors
    findings.warnings += inputs.warnings
    if inputs.model_dir is not None and Path(name).is_dir():  # from the hub the weights would be downloaded
        findings.problems.attempt(lambda: find_weights(name, inputs.model_dir))
        if len(findings.problems) == num_before:
            findings.problems.attempt(lambda: check_identity(options, checkpoint, inputs))
    if inputs.config is None:
        return PlannedRun(inputs, start, None)
    compute = simulated_compute(options, target, inputs)
    model = findings.problems.attempt(lambda: lay_out_model(options, inputs, compute))
    if model is not None:
        weigh_images(inputs, model.flops)
    return PlannedRun(inputs, start, model)


def simulated_compute(options: TrainOptions, target: Target, inputs: RunInputs) -> ComputeOptions:
    """The compute options for a simulation, which runs on a CPU whatever it stands for.

    A GPU's attention kernels keep what SDPA keeps; only eager attention holds more.
    """
    attention = options.compute.attention
    if target.device.type != "cpu" and attention != "eager":
        attention = "auto"
    dtype = str(inputs.compute_dtype).removeprefix("torch.")
    return replace(
        options.compute, attention=attention, compute_dtype=dtype, compile=False, float8=False, use_liger_kernels=False
    )


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
    resume = options.checkpoints.resume
    is_path = resume not in ("auto", "strict")
    paths = [Path(resume)] if is_path else find_checkpoints(Path(options.output_dir) / "checkpoints")
    if not paths:
        return None
    state = read_json(paths[0] / STATE)
    check_state(state, paths[0].name)
    return FoundCheckpoint(paths[0], state)


def check_identity(options: TrainOptions, checkpoint: FoundCheckpoint | None, inputs: RunInputs) -> None:
    """ValueError if the output directory or the checkpoint is another run's."""
    identity, asked = inputs.identify(options), options.checkpoints
    output_dir = Path(options.output_dir)
    if not is_checkpoint_of(output_dir, checkpoint and checkpoint.path):
        check_unused(output_dir, identity, resume=asked.resume)
    if checkpoint is not None:
        check_same_run(
            checkpoint.path,
            checkpoint.state,
            identity,
            allow_changes=asked.allow_changed_options,
            needs_model=not inputs.method.saves_frozen,
        )


def plan_memory(
    options: TrainOptions, target: Target, run: PlannedRun, findings: Findings
) -> tuple[TrainOptions, Packing | None, bool]:
    """Adds what the run is and what memory it needs; returns the options without auto, the packing, if it is known."""
    describe_run(target, run, options, findings)
    if run.model is None or run.inputs.data is None:
        options = settle_mode(options)
        if run.model is not None:
            describe_model(options, run.model, findings)
        return options, None, False
    packing = memory = obstacle = None
    try:
        options = settle_by_simulation(options, target, run, findings)
    except RuntimeError as error:  # torch's, of an operation that needs more than shapes
        obstacle = error
    options = settle_mode(options)
    describe_model(options, run.model, findings)
    if options.data.max_tokens_per_gpu != "auto":
        packing = pack_run(options, target, run)
    try:
        if obstacle is None and packing is not None:
            memory = simulate_packing(options, target, run, packing)
    except RuntimeError as error:
        obstacle = error
    if obstacle is not None:
        findings.lines.append(f"memory: not known, since a step of this model cannot be simulated: {obstacle}")
    if memory is not None:
        findings.lines.append(packing.describe())
        describe_memory(target, packing, memory, findings)
        if packing.num_tokens >= LONG_ROW:
            describe_savings(options, target, run, packing, findings)
        check_memory(target, memory, findings)
    return options, packing, memory is not None


def pack_run(options: TrainOptions, target: Target, run: PlannedRun) -> Packing:
    return pack_next_batches(
        run.inputs.data,
        options.data,
        run.model.flops,
        start=run.start,
        num_steps=run.inputs.num_steps,
        world_size=target.ranks.num_rows,
        cap=max(options.data.max_tokens_per_gpu * (target.ranks.num_sharing or 1), run.inputs.data.longest),
    )


def settle_mode(options: TrainOptions) -> TrainOptions:
    """Where nothing could be found out, with what needs least memory."""
    if options.compute.activation_checkpointing != "auto":
        return options
    return replace_options(options, activation_checkpointing=MODES[-1])


def describe_run(target: Target, run: PlannedRun, options: TrainOptions, findings: Findings) -> None:
    size = ""
    if target.limit is not None:
        size = f", {target.limit / GIB / (1 - MARGIN):,.1f} GiB each, of which {MARGIN:.0%} stay free"
    findings.lines.append(f"plan for {target.ranks.world_size} x {target.name}{size}")
    data, num_steps = run.inputs.data, run.inputs.num_steps
    if data is not None:
        steps = "no end" if num_steps is None else f"{num_steps:,} steps"
        done = f", {run.start.step:,} of them done" if run.start.step else ""
        findings.lines.append(
            f"data: {len(data.kept):,} samples, {data.lengths[data.kept].sum(dtype=np.int64):,} tokens, the longest"
            f" {data.longest:,}\nrun: {steps} of {options.data.batch_size} samples{done}"
        )


def describe_model(options: TrainOptions, model: PlannedModel, findings: Findings) -> None:
    dtype = str(model.meta.compute_dtype).removeprefix("torch.")
    title = f", {model.method.title}" if model.method.title else ""
    findings.lines.append(
        f"model: {model.meta.model.config.model_type}, {model.num_params:,} parameters, {model.num_trainable:,} numbers"
        f" train; {dtype} compute, {options.compute.activation_checkpointing} activation checkpointing{title}"
    )
    if model.meta.left_out.parts:
        num_bytes = getattr(torch, options.optimization.master_weights).itemsize
        findings.lines.append(f"  {model.meta.left_out.describe(num_bytes=num_bytes)}")


def settle_by_simulation(options: TrainOptions, target: Target, run: PlannedRun, findings: Findings) -> TrainOptions:
    """The options with what auto would come to, every token trained; auto stays where no limit of memory is known."""
    given, mode = options.data.max_tokens_per_gpu, options.compute.activation_checkpointing
    autos = [("max-tokens-per-gpu", given), ("activation-checkpointing", mode)]
    if target.limit is None:
        for name in (name for name, value in autos if value == "auto"):
            findings.add_problem(f"--{name} auto cannot be planned without --memory-budget-gb")
    if target.limit is None or "auto" not in (given, mode):
        return options
    data = run.inputs.data
    longest, most = count_useful_tokens(data, options.data, start=run.start, world_size=target.ranks.num_rows)
    least, enough = longest, max(longest, min(most, ENOUGH_TOKENS))
    num_sharing = target.ranks.num_sharing or 1
    if given != "auto":
        least = most = enough = max(longest, min(most, given * num_sharing))

    def find(mode: str) -> Room:
        settled = replace_options(options, activation_checkpointing=mode)
        return find_room(
            lambda num_tokens: probe_by_simulation(settled, target, run, num_tokens=num_tokens),
            first=most,
            least=least,
            most=most,
            plenty=0.0,
        )

    mode, room = choose_mode(find, MODES if mode == "auto" else (mode,), enough=enough, is_timed=False)
    cap = given
    if given == "auto":
        cap = -(-(room.num_tokens or longest) // num_sharing)
        if room.num_tokens == 0:
            findings.add_problem(refuse_longest(data, room))
    return replace_options(options, activation_checkpointing=mode, max_tokens_per_gpu=cap)


def probe_by_simulation(options: TrainOptions, target: Target, run: PlannedRun, *, num_tokens: int) -> Probe:
    """What a step of micro-batches of `num_tokens` needs, every one trained."""
    load = Load(num_tokens, num_tokens, longest=run.inputs.data.longest, accumulates=True)
    memory = simulate(options, target, run, load)
    needed = target.base + memory.total
    return Probe(
        tokens=num_tokens,
        bytes=needed,
        activation_bytes=memory.peak["activations"],
        excess_bytes=needed - target.limit,
        bytes_per_token=memory.per_token,
    )


def simulate_packing(options: TrainOptions, target: Target, run: PlannedRun, packing: Packing) -> StepMemory:
    """A step with the largest micro-batch there is, and the most trained tokens."""
    accumulates = bool(packing.num_micro_batches.max() > 1)
    return simulate(
        options, target, run, Load(packing.num_tokens, packing.num_trained, run.inputs.data.longest, accumulates)
    )


def simulate(options: TrainOptions, target: Target, run: PlannedRun, load: Load) -> StepMemory:
    compute, inputs = simulated_compute(options, target, run.inputs), run.inputs
    return simulate_step(options, lay_out_model(options, inputs, compute), load, target.ranks)


def describe_memory(target: Target, packing: Packing, memory: StepMemory, findings: Findings) -> None:
    base, lines = target.base, findings.lines
    lines.append(
        f"memory of a rank, at the peak of its largest micro-batch: {packing.num_tokens:,} tokens,"
        f" {packing.num_trained:,} of them trained{describe_sharing(target.ranks)}"
    )
    items = {words: memory.peak[kind] for kind, words in KINDS.items()}
    items["interpreter and libraries"] = base
    lines += [f"  {words:<48}{size / GIB:9.3f} GiB" for words, size in items.items() if size >= 2**20]
    if target.ranks.offloads:
        lines.append("  what is sharded is in the host's memory and not counted")
    lines.append(f"  {'together':<48}{(base + memory.total) / GIB:9.3f} GiB")
    lines.append(f"  {'one token more in a micro-batch':<48}{memory.per_token / 1024:9.1f} KiB")
    if memory.offloaded:
        lines.append(f"  {'inputs of blocks, in CPU memory':<48}{memory.offloaded / GIB:9.3f} GiB")
    if target.keeps_freed:
        lines.append("  glibc's malloc keeps up to half as much again, unless MALLOC_MMAP_THRESHOLD_=65536 is set")


def describe_sharing(ranks: Ranks) -> str:
    return "" if ranks.num_sharing is None else f"; {ranks.num_sharing} ranks share it, and have an equal part each"


def describe_savings(
    options: TrainOptions, target: Target, run: PlannedRun, packing: Packing, findings: Findings
) -> None:
    """Adds what the options for long rows would come to, those that the run could have and has not."""
    for change in list_savings(options, target):
        changed = replace_options(options, **change)
        try:
            memory = simulate_packing(changed, target, run, packing)
        except ValueError:  # of a model that has no such modules
            continue
        names = " ".join(f"--{name.replace('_', '-')}" for name, value in change.items() if value is True)
        findings.lines.append(
            f"  {f'together with {names}':<64}{(target.base + memory.total) / GIB:9.3f} GiB,"
            f" {memory.per_token / 1024:,.1f} KiB for a token more"
        )


def list_savings(options: TrainOptions, target: Target) -> list[dict[str, bool]]:
    compute, savings = options.compute, []
    if not (compute.tiled_mlp or compute.compile):
        savings.append(dict(tiled_mlp=True))
    is_able = target.device.type == "cuda" and compute.activation_checkpointing == "full"
    if is_able and not compute.offload_activations:
        savings.append(dict(offload_activations=True))
    return savings if len(savings) < 2 else [*savings, savings[0] | savings[1]]


def check_memory(target: Target, memory: StepMemory, findings: Findings) -> None:
    needed = target.base + memory.total
    if target.limit is None:
        findings.lines.append("  whether that fits is not known: give --memory-budget-gb")
    elif needed > target.limit:
        findings.add_problem(
            f"a step needs {needed / GIB:,.1f} GiB on each rank, and of {target.limit / GIB / (1 - MARGIN):,.1f} GiB"
            f" {1 - MARGIN:.0%} may be used: lower --max-tokens-per-gpu (auto finds the largest), use"
            " --activation-checkpointing full, --tiled-mlp, --offload-activations, or more GPUs"
        )


def plan_disk(options: TrainOptions, run: PlannedRun, findings: Findings) -> None:
    """Adds the sizes of checkpoints and exports; a problem where the disk has no room for them."""
    if run.model is None:
        return
    output_dir, num_kept = Path(options.output_dir), options.checkpoints.keep_checkpoints
    checkpoint_bytes, num_checkpoints = run.model.state_bytes, num_kept + 1  # and one that is being written
    num_exported = run.model.num_params + run.model.meta.left_out.num_params
    model_bytes = num_exported * getattr(torch, options.exports.export_dtype).itemsize
    export_bytes = run.model.method.count_export_bytes(model_bytes)
    num_exports = 1 if run.inputs.num_steps is None else count_exports(options, run)
    if options.validation.is_asked and options.validation.export_best:
        num_exports += 2  # the best, and a better one that is being written
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    used = sum(file.stat().st_size for file in output_dir.glob("checkpoints/step_*/*"))  # these will make room
    needed = num_checkpoints * checkpoint_bytes + num_exports * export_bytes + SPARE_BYTES
    or_more = " or more" if run.inputs.num_steps is None else ""
    exports = f"{num_exports}{or_more} export{'' if num_exports == 1 else 's'}"
    findings.lines.append(
        f"disk: {num_checkpoints} checkpoints of {checkpoint_bytes / 1e9:,.2f} GB ({num_kept} kept, one"
        f" being written), {exports} of {export_bytes / 1e9:,.2f} GB: {needed / 1e9:,.2f} GB;"
        f" {free / 1e9:,.2f} GB free at {existing}"
    )
    if needed > free + used:
        findings.add_problem(
            f"--output-dir {output_dir}: checkpoints and exports need {needed / 1e9:,.2f} GB, and {free / 1e9:,.2f} GB"
            " are free: free some, lower --keep-checkpoints, or export less often"
        )


def count_exports(options: TrainOptions, run: PlannedRun) -> int:
    """How many models the run will still have exported at its end."""
    batch_size, num_steps = options.data.batch_size, run.inputs.num_steps
    position, count = run.start, 0
    for step in range(run.start.step, num_steps):
        position = RunPosition(step + 1, position.num_samples + batch_size)
        count += is_export_due(
            position,
            options.exports,
            batch_size=batch_size,
            epoch_length=len(run.inputs.data.kept),
            is_last=step + 1 == num_steps,
        )
    return count


def plan_time(
    target: Target, run: PlannedRun, packing: Packing | None, speed: Speed | None, findings: Findings
) -> None:
    """Adds how long a step and the run take, and how that is known."""
    if packing is None:
        return
    flops = packing.flops.mean()
    if speed is not None:
        seconds = flops * speed.seconds_per_flop + speed.update_seconds
        how = f"measured here, on {NUM_TIMED} micro-batches"
    elif target.peak_flops is not None:
        seconds = flops / (ASSUMED_MFU * target.peak_flops * target.ranks.world_size)
        how = f"assumed: {ASSUMED_MFU:.0%} of {target.peak_flops / 1e12:,.0f} TFLOP/s"
    else:
        findings.lines.append(f"time: {flops / 1e12:,.2f} TFLOP a step; not measured")
        return
    text = f"time: {flops / 1e12:,.2f} TFLOP a step, {seconds:,.2f} s ({how})"
    if run.inputs.num_steps is None:
        text += "; the run has no end"
    else:
        left = seconds * max(0, run.inputs.num_steps - run.start.step)
        text += f"; {describe_duration(left)} for the steps that are left"
    findings.lines.append(text)
