"""The columns of preferences (a chosen and a rejected sequence of one prompt), and of good and bad answers."""

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from mini_trainer.data.columns.base import BY_TOKEN, IGNORED, LENGTHS_COLUMN, Columns, DataTask, RowFacts, Sample
from mini_trainer.data.columns.token_columns import TextColumns

if TYPE_CHECKING:
    from mini_trainer.data.columns.encoding import TokenizedFeedback, TokenizedPair

MARGIN_COLUMN, PAIR_WEIGHT_COLUMN, GOOD_COLUMN = "margin", "pair_weight", "good"
REFERENCE_COLUMN = "reference_logps"  # computed before training: of each answer, (2,)
LEAST_WEIGHT, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class AnswerColumns(TextColumns):
    """One or two sequences, one after the other; labels as those of language models. `len` is that of all; a column
    that may be null holds one number."""

    optional: ClassVar = {PAIR_WEIGHT_COLUMN: np.float32(1)}

    def fill(self, name: str, length: int) -> np.ndarray | tuple[()]:
        return super().fill(name, 1)

    def make_row(self, tokens: "TokenizedPair | TokenizedFeedback") -> dict[str, Any]:
        row = super().make_row(tokens) | {LENGTHS_COLUMN: [len(side.input_ids) for side in tokens.sides]}
        return row if tokens.weight is None else row | {PAIR_WEIGHT_COLUMN: [tokens.weight]}

    describe_data, encode = Columns.describe_data, Columns.encode


class PreferenceColumns(AnswerColumns):
    """A chosen sequence and a rejected one. `num_loss_counted_tokens` are those of both."""

    schema = pa.schema(
        BY_TOKEN
        | {
            LENGTHS_COLUMN: pa.list_(pa.int32()),  # of the chosen and of the rejected sequence
            MARGIN_COLUMN: pa.list_(pa.float32()),  # by how much the chosen one is to be better
            PAIR_WEIGHT_COLUMN: pa.list_(pa.float32()),  # the pair's weight in the mean
        }
    )
    optional: ClassVar = AnswerColumns.optional | {MARGIN_COLUMN: np.float32(0)}

    def describe(self, task: DataTask) -> str:
        return "preferences"

    def check(self, sample: Sample, row: RowFacts) -> None:
        super().check(sample, row)
        lengths, labels = sample[LENGTHS_COLUMN], sample["labels"]
        if len(lengths) != 2:
            raise ValueError(f"{row.where}: {LENGTHS_COLUMN} are {lengths.tolist()}, expected two: chosen and rejected")
        for name, side in zip(("chosen", "rejected"), np.split(labels, lengths[:1]), strict=True):
            if side[0] != IGNORED or (side == IGNORED).all():
                raise ValueError(f"{row.where}: the {name} sequence must train some of its tokens, and not its first")
        check_number(sample, MARGIN_COLUMN, row, least=0)
        check_number(sample, PAIR_WEIGHT_COLUMN, row, least=LEAST_WEIGHT)

    def make_row(self, tokens: "TokenizedPair") -> dict[str, Any]:
        return super().make_row(tokens) | ({} if tokens.margin is None else {MARGIN_COLUMN: [tokens.margin]})


class FeedbackColumns(AnswerColumns):
    """A good or bad answer, and after it the same prompt with an unrelated answer, which may be missing.
    `num_loss_counted_tokens` are those of the answer."""

    schema = pa.schema(
        BY_TOKEN
        | {
            LENGTHS_COLUMN: pa.list_(pa.int32()),  # one or two
            GOOD_COLUMN: pa.list_(pa.float32()),  # one number: 1 for a good answer, 0 for a bad one
            PAIR_WEIGHT_COLUMN: pa.list_(pa.float32()),  # the sample's weight in the mean
        }
    )

    def describe(self, task: DataTask) -> str:
        return "binary feedback"

    def check(self, sample: Sample, row: RowFacts) -> None:
        own, *unrelated = np.split(sample["labels"], sample[LENGTHS_COLUMN][:-1].cumsum())
        super().check(sample | {"labels": own}, row)
        if len(unrelated) > 1 or any(side[0] != IGNORED or (side == IGNORED).all() for side in (own, *unrelated)):
            raise ValueError(f"{row.where}: each of one or two sequences must train some of its tokens, not its first")
        if sample["labels"].max() >= row.vocab_size:
            raise ValueError(f"{row.where}: token ids beyond the model's vocabulary of {row.vocab_size}")
        check_number(sample, GOOD_COLUMN, row, least=0, most=1)
        check_number(sample, PAIR_WEIGHT_COLUMN, row, least=LEAST_WEIGHT)

    def make_row(self, tokens: "TokenizedFeedback") -> dict[str, Any]:
        return super().make_row(tokens) | {GOOD_COLUMN: [float(tokens.is_good)]}


PREFERENCES, FEEDBACKS = PreferenceColumns(), FeedbackColumns()


def check_number(sample: Sample, name: str, row: RowFacts, *, least: float, most: float = LARGEST) -> None:
    """ValueError if a column exists without one number in these bounds."""
    value = sample.get(name)
    if value is not None and not (len(value) == 1 and least <= value[0] <= most):
        raise ValueError(f"{row.where}: {name} is {value.tolist()}, expected one number from {least:g} to {most:g}")
