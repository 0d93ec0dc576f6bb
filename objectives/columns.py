"""The columns of a tokenized data set, by the objective it is for: what process_data.py writes and training reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

CAUSAL_LM, SEQUENCES, TOKENS = "causal-lm", "sequence-classification", "token-classification"
VISION = "vision-language"
LabelType = Literal["single", "multi", "regression"]

WEIGHTS_COLUMN = "loss_weights"
TYPES_COLUMN = "token_type_ids"
TARGET_COLUMN = "target"
IMAGES_COLUMN = "images"
# Null in a row that has none; a data set may lack the column. Where some rows have one, this is the others' value, of
# each token if it is a number.
OPTIONAL_COLUMNS = {WEIGHTS_COLUMN: np.float32(1), TYPES_COLUMN: np.int8(0), IMAGES_COLUMN: ()}

SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int32()),  # not shifted; IGNORED where not trained
        "len": pa.int32(),  # tokens
        "num_loss_counted_tokens": pa.int32(),  # labels after the first that are not IGNORED
        WEIGHTS_COLUMN: pa.list_(pa.float32()),  # each token's, from 0 to 1; null where all are 1
    }
)
TOKEN_SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int32()),  # each token's own class; IGNORED where it has none
        "len": pa.int32(),
        "num_loss_counted_tokens": pa.int32(),  # labels that are not IGNORED
        TYPES_COLUMN: pa.list_(pa.int8()),  # which text of a pair each token is of; null where all are of the first
    }
)
SEQUENCE_SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        TARGET_COLUMN: pa.list_(pa.float32()),  # a class; a 0 or 1 for each class; or the values to predict
        "len": pa.int32(),
        "num_loss_counted_tokens": pa.int32(),  # 1
        TYPES_COLUMN: pa.list_(pa.int8()),
    }
)
VISION_SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),  # with as many placeholders for each image as the model's processor makes
        "labels": pa.list_(pa.int32()),
        "len": pa.int32(),
        "num_loss_counted_tokens": pa.int32(),
        "num_image_tokens": pa.int32(),  # placeholders among the tokens
        "image_sizes": pa.list_(pa.int32()),  # height and width of the first image, of the second, ...
        IMAGES_COLUMN: pa.list_(pa.string()),  # paths of files, from the data set's directory, or data: URLs; or null
    }
)
SCHEMAS = {CAUSAL_LM: SCHEMA, VISION: VISION_SCHEMA, SEQUENCES: SEQUENCE_SCHEMA, TOKENS: TOKEN_SCHEMA}
REQUIRED_COLUMNS = tuple(name for name in SCHEMA.names if name not in OPTIONAL_COLUMNS)

# Number of targets of each class, (classes,), and of all, in the samples that are trained.
CountLabels = Callable[[], tuple[np.ndarray, float]]


@dataclass(frozen=True)
class Task:
    """What a data set is for, as its sidecar says; chats have no labels to name."""

    objective: str = CAUSAL_LM
    label_type: LabelType | None = None
    label_names: tuple[str, ...] = ()  # by class; empty for regression
    num_labels: int = 0  # classes; for regression values to predict

    @property
    def schema(self) -> pa.Schema:
        return SCHEMAS[self.objective]

    @property
    def is_language(self) -> bool:
        """Whether next tokens are learned, with images in the text or without."""
        return self.objective in (CAUSAL_LM, VISION)

    @property
    def sample_columns(self) -> list[pa.Field]:
        """What a sample has: its tokens, its targets, and what may be null. The others are counts of them."""
        return [field for field in self.schema if pa.types.is_list(field.type) and field.name != "image_sizes"]

    @property
    def target_column(self) -> str:
        """What is learned: the labels of tokens, or the target of a sequence."""
        return TARGET_COLUMN if TARGET_COLUMN in self.schema.names else "labels"

    def describe(self) -> str:
        if self.objective == CAUSAL_LM:
            return "language modelling"
        if self.objective == VISION:
            return "language modelling on texts with images"
        if self.label_type == "regression":
            return f"{self.objective}, regression of {self.num_labels} value{'s' * (self.num_labels > 1)}"
        return f"{self.objective} ({self.label_type}) with the labels {describe_names(self.label_names)}"


def describe_names(names: Sequence[str], *, most: int = 12) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(name if len(name) <= 40 else f"{name[:37]}..." for name in names[:most]) + more


def read_task(sidecar: dict[str, Any] | None, *, named: str) -> Task:
    """What a data set with this sidecar is for. ValueError, which begins with `named`, for what cannot be."""
    sidecar = {} if sidecar is None else sidecar
    objective = sidecar.get("objective", CAUSAL_LM)
    if objective not in SCHEMAS:
        raise ValueError(f"{named}: made for the objective {objective!r}; known are {', '.join(SCHEMAS)}")
    if objective in (CAUSAL_LM, VISION):
        return Task(objective)
    label_type, names = sidecar.get("label_type"), sidecar.get("label_names")
    if label_type not in get_args(LabelType):
        raise ValueError(f"{named}: label_type is {label_type!r}; allowed: {', '.join(get_args(LabelType))}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{named}: label_names is {names!r}, expected a list of names")
    num_labels = sidecar.get("num_labels", 1) if label_type == "regression" else len(names)
    is_known = bool(names) != (label_type == "regression") and len(set(names)) == len(names)
    if not is_known or not isinstance(num_labels, int) or num_labels < 1:
        raise ValueError(f"{named}: {label_type} labels with the names {names!r}; tokenize the data again")
    return Task(objective, label_type, tuple(names), num_labels)
