"""Duration of a run, with its reference model and its teacher: from timed micro-batches, or from FLOPs."""

import itertools
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mini_trainer.distributed.devices import DTYPES, describe_duration
from mini_trainer.distributed.world import World
from mini_trainer.model.build import make_meta_model
from mini_trainer.model.flops import count_flops
from mini_trainer.model.method import Full
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.objectives.objective import TeacherModel
from mini_trainer.run.auto_settings import NUM_BATCHES
from mini_trainer.run.inputs import REFERENCE_MODEL, TEACHER_MODEL, RunInputs
from mini_trainer.run.plan.memory import (
    Findings,
    Packing,
    PlannedReference,
    PlannedRun,
    PlannedTeacher,
    Target,
    simulated_compute,
)
from mini_trainer.run.plan.simulation import PlannedModel
from mini_trainer.run.references import find_unscored
from mini_trainer.run.run_model import build_run_model
from mini_trainer.run.step import StepOptions, TrainState, run_backward, update_weights
from mini_trainer.sampler import RunPosition, iterate_batches

NUM_TIMED = 3  # micro-batches that are timed, after one to warm up
ASSUMED_MFU = 0.4  # if nothing can be measured


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
        if inputs.objective.reference is not None:
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
    target: Target, run: PlannedRun, packing: Packing | None, speed: Speed | None, findings: Findings
) -> None:
    """Adds the durations of a step, of the reference's scores and of the run, and how they were found."""
    if packing is None:
        return
    rates, flops = find_rates(target, speed), packing.flops.mean()
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
    if speed is None:
        how = f"assumed: {ASSUMED_MFU:.0%} of {target.peak_flops / 1e12:,.0f} TFLOP/s"
    seconds = flops * rates.seconds_per_flop + rates.update_seconds
    if speed is None and run.teacher is not None:  # the measurement includes the teacher's pass
        seconds += run.teacher.flops * rates.seconds_per_scored_flop
    if speed is None:
        seconds += update_flops * rates.seconds_per_flop
    text = f"time: {flops / 1e12:,.2f} TFLOP a step, {seconds:,.2f} s ({how})"
    if run.inputs.num_steps is None:
        text += "; the run has no end"
    else:
        left = seconds * max(0, run.inputs.num_steps - run.start.step)
        text += f"; {describe_duration(left + scoring)} for the remaining steps"
        text += f" and the reference, {describe_duration(scoring)}" if scoring else ""
    findings.lines.append(text)


def find_rates(target: Target, speed: Speed | None) -> Speed | None:
    """The measured speed, or the assumed speed of the planned device; None if unknown."""
    if speed is not None or target.peak_flops is None:
        return speed
    rate = 1 / (ASSUMED_MFU * target.peak_flops * target.ranks.world_size)
    return Speed(rate, rate, 0.0)


def plan_scoring(run: PlannedRun, rates: Speed | None, findings: Findings) -> float:
    """Adds the samples that the reference has to score before the first step; returns the seconds this takes."""
    reference = run.reference
    if reference is None:
        return 0.0
    if not reference.num_rows:
        findings.lines.append("reference: all samples have been scored before")
        return 0.0
    findings.lines.append(
        f"reference: {reference.num_rows:,} samples to score before the first step, {reference.flops / 1e12:,.2f} TFLOP"
    )
    return 0.0 if rates is None else reference.flops * rates.seconds_per_scored_flop


def plan_reference(
    options: StepOptions, target: Target, inputs: RunInputs, model: PlannedModel | None
) -> PlannedReference | None:
    """The samples that no run has scored, and what the model or --reference-model needs for them."""
    objective = inputs.objective
    if model is None or inputs.data is None or objective is None or objective.reference is None:
        return None
    unscored, flops, num_bytes = find_unscored(inputs), model.flops, 0
    num_rows = sum(len(rows) for _, rows in unscored)
    source = inputs.other_models.get(REFERENCE_MODEL)
    if source is not None and num_rows:
        compute, device = simulated_compute(options.compute, target, inputs), torch.device("cpu")
        other = make_meta_model(source, compute, family=inputs.family, method=Full(), device=device).model
        num_params = sum(param.numel() for param in other.parameters())
        flops = count_flops(other)
        if not target.ranks.offloads:
            num_bytes = num_params * inputs.compute_dtype.itemsize // target.ranks.num_shards
    total = sum(flops.of_scores(rows, data, objective) for data, rows in unscored)
    return PlannedReference(num_rows, total, num_bytes)


def plan_teacher(
    options: StepOptions, target: Target, inputs: RunInputs, model: PlannedModel | None
) -> PlannedTeacher | None:
    """The teacher's memory on a rank, and the FLOPs of its forward pass over a batch; None without one."""
    objective, data = inputs.objective, inputs.data
    if model is None or inputs.batching is None or objective is None or not isinstance(objective.teacher, TeacherModel):
        return None
    source = inputs.other_models.get(TEACHER_MODEL)
    if source is None:  # the model as it is at the start: copies of the trained weights
        flops, num_bytes = model.flops, model.num_trainable * DTYPES[options.optimization.master_weights].itemsize
    else:
        compute, device = simulated_compute(options.compute, target, inputs), torch.device("cpu")
        other = make_meta_model(source, compute, family=inputs.family, method=Full(), device=device).model
        flops = count_flops(other)
        num_bytes = sum(param.numel() for param in other.parameters()) * inputs.compute_dtype.itemsize
    rows = np.concatenate(list(itertools.islice(inputs.draw_batches(RunPosition()), NUM_BATCHES)))
    on_rank = 0 if target.ranks.offloads else num_bytes // target.ranks.num_shards
    read = data if inputs.teacher_data is None else inputs.teacher_data  # whose rows have the same numbers
    return PlannedTeacher(flops.of_scores(rows, read, objective) / NUM_BATCHES, on_rank)
