"""Attention over a packed row that N ranks share: each has T/N of its tokens, and attends for some of the heads.

An all-to-all turns (1, heads, T/N, D) into (1, heads/N, T, D), any backend of model/attention.py handles it as a whole
row, and another all-to-all returns the outputs (DeepSpeed-Ulysses, arXiv 2309.14509). Sequence borders, windows, soft
caps and sinks thus work unchanged, and causal work is balanced, since all heads cost the same. torch's own
`context_parallel` (torch.distributed.tensor.experimental) is ring attention for one sequence per row, without borders.

If N does not divide the number of heads, they are padded with heads of zeros. Ring attention would need no padding;
but parts of a row are contiguous, so its last rank would have twice the mean causal work, as with padding when N is
twice the number of heads, and each rank would hold the keys and values of all heads for the whole row instead of only
those of its own heads.

Hq query heads, Hkv key/value heads, D head size.
"""

import math

from torch import Tensor
from torch.nn.functional import pad

from mini_trainer.distributed.world import RowGroup


def take_heads(
    query: Tensor,  # (1, Hq, T/N, D)
    key: Tensor,  # (1, Hkv, T/N, D)
    value: Tensor,
    row_group: RowGroup,
) -> tuple[Tensor, Tensor, Tensor]:  # (1, heads, T, D)
    """This rank's query heads for the whole row, and the corresponding key/value heads. Key/value heads are repeated
    until N divides their number. If N does not divide the number of query heads, these are padded with heads of zeros,
    and every query head gets its own key/value head."""
    num_kv_heads, size = key.shape[1], row_group.size
    num_needed = count_key_heads(query.shape[1], num_kv_heads, size)
    if num_needed > num_kv_heads:
        key, value = (t.repeat_interleave(num_needed // num_kv_heads, dim=1) for t in (key, value))
    filled = (fill_heads(t, size, dim=1) for t in (query, key, value))
    query, key, value = (row_group.swap(t, split_dim=1, join_dim=2) for t in filled)
    return query, key, value


def give_heads_back(output: Tensor, num_heads: int, row_group: RowGroup) -> Tensor:  # (1, T/N, Hq, D)
    """Outputs of all heads for this rank's tokens, from its heads' outputs for all tokens (1, T, heads, D)."""
    return row_group.swap(output, split_dim=1, join_dim=2)[:, :, :num_heads].contiguous()


def choose_own(of_heads: Tensor, row_group: RowGroup) -> Tensor:  # (heads,)
    """Selects this rank's heads from a value per query head (Hq,), such as attention sinks."""
    return fill_heads(of_heads, row_group.size, dim=0).chunk(row_group.size)[row_group.rank]


def count_key_heads(num_heads: int, num_kv_heads: int, num_sharing: int) -> int:
    """Number of key/value heads after repetition, before padding."""
    return math.lcm(num_kv_heads, num_sharing) if num_heads % num_sharing == 0 else num_heads


def describe_heads(num_heads: int, num_sharing: int) -> str:
    num_filled = num_heads + -num_heads % num_sharing
    heads = f"{num_heads}" if num_filled == num_heads else f"{num_heads}, padded to {num_filled},"
    return f"rows shared by {num_sharing} ranks, {num_filled // num_sharing} of {heads} heads each"


def fill_heads(tensor: Tensor, size: int, *, dim: int) -> Tensor:
    """Pads `tensor` with heads of zeros until their number is a multiple of `size`."""
    num_missing = -tensor.shape[dim] % size
    return pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, num_missing)) if num_missing else tensor
