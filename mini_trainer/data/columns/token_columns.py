"""The columns of language models' texts."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from mini_trainer.data.columns import base

if TYPE_CHECKING:
    from mini_trainer.data.chat.conversation import TokenizedChat

WEIGHTS_COLUMN = "loss_weights"
IMAGES_COLUMN = "images"


class TextColumns(base.Columns):
    """Labels are the tokens themselves, not shifted; IGNORED where not trained. A first token is no target, and
    `num_loss_counted_tokens` are the others that are not IGNORED."""

    # Weights are each token's, from 0 to 1; null where all are 1.
    schema = pa.schema(base.BY_TOKEN | {WEIGHTS_COLUMN: pa.list_(pa.float32())})
    optional: ClassVar = {WEIGHTS_COLUMN: np.float32(1)}

    def describe(self, task: base.DataTask) -> str:
        return "language modelling"

    def describe_data(self, counts: base.Counts, task: base.DataTask) -> dict[str, Any]:
        return {}  # as data sets had it before there were other objectives

    def check(self, sample: base.Sample, row: base.RowFacts) -> None:
        labels, where = sample["labels"], row.where
        base.check_numbers(sample, WEIGHTS_COLUMN, row, most=1)
        if labels.max() >= row.vocab_size:
            raise ValueError(f"{where}: token ids beyond the model's vocabulary of {row.vocab_size}")
        no_labels = labels[(labels < 0) & (labels != base.IGNORED)]
        if len(no_labels):
            raise ValueError(
                f"{where}: a label is {no_labels[0]}; allowed are token ids, and {base.IGNORED} where nothing is"
                " trained"
            )
        num_targets = np.count_nonzero(labels[1:] != base.IGNORED)
        if num_targets != row.num_counted:
            raise ValueError(
                f"{where}: num_loss_counted_tokens is {row.num_counted}, but {num_targets} labels after the"
                f" first are not {base.IGNORED}: tokenize the data again with process_data.py"
            )

    def make_row(self, tokens: "TokenizedChat") -> dict[str, Any]:
        labels = tokens.labels
        row = {
            "input_ids": tokens.input_ids,
            "labels": labels,
            "len": len(labels),
            "num_loss_counted_tokens": tokens.num_loss_counted_tokens,
        }
        return row | {WEIGHTS_COLUMN: tokens.loss_weights} if tokens.is_weighted else row

    def encode(self, samples: "Sequence[TokenizedChat]") -> pa.RecordBatch:
        from mini_trainer.data.columns.encoding import encode_texts

        return encode_texts(samples, self.schema)

    def report(self, counts: base.Counts, task: base.DataTask) -> Iterator[str]:
        yield base.format_count("trained tokens", counts.num_loss_counted_tokens, counts.num_tokens)
        stops = counts.stops
        if stops["rows"]:
            yield base.format_count("rows with a trained stop", stops["trained"], stops["rows"])
        if stops["appended"]:
            yield base.format_count("stop tokens appended", stops["appended"])

    def draw(self, counts: base.Counts, task: base.DataTask) -> base.Bars:
        trained = {f"trained: {role}": count for role, count in counts.trained_by_role.most_common()}
        rest = counts.num_tokens - counts.trained_by_role.total()
        return base.Bars("Tokens by role", trained | {"not trained": rest}, counts.num_tokens)

    def summarize(self, counts: base.Counts, task: base.DataTask) -> tuple[str, str]:
        return "trained", f"{counts.num_loss_counted_tokens / counts.num_tokens:.1%}"


TEXTS = TextColumns()
