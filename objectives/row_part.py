"""A rank's part of a packed row that several ranks share (--context-parallel), and the whole row of its parts.

T tokens in the row, N ranks that share it.
"""

import itertools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from chat.labels import IGNORED
from objectives.micro_batch import MicroBatch
from ranks.row_group import RowGroup

LEAST_TOKENS = 2  # of a part: torch.compile takes 0 and 1 for constants


def take_part(row: MicroBatch, row_group: RowGroup | None) -> MicroBatch:
    """This rank's tokens of a packed row, with the borders of all of it; without a group, the row.

    The row is filled up to N parts of equal length by one more sequence, without targets.
    """
    if row_group is None:
        return row
    num_tokens = row.input_ids.shape[1]
    length = max(LEAST_TOKENS, -(-num_tokens // row_group.size))
    row = fill_up(row, length * row_group.size - num_tokens)
    start = row_group.rank * length
    part = slice(start, start + length)
    first, end = np.searchsorted(row.trained_index.numpy(), [part.start, part.stop])
    return replace(
        row,
        input_ids=row.input_ids[:, part].contiguous(),
        position_ids=row.position_ids[:, part].contiguous(),
        targets=row.targets[part].contiguous(),
        trained_index=row.trained_index[first:end] - start,
        target_weights=None if row.target_weights is None else row.target_weights[part].contiguous(),
        sources=None if row.sources is None else row.sources[first:end].contiguous(),
        row_group=row_group,
    )


def fill_up(row: MicroBatch, num_more: int) -> MicroBatch:
    """The row with a last sequence of `num_more` tokens, none of them trained."""
    if num_more == 0:
        return row

    def extend(tensor: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, num_more), value=value)

    lengths = [*row.seq_lengths, num_more]
    return replace(
        row,
        input_ids=extend(row.input_ids, 0),
        position_ids=torch.cat([row.position_ids, torch.arange(num_more)[None]], dim=1),
        targets=extend(row.targets, IGNORED),
        target_weights=None if row.target_weights is None else extend(row.target_weights, 0),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        seq_lengths=lengths,
    )


def gather_row(part: MicroBatch) -> MicroBatch:
    """The ids and targets of all parts of a row, without what fills it up, for the model's own forward pass.

    All ranks of the group call this, with a row of one sequence.
    """
    if part.row_group is None:
        return part
    num_tokens = part.seq_lengths[0]
    input_ids = part.row_group.gather(part.input_ids, dim=1)[:, :num_tokens]
    return replace(part, input_ids=input_ids, targets=part.row_group.gather(part.targets, dim=0)[:num_tokens])
