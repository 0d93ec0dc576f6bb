"""AdamW that needs less memory: moments in 8 bits, weights in bfloat16 with stochastic rounding, or both.

Everything is computed in fp32, one parameter's shard after the other. A block is `BLOCK_SIZE` neighbours, or fewer, in
the last dimension, which FSDP never divides: the moments are the same for any number of ranks, and so is all that is
saved but for the random rounding of bf16 weights.

Not torchao's AdamW8bit (0.18): its blocks are cut from each rank's flat shard, if that divides into them, so that a
(90, 128) matrix had 8-bit moments on one rank and fp32 ones on two, and a (101, 128) one both at once on two ranks, on
which gathering them hung; where gradients differ much within a block it rounds second moments to zero (three steps of
AdamW at 1e-3 moved a weight by 0.47); it compiles for every shape; and its random rounding draws from torch's default
generator, whose seed is another on every rank, so that copies of a shard would part.
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK_SIZE = 256
MIN_BLOCK_SIZE = 32  # smaller blocks would cost more for their scales than the codes save: their moments stay in fp32
ROUNDING_STREAM = 1  # tells these random numbers from dropout's of the same seed, step and rank


class CompactAdamW(torch.optim.Optimizer):
    """AdamW over DTensors. Each group's "lr", and "step", counted from 0, are set from outside before every step.

    With `is_8bit` the moments of every parameter of at least two dimensions are kept as blocks of 8-bit codes with one
    fp32 scale each (Dettmers et al. 2021, arXiv 2110.02861); of the second moment the root, so that what is too small
    for the map is too small in both. bfloat16 parameters are rounded up or down with the probability that makes the
    expected value right; the random numbers follow from `seed`, the step and the shard.
    """

    def __init__(
        self, groups: list[dict], *, lr: float, betas: tuple[float, float], eps: float, is_8bit: bool, seed: int
    ):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, step=0))
        self.is_8bit, self.seed = is_8bit, seed

    def choose_block_size(self, param: DTensor) -> int | None:
        """None: the parameter's moments stay in fp32."""
        size = math.gcd(param.shape[-1], BLOCK_SIZE) if self.is_8bit and param.ndim >= 2 else 0
        return size if size >= MIN_BLOCK_SIZE else None

    def state_keys(self, param: DTensor) -> set[str]:
        """What the optimizer keeps of a parameter."""
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
        generator = make_generator(self.seed, self.param_groups[0]["step"], params[0])
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group, generator)

    def update(self, param: DTensor, group: dict, generator: torch.Generator) -> None:
        if not self.state[param]:
            self.init_state(param)
        state = {key: value.to_local() for key, value in self.state[param].items()}
        weight, gradient = param.to_local(), param.grad.to_local().float()
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
            weight.copy_(round_to_bf16(value, generator))
        if is_coded:
            encode(exp_avg, state["exp_avg_codes"], state["exp_avg_scales"], is_signed=True)
            encode(exp_avg_sq.sqrt_(), state["exp_avg_root_codes"], state["exp_avg_root_scales"], is_signed=False)


def make_generator(seed: int, step: int, param: DTensor) -> torch.Generator:
    """Random numbers of one step, others on every shard and the same on every copy of it."""
    dims = [i for i, placement in enumerate(param.placements) if placement.is_shard()]
    shards = [param.device_mesh.get_local_rank(i) for i in dims]
    state = np.random.SeedSequence([seed, step, *shards, ROUNDING_STREAM]).generate_state(1)
    return torch.Generator(param.device).manual_seed(int(state[0]))


def round_to_bf16(value: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 numbers, changed in place to neighbours that bf16 can hold; their expectation is what they were.

    bf16 is the upper half of fp32's bits: random bits are added to the lower half, which is then cut off.
    """
    bits = value.view(torch.int32)
    bits.add_(torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator))
    bits.bitwise_and_(-(2**16))
    return value


def decode(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """(..., n) uint8 codes with (..., n / block size) scales -> (..., n) fp32."""
    values, _ = load_map(is_signed, codes.device)
    blocks = values[codes.int()].unflatten(-1, (scales.shape[-1], -1))
    return blocks.mul_(scales[..., None]).flatten(-2)


def encode(value: Tensor, codes: Tensor, scales: Tensor, *, is_signed: bool) -> None:
    """Writes (..., n) fp32 numbers as codes and scales; what is not zero never becomes zero in an unsigned map."""
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
    """The 256 numbers that codes stand for, ascending, and the 255 borders half-way between them.

    Dettmers 2015 (arXiv 1511.04561): seven decades below 1, each with twice the numbers of the one below it.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if is_signed else decade + 1) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*means, *(-means if is_signed else [])]
    values = torch.tensor(sorted(values), dtype=torch.float64)
    assert len(values) == 256, f"{len(values)} values"
    borders = (values[:-1] + values[1:]) / 2
    return values.float().to(device), borders.float().to(device)
