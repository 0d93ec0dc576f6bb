"""Learning rates as pure functions of the step."""

import math

from options import OptimizationOptions


def learning_rate_at(step: int, options: OptimizationOptions, *, num_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (0-based) of `num_steps`.

    Warm-up rises linearly and reaches the peak at step `num_warmup_steps`; step 0 already trains, with
    peak / (num_warmup_steps + 1). Decays (linear, cosine, and wsd's last `num_decay_steps`) reach
    `min_lr_ratio` * peak one step after the last, so that the last step still trains when the ratio is 0.
    """
    scheduler, peak, num_warmup_steps = options.lr_scheduler, options.learning_rate, options.num_warmup_steps
    if step < num_warmup_steps and scheduler != "constant":
        return peak * (step + 1) / (num_warmup_steps + 1)
    if scheduler in ("constant", "constant_with_warmup"):
        return peak
    assert num_steps is not None, f"{scheduler} needs the number of steps"
    if scheduler == "wsd":
        decay_length = options.num_decay_steps or max(1, num_steps // 10)
        decay_start = max(num_warmup_steps, num_steps - decay_length)
    else:
        decay_start = num_warmup_steps
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, num_steps - decay_start)))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if scheduler == "cosine" else 1 - progress
    least = options.min_lr_ratio or 0.0
    return peak * (least + (1 - least) * remaining)
