"""Attention over a packed row that N ranks share: each has T/N of its tokens, and attends for some of the heads.

From (1, heads, T/N, D) an all-to-all makes (1, heads/N, T, D), any backend of model/attention.py does what it does with
a whole row, and another all-to-all brings the outputs back (DeepSpeed-Ulysses, arXiv 2309.14509). So borders, windows,
soft caps and sinks are what they are without it, and causal work is balanced, since heads are alike. torch's own
`context_parallel` (torch.distributed.tensor.experimental) is a ring for one sequence a row: it knows no borders.

Heads that do not divide by N, or are fewer, are filled up with heads of zeros. A ring of keys and values would leave no
rank without a head; but parts of a row lie one after the other, so that its last rank would have twice the mean of
causal attention's work, which heads of zeros come to where N is twice the heads, and each rank would hold the keys and
values of all heads for the whole row, where now it holds those of its own.

Hq query heads, Hkv key/value heads, D head size.
"""

import math

from torch import Tensor
from torch.nn.functional import pad

from ranks.row_group import RowGroup


def take_heads(
    query: Tensor,  # (1, Hq, T/N, D)
    key: Tensor,  # (1, Hkv, T/N, D)
    value: Tensor,
    row_group: RowGroup,
) -> tuple[Tensor, Tensor, Tensor]:  # (1, heads, T, D)
    """This rank's query heads of the whole row, and the key/value heads that belong to them.

    Key/value heads that do not divide by N are repeated until they do. Query heads that do not are filled up by heads
    of zeros, and then every query head has a key/value head of its own.
    """
    num_kv_heads, size = key.shape[1], row_group.size
    num_needed = count_key_heads(query.shape[1], num_kv_heads, size)
    if num_needed > num_kv_heads:
        key, value = (t.repeat_interleave(num_needed // num_kv_heads, dim=1) for t in (key, value))
    filled = (fill_heads(t, size, dim=1) for t in (query, key, value))
    query, key, value = (row_group.swap(t, split_dim=1, join_dim=2) for t in filled)
    return query, key, value


def give_heads_back(output: Tensor, num_heads: int, row_group: RowGroup) -> Tensor:  # (1, T/N, Hq, D)
    """All heads' outputs for this rank's tokens, from its heads' outputs for all tokens (1, T, heads, D)."""
    return row_group.swap(output, split_dim=1, join_dim=2)[:, :, :num_heads].contiguous()


def choose_own(of_heads: Tensor, row_group: RowGroup) -> Tensor:  # (heads,)
    """The numbers of this rank's heads, from one for each query head (Hq,), such as its sink."""
    return fill_heads(of_heads, row_group.size, dim=0).chunk(row_group.size)[row_group.rank]


def count_key_heads(num_heads: int, num_kv_heads: int, num_sharing: int) -> int:
    """How many key/value heads there are after those that have to be repeated, before any is filled up."""
    return math.lcm(num_kv_heads, num_sharing) if num_heads % num_sharing == 0 else num_heads


def describe_heads(num_heads: int, num_sharing: int) -> str:
    num_filled = num_heads + -num_heads % num_sharing
    heads = f"{num_heads}" if num_filled == num_heads else f"{num_heads}, filled up to {num_filled},"
    return f"rows shared by {num_sharing} ranks, {num_filled // num_sharing} of {heads} heads each"


def fill_heads(tensor: Tensor, size: int, *, dim: int) -> Tensor:
    """`tensor` with zeros in the place of heads, until their number divides by `size`."""
    num_missing = -tensor.shape[dim] % size
    return pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, num_missing)) if num_missing else tensor
