"""Tokenized texts as Arrow columns, without a Python object for each token."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from mini_trainer.data.chat.token_spans import TokenizedChat
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
    is_null = pa.Array.from_buffers(
        pa.bool_(), len(samples), [None, pa.py_buffer(np.packbits(~is_weighted, bitorder="little"))]
    )
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
