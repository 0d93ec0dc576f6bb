"""The optimizer, and learning rates as pure functions of the step."""

import math
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from optim.compact_adamw import BLOCK_SIZE, CompactAdamW

Scheduler = Literal["constant_with_warmup", "constant", "linear", "cosine", "wsd"]


def learning_rate_at(
    step: int,
    *,
    scheduler: Scheduler,
    peak: float,
    num_warmup_steps: int,
    num_steps: int | None,
    num_decay_steps: int | None = None,
    min_lr_ratio: float = 0.0,
) -> float:
    """Learning rate of optimizer step `step` (0-based) of `num_steps`.

    Warm-up rises linearly and reaches `peak` at step `num_warmup_steps`; step 0 already trains, with
    peak / (num_warmup_steps + 1). Decays (linear, cosine, and wsd's last `num_decay_steps`) reach
    `min_lr_ratio * peak` one step after the last, so that the last step still trains when the ratio is 0.
    """
    if step < num_warmup_steps and scheduler != "constant":
        return peak * (step + 1) / (num_warmup_steps + 1)
    if scheduler in ("constant", "constant_with_warmup"):
        return peak
    assert num_steps is not None, f"{scheduler} needs the number of steps"
    if scheduler == "wsd":
        decay_length = num_decay_steps or max(1, num_steps // 10)
        decay_start = max(num_warmup_steps, num_steps - decay_length)
    else:
        decay_start = num_warmup_steps
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, num_steps - decay_start)))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if scheduler == "cosine" else 1 - progress
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * remaining)


def build_optimizer(
    model: nn.Module,
    *,
    optimizer: Literal["adamw", "adamw8bit"] = "adamw",
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    seed: int = 0,
) -> torch.optim.AdamW | CompactAdamW:
    """AdamW over the trainable parameters; norms and biases (fewer than 2 dimensions) are not decayed.

    torch's fused one where moments and weights are fp32, else `CompactAdamW`, for which `seed` rounds.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    assert all(isinstance(p, DTensor) for p in params), "gathered parameters: the optimizer would train dead copies"
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    if optimizer == "adamw" and all(p.dtype == torch.float32 for p in params):
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)
    return CompactAdamW(groups, lr=learning_rate, betas=betas, eps=eps, is_8bit=optimizer == "adamw8bit", seed=seed)


def set_step(optimizer: torch.optim.Optimizer, *, step: int, learning_rate: float) -> None:
    """What the optimizer has to know of the step (0-based) that it takes next."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        if isinstance(optimizer, CompactAdamW):
            group["step"] = step


def moment_bytes(param: torch.Tensor, optimizer: str) -> int:
    """Bytes of what `build_optimizer`'s optimizer will keep of a parameter, or of a shard of it."""
    if optimizer == "adamw8bit" and param.ndim >= 2:
        return 2 * (param.numel() + 4 * param.numel() // BLOCK_SIZE)  # codes, and fp32 scales
    return 2 * 4 * param.numel()


def state_keys(optimizer: torch.optim.Optimizer, param: DTensor) -> set[str]:
    """The names of what the optimizer keeps of a parameter."""
    return optimizer.state_keys(param) if isinstance(optimizer, CompactAdamW) else {"step", "exp_avg", "exp_avg_sq"}


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of all gradients."""
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def clip_gradients(gradients: list[torch.Tensor], *, grad_norm: float, max_grad_norm: float | None) -> None:
    """Scales the gradients in place so that their global norm `grad_norm` becomes at most `max_grad_norm`."""
    if max_grad_norm is not None and grad_norm > max_grad_norm:
        torch._foreach_mul_(gradients, max_grad_norm / grad_norm)
