"""The optimizer: construction, per-step settings, state sizes and gradient clipping."""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from mini_trainer.distributed.ending import log
from mini_trainer.model.optim.compact_adamw import BLOCK_SIZE, CompactAdamW
from mini_trainer.model.optim.matrices import Layout, find_decayed, find_family, find_matrices
from mini_trainer.model.optim.muon import Muon, count_flops
from mini_trainer.model.optim.rates import BLOCK, Rates, choose_rates, name_of_file
from mini_trainer.options import OptimizationOptions

OPTIMIZERS = {"adamw": False, "adamw8bit": True, "muon": False}  # whether moments are stored in 8 bits


def build_optimizer(
    model: nn.Module, options: OptimizationOptions, *, seed: int = 0
) -> torch.optim.AdamW | CompactAdamW:
    """Builds the optimizer of the trainable parameters, with weight decay by `find_decayed`, unless patterns say else.

    AdamW is torch's, fused, if moments and weights are fp32, else `CompactAdamW`, whose rounding `seed` seeds. Each
    group's "rate" is its learning rate as a multiple of the run's. ValueError if an option does not fit the model.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert all(isinstance(p, DTensor) for p in params.values()), "gathered: the optimizer would train dead copies"
    layouts = find_layouts(model, options)
    decayed, rates = find_decayed(model), choose_rates(model, options, matrices=layouts.keys())
    groups: dict[tuple[bool, Rates], list[DTensor]] = {}
    for name, param in sorted(params.items(), key=lambda item: item[0] not in decayed):  # decayed ones first
        groups.setdefault((name in decayed, rates[name]), []).append(param)
    described = [
        {"params": members, "weight_decay": own.weight_decay, "rate": own.rate} for (_, own), members in groups.items()
    ]
    settings = dict(lr=options.learning_rate, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps)
    if layouts:
        log.info(describe_muon(params, layouts))
        own = {params[name]: layout for name, layout in layouts.items()}
        return Muon(described, own, **settings, momentum=options.muon_momentum, scale=options.muon_scale)
    is_8bit = OPTIMIZERS[options.optimizer]
    if not is_8bit and all(p.dtype == torch.float32 for p in params.values()):
        return torch.optim.AdamW(described, **settings, fused=True)
    return CompactAdamW(described, **settings, is_8bit=is_8bit, seed=seed)


def check_optimizer(config: PreTrainedConfig, options: OptimizationOptions) -> None:
    """ValueError if the optimizer does not know the model's family."""
    if options.optimizer == "muon":
        find_family(config)


def find_layouts(model: nn.Module, options: OptimizationOptions) -> dict[str, Layout]:
    """The matrices that Muon updates, by name; none with another optimizer."""
    if options.optimizer != "muon":
        return {}
    layouts = find_matrices(model)
    if not layouts:
        raise ValueError("--optimizer muon: no matrix between hidden states trains: use adamw")
    return layouts


def describe_muon(params: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout]) -> str:
    """Which weights Muon updates, and which AdamW, by their names without the blocks' numbers."""
    kinds = {name: BLOCK.sub(".*.", name_of_file(name)) for name in params}
    counts = Counter(kinds[name] for name in layouts)
    large = dict.fromkeys(kinds[name] for name, param in params.items() if name not in layouts and param.ndim >= 2)
    num_small = sum(param.ndim < 2 for param in params.values())
    return (
        f"optimizer: Muon for {', '.join(f'{kind} ({count})' for kind, count in counts.items())}; AdamW for"
        f" {', '.join([*large, f'{num_small} norms and biases'])}"
    )


def set_step(optimizer: torch.optim.Optimizer, *, step: int, learning_rate: float) -> None:
    """Sets the learning rate and, for `CompactAdamW`, the number (0-based) of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]
        if isinstance(optimizer, CompactAdamW):
            group["step"] = step


def count_state_bytes(
    params: Iterable[tuple[str, torch.Tensor]], model: nn.Module, options: OptimizationOptions
) -> int:
    """Bytes of optimizer state for these trained parameters of `model`, by their names in it, or for shards of them."""
    matrices, is_8bit, total = find_layouts(model, options).keys(), OPTIMIZERS[options.optimizer], 0
    for name, param in params:
        num_bytes = 4 * param.numel()
        if is_8bit and param.ndim >= 2:
            num_bytes = param.numel() + 4 * param.numel() // BLOCK_SIZE  # codes, and fp32 scales
        total += num_bytes if name in matrices else 2 * num_bytes
    return total


def count_update_flops(model: nn.Module, options: OptimizationOptions) -> int:
    """FLOPs of an update, without elementwise operations."""
    layouts, params = find_layouts(model, options), dict(model.named_parameters())
    return sum(
        params[name].shape[:-2].numel() * sum(map(count_flops, layout.list_shapes(params[name])))
        for name, layout in layouts.items()
    )


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
