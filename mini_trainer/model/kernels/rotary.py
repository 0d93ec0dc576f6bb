"""Rotary embeddings of queries and keys in one launch, out of place: what selective checkpointing keeps stays as it is.

B rows of T tokens, H query or key heads of size D.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


class Rotation(torch.autograd.Function):
    """x cos + rotate_half(x) sin for queries and keys (B, H, T, D), in fp32, rounded once; cos, sin: (1 or B, T, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return launch(query, key, cos, sin, is_backward=False)

    @staticmethod
    def backward(ctx: Any, d_query: Tensor, d_key: Tensor) -> tuple[Tensor | None, ...]:
        return *launch(d_query, d_key, *ctx.saved_tensors, is_backward=True), None, None


def launch(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool) -> tuple[Tensor, Tensor]:
    """Both rotated: (B, H, T, D) as views of (B, T, H, D), the layout in which attention reads them."""
    query, key = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key))
    turned = [torch.empty_like(each.transpose(1, 2), memory_format=torch.contiguous_format) for each in (query, key)]
    num_rows, _, num_tokens, size = query.shape
    _rotate[(num_rows * num_tokens,)](
        query, key, *turned, cos, sin, num_tokens, cos.stride(0) if len(cos) > 1 else 0,
        *query.stride()[:3], *key.stride()[:3],
        NUM_QUERIES=query.shape[1], NUM_KEYS=key.shape[1], HALF=size // 2,
        QUERIES=triton.next_power_of_2(query.shape[1]), KEYS=triton.next_power_of_2(key.shape[1]),
        WIDTH=triton.next_power_of_2(size // 2), IS_BACKWARD=is_backward,
    )  # fmt: skip
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


@triton.jit(do_not_specialize=["num_tokens"])  # or another number would compile it again
def _rotate(
    query, key, turned_query, turned_key, cos, sin, num_tokens, angle_row,
    query_row, query_head, query_token, key_row, key_head, key_token,
    NUM_QUERIES: tl.constexpr, NUM_KEYS: tl.constexpr, HALF: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, IS_BACKWARD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, token = program // num_tokens, program % num_tokens
    at = tl.arange(0, WIDTH)
    angles = row * angle_row + token * 2 * HALF + at
    cos1 = tl.load(cos + angles, mask=at < HALF, other=0).to(tl.float32)
    cos2 = tl.load(cos + angles + HALF, mask=at < HALF, other=0).to(tl.float32)
    sin1 = tl.load(sin + angles, mask=at < HALF, other=0).to(tl.float32)
    sin2 = tl.load(sin + angles + HALF, mask=at < HALF, other=0).to(tl.float32)
    if IS_BACKWARD:  # the transpose
        sin1, sin2 = -sin2, -sin1
    begin = query + row * query_row + token * query_token
    _rotate_heads(begin, query_head, turned_query + program * NUM_QUERIES * 2 * HALF, cos1, cos2, sin1, sin2,
                  NUM_QUERIES, QUERIES, HALF, WIDTH)  # fmt: skip
    begin = key + row * key_row + token * key_token
    _rotate_heads(begin, key_head, turned_key + program * NUM_KEYS * 2 * HALF, cos1, cos2, sin1, sin2,
                  NUM_KEYS, KEYS, HALF, WIDTH)  # fmt: skip


@triton.jit
def _rotate_heads(
    begin, head, turned, cos1, cos2, sin1, sin2,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    heads, at = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (heads < NUM_HEADS) & (at < HALF)
    first = tl.load(begin + heads * head + at, mask=inside, other=0).to(tl.float32)
    second = tl.load(begin + heads * head + at + HALF, mask=inside, other=0).to(tl.float32)
    turned += heads * 2 * HALF + at
    element = turned.dtype.element_ty
    tl.store(turned, (first * cos1[None, :] - second * sin1[None, :]).to(element), mask=inside)
    tl.store(turned + HALF, (second * cos2[None, :] + first * sin2[None, :]).to(element), mask=inside)
