"""The optimizer: construction, per-step settings, state sizes and gradient clipping."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedConfig

from mini_trainer.model.optim.rates import Rates, choose_rates, find_decayed
from mini_trainer.options import OptimizationOptions
from mini_trainer.options.doors import OPTIMIZERS


class AdamW:
    """The base class of optimizers: how one is built, and its cost. The defaults are those of AdamW in fp32.

    It is torch's, fused, if the weights are fp32, else `CompactAdamW`.
    """

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
            return torch.optim.AdamW(groups, **settings, fused=True)
        from mini_trainer.model.optim.compact_adamw import CompactAdamW

        return CompactAdamW(groups, **settings, is_8bit=self.is_8bit, seed=seed)

    def count_bytes(self, param: torch.Tensor, *, is_matrix: bool) -> int:
        """Bytes of the state of a parameter, or of its shard; `is_matrix`: one of `find_matrices`."""
        return 8 * param.numel()

    def count_flops(self, model: nn.Module) -> int:
        """FLOPs of an update, without elementwise operations."""
        return 0


class AdamW8bit(AdamW):
    """AdamW with moments in 8 bits."""

    is_8bit = True

    def count_bytes(self, param: torch.Tensor, *, is_matrix: bool) -> int:
        from mini_trainer.model.optim.compact_adamw import BLOCK_SIZE

        if param.ndim < 2:
            return super().count_bytes(param, is_matrix=is_matrix)
        return 2 * (param.numel() + 4 * param.numel() // BLOCK_SIZE)  # codes, and fp32 scales


def choose_settings(options: OptimizationOptions) -> dict[str, Any]:
    """AdamW's arguments."""
    return dict(lr=options.learning_rate, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps)


def open_optimizer(options: OptimizationOptions) -> AdamW:
    """The optimizer that the options name, before there is a model."""
    return OPTIMIZERS[options.optimizer]()


def build_optimizer(model: nn.Module, options: OptimizationOptions, *, seed: int = 0) -> Optimizer:
    """Builds the optimizer of the trainable parameters, with weight decay by `find_decayed`, unless patterns say else.

    Each group's "rate" is its learning rate as a multiple of the run's. `seed`: of rounding. ValueError if an option
    does not fit the model.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert all(isinstance(p, DTensor) for p in params.values()), "gathered: the optimizer would train dead copies"
    chosen = open_optimizer(options)
    decayed, rates = find_decayed(model), choose_rates(model, options)
    groups: dict[tuple[bool, Rates], list[DTensor]] = {}
    for name, param in sorted(params.items(), key=lambda item: item[0] not in decayed):  # decayed ones first
        groups.setdefault((name in decayed, rates[name]), []).append(param)
    described = [
        {"params": members, "weight_decay": own.weight_decay, "rate": own.rate} for (_, own), members in groups.items()
    ]
    return chosen.build(model, described, options, seed=seed)


def set_step(optimizer: Optimizer, *, step: int, learning_rate: float) -> None:
    """Sets the learning rate and, for our own optimizers, the number (0-based) of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]
        if "step" in group:
            group["step"] = step


def count_state_bytes(
    params: Iterable[tuple[str, torch.Tensor]], model: nn.Module, options: OptimizationOptions
) -> int:
    """Bytes of optimizer state for these trained parameters of `model`, by their names in it, or for shards of them."""
    chosen = open_optimizer(options)
    matrices = chosen.find_matrices(model)
    return sum(chosen.count_bytes(param, is_matrix=name in matrices) for name, param in params)


def state_keys(optimizer: Optimizer, param: DTensor) -> set[str]:
    """Names of the optimizer's state tensors for a parameter."""
    own = getattr(optimizer, "state_keys", None)
    return {"step", "exp_avg", "exp_avg_sq"} if own is None else own(param)


@torch.no_grad()  # with gradients, to_local would record a view of each
def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of all gradients."""
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def clip_gradients(gradients: list[torch.Tensor], *, grad_norm: float, max_grad_norm: float | None) -> None:
    """Scales the gradients in place so that their global norm, now `grad_norm`, is at most `max_grad_norm`."""
    if max_grad_norm is not None and grad_norm > max_grad_norm:
        torch._foreach_mul_(gradients, max_grad_norm / grad_norm)
