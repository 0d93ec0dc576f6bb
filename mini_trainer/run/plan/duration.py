"""How long a run would take: by a few micro-batches that were timed, or by its FLOPs."""

from mini_trainer.distributed.devices import describe_duration
from mini_trainer.run.plan.findings import Findings, PlannedRun, Target
from mini_trainer.run.plan.packing import Packing
from mini_trainer.run.plan.speed import NUM_TIMED, Speed

ASSUMED_MFU = 0.4  # where nothing can be measured


def plan_time(
    target: Target, run: PlannedRun, packing: Packing | None, speed: Speed | None, findings: Findings
) -> None:
    """Adds how long a step, the reference's scores and the run take, and how that is known."""
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
    if speed is None and run.teacher is not None:  # what was measured has the teacher's pass in it
        seconds += run.teacher.flops * rates.seconds_per_scored_flop
    if speed is None:
        seconds += update_flops * rates.seconds_per_flop
    text = f"time: {flops / 1e12:,.2f} TFLOP a step, {seconds:,.2f} s ({how})"
    if run.inputs.num_steps is None:
        text += "; the run has no end"
    else:
        left = seconds * max(0, run.inputs.num_steps - run.start.step)
        text += f"; {describe_duration(left + scoring)} for the steps that are left"
        text += f" and the reference, {describe_duration(scoring)}" if scoring else ""
    findings.lines.append(text)


def find_rates(target: Target, speed: Speed | None) -> Speed | None:
    """What was measured, or is assumed of the planned device; None where nothing is known of it."""
    if speed is not None or target.peak_flops is None:
        return speed
    rate = 1 / (ASSUMED_MFU * target.peak_flops * target.ranks.world_size)
    return Speed(rate, rate, 0.0)


def plan_scoring(run: PlannedRun, rates: Speed | None, findings: Findings) -> float:
    """Adds what the reference has to score before the first step; returns the seconds that it takes."""
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
