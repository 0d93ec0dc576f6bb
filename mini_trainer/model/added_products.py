"""Linear layers of one rank whose gradients are added by the product that gives them."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from mini_trainer.distributed.devices import memory_kind
from mini_trainer.model.whole_weights import as_master, is_shared
from mini_trainer.objectives.next_tokens import add_product


def add_products(places: Iterable[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]) -> None:
    """Lets the linear layers add to the gradients of their masters. `places`: of `PlacedWeights`."""
    for module, name, master, weight in places:
        if type(module) is nn.Linear and name == "weight" and master.requires_grad:
            module.forward = functools.partial(multiply, module, functools.partial(add_to_gradient, master, weight))


def multiply(layer: nn.Linear, add: Callable[[Tensor, Tensor], None], x: Tensor) -> Tensor:  # (..., in) -> (..., out)
    if not torch.is_grad_enabled():
        return linear(x, layer.weight, layer.bias)
    return AddedProduct.apply(x, layer.weight, layer.bias, add)


class AddedProduct(torch.autograd.Function):
    """x W^T + b. The product that gives the gradient of W adds it to what earlier micro-batches gave, in the type of
    that: no gradient is rounded, written and read again before it is added."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, add: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.add = add
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        d_flat = d_out.reshape(-1, d_out.shape[-1])  # (T, out)
        ctx.add(d_flat.t(), x.reshape(-1, x.shape[-1]))
        return d_out @ weight if needs_x else None, None, d_flat.sum(0) if needs_bias else None, None


@torch.no_grad()
def add_to_gradient(master: nn.Parameter, weight: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to the gradient of a master, or of the weight that shares its memory, where it now is."""
    holder = weight if is_shared(master, weight) else master
    is_first = holder.grad is None
    if is_first:
        with memory_kind("gradients"):
            total = torch.empty_like(weight, dtype=master.dtype)
        holder.grad = total if holder is weight else as_master(total, master)
    total = holder.grad.to_local() if isinstance(holder.grad, DTensor) else holder.grad
    add_product(total, left, right, is_first=is_first)
