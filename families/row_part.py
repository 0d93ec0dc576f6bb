"""A rank's part of a packed row that several ranks share (--context-parallel), and the whole row of its parts.

T tokens in the row, N ranks that share it.
"""

import itertools
from dataclasses import replace

import torch

from families.micro_batch import Row
from ranks.row_group import RowGroup

LEAST_TOKENS = 2  # of a part: torch.compile takes 0 and 1 for constants


def take_part(row: Row, row_group: RowGroup) -> tuple[Row, slice]:
    """This rank's tokens of a packed row, with the borders of all of it; and where in the row they are.

    The row is filled up to N parts of equal length by one more sequence, which has no targets.
    """
    num_tokens = row.input_ids.shape[1]
    length = max(LEAST_TOKENS, -(-num_tokens // row_group.size))
    row = fill_up(row, length * row_group.size - num_tokens)
    part = slice(row_group.rank * length, (row_group.rank + 1) * length)
    return replace(
        row,
        input_ids=row.input_ids[:, part].contiguous(),
        position_ids=row.position_ids[:, part].contiguous(),
        row_group=row_group,
    ), part


def fill_up(row: Row, num_more: int) -> Row:
    """The row with a last sequence of `num_more` tokens."""
    if num_more == 0:
        return row
    lengths = [*row.seq_lengths, num_more]
    return replace(
        row,
        input_ids=torch.nn.functional.pad(row.input_ids, (0, num_more), value=0),
        position_ids=torch.cat([row.position_ids, torch.arange(num_more)[None]], dim=1),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        seq_lengths=lengths,
    )


def gather_ids(row: Row) -> torch.Tensor:  # (1, L)
    """The ids of all parts of a row of one sequence, without what fills it up. All ranks of the group call this."""
    if row.row_group is None:
        return row.input_ids
    return row.row_group.gather(row.input_ids, dim=1)[:, : row.seq_lengths[0]]
