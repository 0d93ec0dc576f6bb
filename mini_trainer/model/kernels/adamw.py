"""`CompactAdamW`'s update of a shard in one launch: each weight, gradient and moment is read once and written once.

A program has some blocks of neighbours, as rows of a tile. It computes what `compact_adamw.update_rows` computes, in
fp32, with random bits of its own: Philox by number of the weight, parameter, and seed of the step and shard.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # weights of a program
ROW = 256  # of these, where moments have no blocks


def update_shard(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    group: dict,
    maps: tuple[Tensor, ...],
    seed: int,
    number: int,
) -> None:
    """Updates contiguous fp32 or bf16 weights and their moments in place.
    `maps`: values and borders of the signed code book and of the one of roots. `seed`, `number`: of the random bits."""
    assert all(each.is_contiguous() for each in (weight, *state.values())), "a view, which the kernel would not update"
    is_coded = "exp_avg_codes" in state
    names = [f"exp_avg_{kind}" for kind in ("codes", "root_codes", "scales", "root_scales")]
    moments = [state[name] for name in names] if is_coded else [*(state[k] for k in ("exp_avg", "exp_avg_sq"))] * 2
    size = weight.numel() // moments[2].numel() if is_coded else ROW
    (beta1, beta2), step = group["betas"], group["step"] + 1
    _update[(triton.cdiv(weight.numel(), TILE),)](
        weight,
        gradient.contiguous(),
        *moments,
        *maps,
        weight.numel(),
        seed % 2**31,  # always a 32-bit number, or the kernel would be compiled again
        number,
        group["lr"] / (1 - beta1**step),
        1 - group["lr"] * group["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        math.sqrt(1 - beta2**step),
        group["eps"],
        IS_CODED=is_coded,
        ROUNDS=weight.dtype == torch.bfloat16,
        NUM_BLOCKS=TILE // size,
        SIZE=size,
    )


@triton.jit(do_not_specialize=["seed", "number"])
def _update(
    weight, gradient, first, second, first_scales, second_scales,
    values, borders, root_values, root_borders, num_weights, seed, number,
    rate, decay, share, beta2, share_sq, correction, eps,
    IS_CODED: tl.constexpr, ROUNDS: tl.constexpr, NUM_BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    blocks = tl.program_id(0).to(tl.int64) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    at = blocks[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = at < num_weights
    has_block = blocks * SIZE < num_weights
    own_gradient = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if IS_CODED:
        average = tl.load(values + tl.load(first + at, mask=inside, other=0).to(tl.int32))
        average *= tl.load(first_scales + blocks, mask=has_block, other=0.0)[:, None]
        root = tl.load(root_values + tl.load(second + at, mask=inside, other=0).to(tl.int32))
        root *= tl.load(second_scales + blocks, mask=has_block, other=0.0)[:, None]
        square = root * root
    else:
        average = tl.load(first + at, mask=inside, other=0.0)
        square = tl.load(second + at, mask=inside, other=0.0)
    average += share * (own_gradient - average)
    square = square * beta2 + share_sq * own_gradient * own_gradient
    root = tl.sqrt_rn(square)
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * decay
    value -= rate * (average / (root / correction + eps))
    if ROUNDS:
        bits = value.to(tl.int32, bitcast=True) + draw_bits(seed, number, blocks, NUM_BLOCKS, SIZE)
        value = (bits & -65536).to(tl.float32, bitcast=True)
    tl.store(weight + at, value.to(weight.dtype.element_ty), mask=inside)
    if IS_CODED:
        scale = tl.max(tl.abs(average), axis=1)
        codes = find_nearest(average / tl.maximum(scale, 1.17549435e-38)[:, None], borders)
        tl.store(first + at, codes.to(tl.uint8), mask=inside)
        tl.store(first_scales + blocks, scale, mask=has_block)
        scale = tl.max(root, axis=1)
        codes = find_nearest(root / tl.maximum(scale, 1.17549435e-38)[:, None], root_borders)
        codes = tl.maximum(codes, (root > 0).to(tl.int32))
        tl.store(second + at, codes.to(tl.uint8), mask=inside)
        tl.store(second_scales + blocks, scale, mask=has_block)
    else:
        tl.store(first + at, average, mask=inside)
        tl.store(second + at, square, mask=inside)


@triton.jit
def draw_bits(seed, number, blocks, NUM_BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """16 random bits for each weight of the blocks: each of Philox's numbers serves one."""
    quarter = blocks[:, None] * (SIZE // 4) + tl.arange(0, SIZE // 4)[None, :]
    counter = quarter.to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, counter * 0 + number, counter * 0, counter * 0)
    bits = tl.join(tl.join(a, b), tl.join(c, d)).reshape(NUM_BLOCKS, SIZE)
    return (bits & 0xFFFF).to(tl.int32)


@triton.jit
def find_nearest(shares, borders):
    """How many of the 255 ascending borders are below each share: its code."""
    code = tl.zeros(shares.shape, tl.int32)
    for step in tl.static_range(8):
        half = 128 >> step
        code += tl.where(tl.load(borders + code + half - 1) < shares, half, 0)
    return code
