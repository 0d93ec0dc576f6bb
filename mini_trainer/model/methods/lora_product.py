"""x (W + s B A)^T in four products without other passes over the activations: equal to peft's layers, but faster.

T tokens, r the rank, s alpha / r. W (out, in) is frozen, A (r, in) and B (out, r) train.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from mini_trainer.model.methods.nf4 import NF4Linear


def speed_up(layers: Iterable[nn.Module], *, adapter: str) -> None:
    """Gives peft's layers a faster forward if they are plain linear layers with an adapter.

    Layers of experts, DoRA and dropout keep peft's forward.
    """
    from peft.tuners.lora import Linear

    for layer in layers:
        if type(layer) is Linear and not layer.lora_variant and isinstance(layer.lora_dropout[adapter], nn.Identity):
            layer.forward = functools.partial(multiply, layer, adapter)


def multiply(layer: nn.Module, adapter: str, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
    base = layer.base_layer
    if layer.disable_adapters:
        return base(x)
    weight = base.packed if isinstance(base, NF4Linear) else base.weight
    A, B = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    flat = x.reshape(-1, x.shape[-1])
    out = AdaptedProduct.apply(flat, weight, base.bias, A, B, layer.scaling[adapter], base)
    return out.view(*x.shape[:-1], out.shape[-1])


def read_weight(weight: Tensor, base: nn.Module) -> Tensor:  # (out, in)
    """A frozen layer's weight, from its (possibly packed) parameter."""
    if isinstance(base, NF4Linear):
        return base.read(weight)
    return weight.t() if isinstance(base, Conv1D) else weight


class AdaptedProduct(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T; keeps x and s x A^T for backward, which reads W again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, scaling: float, base: nn.Module
    ) -> Tensor:  # (T, out)
        low = linear(x, A) * scaling  # (T, r)
        update = low @ B.t()
        if bias is not None:
            update += bias
        ctx.save_for_backward(x, low, weight, A, B)
        ctx.scaling, ctx.base = scaling, base
        return torch.addmm(update, x, read_weight(weight, base).t())  # last, and the only addmm: see keep_operations

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, A, B = ctx.saved_tensors
        needs_x, _, _, needs_A, needs_B, *_ = ctx.needs_input_grad
        d_low = (d_out @ B) * ctx.scaling
        d_x = (d_out @ read_weight(weight, ctx.base)).addmm_(d_low, A) if needs_x else None
        d_A = d_low.t() @ x if needs_A else None
        d_B = d_out.t() @ low if needs_B else None
        return d_x, None, None, d_A, d_B, None, None
