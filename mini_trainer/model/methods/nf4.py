"""4-bit weights (NF4 of QLoRA, Dettmers et al. 2023, arXiv 2305.14314) that stay packed when sharded and gathered.

The numbers are bitsandbytes' own, in blocks of 64 with doubly quantized scales. All bytes of a weight are in one flat
parameter of the compute dtype: FSDP returns a gathered parameter as a plain tensor, so the attributes of bitsandbytes'
subclass would be lost, and casts any other dtype, which would destroy packed bytes. Fused experts are one tensor
(experts, rows, columns), each expert quantized by itself: in the place of the parameter transformers' grouped forward
pass finds a module that torch calls for the product (`__torch_function__`), as it does for tensor subclasses.
T tokens, S pairs of a token and an expert, sorted by expert; r the rank.
"""

import functools
import math
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear
from transformers.pytorch_utils import Conv1D

from mini_trainer.distributed.world import World, broadcast_from_rank0
from mini_trainer.model.blocks import is_linear
from mini_trainer.model.weights import Readers

BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a second-level scale
NUM_CODES = 256  # values of an 8-bit scale
MAX_NUMEL = 2**31 - 1  # of a tensor that bitsandbytes' kernels take


class NF4Weight(nn.Module):
    """A frozen weight stored in NF4: a matrix, or one per expert, each quantized by itself. `packed` holds, as bytes:
    in fp32, one scale per 256 scales, the 256 values of these, and their mean in each matrix; a byte per scale; half a
    byte per weight."""

    suffix = ""  # of the parameter's name in the base model, after the module's

    def __init__(self, shape: tuple[int, ...], *, compute_dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.packed_shape = shape  # (rows, columns) or (experts, rows, columns)
        num_bytes = -(-sum(measure_parts(shape)) // 4) * 4
        packed = torch.empty(num_bytes // compute_dtype.itemsize, dtype=compute_dtype, device=device)
        self.packed = nn.Parameter(packed, requires_grad=False)

    def read(self, packed: Tensor) -> Tensor:  # of `packed_shape`
        """Unpacks the weight from the gathered `packed`."""
        return unpack(packed, self.packed_shape)

    def orient(self, weight: Tensor) -> Tensor:
        """The base model's weight as it is packed."""
        return weight


class NF4Linear(NF4Weight):
    """A frozen linear layer whose weight is stored in NF4 and unpacked for each product."""

    suffix = ".weight"

    def __init__(self, module: nn.Linear | Conv1D, *, compute_dtype: torch.dtype):
        is_conv1d = isinstance(module, Conv1D)
        shape = tuple(reversed(module.weight.shape) if is_conv1d else module.weight.shape)
        super().__init__(shape, compute_dtype=compute_dtype, device=module.weight.device)
        self.is_conv1d = is_conv1d
        self.out_features, self.in_features = shape
        self.bias = module.bias

    def orient(self, weight: Tensor) -> Tensor:
        return weight.T if self.is_conv1d else weight

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return PackedProduct.apply(x, self.packed, self.bias, self)


def pack_layers(blocks: nn.ModuleList, *, compute_dtype: torch.dtype, kept: Container[nn.Parameter]) -> None:
    """Replaces every frozen linear layer of the blocks with an `NF4Linear`, except those in `kept`."""
    for block in blocks:
        for name, module in list(block.named_modules()):
            if is_linear(module) and not module.weight.requires_grad and module.weight not in kept:
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


def measure_parts(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes of the fp32 numbers, the scales and the codes of a packed weight.
    Scales and codes of each matrix are padded to whole blocks, so that all matrices are unpacked at once."""
    num_matrices, num_blocks, num_groups = count_blocks(shape)
    num_floats = num_matrices * num_groups + NUM_CODES + num_matrices
    return 4 * num_floats, num_matrices * num_groups * SCALE_BLOCK, num_matrices * num_blocks * BLOCK // 2


def count_blocks(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Number of matrices, and of each one's blocks and groups of blocks."""
    num_blocks = -(-shape[-2] * shape[-1] // BLOCK)
    return math.prod(shape[:-2]), num_blocks, -(-num_blocks // SCALE_BLOCK)


def pack(weight: Tensor) -> Tensor:
    """Packs a weight (..., rows, columns), fp32 or bf16, into the flat `NF4Weight.packed` of the same dtype."""
    from bitsandbytes.functional import quantize_4bit

    num_matrices, num_blocks, num_groups = count_blocks(weight.shape)
    sizes = measure_parts(weight.shape)
    packed = torch.zeros(-(-sum(sizes) // 4) * 4, dtype=torch.uint8, device=weight.device)
    floats, scales, codes = split_parts(packed, sizes)
    absmax, values, means = split_floats(floats, num_matrices)
    scales, codes = scales.view(num_matrices, -1), codes.view(num_matrices, -1)
    for i, matrix in enumerate(weight.reshape(num_matrices, *weight.shape[-2:])):
        own, state = quantize_4bit(matrix.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
        absmax[i * num_groups : (i + 1) * num_groups] = state.state2.absmax
        values[:] = state.state2.code  # the same for all matrices
        means[i] = state.offset
        scales[i, :num_blocks] = state.absmax
        codes[i, : own.numel()] = own.flatten()
    return packed.view(weight.dtype)


def unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Unpacks a weight of `shape` (..., rows, columns), in the dtype of `packed`."""
    import bitsandbytes  # noqa: F401  (registers torch.ops.bitsandbytes)

    num_matrices, num_blocks, _ = count_blocks(shape)
    floats, scales, codes = split_parts(packed.view(torch.uint8), measure_parts(shape))
    absmax, values, means = split_floats(floats, num_matrices)
    ops = torch.ops.bitsandbytes
    scales = ops.dequantize_blockwise(scales, absmax, values, SCALE_BLOCK, torch.float32)
    scales = scales.view(num_matrices, -1)[:, :num_blocks] + means[:, None]
    step = max(1, MAX_NUMEL // (num_blocks * BLOCK))  # matrices at a time
    parts = [
        ops.dequantize_4bit(part.reshape(-1, 1), own.flatten(), BLOCK, "nf4", (own.numel(), BLOCK), packed.dtype)
        for part, own in zip(codes.view(num_matrices, -1).split(step), scales.split(step), strict=True)
    ]
    padded = parts[0] if len(parts) == 1 else torch.cat(parts)
    return padded.view(num_matrices, -1)[:, : shape[-2] * shape[-1]].reshape(shape)


def split_parts(packed: Tensor, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The fp32 numbers, the scales and the codes of a packed weight, as views of its bytes."""
    floats, scales, codes, _ = packed.split([*sizes, packed.nbytes - sum(sizes)])
    return floats.view(torch.float32), scales, codes


def split_floats(floats: Tensor, num_matrices: int) -> tuple[Tensor, Tensor, Tensor]:
    """The scales of scales, the values of an 8-bit scale, and the mean scale of each matrix."""
    return floats.split([len(floats) - NUM_CODES - num_matrices, NUM_CODES, num_matrices])


def fill_packed(layer: NF4Weight, name: str, readers: Readers, *, world: World) -> None:
    """Fills a meta layer with rank 0's weight, packed before broadcasting: only one weight is ever unpacked."""
    packed = None
    if world.rank == 0:
        weight = readers.pop(f"{name}{layer.suffix}")().to(world.device, layer.packed.dtype)
        packed = pack(layer.orient(weight)).view(torch.uint8)
    received = broadcast_from_rank0(packed, (layer.packed.nbytes,), dtype=torch.uint8, device=world.device)
    layer.packed = nn.Parameter(received.view(layer.packed.dtype), requires_grad=False)


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


def pack_experts(blocks: nn.ModuleList, *, compute_dtype: torch.dtype, kept: Container[nn.Parameter]) -> bool:
    """Replaces the frozen weights of fused experts by `NF4Experts`, where transformers multiplies them in groups,
    except those in `kept`. Returns whether there are any."""
    found = [
        (module, name, param)
        for module in blocks.modules()
        for name, param in module.named_parameters(recurse=False)
        if is_grouped(module) and param.ndim == 3 and not param.requires_grad and param not in kept
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
