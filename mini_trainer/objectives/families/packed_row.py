"""Arguments of transformers' models for a packed row, common to all families."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mini_trainer.objectives.families.micro_batch import MicroBatch, Row
from mini_trainer.objectives.families.text_tower import find_decoder


def describe_row(micro_batch: MicroBatch, *, pad_position: int | None) -> dict[str, Any]:
    """Arguments of a base model's forward pass over the packed row."""
    row = micro_batch.row
    return dict(
        input_ids=row.input_ids,
        position_ids=number_positions(row, pad_position=pad_position),
        use_cache=False,
        cu_seq_lens_q=row.cu_seqlens,
        cu_seq_lens_k=row.cu_seqlens,
        max_length_q=row.max_seqlen,
        max_length_k=row.max_seqlen,
        micro_batch=micro_batch,  # for the functions of model.attention
    )


def number_positions(row: Row, *, pad_position: int | None) -> Tensor:  # (1, T)
    """Each token's position in its sequence, from 0, or, if padding has a position (RoBERTa), from the next one.

    In the second case padding tokens get that position and are not counted, as in the model's own forward.
    """
    if pad_position is None:
        return row.position_ids
    is_counted = (row.input_ids != pad_position).long()
    counts = is_counted.cumsum(dim=1)
    index = torch.arange(counts.shape[1], device=counts.device)
    firsts = index - row.position_ids  # (1, T): index of the first token of each token's sequence
    before = (counts - is_counted).gather(1, firsts)
    return (counts - before) * is_counted + pad_position


def find_pad_position(model: PreTrainedModel) -> int | None:
    """Padding's index in the model's table of positions (RoBERTa), after which sequences start; None without one."""
    table = find_position_table(model)
    return None if table is None else table.padding_idx


def find_position_table(model: PreTrainedModel) -> nn.Embedding | None:
    """The model's learned position embeddings; None for other kinds of positions (rotary embeddings)."""
    tables = [
        module
        for name, module in find_decoder(model).named_modules()
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, nn.Embedding)
    ]
    return tables[0] if tables else None


def check_positions(model: PreTrainedModel, *, longest: int) -> None:
    """ValueError if the longest sample, of `longest` tokens, exceeds the model's positions."""
    table = find_position_table(model)
    if table is None:
        return
    limit = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    if longest > limit:
        raise ValueError(
            f"model type {model.config.model_type!r} has positions for {limit} tokens, but the longest sample has"
            f" {longest}: drop longer samples (--max-tokens-per-gpu {limit} --drop-overlong), or tokenize the data"
            f" again with --max-sample-num-tokens {limit}"
        )
