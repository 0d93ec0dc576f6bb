"""The plan of a run: its memory, time and disk space, and every problem that can be found beforehand. Writes nothing.

    python train.py --config run.yaml --dry-run --plan-for 8xH100 --memory-budget-gb 80

Memory comes from a simulated step (simulation.py), time from a few real micro-batches if the plan is for this machine,
otherwise from FLOPs.
"""

import functools
import itertools
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mini_trainer.data.stores.disk import count_free
from mini_trainer.data.stores.model_files import find_weights
from mini_trainer.distributed import devices
from mini_trainer.distributed.agreement import compare_ranks
from mini_trainer.distributed.ending import ExitCode, RanksDiffer, log
from mini_trainer.distributed.process import count_local_ranks
from mini_trainer.distributed.world import (
    World,
    call_on_rank0,
    check_sharing,
    count_shards,
    divide_world,
    init_world,
    setup_logging,
)
from mini_trainer.model.build import make_meta_model
from mini_trainer.model.config import ModelSource
from mini_trainer.model.flops import FlopCount, count_flops
from mini_trainer.model.method import Full
from mini_trainer.model.optim.averages import find_first_step
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.options import (
    CheckpointOptions,
    ExportOptions,
    OptimizationOptions,
    TrainOptions,
    ValidationOptions,
    fill_unset,
    flatten_options,
    list_data_sets,
    parse_machine,
    replace_options,
)
from mini_trainer.options.reading import read_json
from mini_trainer.run import keeping, references
from mini_trainer.run.auto_settings import NUM_BATCHES
from mini_trainer.run.checkpoint_files import STATE
from mini_trainer.run.checkpointing import Checkpoint, check_state
from mini_trainer.run.file_names import find_checkpoints
from mini_trainer.run.identity import check_checkpoints, identify_run, is_checkpoint_of
from mini_trainer.run.inputs import REFERENCE_MODEL, TEACHER_MODEL, RunInputs
from mini_trainer.run.plan import memory
from mini_trainer.run.plan.memory import Findings, PlannedRun, Target
from mini_trainer.run.plan.simulation import PlannedModel, Ranks, lay_out_model
from mini_trainer.run.preflight import SETTLED, DiskUse, check_directory
from mini_trainer.run.raw_rows import find_local_data
from mini_trainer.run.record import check_unused
from mini_trainer.run.run_directory import read_origin
from mini_trainer.run.run_model import build_run_model, describe_schedule, weigh_images
from mini_trainer.run.start import choose_method, open_inputs, settle_by_device
from mini_trainer.run.start_checks import describe_start
from mini_trainer.run.step import StepOptions, TrainState, run_backward, update_weights
from mini_trainer.sampler import Batching, RunPosition, iterate_batches

NUM_TIMED = 3  # micro-batches that are timed, after one to warm up
ASSUMED_MFU = 0.4  # if nothing can be measured
RANKS_PER_NODE = 8  # for plans of --sharding hybrid for other machines


def plan_run(options: TrainOptions) -> ExitCode:
    """Prints the plan; BAD_INPUT if there are problems. Under torchrun every rank calls this."""
    setup_logging("WARNING")
    num_here = int(os.environ.get("WORLD_SIZE", 1))
    world_size, device_name = parse_machine(options.plan.plan_for or str(num_here))
    is_here = world_size == num_here and device_name is None
    is_rank0 = os.environ.get("RANK", "0") == "0"
    findings, given = Findings(), options
    if is_rank0:
        if (found := findings.problems.attempt(lambda: find_local_data(options))) is None:
            findings.print()
            return ExitCode.BAD_INPUT
        options = replace_options(options, **found)
        step_options = choose_step_options(options)
        target = find_target(device_name, step_options, world_size, findings, is_here=is_here)
        is_known = is_here or target.device.type == "cpu"  # of another machine it is assumed that it can have kernels
        settled = findings.problems.attempt(lambda: settle_by_device(options, target.device, None, is_known=is_known))
        options = settled or replace_options(fill_unset(options, target.device.type), kernels="eager")
        step_options = choose_step_options(options)
        run = look_at_run(options, target, findings)
        options = run.inputs.options
        describe_run(target, run, options.optimization, findings)
        settled, packing, is_simulated = memory.plan_memory(step_options, target, run, findings)
        plan_disk(options.checkpoints, options.exports, options.validation, options.optimization, run, findings)
    speed = None
    if is_here:
        try:
            world = init_world(start_timeout=3600)  # rank 0 comes last, when it has made the rest of the plan
            compare_ranks(world, lambda: describe_start(flatten_options(given), world))
            world = divide_world(world, options.sharding)
            options = replace_options(options, **call_on_rank0(world, lambda: list_changes(settled, options)))
            if call_on_rank0(world, lambda: is_simulated and not findings.problems and not run.model.method.takes_long):
                inputs = open_inputs(options, device=world.device, world_size=world.world_size, start=RunPosition())
                speed = measure_speed(inputs, choose_step_options(options), world)
        except (ValueError, OSError) as error:  # of the model itself, on every rank
            findings.problems.append(error)
            if isinstance(error, RanksDiffer) and not is_rank0:  # rank 0 may be training, and not print this plan
                log.error(f"[rank {world.rank}] error: {error}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    if is_rank0:
        plan_time(target, run, packing, speed, findings)
        findings.print()
    return ExitCode.BAD_INPUT if findings.problems else ExitCode.DONE


def choose_step_options(options: TrainOptions) -> StepOptions:
    return StepOptions(options.data, options.compute, options.sharding, options.optimization)


def list_changes(settled: StepOptions, options: TrainOptions) -> dict[str, Any]:
    """The values of options that may have been auto, and local paths of data sets in place of rows and URLs."""
    of_step, values = flatten_options(settled), flatten_options(options)
    return {name: of_step[name] for name in SETTLED} | {name: values[name] for name in list_data_sets(options)}


def find_target(
    given: str | None, options: StepOptions, world_size: int, findings: Findings, *, is_here: bool
) -> Target:
    """The machine to plan for: with GPUs of the name `given`, and this machine otherwise."""
    has_gpu, budget = torch.cuda.is_available(), options.compute.memory_budget_gb
    sharding = options.sharding
    device = torch.device("cuda" if has_gpu or given is not None else "cpu")
    name = given or devices.describe_device(device)
    peak = devices.find_peak_flops(name)
    if given is not None and peak is None:
        findings.add_problem(f"--plan-for {world_size}x{name}: unknown GPU; known are {', '.join(devices.PEAK_FLOPS)}")
    is_known = budget is not None or is_here or (has_gpu and given is None)
    limit = devices.memory_limit(budget, device, is_here=given is None) if is_known else None
    found = findings if not is_here else Findings()  # init_world says it, too
    num_shards, shard_size = world_size, sharding.shard_size
    if sharding.sharding == "hybrid":
        ranks_per_node = count_local_ranks() if is_here else min(world_size, RANKS_PER_NODE)
        num_shards = found.problems.attempt(lambda: count_shards(world_size, ranks_per_node, shard_size)) or world_size
    num_sharing = sharding.context_parallel
    if found.problems.attempt(lambda: check_sharing(world_size, num_sharing) or True) is None:
        num_sharing = None
    offloads = sharding.cpu_offload and device.type == "cuda"
    return Target(
        Ranks(world_size, num_shards, num_sharing, offloads, limit if device.type == "cuda" else None),
        device,
        name,
        peak,
        limit,
    )


def look_at_run(options: TrainOptions, target: Target, findings: Findings) -> PlannedRun:
    """Reads a run's inputs, in the same order, and continues after errors."""
    num_before, asked = len(findings.problems), options.checkpoints
    findings.problems.attempt(lambda: check_directory(options))
    output_dir, resume, origin_path = Path(options.output_dir), asked.resume, asked.continue_from
    checkpoint = findings.problems.attempt(lambda: find_checkpoint(output_dir, resume)) if resume != "none" else None
    start = RunPosition(**checkpoint.state["position"]) if checkpoint else RunPosition()
    origin = None  # its tensors are not verified
    if origin_path is not None:
        origin = findings.problems.attempt(lambda: read_origin(Path(origin_path), output_dir))
    inputs = open_inputs(options, device=target.device, world_size=target.ranks.world_size, start=start, origin=origin)
    options = inputs.options
    findings.problems += inputs.errors
    findings.warnings += inputs.warnings
    models = inputs.list_models()
    local = [model for model in models if Path(model[0]).is_dir()]  # from the hub the weights would be downloaded
    for model in local:
        findings.problems.attempt(lambda model=model: find_weights(*model))
    if local == models and len(findings.problems) == num_before:
        findings.problems.attempt(lambda: check_identity(asked, options.optimization, checkpoint, inputs))
    make_method = functools.partial(choose_method, options)
    if inputs.config is None or inputs.objective is None:  # without an objective, the required kind of model is unknown
        return PlannedRun(inputs, start, make_method, None)
    step_options, compute = choose_step_options(options), memory.simulated_compute(options.compute, target, inputs)
    model = findings.problems.attempt(lambda: lay_out_model(step_options, inputs, compute, make_method()))
    if model is not None:
        weigh_images(inputs, model.flops)
    reference = findings.problems.attempt(lambda: plan_reference(step_options, target, inputs, model))
    teacher = findings.problems.attempt(lambda: plan_teacher(step_options, target, inputs))
    return PlannedRun(inputs, start, make_method, model, reference, teacher)


def find_checkpoint(output_dir: Path, resume: str) -> Checkpoint | None:
    """The checkpoint that --resume would most likely use, not verified, and without its manifest."""
    paths = find_checkpoints(output_dir / "checkpoints") if resume in ("auto", "strict") else [Path(resume)]
    if not paths:
        return None
    state = read_json(paths[0] / STATE)
    check_state(state, paths[0].name)
    return Checkpoint(paths[0], "", {}, state)


def check_identity(
    asked: CheckpointOptions, optimization: OptimizationOptions, checkpoint: Checkpoint | None, inputs: RunInputs
) -> None:
    """ValueError if the output directory or the checkpoint is another run's."""
    identity, output_dir = identify_run(inputs, optimization), Path(inputs.values["output_dir"])
    if not is_checkpoint_of(output_dir, checkpoint and checkpoint.path):
        check_unused(output_dir, asked.resume, identity, inputs.own_paths)
    check_checkpoints(inputs, checkpoint, identity, allow_changes=asked.allow_changed_options)


def describe_run(target: Target, run: PlannedRun, optimization: OptimizationOptions, findings: Findings) -> None:
    size = ""
    if target.limit is not None:
        gib = target.limit / devices.GIB / (1 - devices.MARGIN)
        size = f", {gib:,.1f} GiB each, of which {devices.MARGIN:.0%} stay free"
    findings.lines.append(f"plan for {target.ranks.world_size} x {target.name}{size}")
    data, num_steps = run.inputs.data, run.inputs.num_steps
    if run.inputs.batching is not None:
        steps = "no end" if num_steps is None else f"{num_steps:,} steps"
        done = f", {run.start.step:,} of them done" if run.start.step else ""
        findings.lines.append(
            f"data: {len(data.kept):,} samples, {data.num_tokens:,} tokens, the longest"
            f" {data.longest:,}{run.inputs.chosen}\nrun: {steps} of {run.inputs.batching}{done}"
        )
        findings.lines += describe_schedule(run.inputs, optimization, start=run.start)


def find_most_exports(options: ExportOptions) -> int | None:
    """The most exports that exist at once, including one being written; None: all of them."""
    return None if options.keep_exports is None else options.keep_exports + 1


def count_exports(
    options: ExportOptions, optimization: OptimizationOptions, inputs: RunInputs, *, start: RunPosition
) -> tuple[int, int]:
    """The most exports that exist at once, and how many of them have an average's export next to them."""
    most, is_averaged = find_most_exports(options), optimization.weight_average != "none"
    if inputs.num_steps is None:
        num_exports = 1 if most is None else most
        return num_exports, num_exports * is_averaged
    steps = list_export_steps(
        options, inputs.batching, start=start, num_steps=inputs.num_steps, epoch_length=len(inputs.data.kept)
    )
    steps = steps if most is None else steps[-most:]  # the last ones: only they may be of a tail
    first = find_first_step(optimization, end=inputs.last_step)
    return len(steps), 0 if first is None else sum(inputs.num_steps_before + step > first for step in steps)


def list_export_steps(
    options: ExportOptions, batching: Batching, *, start: RunPosition, num_steps: int, epoch_length: int
) -> list[int]:
    """Numbers of the steps that an export follows, from the step after `start` to the last of `num_steps`."""
    intervals = [options.min_samples_per_checkpoint, epoch_length if options.checkpoint_at_epoch else None]
    intervals = [every for every in intervals if every is not None]
    position, step, steps = start.num_samples, start.step, {num_steps} if options.save_final_checkpoint else set()
    while intervals and step < num_steps:  # from one step that crosses a threshold to the next one
        threshold = min((position // every + 1) * every for every in intervals)
        num_batches = batching.count(position, threshold)
        position, step = batching.find_end(position, num_batches=num_batches), step + num_batches
        steps.add(step)
    return sorted(step for step in steps if start.step < step <= num_steps)


def plan_disk(
    checkpoints: CheckpointOptions,
    exports: ExportOptions,
    validation: ValidationOptions,
    optimization: OptimizationOptions,
    run: PlannedRun,
    findings: Findings,
) -> None:
    """Adds the sizes of checkpoints and exports; a problem if the disk has no room for them."""
    if run.model is None:
        return
    output_dir, num_kept = Path(run.inputs.values["output_dir"]), checkpoints.keep_checkpoints
    num_exported = run.model.num_params + run.model.meta.left_out.num_params
    export_bytes = run.model.method.count_export_bytes(num_exported * devices.DTYPES[exports.export_dtype].itemsize)
    num_exports, num_averages = count_exports(exports, optimization, run.inputs, start=run.start)
    num_exports += num_averages
    if validation.validation_data_path and validation.export_best:
        num_exports += 2  # the best, and a better one that is being written
    use = DiskUse(num_kept + 1, run.model.state_bytes, num_exports, export_bytes)  # and one that is being written
    or_more = " or more" if run.inputs.num_steps is None and find_most_exports(exports) is None else ""
    counted = f"{num_exports}{or_more} export{'' if num_exports == 1 else 's'}"
    of_averages = f", {num_averages}{or_more} of them of an average," if num_averages else ""
    findings.lines.append(
        f"disk: {num_kept + 1} checkpoints of {use.checkpoint_bytes / 1e9:,.2f} GB ({num_kept} kept, one being"
        f" written), {counted}{of_averages} of {export_bytes / 1e9:,.2f} GB: {use.total / 1e9:,.2f} GB;"
        f" {count_free(output_dir) / 1e9:,.2f} GB free"
    )
    num_replaced = min(num_kept, len(find_checkpoints(output_dir / "checkpoints")))  # by those that will be written
    left = replace(use, num_checkpoints=use.num_checkpoints - num_replaced)
    findings.problems.attempt(lambda: left.check(output_dir))


@dataclass(frozen=True)
class Speed:
    """Speed of a run, measured in advance."""

    seconds_per_flop: float  # of a micro-batch, on all ranks together
    seconds_per_scored_flop: float  # of a forward pass without gradients
    update_seconds: float


def measure_speed(inputs: RunInputs, options: StepOptions, world: World) -> Speed:
    """Times forward, backward and update of the run with these inputs. All ranks call this."""
    model = build_run_model(inputs, options, world, only_measures=True)
    flops = count_flops(model.model)
    state = TrainState(model, inputs.method, build_optimizer(model, options.optimization), world)
    batches = iterate_batches(
        inputs.data,
        inputs.data_options,
        objective=inputs.objective,
        batching=inputs.batching,
        num_steps=1 + NUM_TIMED,
        attention_cost=flops.attention_cost,
        world=world,
    )
    micro_batches = (
        (batch, row, micro_batch)
        for batch in batches
        for row, micro_batch in zip(batch.table, batch.micro_batches, strict=True)
    )
    measured = []
    for batch, row, micro_batch in itertools.islice(micro_batches, 1 + NUM_TIMED):
        rows = batch.sample_ids[np.concatenate([np.array(indices, dtype=int) for indices in row])]
        micro_batch = micro_batch.to(world.device)
        times = [now(world)]
        micro_batch = model.prepare(micro_batch)
        if model.looks_ahead:
            model.look_ahead(micro_batch)
        run_backward(model, micro_batch, batch.divisors)
        times.append(now(world))
        if inputs.objective.reference is not None or inputs.old is not None:
            model.score(micro_batch)
        times.append(now(world))
        counted = [count(rows, inputs.data, inputs.objective) for count in (flops.of_rows, flops.of_scores)]
        measured.append((*np.diff(times), *counted))
    trained, scored, trained_flops, scored_flops = np.sum(measured[1:], axis=0).tolist()
    update_weights(state, step=0, lr=0.0, num_samples=1)  # makes the optimizer's state
    run_backward(model, micro_batch, batch.divisors)
    begin = now(world)
    update_weights(state, step=1, lr=0.0, num_samples=1)
    return Speed(trained / trained_flops, scored / scored_flops, now(world) - begin)


def now(world: World) -> float:
    """Waits for all ranks, then returns the time."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    dist.barrier(group=world.control)
    return time.perf_counter()


def plan_time(
    target: Target, run: PlannedRun, packing: memory.Packing | None, speed: Speed | None, findings: Findings
) -> None:
    """Adds the durations of a step, of the reference's scores and of the run, and how they were found."""
    if packing is None:
        return
    rates, flops = speed, packing.flops.mean()
    if rates is None and target.peak_flops is not None:
        rate = 1 / (ASSUMED_MFU * target.peak_flops * target.ranks.world_size)
        rates = Speed(rate, rate, 0.0)
    scoring = plan_scoring(run, rates, findings)
    if run.teacher is not None:
        findings.lines.append(f"teacher: a forward pass in each step, {run.teacher.flops / 1e12:,.2f} TFLOP")
    update_flops = 0 if run.model is None else run.model.update_flops
    if update_flops:
        findings.lines.append(f"optimizer: {update_flops / 1e12:,.2f} TFLOP in each step")
    if rates is None:
        findings.lines.append(f"time: {flops / 1e12:,.2f} TFLOP a step; not measured")
        return
    how = f"measured here, on {NUM_TIMED} micro-batches"
    seconds = flops * rates.seconds_per_flop + rates.update_seconds
    if speed is None:  # a measurement includes the teacher's pass and the update
        how = f"assumed: {ASSUMED_MFU:.0%} of {target.peak_flops / 1e12:,.0f} TFLOP/s"
        seconds += (0 if run.teacher is None else run.teacher.flops) * rates.seconds_per_scored_flop
        seconds += update_flops * rates.seconds_per_flop
    text = f"time: {flops / 1e12:,.2f} TFLOP a step, {seconds:,.2f} s ({how})"
    if run.inputs.num_steps is None:
        text += "; the run has no end"
    else:
        left = seconds * max(0, run.inputs.num_steps - run.start.step)
        text += f"; {devices.describe_duration(left + scoring)} for the remaining steps"
        text += f" and the samples to score, {devices.describe_duration(scoring)}" if scoring else ""
    findings.lines.append(text)


def plan_scoring(run: PlannedRun, rates: Speed | None, findings: Findings) -> float:
    """Adds the samples to score before the first step; returns the seconds that this takes."""
    if (reference := run.reference) is None:
        return 0.0
    what = "reference" if run.inputs.old is None else "keep"
    if not reference.num_rows:
        findings.lines.append(f"{what}: all samples have been scored before")
        return 0.0
    findings.lines.append(
        f"{what}: {reference.num_rows:,} samples to score before the first step, {reference.flops / 1e12:,.2f} TFLOP"
    )
    return 0.0 if rates is None else reference.flops * rates.seconds_per_scored_flop


def measure_other(
    options: StepOptions, target: Target, inputs: RunInputs, source: ModelSource
) -> tuple[FlopCount, int]:
    """FLOPs of another model that the run reads, and the bytes of its weights."""
    compute, device = memory.simulated_compute(options.compute, target, inputs), torch.device("cpu")
    other = make_meta_model(source, compute, family=inputs.family, method=Full(), device=device).model
    return count_flops(other), sum(param.numel() for param in other.parameters()) * inputs.compute_dtype.itemsize


def plan_reference(
    options: StepOptions, target: Target, inputs: RunInputs, model: PlannedModel | None
) -> memory.PlannedOther | None:
    """The samples that no run has scored, and what the model or --reference-model needs for them."""
    objective = inputs.objective
    if model is None or inputs.data is None or objective is None:
        return None
    if inputs.old is None and objective.reference is None:
        return None
    find = references.find_unscored if inputs.old is None else keeping.find_unscored
    unscored, flops, num_bytes = find(inputs), model.flops, 0
    num_rows = sum(len(rows) for _, rows in unscored)
    if (source := inputs.other_models.get(REFERENCE_MODEL)) is not None and num_rows:
        flops, other_bytes = measure_other(options, target, inputs, source)
        num_bytes = 0 if target.ranks.offloads else other_bytes // target.ranks.num_shards
    total = sum(flops.of_scores(rows, data, objective) for data, rows in unscored)
    return memory.PlannedOther(total, num_bytes, num_rows)


def plan_teacher(options: StepOptions, target: Target, inputs: RunInputs) -> memory.PlannedOther | None:
    """The teacher's memory on a rank, and the FLOPs of its forward pass over a batch; None without one."""
    source = inputs.other_models.get(TEACHER_MODEL)
    if source is None or inputs.batching is None:
        return None
    flops, num_bytes = measure_other(options, target, inputs, source)
    rows = np.concatenate(list(itertools.islice(inputs.draw_batches(RunPosition()), NUM_BATCHES)))
    on_rank = 0 if target.ranks.offloads else num_bytes // target.ranks.num_shards
    return memory.PlannedOther(flops.of_scores(rows, inputs.data, inputs.objective) / NUM_BATCHES, on_rank)
