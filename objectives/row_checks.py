"""Whether a row of a tokenized data set keeps the contract of its objective. Messages name what it breaks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chat.labels import IGNORED
from families.sample import Sample
from objectives.columns import (
    CAUSAL_LM,
    SEQUENCES,
    TARGET_COLUMN,
    TOKENS,
    TYPES_COLUMN,
    VISION,
    WEIGHTS_COLUMN,
    Task,
)


@dataclass(frozen=True)
class RowFacts:
    """What the data set says of a row beside its lists."""

    task: Task
    length: int  # tokens
    num_counted: int  # targets
    vocab_size: float  # the model's
    where: str  # file and row, which messages begin with


def check_sample(sample: Sample, row: RowFacts) -> None:
    """ValueError for a row that is not what its objective's columns promise."""
    check_aligned(sample, [name for name in ("input_ids", "labels") if name in sample], row)
    input_ids = sample["input_ids"]
    if input_ids.min() < 0 or input_ids.max() >= row.vocab_size:
        raise ValueError(f"{row.where}: token ids beyond the model's vocabulary of {row.vocab_size}")
    CHECKS[row.task.objective](sample, row)


def check_aligned(sample: Sample, names: Sequence[str], row: RowFacts) -> None:
    """ValueError if one of the columns has not one value for each token."""
    if any(len(sample[name]) != row.length for name in names):
        counts = ", ".join(f"{len(sample[name])} {name}" for name in names)
        raise ValueError(f"{row.where}: {counts} and len {row.length}")


def check_numbers(sample: Sample, name: str, row: RowFacts, *, most: float = np.inf) -> None:
    """ValueError if an optional column is there, and has not a number from 0 to `most` for each token."""
    values = sample.get(name)
    if values is not None and not (len(values) == row.length and values.min() >= 0 and values.max() <= most):
        bounds = "from 0" if most == np.inf else f"from 0 to {most}"
        raise ValueError(f"{row.where}: {name} has to hold {row.length} numbers {bounds}")


def check_next_tokens(sample: Sample, row: RowFacts) -> None:
    """Of language models: a label for each token, and where there are weights one, too."""
    labels, where = sample["labels"], row.where
    check_numbers(sample, WEIGHTS_COLUMN, row, most=1)
    if labels.max() >= row.vocab_size:
        raise ValueError(f"{where}: token ids beyond the model's vocabulary of {row.vocab_size}")
    no_labels = labels[(labels < 0) & (labels != IGNORED)]
    if len(no_labels):
        raise ValueError(
            f"{where}: a label is {no_labels[0]}; allowed are token ids, and {IGNORED} where nothing is trained"
        )
    num_targets = np.count_nonzero(labels[1:] != IGNORED)
    if num_targets != row.num_counted:
        raise ValueError(
            f"{where}: num_loss_counted_tokens is {row.num_counted}, but {num_targets} labels after the"
            f" first are not {IGNORED}: tokenize the data again with process_data.py"
        )


def check_token_classes(sample: Sample, row: RowFacts) -> None:
    """Of classifiers of tokens: a class or IGNORED for each token."""
    labels, task, where = sample["labels"], row.task, row.where
    check_numbers(sample, TYPES_COLUMN, row)
    counted = labels[labels != IGNORED]
    beyond = counted[(counted < 0) | (counted >= task.num_labels)]
    if len(beyond):
        raise ValueError(
            f"{where}: a label is {beyond[0]}; allowed are the classes 0 to {task.num_labels - 1}, and {IGNORED} where"
            " there is none"
        )
    if len(counted) != row.num_counted:
        raise ValueError(
            f"{where}: num_loss_counted_tokens is {row.num_counted}, but {len(counted)} labels are not {IGNORED}:"
            " tokenize the data again with process_data.py"
        )


def check_sequence_target(sample: Sample, row: RowFacts) -> None:
    """Of classifiers of sequences: one target."""
    target, task, where = sample[TARGET_COLUMN], row.task, row.where
    check_numbers(sample, TYPES_COLUMN, row)
    is_single = task.label_type == "single"
    expected = 1 if is_single else task.num_labels
    if len(target) != expected or not np.isfinite(target).all():
        raise ValueError(f"{where}: the target is {target.tolist()}, expected {expected} finite numbers")
    if is_single and target[0] not in range(task.num_labels):
        raise ValueError(f"{where}: the class is {target[0]:g}; allowed are 0 to {task.num_labels - 1}")
    if task.label_type == "multi" and not np.isin(target, (0, 1)).all():
        raise ValueError(f"{where}: the target is {target.tolist()}, expected a 0 or 1 for each label")
    if row.num_counted != 1:
        raise ValueError(f"{where}: num_loss_counted_tokens is {row.num_counted}; a sequence has one target")


CHECKS = {
    CAUSAL_LM: check_next_tokens,
    VISION: check_next_tokens,
    SEQUENCES: check_sequence_target,
    TOKENS: check_token_classes,
}
