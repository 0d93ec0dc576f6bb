"""A sample: a row of a tokenized data set, by column."""

from typing import Any

import numpy as np

Sample = dict[str, Any]  # `input_ids` (L,), and the columns of its objective and family; optional ones may be absent
LENGTHS_COLUMN = "sequence_lengths"  # in samples of several sequences, which are concatenated in `input_ids`


def list_sequences(sample: Sample) -> list[np.ndarray]:
    """Token ids of each of a sample's sequences, which stay together in one micro-batch."""
    lengths = sample.get(LENGTHS_COLUMN)
    return [sample["input_ids"]] if lengths is None else np.split(sample["input_ids"], np.cumsum(lengths)[:-1])
