"""How long a run would take: by a few micro-batches that were timed, or by its FLOPs."""

import torch

from lifecycle.reference import find_unscored
from methods.full import Full
from model.build import make_meta_model
from model.flops import FlopCount, count_flops
from options import TrainOptions
from plan.findings import Findings, PlannedRun, Target
from plan.memory import simulated_compute
from plan.packing import Packing
from plan.speed import NUM_TIMED, Speed
from ranks.devices import describe_duration

ASSUMED_MFU = 0.4  # where nothing can be measured


def plan_time(
    options: TrainOptions,
    target: Target,
    run: PlannedRun,
    packing: Packing | None,
    speed: Speed | None,
    findings: Findings,
) -> None:
    """Adds how long a step, the reference's scores and the run take, and how that is known."""
    if packing is None:
        return
    rates = find_rates(target, speed)
    flops, num_left = packing.flops.mean(), None
    if run.inputs.num_steps is not None:
        num_left = max(0, run.inputs.num_steps - run.start.step)
    scoring = plan_reference(options, target, run, rates, findings)
    if rates is None:
        findings.lines.append(f"time: {flops / 1e12:,.2f} TFLOP a step; not measured")
        return
    seconds = flops * rates.seconds_per_flop + rates.update_seconds
    how = f"assumed: {ASSUMED_MFU:.0%} of {(target.peak_flops or 0) / 1e12:,.0f} TFLOP/s"
    if speed is not None:
        how = f"measured here, on {NUM_TIMED} micro-batches"
    text = f"time: {flops / 1e12:,.2f} TFLOP a step, {seconds:,.2f} s ({how})"
    if num_left is None:
        text += "; the run has no end"
    else:
        before = f", {describe_duration(scoring)} of it for the reference" if scoring else ""
        text += f"; {describe_duration(num_left * seconds + scoring)} for the steps that are left{before}"
    findings.lines.append(text)


def find_rates(target: Target, speed: Speed | None) -> Speed | None:
    """What was measured, or is assumed of the planned device; None where nothing is known of it."""
    if speed is not None or target.peak_flops is None:
        return speed
    rate = 1 / (ASSUMED_MFU * target.peak_flops * target.ranks.world_size)
    return Speed(rate, rate, 0.0)


def plan_reference(
    options: TrainOptions, target: Target, run: PlannedRun, rates: Speed | None, findings: Findings
) -> float:
    """Adds what the reference has to score before the first step; returns the seconds that it takes."""
    inputs = run.inputs
    if inputs.objective is None or inputs.objective.reference_column is None:
        return 0.0
    flops = count_reference_flops(options, target, run)
    unscored = find_unscored(options, inputs)
    total = sum(flops.of_scores(rows, data, inputs.objective) for data, rows in unscored)
    seconds = 0.0 if rates is None else total * rates.seconds_per_scored_flop
    num_rows = sum(len(rows) for _, rows in unscored)
    how_long = f", {describe_duration(seconds)}" if seconds else ""
    findings.lines.append(
        f"reference: {num_rows:,} samples to score before the first step, {total / 1e12:,.2f} TFLOP{how_long}"
    )
    return seconds


def count_reference_flops(options: TrainOptions, target: Target, run: PlannedRun) -> FlopCount:
    """The FLOPs of --reference-model, or of the model itself."""
    inputs = run.inputs
    if inputs.reference is None:
        return run.model.flops
    compute = simulated_compute(options, target, inputs)
    made = make_meta_model(inputs.reference, compute, family=inputs.family, method=Full(), device=torch.device("cpu"))
    return count_flops(made.model)
