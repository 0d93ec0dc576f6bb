"""The optimizer: construction, per-step settings, state sizes and gradient clipping; learning rates, weight
decay, and the reduction of gradients over ranks by one collective and one host sync.

Schedules are pure functions of the step. A parameter's role, not its number of dimensions, decides its weight decay.
"""

import functools
import math
import operator
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from mini_trainer.distributed.devices import peak_memory
from mini_trainer.objectives.objective import LossSums
from mini_trainer.options import OptimizationOptions, parse_rate
from mini_trainer.options.doors import DECAYS, OPTIMIZERS

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
    if param.ndim < 2:
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
    `lr_shape` steps) reach `min_lr_ratio` * peak one step after the last, so that the last step still trains when the
    ratio is 0. After warm-up, schedules have the shapes of transformers.optimization; inverse_sqrt's time scale is the
    warm-up, or `INVERSE_SQRT_STEPS`.
    """
    scheduler, peak, given = options.lr_scheduler, options.peak_rate, options.num_warmup_steps
    # A share is rounded up, as in transformers.
    num_warmup_steps = math.ceil(given * num_steps) if 0 < given < 1 else int(given)
    if step < num_warmup_steps and scheduler != "constant":
        return peak * (step + 1) / (num_warmup_steps + 1)
    if scheduler in ("constant", "constant_with_warmup"):
        return peak
    if scheduler == "inverse_sqrt":
        time_scale = num_warmup_steps or INVERSE_SQRT_STEPS
        return peak / math.sqrt((step - num_warmup_steps + time_scale) / time_scale)
    assert num_steps is not None, f"{scheduler} needs the number of steps"
    if scheduler == "wsd":
        decay_length = int(options.lr_shape or max(1, num_steps // 10))
        decay_start = max(num_warmup_steps, num_steps - decay_length)
    else:
        decay_start = num_warmup_steps
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, num_steps - decay_start)))
    least = options.min_lr_ratio or 0.0
    return peak * (least + (1 - least) * DECAYS[scheduler](progress, options))


def decay_linearly(progress: float, options: OptimizationOptions) -> float:
    return 1 - progress


def decay_by_power(progress: float, options: OptimizationOptions) -> float:
    return (1 - progress) ** (options.lr_shape or 1.0)


def decay_by_cosine(progress: float, options: OptimizationOptions) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def decay_in_cycles(progress: float, options: OptimizationOptions) -> float:
    in_cycle = 1.0 if progress >= 1 else ((options.lr_shape or 1.0) * progress) % 1.0
    return decay_by_cosine(in_cycle, options)


@dataclass(frozen=True)
class Rates:
    """A parameter's multiple of --learning-rate, and its weight decay."""

    rate: float
    weight_decay: float


def choose_rates(model: nn.Module, options: OptimizationOptions) -> dict[str, Rates]:
    """The rates of each trained parameter, by name.
    ValueError if a pattern of --learning-rate-for matches no parameter."""
    peak = options.peak_rate
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


class AdamW:
    """The base class of optimizers: how one is built, and its cost. The defaults are those of AdamW in fp32.
    It is torch's, fused, if the weights are fp32, else `CompactAdamW`."""

    is_8bit = False  # whether moments are stored in 8 bits

    def check(self, config: PreTrainedConfig) -> None:
        """ValueError if the optimizer does not know the model's family."""

    def find_matrices(self, model: nn.Module) -> Collection[str]:
        """Names of the trained weights that it does not update like AdamW; their rate is --learning-rate."""
        return ()

    def build(self, model: nn.Module, groups: list[dict], options: OptimizationOptions, *, seed: int) -> Optimizer:
        """The optimizer of these parameter groups. `seed`: of rounding."""
        settings = choose_settings(options)
        is_fp32 = all(param.dtype == torch.float32 for group in groups for param in group["params"])
        if is_fp32 and not self.is_8bit:
            return ShardedAdamW(groups, **settings, fused=True)
        from mini_trainer.model.optim.compact_adamw import CompactAdamW

        return CompactAdamW(groups, **settings, is_8bit=self.is_8bit, seed=seed)

    def count_bytes(self, param: Tensor, *, is_matrix: bool) -> int:
        """Bytes of the state of a parameter, or of its shard; `is_matrix`: one of `find_matrices`."""
        return 8 * param.numel()

    def count_flops(self, model: nn.Module) -> int:
        """FLOPs of an update, without elementwise operations."""
        return 0


class ShardedAdamW(torch.optim.AdamW):
    """torch's AdamW, whose kernels get this rank's shards: over DTensors the host takes several times as long."""

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Fills the lists of parameters, gradients and states that an update is given."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # to_local takes longer than the rest of the update
            tensors[:] = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return has_complex


class AdamW8bit(AdamW):
    """AdamW with moments in 8 bits."""

    is_8bit = True

    def count_bytes(self, param: Tensor, *, is_matrix: bool) -> int:
        from mini_trainer.model.optim.compact_adamw import find_block_size

        block_size = find_block_size(param)
        if block_size is None:
            return super().count_bytes(param, is_matrix=is_matrix)
        return 2 * (param.numel() + 4 * param.numel() // block_size)  # codes, and fp32 scales


def choose_settings(options: OptimizationOptions) -> dict[str, Any]:
    """AdamW's arguments."""
    return dict(lr=options.peak_rate, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps)


def open_optimizer(options: OptimizationOptions) -> AdamW:
    """The optimizer that the options name, before there is a model."""
    return OPTIMIZERS[options.optimizer]()


def build_optimizer(model: nn.Module, options: OptimizationOptions, *, seed: int = 0) -> Optimizer:
    """Builds the optimizer of the trainable parameters, with weight decay by `find_decayed`, unless patterns say else.
    Each group's "rate" is its learning rate as a multiple of the run's. `seed`: of rounding. ValueError if an option
    does not fit the model."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert all(isinstance(p, DTensor) for p in params.values()), "gathered: the optimizer would train dead copies"
    decayed, rates = find_decayed(model), choose_rates(model, options)
    groups: dict[tuple[bool, Rates], list[DTensor]] = {}
    for name, param in sorted(params.items(), key=lambda item: item[0] not in decayed):  # decayed ones first
        groups.setdefault((name in decayed, rates[name]), []).append(param)
    described = [
        {"params": members, "weight_decay": own.weight_decay, "rate": own.rate} for (_, own), members in groups.items()
    ]
    return open_optimizer(options).build(model, described, options, seed=seed)


def set_step(optimizer: Optimizer, *, step: int, learning_rate: float) -> None:
    """Sets the learning rate and, for our own optimizers, the number (0-based) of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]
        if "step" in group:
            group["step"] = step


def count_state_bytes(params: Iterable[tuple[str, Tensor]], model: nn.Module, options: OptimizationOptions) -> int:
    """Bytes of optimizer state for these trained parameters of `model`, by their names in it, or for shards of them."""
    chosen = open_optimizer(options)
    matrices = chosen.find_matrices(model)
    return sum(chosen.count_bytes(param, is_matrix=name in matrices) for name, param in params)


def state_keys(optimizer: Optimizer, param: DTensor) -> set[str]:
    """Names of the optimizer's state tensors for a parameter."""
    own = getattr(optimizer, "state_keys", None)
    return {"step", "exp_avg", "exp_avg_sq"} if own is None else own(param)


@torch.no_grad()  # with gradients, to_local would record a view of each
def local_gradients(model: nn.Module) -> list[Tensor]:
    """This rank's shards of all gradients."""
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def clip_gradients(gradients: list[Tensor], *, grad_norm: float, max_grad_norm: float | None) -> None:
    """Scales the gradients in place so that their global norm, now `grad_norm`, is at most `max_grad_norm`."""
    if max_grad_norm is not None and grad_norm > max_grad_norm:
        torch._foreach_mul_(gradients, max_grad_norm / grad_norm)


@dataclass(frozen=True)
class StepSums:
    """A step's results over all ranks, after one all-gather."""

    loss_sum: float
    grad_norm: float
    peak_memory_bytes: float
    data_wait_seconds: float
    bad_micro_batches: list[tuple[int, int]]  # (k, rank) of each micro-batch whose loss is not finite
    flags: int  # distributed.ending.Flag, OR-ed over ranks
    reports: dict[str, np.ndarray]  # `LossSums.reports`, summed over micro-batches and ranks; fp64

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)


def reduce_step(
    sums: list[LossSums],
    gradients: list[Tensor],
    *,
    device: torch.device,
    num_shards: int,
    data_wait_seconds: float,
    flags: int = 0,
) -> StepSums:
    """Combines all ranks' `sums`, gradient norms, memory, waiting times and flags: one collective, one sync. `sums`: of
    a rank's micro-batches, as many on each. The first `num_shards` ranks hold the whole gradient, others copies."""
    names = dict.fromkeys(name for each in sums for name in each.reports)  # the same, in the same order, on every rank
    totals = {name: sum(each.reports[name].double() for each in sums if name in each.reports) for name in names}
    by_device: dict[torch.device, list[Tensor]] = {}  # with --cpu-offload most are on the CPU
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    squares = [  # in float64: fp32 sums lose 1e-5 on CPU
        torch.stack(torch._foreach_norm(part, dtype=torch.float64)).square().sum() for part in by_device.values()
    ]
    own = [
        functools.reduce(operator.add, [each.to(device, non_blocking=True) for each in squares]),
        torch.full((), peak_memory(device), dtype=torch.float64, device=device),  # filled on the device: no sync
        torch.full((), data_wait_seconds, dtype=torch.float64, device=device),
        torch.full((), flags, dtype=torch.float64, device=device),
    ]
    losses = torch.stack([each.loss for each in sums])
    row = torch.cat([torch.stack(own), losses.double(), *(total.flatten() for total in totals.values())])
    rows = row.new_empty(dist.get_world_size(), len(row))
    dist.all_gather(list(rows.unbind()), row)
    rows = rows.cpu()
    sizes = [len(sums), *(total.numel() for total in totals.values())]
    losses_by_rank, *reports_by_rank = rows[:, len(own) :].split(sizes, dim=1)
    return StepSums(
        loss_sum=losses_by_rank.sum().item(),
        grad_norm=rows[:num_shards, 0].sum().sqrt().item(),
        peak_memory_bytes=rows[:, 1].max().item(),
        data_wait_seconds=rows[:, 2].max().item(),
        flags=functools.reduce(operator.or_, map(int, rows[:, 3].tolist())),
        reports={
            name: by_rank.sum(0).reshape(total.shape).numpy()
            for (name, total), by_rank in zip(totals.items(), reports_by_rank, strict=True)
        },
        bad_micro_batches=[(k, rank) for rank, k in (~losses_by_rank.isfinite()).nonzero().tolist()],
    )
