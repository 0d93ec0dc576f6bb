"""Memory-efficient AdamW: moments in 8 bits, weights in bfloat16 with stochastic rounding, or both.

Computes in fp32, one parameter's shard at a time: on CUDA by a kernel that reads and writes each number once, else of
a large one some rows at a time, since of each number in work a dozen temporary ones exist. A block is at most
`BLOCK_SIZE` neighbours in the last dimension, which FSDP never splits: moments are the same for any number of ranks,
and so is everything saved except for the stochastic rounding of bf16 weights.

Not torchao's AdamW8bit (0.18): it cuts blocks from each rank's flat shard, if the shard's size is divisible, so that a
(90, 128) matrix had 8-bit moments on one rank and fp32 ones on two, and a (101, 128) matrix had both at once on two
ranks, on which gathering them hung; if gradients vary widely within a block, it rounds second moments to zero (three
steps at a learning rate of 1e-3 moved a weight by 0.47); it compiles for every shape; and its stochastic rounding
draws from torch's default generator, whose seed differs between ranks, so that replicas of a shard would diverge.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK_SIZE = 256
MIN_BLOCK_SIZE = 32  # narrower matrices are small: their moments stay in fp32
MAX_NUMEL = 2**26  # numbers of a shard that are updated at a time: 3 GB of temporary ones
ROUNDING_STREAM = 1  # separates these random numbers from dropout's for the same seed, step and rank


class CompactAdamW(torch.optim.Optimizer):
    """AdamW over DTensors. The caller sets each group's "lr" and "step" (0-based) before every step.

    With `is_8bit`, the moments of parameters with at least two dimensions are stored as blocks of 8-bit codes with one
    fp32 scale each (Dettmers et al. 2021, arXiv 2110.02861); the second moment as its square root, so that both moments
    underflow together. bfloat16 parameters are rounded stochastically, without bias; the random numbers depend on
    `seed`, the step and the shard.
    """

    def __init__(
        self, groups: list[dict], *, lr: float, betas: tuple[float, float], eps: float, is_8bit: bool, seed: int
    ):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, step=0, rate=1.0))
        self.is_8bit, self.seed = is_8bit, seed

    def choose_block_size(self, param: DTensor) -> int | None:
        """Block size for a parameter's moments; None if they stay in fp32."""
        return find_block_size(param) if self.is_8bit else None

    def state_keys(self, param: DTensor) -> set[str]:
        """Names of the optimizer's state tensors for a parameter."""
        if self.choose_block_size(param) is None:
            return {"exp_avg", "exp_avg_sq"}
        return {"exp_avg_codes", "exp_avg_scales", "exp_avg_root_codes", "exp_avg_root_scales"}

    def init_state(self, param: DTensor) -> None:
        state, block_size = self.state[param], self.choose_block_size(param)
        for key in sorted(self.state_keys(param)):
            value = torch.zeros_like(param, dtype=torch.uint8 if key.endswith("codes") else torch.float32)
            state[key] = value[..., ::block_size].contiguous() if key.endswith("scales") else value

    @torch.no_grad()
    def step(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        rounding = Rounding(make_generator(self.seed, self.param_groups[0]["step"], params[0]))
        for group in self.param_groups:
            for param in group["params"]:
                rounding.number += 1
                if param.grad is not None:
                    self.update(param, group, rounding)

    def update(self, param: DTensor, group: dict, rounding: "Rounding") -> None:
        if not self.state[param]:
            self.init_state(param)
        weight, gradient = param.to_local(), param.grad.to_local()
        if not weight.numel():
            return
        state = {key: value.to_local() for key, value in self.state[param].items()}
        if has_kernel(weight):
            from mini_trainer.model.kernels.adamw import update_shard

            maps = (*load_map(True, weight.device), *load_map(False, weight.device))
            update_shard(weight, gradient, state, group, maps, rounding.generator.initial_seed(), rounding.number)
            return
        if weight.numel() <= MAX_NUMEL:
            update_rows(weight, gradient.float(), state, group, rounding)
            return
        size = max(1, MAX_NUMEL * len(weight) // weight.numel())  # in rows
        for start in range(0, len(weight), size):
            rows = slice(start, start + size)
            own = {key: value[rows] for key, value in state.items()}
            update_rows(weight[rows], gradient[rows].float(), own, group, rounding)


def find_block_size(param: Tensor) -> int | None:
    """Neighbours in the last dimension of a parameter, or of its shard, that share a scale in 8 bits; None: fp32."""
    size = math.gcd(param.shape[-1], BLOCK_SIZE) if param.ndim >= 2 else 0
    return size if size >= MIN_BLOCK_SIZE else None


def has_kernel(weight: Tensor) -> bool:
    if not weight.is_cuda:
        return False
    from mini_trainer.model.kernels import are_usable

    return are_usable(weight.device)


@dataclass
class Rounding:
    """Where the random numbers of a step's stochastic rounding come from: eagerly the generator, in a kernel its seed
    and the number of the parameter."""

    generator: torch.Generator
    number: int = 0

    def draw(self, weight: Tensor) -> Tensor:
        """16 random bits for each weight, as int32."""
        return torch.randint(2**16, weight.shape, dtype=torch.int32, device=weight.device, generator=self.generator)


def update_rows(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict, rounding: Rounding) -> None:
    """AdamW's update of some rows and their moments, in place. `gradient`: fp32."""
    is_coded = "exp_avg_codes" in state
    if is_coded:
        exp_avg = decode(state["exp_avg_codes"], state["exp_avg_scales"], is_signed=True)
        exp_avg_sq = decode(state["exp_avg_root_codes"], state["exp_avg_root_scales"], is_signed=False).square_()
    else:
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    (beta1, beta2), step = group["betas"], group["step"] + 1
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    value = weight.float()  # the weight itself if that is fp32
    value.mul_(1 - group["lr"] * group["weight_decay"])
    value.addcdiv_(exp_avg, denominator, value=-group["lr"] / (1 - beta1**step))
    if weight.dtype == torch.bfloat16:
        weight.copy_(round_to_bf16(value, rounding.draw(value)))
    if is_coded:
        encode(exp_avg, state["exp_avg_codes"], state["exp_avg_scales"], is_signed=True)
        encode(exp_avg_sq.sqrt_(), state["exp_avg_root_codes"], state["exp_avg_root_scales"], is_signed=False)


def make_generator(seed: int, step: int, param: DTensor) -> torch.Generator:
    """A generator for one step; it differs between shards and is the same on all replicas of a shard."""
    dims = [i for i, placement in enumerate(param.placements) if placement.is_shard()]
    shards = [param.device_mesh.get_local_rank(i) for i in dims]
    state = np.random.SeedSequence([seed, step, *shards, ROUNDING_STREAM]).generate_state(1)
    return torch.Generator(param.device).manual_seed(int(state[0]))


def round_to_bf16(value: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 numbers stochastically, in place, to values representable in bf16, without bias.
    bf16 is the upper half of fp32's bits: 16 random bits are added to the lower half, which is then truncated."""
    value.view(torch.int32).add_(bits).bitwise_and_(-(2**16))
    return value


def decode(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Decodes (..., n) uint8 codes with (..., n / block size) scales to (..., n) fp32."""
    values, _ = load_map(is_signed, codes.device)
    blocks = values[codes.int()].unflatten(-1, (scales.shape[-1], -1))
    return blocks.mul_(scales[..., None]).flatten(-2)


def encode(value: Tensor, codes: Tensor, scales: Tensor, *, is_signed: bool) -> None:
    """Encodes (..., n) fp32 numbers as codes and scales; nonzero values never become zero in the unsigned map."""
    _, borders = load_map(is_signed, codes.device)
    blocks = value.unflatten(-1, (scales.shape[-1], -1))
    torch.amax(blocks.abs(), dim=-1, out=scales)
    shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    nearest = torch.bucketize(shares, borders, out_int32=True)
    if not is_signed:
        nearest = torch.maximum(nearest, (blocks > 0).int())
    codes.copy_(nearest.flatten(-2))


@functools.lru_cache
def load_map(is_signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 values of the code book, ascending, and the 255 midpoints between them.
    Dettmers 2015 (arXiv 1511.04561): seven decades below 1, each with twice as many values as the one below it."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if is_signed else decade + 1) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*means, *(-means if is_signed else [])]
    values = torch.tensor(sorted(values), dtype=torch.float64)
    assert len(values) == 256, f"{len(values)} values"
    borders = (values[:-1] + values[1:]) / 2
    return values.float().to(device), borders.float().to(device)
