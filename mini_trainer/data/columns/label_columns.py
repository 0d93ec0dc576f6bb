"""The columns of classifiers: of whole sequences, and of tokens."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from mini_trainer.data.columns import base

TYPES_COLUMN = "token_type_ids"
TARGET_COLUMN = "target"
LABEL_TYPES = {"single": "one of", "multi": "several of", "regression": "values of"}
NUM_LABELS_SHOWN = 30
NUM_LABELS_DRAWN = 20


class LabelledColumns(base.Columns):
    """Rows whose labels the data set names."""

    # Which text of a pair each token is of; null where all are of the first.
    optional: ClassVar = {TYPES_COLUMN: np.int8(0)}
    has_labels = True

    def describe(self, task: base.DataTask) -> str:
        if task.label_type == "regression":
            return f"{task.objective}, regression of {task.num_labels} value{'s' * (task.num_labels > 1)}"
        return f"{task.objective} ({task.label_type}) with the labels {describe_names(task.label_names)}"

    def describe_data(self, counts: base.Counts, task: base.DataTask) -> dict[str, Any]:
        return {
            "objective": task.objective,
            "label_type": task.label_type,
            "num_labels": task.num_labels,
            "label_names": list(task.label_names),
            "label_counts": {name: counts.labels[name] for name in task.label_names},
        }

    def make_row(self, tokens: Any) -> dict[str, Any]:
        row = {
            "input_ids": tokens.input_ids,
            self.target: tokens.target,
            "len": len(tokens.input_ids),
            "num_loss_counted_tokens": tokens.num_loss_counted_tokens,
        }
        return row if tokens.type_ids is None else row | {TYPES_COLUMN: tokens.type_ids}

    def report(self, counts: base.Counts, task: base.DataTask) -> Iterator[str]:
        """Each label with its count and its share, in the order of the classes."""
        if counts.rows["truncated"]:
            yield base.format_count("truncated", counts.rows["truncated"])
        yield f"  {task.objective}: {LABEL_TYPES[task.label_type]} {task.num_labels:,} labels"
        for name in task.label_names[:NUM_LABELS_SHOWN]:
            yield base.format_count(f"  {name}", counts.labels[name], self.count_labelled(counts))
        if task.num_labels > NUM_LABELS_SHOWN:
            yield f"    and {task.num_labels - NUM_LABELS_SHOWN:,} more, which are in the sidecar"

    def count_labelled(self, counts: base.Counts) -> int:
        """The number that labels are shares of."""
        return counts.num_samples

    def draw(self, counts: base.Counts, task: base.DataTask) -> base.Bars:
        shown = {f"label: {name}": counts.labels[name] for name in task.label_names[:NUM_LABELS_DRAWN]}
        return base.Bars("Labels", shown, counts.labels.total())

    def summarize(self, counts: base.Counts, task: base.DataTask) -> tuple[str, str]:
        return "labels", f"{task.num_labels:,}"


class SequenceColumns(LabelledColumns):
    """One target of a whole sequence: a class; a 0 or 1 for each class; or the values to predict."""

    schema = pa.schema(
        {"input_ids": pa.list_(pa.int32()), TARGET_COLUMN: pa.list_(pa.float32())}
        | base.COMMON
        | {TYPES_COLUMN: pa.list_(pa.int8())}
    )
    target = TARGET_COLUMN

    def check(self, sample: base.Sample, row: base.RowFacts) -> None:
        target, task, where = sample[TARGET_COLUMN], row.task, row.where
        base.check_numbers(sample, TYPES_COLUMN, row)
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


class TokenColumns(LabelledColumns):
    """Each token's own class; IGNORED where it has none, which `num_loss_counted_tokens` leaves out."""

    schema = pa.schema(base.BY_TOKEN | {TYPES_COLUMN: pa.list_(pa.int8())})

    def check(self, sample: base.Sample, row: base.RowFacts) -> None:
        labels, task, where = sample["labels"], row.task, row.where
        base.check_numbers(sample, TYPES_COLUMN, row)
        counted = labels[labels != base.IGNORED]
        beyond = counted[(counted < 0) | (counted >= task.num_labels)]
        if len(beyond):
            raise ValueError(
                f"{where}: a label is {beyond[0]}; allowed are the classes 0 to {task.num_labels - 1}, and"
                f" {base.IGNORED} where there is none"
            )
        if len(counted) != row.num_counted:
            raise ValueError(
                f"{where}: num_loss_counted_tokens is {row.num_counted}, but {len(counted)} labels are not"
                f" {base.IGNORED}: tokenize the data again with process_data.py"
            )

    def count_labelled(self, counts: base.Counts) -> int:
        return counts.labels.total()


SEQUENCE_LABELS, TOKEN_LABELS = SequenceColumns(), TokenColumns()


def describe_names(names: Sequence[str], *, most: int = 12) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(name if len(name) <= 40 else f"{name[:37]}..." for name in names[:most]) + more
