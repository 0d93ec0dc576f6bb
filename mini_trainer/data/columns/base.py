"""The kinds of data, their columns in tokenized data sets, and their descriptions in sidecars."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args

import numpy as np
import pyarrow as pa

from mini_trainer.options.doors import Doors

IGNORED = -100  # label of a token that is not trained

Sample = dict[str, Any]  # `input_ids` (L,), and the columns of its objective and family; optional ones may be absent
# Columns of data sets of every kind, and of those with a label for each token.
COMMON = {"input_ids": pa.list_(pa.int32()), "len": pa.int32(), "num_loss_counted_tokens": pa.int32()}
BY_TOKEN = {"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())} | COMMON
LENGTHS_COLUMN = "sequence_lengths"  # in samples of several sequences, which are concatenated in `input_ids`

CAUSAL_LM, SEQUENCES, TOKENS = "causal-lm", "sequence-classification", "token-classification"
VISION, PREFERENCE, FEEDBACK = "vision-language", "preference", "feedback"
LabelType = Literal["single", "multi", "regression"]

# Number of targets of each class, (classes,), and of all, in the samples that are trained.
CountLabels = Callable[[], tuple[np.ndarray, float]]


def list_sequences(sample: Sample) -> list[np.ndarray]:
    """Token ids of each of a sample's sequences, which stay together in one micro-batch."""
    lengths = sample.get(LENGTHS_COLUMN)
    return [sample["input_ids"]] if lengths is None else np.split(sample["input_ids"], np.cumsum(lengths)[:-1])


@dataclass(frozen=True)
class DataTask:
    """The purpose of a data set, as its sidecar says; chats have no labels to name."""

    objective: str = CAUSAL_LM
    label_type: LabelType | None = None
    label_names: tuple[str, ...] = ()  # by class; empty for regression
    num_labels: int = 0  # classes; for regression values to predict


@dataclass(frozen=True)
class RowFacts:
    """Facts about a row in addition to its lists."""

    task: DataTask
    length: int  # tokens
    num_counted: int  # targets
    vocab_size: float  # the model's
    where: str  # file and row, which messages begin with


class Counts(Protocol):
    """Counts over the rows of a data set (data.rows.report.Totals)."""

    rows: Counter[str]  # by what became of them
    trained_by_role: Counter[str]
    stops: Counter[str]
    labels: Counter[str]
    num_samples: int
    num_tokens: int
    num_loss_counted_tokens: int


@dataclass(frozen=True)
class Bars:
    """A chart of the page of process_data.py."""

    title: str
    counts: Mapping[str, int | float]
    whole: int | None  # the total of which the counts are shares; None: numbers without a bar


class Columns(ABC):
    """Columns of data sets for an objective: the schema, the check of a row, and how rows are written, counted, shown.
    The schema's lists are a sample's columns. `optional` may be missing or null; the values here take their place where
    other rows have one, repeated for each token if they are numbers."""

    schema: pa.Schema
    optional: ClassVar[Mapping[str, np.generic | tuple[()]]] = {}  # by column
    target: str = "labels"  # the column of targets
    has_labels = False  # whether rows name classes or values, which the sidecar lists
    facts: tuple[str, ...] = ()  # list columns that describe a sample without being part of it

    def fill(self, name: str, length: int) -> np.ndarray | tuple[()]:
        """The value of an optional column for a sample of `length` tokens that has none."""
        value = self.optional[name]
        return value if isinstance(value, tuple) else np.full(length, value)

    @abstractmethod
    def describe(self, task: DataTask) -> str:
        """The training signal, in words."""

    @abstractmethod
    def check(self, sample: Sample, row: RowFacts) -> None:
        """ValueError, which begins with the row's place, for one that breaks the contract. Tokens have been checked."""

    @abstractmethod
    def make_row(self, tokens: Any) -> dict[str, Any]:
        """The columns of a tokenized row, without those that are null."""

    def encode(self, samples: Sequence[Any]) -> pa.RecordBatch:
        """The columns of tokenized rows."""
        return pa.RecordBatch.from_pylist([self.make_row(tokens) for tokens in samples], schema=self.schema)

    def report(self, counts: Counts, task: DataTask) -> Iterator[str]:
        """Lines on the targets, for the terminal. Default: their number."""
        yield format_count("targets", counts.num_loss_counted_tokens)

    def draw(self, counts: Counts, task: DataTask) -> Bars:
        """The chart of the targets. Default: their number."""
        return Bars("Targets", {"targets": counts.num_loss_counted_tokens}, None)

    def summarize(self, counts: Counts, task: DataTask) -> tuple[str, str]:
        """The figure of the targets: its label and value. Default: their number."""
        return "targets", f"{counts.num_loss_counted_tokens:,}"

    def describe_data(self, counts: Counts, task: DataTask) -> dict[str, Any]:
        """The sidecar's entries about the data's kind."""
        return {"objective": task.objective}


def check_sample(columns: Columns, sample: Sample, row: RowFacts) -> None:
    """ValueError for a row that breaks the contract of its objective's columns."""
    names, input_ids = [name for name in ("input_ids", "labels") if name in sample], sample["input_ids"]
    if any(len(sample[name]) != row.length for name in names):
        counts = ", ".join(f"{len(sample[name])} {name}" for name in names)
        raise ValueError(f"{row.where}: {counts} and len {row.length}")
    if input_ids.min() < 0 or input_ids.max() >= row.vocab_size:
        raise ValueError(f"{row.where}: token ids beyond the model's vocabulary of {row.vocab_size}")
    if LENGTHS_COLUMN in sample and (sample[LENGTHS_COLUMN].min() < 1 or sample[LENGTHS_COLUMN].sum() != row.length):
        raise ValueError(f"{row.where}: {LENGTHS_COLUMN} are {sample[LENGTHS_COLUMN].tolist()} and len {row.length}")
    columns.check(sample, row)


def check_numbers(sample: Sample, name: str, row: RowFacts, *, most: float = np.inf) -> None:
    """ValueError if an optional column exists without a number from 0 to `most` for each token."""
    values = sample.get(name)
    if values is not None and not (len(values) == row.length and values.min() >= 0 and values.max() <= most):
        bounds = "from 0" if most == np.inf else f"from 0 to {most}"
        raise ValueError(f"{row.where}: {name} has to hold {row.length} numbers {bounds}")


def format_count(label: str, count: int, whole: int | None = None) -> str:
    """A line of a report, with the share of `whole` if there is one."""
    return f"  {label:<24}{count:>14,}" + ("" if whole is None else f"  {count / max(whole, 1):.1%}")


COLUMNS: Mapping[str, Columns] = Doors(
    {
        CAUSAL_LM: "mini_trainer.data.columns.token_columns:TEXTS",
        VISION: "mini_trainer.data.columns.image_columns:PICTURED",
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
