"""Splitting a packed row over the ranks that share it (--context-parallel), and gathering it again.

T tokens in the row, N ranks that share it.
"""

import itertools
from dataclasses import replace

import torch

from mini_trainer.distributed.row_group import RowGroup
from mini_trainer.objectives.families.micro_batch import Row

LEAST_TOKENS = 2  # minimum tokens per part: torch.compile specializes on sizes 0 and 1


def take_part(row: Row, row_group: RowGroup) -> tuple[Row, slice]:
    """Returns this rank's part of a packed row, with the whole row's borders, and its slice of the row.

    The row is padded to N parts of equal length by an additional sequence without targets.
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
    """Appends a sequence of `num_more` tokens to the row."""
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
        has_targets=torch.nn.functional.pad(row.has_targets, (0, 1)),
    )


def gather_ids(row: Row) -> torch.Tensor:  # (1, L)
    """Gathers the ids of a row of one sequence, without padding. All ranks of the group call this."""
    if row.row_group is None:
        return row.input_ids
    return row.row_group.gather(row.input_ids, dim=1)[:, : row.seq_lengths[0]]
