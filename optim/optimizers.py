"""The optimizer: construction, per-step settings, state sizes and gradient clipping."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from optim.compact_adamw import BLOCK_SIZE, CompactAdamW
from options import OptimizationOptions

OPTIMIZERS = {"adamw": False, "adamw8bit": True}  # whether moments are stored in 8 bits


def build_optimizer(
    model: nn.Module, options: OptimizationOptions, *, seed: int = 0
) -> torch.optim.AdamW | CompactAdamW:
    """Builds AdamW over the trainable parameters; norms and biases (fewer than 2 dimensions) get no weight decay.

    This is torch's fused AdamW if moments and weights are fp32, else `CompactAdamW`, whose rounding `seed` seeds.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    assert all(isinstance(p, DTensor) for p in params), "gathered parameters: the optimizer would train dead copies"
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    lr, betas, eps = options.learning_rate, (options.adam_beta1, options.adam_beta2), options.adam_eps
    is_8bit = OPTIMIZERS[options.optimizer]
    if not is_8bit and all(p.dtype == torch.float32 for p in params):
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    return CompactAdamW(groups, lr=lr, betas=betas, eps=eps, is_8bit=is_8bit, seed=seed)


def set_step(optimizer: torch.optim.Optimizer, *, step: int, learning_rate: float) -> None:
    """Sets the learning rate and, for `CompactAdamW`, the number (0-based) of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        if isinstance(optimizer, CompactAdamW):
            group["step"] = step


def moment_bytes(param: torch.Tensor, optimizer: str) -> int:
    """Bytes of optimizer state for a parameter or a shard of it."""
    if OPTIMIZERS[optimizer] and param.ndim >= 2:
        return 2 * (param.numel() + 4 * param.numel() // BLOCK_SIZE)  # codes, and fp32 scales
    return 2 * 4 * param.numel()


def state_keys(optimizer: torch.optim.Optimizer, param: DTensor) -> set[str]:
    """Names of the optimizer's state tensors for a parameter."""
    return optimizer.state_keys(param) if isinstance(optimizer, CompactAdamW) else {"step", "exp_avg", "exp_avg_sq"}


@torch.no_grad()  # with gradients, to_local would record a view of each
def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of all gradients."""
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def clip_gradients(gradients: list[torch.Tensor], *, grad_norm: float, max_grad_norm: float | None) -> None:
    """Scales the gradients in place so that their global norm, now `grad_norm`, is at most `max_grad_norm`."""
    if max_grad_norm is not None and grad_norm > max_grad_norm:
        torch._foreach_mul_(gradients, max_grad_norm / grad_norm)
