"""Tokenized rows: pairs of answers, and texts as Arrow columns without a Python object for each token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa

from mini_trainer.data.chat.conversation import TokenizedChat, TrainedSpan
from mini_trainer.data.columns.base import IGNORED


def encode_texts(samples: Sequence[TokenizedChat], schema: pa.Schema) -> pa.RecordBatch:
    """The samples as rows of `TextColumns`."""
    lengths = np.array([len(tokens.input_ids) for tokens in samples], np.int32)
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    input_ids = np.fromiter(chain.from_iterable(tokens.input_ids for tokens in samples), np.int32)
    labels, weights = np.full_like(input_ids, IGNORED), np.zeros(len(input_ids), np.float32)
    for start, tokens in zip(bounds.tolist(), samples, strict=False):
        for span in tokens.spans:
            trained = slice(start + span.start, start + span.end)
            labels[trained], weights[trained] = input_ids[trained], span.weight
    num_targets = np.array([tokens.num_loss_counted_tokens for tokens in samples], np.int32)
    is_weighted = np.array([tokens.is_weighted for tokens in samples], bool)
    weight_bounds = np.cumsum([0, *np.where(is_weighted, lengths, 0)], dtype=np.int32)  # a null takes no room
    bits = np.packbits(~is_weighted, bitorder="little")
    is_null = pa.Array.from_buffers(pa.bool_(), len(samples), [None, pa.py_buffer(bits)])
    columns = [
        pa.ListArray.from_arrays(wrap(bounds), wrap(input_ids)),
        pa.ListArray.from_arrays(wrap(bounds), wrap(labels)),
        wrap(lengths),
        wrap(num_targets),
        pa.ListArray.from_arrays(wrap(weight_bounds), wrap(weights[np.repeat(is_weighted, lengths)]), mask=is_null),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def wrap(values: np.ndarray) -> pa.Array:
    """Numbers as an Arrow array on the same memory: `pa.array` would import pandas, in every worker process."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


@dataclass(frozen=True)
class TokenizedPair(TokenizedChat):
    """Two tokenized chats, one after the other: the chosen and the rejected side of a preference."""

    sides: tuple[TokenizedChat, ...] = ()
    margin: float | None = None
    weight: float | None = None

    @property
    def summary(self) -> str:
        chosen, rejected = self.sides
        return f"chosen: {chosen.summary}; rejected: {rejected.summary}"

    @property
    def shown(self) -> tuple[tuple[str, TokenizedChat], ...]:
        return tuple(zip(("chosen", "rejected"), self.sides, strict=True))


def pair_up(
    chosen: TokenizedChat, rejected: TokenizedChat, *, margin: float | None = None, weight: float | None = None
) -> TokenizedPair:
    """The pair; its spans have the sides' names as their roles."""
    return TokenizedPair(
        chosen.input_ids + rejected.input_ids,
        join_spans((chosen, rejected), ("chosen", "rejected")),
        is_stop_appended=chosen.is_stop_appended or rejected.is_stop_appended,
        remarks=chosen.remarks + rejected.remarks,
        sides=(chosen, rejected),
        margin=margin,
        weight=weight,
    )


@dataclass(frozen=True)
class TokenizedFeedback(TokenizedChat):
    """A tokenized answer, and after it the same prompt with an unrelated one."""

    sides: tuple[TokenizedChat, ...] = ()  # the second may be missing
    is_good: bool = True
    weight: float | None = None

    @property
    def labels(self) -> list[int]:
        """Also the unrelated answer's, which is measured and not trained."""
        return [label for side in self.sides for label in side.labels]

    @property
    def summary(self) -> str:
        return f"{'good' if self.is_good else 'bad'}: {self.sides[0].summary}"

    @property
    def shown(self) -> tuple[tuple[str, TokenizedChat], ...]:
        titles = ("good" if self.is_good else "bad", "unrelated, for KTO's point of reference")
        return tuple(zip(titles, self.sides, strict=False))


def add_mismatched(
    tokens: TokenizedChat, mismatched: TokenizedChat | None, *, is_good: bool, weight: float | None = None
) -> TokenizedFeedback:
    """The feedback; its spans, which are the answer's alone, have the role `good` or `bad`."""
    sides = (tokens,) if mismatched is None else (tokens, mismatched)
    return TokenizedFeedback(
        [token_id for side in sides for token_id in side.input_ids],
        join_spans((tokens,), ("good" if is_good else "bad",)),
        is_stop_appended=tokens.is_stop_appended,
        remarks=tokens.remarks,
        sides=sides,
        is_good=is_good,
        weight=weight,
    )


def join_spans(sides: Sequence[TokenizedChat], roles: Sequence[str]) -> list[TrainedSpan]:
    """The spans of sequences that follow each other; each sequence's have its role."""
    spans, offset = [], 0
    for side, role in zip(sides, roles, strict=False):
        spans += [replace(span, start=span.start + offset, end=span.end + offset, role=role) for span in side.spans]
        offset += len(side.input_ids)
    return spans
