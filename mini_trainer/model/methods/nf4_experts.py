"""Fused experts in NF4: one tensor (experts, rows, columns), each expert quantized by itself.

transformers' own grouped forward pass runs unchanged: in the place of the parameter it finds a module that torch calls
for the product (`__torch_function__`), as it does for tensor subclasses.
S pairs of a token and an expert, sorted by expert; r the rank.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from mini_trainer.model.methods.nf4 import NF4Weight

IMPLEMENTATION = "grouped_mm"  # transformers' implementation of experts that multiplies whole parameters
ALIGNMENT = 8  # grouped products need rows of a multiple of 16 bytes


class Factors(NamedTuple):
    """A low-rank update of each expert's weight."""

    A: Tensor  # (experts, r, in)
    B: Tensor  # (experts, r, out)
    scaling: float


class NF4Experts(NF4Weight):
    """The weights of all experts of a layer, unpacked for each product."""

    def __init__(self, param: Tensor, *, compute_dtype: torch.dtype):
        super().__init__(tuple(param.shape), compute_dtype=compute_dtype, device=param.device)
        self.factors: Factors | None = None  # of an adapter, during its forward pass

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def transpose(self, first: int, second: int) -> "Transposed":
        assert {first, second} == {-2, -1}, f"({first}, {second}) of the experts' weights cannot be exchanged"
        return Transposed(self)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        x, layer = args
        return multiply(x, layer, choose_product(function), is_transposed=False, offs=kwargs["offs"])


class Transposed:
    """The weights of all experts with rows and columns exchanged."""

    def __init__(self, layer: NF4Experts):
        self.layer, self.dtype, self.device = layer, layer.dtype, layer.device

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        x, transposed = args
        return multiply(x, transposed.layer, choose_product(function), is_transposed=True, offs=kwargs["offs"])


def choose_product(function: Callable) -> Callable:
    """The grouped product that torch was asked for; TypeError for any other operation."""
    if function in (grouped_mm, torch._grouped_mm):
        return grouped_mm
    if function is torch.ops.transformers.grouped_mm_fallback:
        return function
    raise TypeError(f"{function} of experts in NF4 is not implemented")


def multiply(x: Tensor, layer: NF4Experts, product: Callable, *, is_transposed: bool, offs: Tensor) -> Tensor:
    """x W (S, out), or x W^T, plus the update by the layer's adapter; W (experts, in, out), or (experts, out, in)."""
    out = PackedGroupedProduct.apply(x, layer.packed, offs, layer, product, is_transposed)
    if layer.factors is None:
        return out
    A, B, scaling = layer.factors
    low = product(x, A.transpose(1, 2), offs=offs)  # (S, r)
    return out + product(low, B, offs=offs) * scaling


class PackedGroupedProduct(torch.autograd.Function):
    """Each expert's x W or x W^T, where backward unpacks W again instead of keeping it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, offs: Tensor, layer: NF4Experts, product: Callable, is_transposed: bool
    ) -> Tensor:  # (S, out)
        ctx.save_for_backward(packed, offs)
        ctx.layer, ctx.product, ctx.is_transposed = layer, product, is_transposed
        weight = layer.read(packed)
        return product(x, weight.transpose(1, 2) if is_transposed else weight, offs=offs)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        packed, offs = ctx.saved_tensors
        weight = ctx.layer.read(packed)
        d_x = ctx.product(d_out, weight if ctx.is_transposed else weight.transpose(1, 2), offs=offs)
        return d_x, None, None, None, None, None


def pack_experts(blocks: nn.ModuleList, *, compute_dtype: torch.dtype) -> bool:
    """Replaces the frozen weights of fused experts by `NF4Experts`, where transformers multiplies them in groups.

    Returns whether there are any.
    """
    found = [
        (module, name, param)
        for module in blocks.modules()
        for name, param in module.named_parameters(recurse=False)
        if is_grouped(module) and param.ndim == 3 and not param.requires_grad
    ]
    for module, name, param in found:
        delattr(module, name)
        setattr(module, name, NF4Experts(param, compute_dtype=compute_dtype))
    return bool(found)


def is_grouped(module: nn.Module) -> bool:
    """Whether a module is one of transformers' fused experts whose products are grouped."""
    config = getattr(module, "config", None)
    is_experts = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
    return is_experts and getattr(config, "_experts_implementation", None) == IMPLEMENTATION


def adapt_experts(layers: Iterable[nn.Module], *, adapter: str) -> None:
    """Gives peft's layers of experts in NF4 a forward pass that never builds W + s B A."""
    from peft.tuners.lora import ParamWrapper

    for layer in layers:
        if isinstance(layer, ParamWrapper) and isinstance(layer.get_param(), NF4Experts):
            layer.forward = functools.partial(run_adapted, layer, layer.get_param(), adapter)


def run_adapted(layer: nn.Module, experts: NF4Experts, adapter: str, x: Tensor, *args: Tensor) -> Tensor:
    """The experts with the adapter of one of their weights; nested layers of peft have one each."""
    if layer.disable_adapters:
        return layer.base_layer(x, *args)
    num_experts, rank = layer.num_experts, layer.r[adapter]
    A = layer.lora_A[adapter].weight.view(num_experts, rank, -1)
    B = layer.lora_B[adapter].weight.view(-1, rank, num_experts).permute(2, 1, 0)
    experts.factors = Factors(pad_rank(A), pad_rank(B).contiguous(), layer.scaling[adapter])
    try:
        return layer.base_layer(x, *args)
    finally:
        experts.factors = None


def pad_rank(factor: Tensor) -> Tensor:  # (experts, r, size)
    """Adds rows of zeros up to a multiple of `ALIGNMENT`."""
    missing = -factor.shape[1] % ALIGNMENT
    return nn.functional.pad(factor, (0, 0, 0, missing)) if missing else factor
