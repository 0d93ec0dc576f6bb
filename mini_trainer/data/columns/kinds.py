"""The kinds of data, all named here, and their descriptions in sidecars."""

from typing import Any, get_args

from mini_trainer.data.columns.base import (
    CAUSAL_LM,
    FEEDBACK,
    PREFERENCE,
    SEQUENCES,
    TOKENS,
    VISION,
    Columns,
    DataTask,
    LabelType,
)
from mini_trainer.options.doors import Doors

COLUMNS: Doors[Columns] = Doors(
    {
        CAUSAL_LM: "mini_trainer.data.columns.token_columns:TEXTS",
        VISION: "mini_trainer.data.columns.token_columns:PICTURED",
        SEQUENCES: "mini_trainer.data.columns.label_columns:SEQUENCE_LABELS",
        TOKENS: "mini_trainer.data.columns.label_columns:TOKEN_LABELS",
        PREFERENCE: "mini_trainer.data.columns.preference_columns:PREFERENCES",
        FEEDBACK: "mini_trainer.data.columns.preference_columns:FEEDBACKS",
    }
)


def describe_task(task: DataTask) -> str:
    """The training signal of data sets for the task, in words."""
    return COLUMNS[task.objective].describe(task)


def read_task(sidecar: dict[str, Any] | None, *, named: str) -> DataTask:
    """The task of a data set with this sidecar. ValueError, which begins with `named`, for an invalid one."""
    sidecar = {} if sidecar is None else sidecar
    objective = sidecar.get("objective", CAUSAL_LM)
    if objective not in COLUMNS:
        raise ValueError(f"{named}: made for the objective {objective!r}; known are {', '.join(COLUMNS)}")
    if not COLUMNS[objective].has_labels:
        return DataTask(objective)
    label_type, names = sidecar.get("label_type"), sidecar.get("label_names")
    if label_type not in get_args(LabelType):
        raise ValueError(f"{named}: label_type is {label_type!r}; allowed: {', '.join(get_args(LabelType))}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{named}: label_names is {names!r}, expected a list of names")
    num_labels = sidecar.get("num_labels", 1) if label_type == "regression" else len(names)
    is_known = bool(names) != (label_type == "regression") and len(set(names)) == len(names)
    if not is_known or not isinstance(num_labels, int) or num_labels < 1:
        raise ValueError(f"{named}: {label_type} labels with the names {names!r}; tokenize the data again")
    return DataTask(objective, label_type, tuple(names), num_labels)
