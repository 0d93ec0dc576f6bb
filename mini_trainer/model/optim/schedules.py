"""Learning-rate schedules as pure functions of the step."""

import math
from collections.abc import Callable

from mini_trainer.options import OptimizationOptions

INVERSE_SQRT_STEPS = 10_000  # time scale of inverse_sqrt without warm-up, as in transformers


def learning_rate_at(step: int, options: OptimizationOptions, *, num_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (0-based) of `num_steps`.

    Warm-up rises linearly and reaches the peak at step `num_warmup_steps`; step 0 already trains, with
    peak / (num_warmup_steps + 1). Schedules that decay towards the end (`SCHEDULES_WITH_END`; wsd in its last
    `num_decay_steps`) reach `min_lr_ratio` * peak one step after the last, so that the last step still trains when the
    ratio is 0. After warm-up, schedules have the shapes of transformers.optimization; inverse_sqrt's time scale is the
    warm-up, or `INVERSE_SQRT_STEPS`.
    """
    scheduler, peak, num_warmup_steps = (
        options.lr_scheduler,
        options.learning_rate,
        count_warmup_steps(options, num_steps=num_steps),
    )
    if step < num_warmup_steps and scheduler != "constant":
        return peak * (step + 1) / (num_warmup_steps + 1)
    if scheduler in ("constant", "constant_with_warmup"):
        return peak
    if scheduler == "inverse_sqrt":
        time_scale = num_warmup_steps or INVERSE_SQRT_STEPS
        return peak / math.sqrt((step - num_warmup_steps + time_scale) / time_scale)
    assert num_steps is not None, f"{scheduler} needs the number of steps"
    if scheduler == "wsd":
        decay_length = options.num_decay_steps or max(1, num_steps // 10)
        decay_start = max(num_warmup_steps, num_steps - decay_length)
    else:
        decay_start = num_warmup_steps
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, num_steps - decay_start)))
    least = options.min_lr_ratio or 0.0
    return peak * (least + (1 - least) * DECAYS[scheduler](progress, options))


def count_warmup_steps(options: OptimizationOptions, *, num_steps: int | None) -> int:
    """Warm-up steps of a run of `num_steps`; a ratio is rounded up, as in transformers."""
    if options.warmup_ratio is None:
        return options.num_warmup_steps
    return math.ceil(options.warmup_ratio * num_steps)


def decay_linearly(progress: float, options: OptimizationOptions) -> float:
    return 1 - progress


def decay_by_power(progress: float, options: OptimizationOptions) -> float:
    return (1 - progress) ** (1.0 if options.lr_power is None else options.lr_power)


def decay_by_cosine(progress: float, options: OptimizationOptions) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def decay_in_cycles(progress: float, options: OptimizationOptions) -> float:
    in_cycle = 1.0 if progress >= 1 else (options.num_cycles * progress) % 1.0
    return decay_by_cosine(in_cycle, options)


# Fraction of the peak, from 1 to 0, as a function of the decay's `progress`, from 0 to 1.
DECAYS: dict[str, Callable[[float, OptimizationOptions], float]] = {
    "linear": decay_linearly,
    "wsd": decay_linearly,
    "polynomial": decay_by_power,
    "cosine": decay_by_cosine,
    "cosine_with_restarts": decay_in_cycles,
}
SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt", *DECAYS)
