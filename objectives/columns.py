"""The columns of a tokenized data set: what process_data.py writes and training reads."""

import numpy as np
import pyarrow as pa

WEIGHTS_COLUMN = "loss_weights"
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int32()),  # not shifted; IGNORED where not trained
        "len": pa.int32(),  # tokens
        "num_loss_counted_tokens": pa.int32(),  # labels after the first that are not IGNORED
        WEIGHTS_COLUMN: pa.list_(pa.float32()),  # each token's, from 0 to 1; null where all are 1
    }
)
REQUIRED_COLUMNS = tuple(name for name in SCHEMA.names if name != WEIGHTS_COLUMN)
LIST_COLUMNS = tuple(field.name for field in SCHEMA if pa.types.is_list(field.type))

Sample = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # input_ids, labels, weights: (len,) each
