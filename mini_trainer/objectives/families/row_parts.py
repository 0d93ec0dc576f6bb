"""Packed rows with other borders: parts of a row for the ranks that share it (--context-parallel), and chunks."""

import itertools
from dataclasses import replace

import torch

from mini_trainer.distributed.world import RowGroup
from mini_trainer.objectives.families.family import Row

LEAST_TOKENS = 2  # minimum tokens per part: torch.compile specializes on sizes 0 and 1


def take_part(row: Row, row_group: RowGroup) -> tuple[Row, slice]:
    """Returns this rank's part of a packed row, with the whole row's borders, and its slice of the row.
    The row is padded to N parts of equal length by an additional sequence without targets."""
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


def chunk_sequences(row: Row, size: int) -> Row:
    """Adds a border after every `size` tokens of each sequence, for chunked attention."""
    lengths = [min(size, length - start) for length in row.seq_lengths for start in range(0, length, size)]
    device = row.cu_seqlens.device
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
    cu_seqlens = borders.to(device, non_blocking=True)  # without pinned memory the host would wait
    return replace(row, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), seq_lengths=lengths)
