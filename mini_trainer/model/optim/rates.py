"""Learning rates: schedules as pure functions of the step, and the rates and weight decay of parts of a model.

A parameter's role, not its number of dimensions, decides whether it gets weight decay.
"""

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from transformers.pytorch_utils import Conv1D

from mini_trainer.options import OptimizationOptions, parse_rate
from mini_trainer.options.doors import DECAYS

# Modules whose "weight" is a matrix or a table of rows; torch's convolutions share a private base class.
MATRICES = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Bilinear, Conv1D, nn.modules.conv._ConvNd)
# Names of parameters that other modules hold: biases, norms, scales and the decay rates of a recurrence. All else that
# they hold are matrices, such as fused experts, and tables.
NEVER = re.compile(r"bias|norm|scale|gamma|lambda|decay|^a_log$|^d$")


def find_decayed(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: weights of linear layers, embeddings and convolutions, and
    other parameters with two dimensions or more, such as fused experts, unless they are biases, norms or scales."""
    return {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key, param in module.named_parameters(recurse=False)
        if is_decayed(module, key, param)
    }


def is_decayed(module: nn.Module, key: str, param: nn.Parameter) -> bool:
    """Whether weight decay applies to the parameter that `module` itself holds as `key`."""
    if param.ndim < 2 or key.endswith("bias"):
        return False
    if isinstance(module, MATRICES):
        return True
    # Every transformers model has its own norm classes, with Norm in the name.
    is_norm = any("norm" in base.__name__.lower() for base in type(module).__mro__)
    return not is_norm and NEVER.search(key.lower()) is None


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
    """Warm-up steps of a run of `num_steps`; a share is rounded up, as in transformers."""
    given = options.num_warmup_steps
    return math.ceil(given * num_steps) if 0 < given < 1 else int(given)


def decay_linearly(progress: float, options: OptimizationOptions) -> float:
    return 1 - progress


def decay_by_power(progress: float, options: OptimizationOptions) -> float:
    return (1 - progress) ** (options.lr_shape or 1.0)


def decay_by_cosine(progress: float, options: OptimizationOptions) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def decay_in_cycles(progress: float, options: OptimizationOptions) -> float:
    in_cycle = 1.0 if progress >= 1 else (options.lr_shape * progress) % 1.0
    return decay_by_cosine(in_cycle, options)


@dataclass(frozen=True)
class Rates:
    """A parameter's multiple of --learning-rate, and its weight decay."""

    rate: float
    weight_decay: float


def choose_rates(model: nn.Module, options: OptimizationOptions) -> dict[str, Rates]:
    """The rates of each trained parameter, by name.

    ValueError if a pattern of --learning-rate-for matches no parameter.
    """
    peak = options.learning_rate
    patterns = {pattern: values for pattern, *values in map(parse_rate, options.learning_rate_for)}
    names = {name: name_of_file(name) for name, param in model.named_parameters() if param.requires_grad}
    decayed, rates, unused = find_decayed(model), {}, dict(patterns)
    for name, own in names.items():
        rate, decay = 1.0, options.weight_decay if name in decayed else 0.0
        found = next((pattern for pattern in patterns if fnmatchcase(own, pattern)), None)
        if found is not None:
            unused.pop(found, None)
            given_rate, given_decay = patterns[found]
            rate = rate if given_rate is None else given_rate / peak
            decay = decay if given_decay is None else given_decay
        rates[name] = Rates(rate, decay)
    if unused:
        raise ValueError(
            f"--learning-rate-for {next(iter(unused))}: no trained parameter has such a name that no pattern before it"
            f" has; they are like {', '.join(list(names.values())[:3])}"
        )
    return rates


def name_of_file(name: str) -> str:
    """A parameter's name in the model's own files, by its name in the model that is trained."""
    return name.removeprefix("model.")
