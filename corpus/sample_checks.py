"""Whether a row of a tokenized data set keeps the contract of its objective. What it breaks is named."""

import numpy as np

from chat.labels import IGNORED
from objectives.columns import SEQUENCES, Task


def check_targets(targets: np.ndarray, task: Task, *, num_counted: int, vocab_size: float, where: str) -> None:
    """A row's labels or target. Raises ValueError that begins with `where`."""
    if task.is_language:
        check_next_tokens(targets, num_counted=num_counted, vocab_size=vocab_size, where=where)
    elif task.objective == SEQUENCES:
        check_sequence_target(targets, task, num_counted=num_counted, where=where)
    else:
        check_token_classes(targets, task, num_counted=num_counted, where=where)


def check_next_tokens(labels: np.ndarray, *, num_counted: int, vocab_size: float, where: str) -> None:
    if labels.max() >= vocab_size:
        raise ValueError(f"{where}: token ids beyond the model's vocabulary of {vocab_size}")
    no_labels = labels[(labels < 0) & (labels != IGNORED)]
    if len(no_labels):
        raise ValueError(
            f"{where}: a label is {no_labels[0]}; allowed are token ids, and {IGNORED} where nothing is trained"
        )
    num_targets = np.count_nonzero(labels[1:] != IGNORED)
    if num_targets != num_counted:
        raise ValueError(
            f"{where}: num_loss_counted_tokens is {num_counted}, but {num_targets} labels after the"
            f" first are not {IGNORED}: tokenize the data again with process_data.py"
        )


def check_token_classes(labels: np.ndarray, task: Task, *, num_counted: int, where: str) -> None:
    counted = labels[labels != IGNORED]
    beyond = counted[(counted < 0) | (counted >= task.num_labels)]
    if len(beyond):
        raise ValueError(
            f"{where}: a label is {beyond[0]}; allowed are the classes 0 to {task.num_labels - 1}, and {IGNORED} where"
            " there is none"
        )
    if len(counted) != num_counted:
        raise ValueError(
            f"{where}: num_loss_counted_tokens is {num_counted}, but {len(counted)} labels are not {IGNORED}: tokenize"
            " the data again with process_data.py"
        )


def check_sequence_target(target: np.ndarray, task: Task, *, num_counted: int, where: str) -> None:
    is_single = task.label_type == "single"
    expected = 1 if is_single else task.num_labels
    if len(target) != expected or not np.isfinite(target).all():
        raise ValueError(f"{where}: the target is {target.tolist()}, expected {expected} finite numbers")
    if is_single and target[0] not in range(task.num_labels):
        raise ValueError(f"{where}: the class is {target[0]:g}; allowed are 0 to {task.num_labels - 1}")
    if task.label_type == "multi" and not np.isin(target, (0, 1)).all():
        raise ValueError(f"{where}: the target is {target.tolist()}, expected a 0 or 1 for each label")
    if num_counted != 1:
        raise ValueError(f"{where}: num_loss_counted_tokens is {num_counted}; a sequence has one target")
