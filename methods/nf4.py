"""4-bit weights (NF4 of QLoRA, Dettmers et al. 2023, arXiv 2305.14314) that stay packed when sharded and gathered.

The numbers are bitsandbytes' own, in blocks of 64 with doubly quantized scales. All bytes of a weight are in one flat
parameter of the compute dtype: FSDP returns a gathered parameter as a plain tensor, so the attributes of bitsandbytes'
subclass would be lost, and casts any other dtype, which would destroy packed bytes.
T tokens.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from model.weights import Reader
from ranks.world import World, broadcast_from_rank0

BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a second-level scale
NUM_CODES = 256  # values of an 8-bit scale


def check_bitsandbytes() -> None:
    """ValueError if the package is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "--base-quantization nf4 needs the package bitsandbytes, which is not installed:"
            " pip install bitsandbytes peft"
        )


class NF4Linear(nn.Module):
    """A frozen linear layer whose weight is stored in NF4 and unpacked for each product.

    `packed` holds, as bytes: in fp32, one scale per 256 scales, the 256 values of these, and their mean; a byte per
    scale; half a byte per weight.
    """

    def __init__(self, module: nn.Linear | Conv1D, *, compute_dtype: torch.dtype):
        super().__init__()
        shape = tuple(module.weight.shape)
        self.is_conv1d = isinstance(module, Conv1D)
        self.out_features, self.in_features = reversed(shape) if self.is_conv1d else shape
        num_scales = -(-self.weight_numel // BLOCK)
        num_floats = -(-num_scales // SCALE_BLOCK) + NUM_CODES + 1
        self.sizes = (4 * num_floats, num_scales, -(-self.weight_numel // 2))
        num_bytes = -(-sum(self.sizes) // 4) * 4
        self.packed = nn.Parameter(
            torch.empty(num_bytes // compute_dtype.itemsize, dtype=compute_dtype, device=module.weight.device), False
        )
        self.bias = module.bias
        self.replacement: Callable[[], Tensor] | None = None  # temporary replacement of the weight

    @property
    def weight_numel(self) -> int:
        """Number of elements of the packed weight."""
        return self.in_features * self.out_features

    def read(self, packed: Tensor) -> Tensor:  # (out, in)
        """Unpacks the weight from the gathered `packed`."""
        if self.replacement is not None:
            return self.replacement()
        return unpack(packed, self.sizes, (self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return PackedProduct.apply(x, self.packed, self.bias, self)


def pack_layers(blocks: nn.ModuleList, *, compute_dtype: torch.dtype) -> None:
    """Replaces every frozen linear layer of the blocks with an `NF4Linear`."""
    for block in blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, (nn.Linear, Conv1D)) and not module.weight.requires_grad:
                block.set_submodule(name, NF4Linear(module, compute_dtype=compute_dtype))


class PackedProduct(torch.autograd.Function):
    """x W^T + b, where backward unpacks W again instead of keeping it; b is also frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, layer: NF4Linear) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.layer = layer
        return linear(x, layer.read(packed), bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        return d_out @ ctx.layer.read(packed), None, None, None


def pack(weight: Tensor) -> Tensor:
    """Packs a weight (out, in), fp32 or bf16, into the flat `NF4Linear.packed` of the same dtype."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    nested = state.state2
    parts = (nested.absmax, nested.code, state.offset.reshape(1), state.absmax, codes.flatten())
    flat = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    padded = torch.zeros(-(-len(flat) // 4) * 4, dtype=torch.uint8, device=weight.device)
    padded[: len(flat)] = flat
    return padded.view(weight.dtype)


def unpack(packed: Tensor, sizes: tuple[int, int, int], shape: tuple[int, int]) -> Tensor:
    """Unpacks a weight of `shape` (out, in), in the dtype of `packed`."""
    import bitsandbytes  # noqa: F401  (registers torch.ops.bitsandbytes)

    floats, scales, codes, _ = packed.view(torch.uint8).split([*sizes, packed.nbytes - sum(sizes)])
    floats = floats.view(torch.float32)
    absmax, values, mean = floats.split([len(floats) - NUM_CODES - 1, NUM_CODES, 1])
    ops = torch.ops.bitsandbytes
    scales = ops.dequantize_blockwise(scales, absmax, values, SCALE_BLOCK, torch.float32) + mean
    return ops.dequantize_4bit(codes[:, None], scales, BLOCK, "nf4", shape, packed.dtype)


def fill_packed(layer: NF4Linear, name: str, readers: dict[str, Reader], *, world: World) -> None:
    """Fills a meta layer with rank 0's weight, packed before broadcasting: only one weight is ever unpacked."""
    packed = None
    if world.rank == 0:
        weight = readers.pop(f"{name}.weight")().to(world.device, layer.packed.dtype)
        packed = pack(weight.T if layer.is_conv1d else weight).view(torch.uint8)
    received = broadcast_from_rank0(packed, (layer.packed.nbytes,), dtype=torch.uint8, device=world.device)
    layer.packed = nn.Parameter(received.view(layer.packed.dtype), requires_grad=False)


@contextmanager
def whole_weights(model: nn.Module, read: Callable[[str], Tensor] | None, *, world: World) -> Iterator[None]:
    """Makes each layer use the weight that rank 0 reads by its name, broadcast when needed, inside this block."""

    def receive(layer: NF4Linear, name: str) -> Tensor:
        weight = None
        if world.rank == 0:
            weight = read(f"{name}.weight")
            weight = weight.T if layer.is_conv1d else weight
        shape, dtype = (layer.out_features, layer.in_features), layer.packed.dtype
        return broadcast_from_rank0(weight, shape, dtype=dtype, device=world.device)

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, NF4Linear)}
    for name, layer in layers.items():
        layer.replacement = functools.partial(receive, layer, name)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.replacement = None
