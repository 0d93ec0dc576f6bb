"""Converts rows for classifiers to `Labelled`: a text, a pair of texts, words or a chat, with its labels.

| keys                     | becomes                                               |
|--------------------------|-------------------------------------------------------|
| text, label              | a text                                                |
| text, text_pair, label   | two texts                                             |
| tokens, labels           | words, each with a label of its own                   |
| messages, tools, label   | a chat, which the chat template renders               |

Labels are collected over all rows before any is tokenized, then looked up row by row. A class is identified by its
name; an integer's name is its digits. Classes are numbered in the order of their names, integers by value, unless the
order is set (--label-names), another data set's (--labels-from), or the file's own (`ClassLabel` of the package
datasets, in Parquet).
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from mini_trainer.data.chat.conversation import Chat
from mini_trainer.data.chat.rendering import check_unicode
from mini_trainer.data.columns.base import IGNORED, SEQUENCES, TOKENS, DataTask, LabelType, describe_task, read_task
from mini_trainer.data.columns.label_columns import describe_names
from mini_trainer.data.rows import column_names
from mini_trainer.data.rows.chat_rows import build_chat, parse_lists, parse_turns, require_list, require_text
from mini_trainer.data.rows.column_names import Fields
from mini_trainer.data.rows.files import Chunk, Source
from mini_trainer.data.rows.values import read_features
from mini_trainer.data.stores.json_lines import quote
from mini_trainer.options import RowOptions
from mini_trainer.options.reading import read_object

NO_NAME = ("Cc", "Zl", "Zp")  # categories of characters: controls, and ends of lines

Label = str | int | float  # as in the row: a name, an integer, or a number

CLASSIFICATION = "classification"  # the format of rows for classifiers


@dataclass(frozen=True)
class Words:
    """A text in words, each of which has a label."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class TextPair:
    """Two texts that are classified together."""

    first: str
    second: str


Content = str | TextPair | Words | Chat


@dataclass(frozen=True)
class Labelled:
    """A content and its label: one, several, or one per word. `is_cell`: of a text table, where 1 may be a number."""

    content: Content
    label: Label | list[Label]
    is_cell: bool = False

    @property
    def identity(self) -> Content:
        return self.content


def read_labelled(values: Fields, chunk: Chunk, tally: Counter[str], *, options: RowOptions) -> list[Labelled]:
    """The row's content and label. Counts unread columns; one that weights the row raises RefusedColumn."""
    return [read_row(check_values(values, options, tally), options, is_cell=chunk.encoding == "table")]


def check_values(values: Fields, options: RowOptions, tally: Counter[str]) -> Fields:
    """The row without ignored columns. Raises RefusedColumn for a column, or a key of a message, that says how much is
    trained. Unread labels and scores are treated like any other column."""
    values = parse_turns(column_names.drop_ignored(values, options.ignore_columns, tally), ())
    label, text = options.column("label"), options.column("text")
    labels = ("label", "labels") if label is None else (label,)
    values = parse_lists(values, (*(("tokens",) if text is None else ()), *labels))
    texts = ("text", "tokens", "messages") if text is None else (text,)
    read = {"tools", *texts, options.column("text_pair") or "text_pair", *labels}
    ignored, meanings = options.ignore_columns, (column_names.WEIGHING,)
    why = "Classification does not read such columns"
    column_names.check_columns(values, read=read, paths=read, ignored=ignored, why=why, meanings=meanings, tally=tally)
    return column_names.check_messages(values, ignored, tally, marks=(), meanings=meanings)


def read_row(values: Fields, options: RowOptions, *, is_cell: bool) -> Labelled:
    """The row's content and label. Raises ValueError if one is missing or there are two contents."""
    content = read_content(values, options)
    name = column_names.find_name(values, options.column("label"), ("label", "labels"), option="--columns label=")
    given = column_names.look_up(values, name)
    if isinstance(content, Words):
        labels = [read_label(label, f"{name!r}, word {i}") for i, label in enumerate(require_items(given, name), 1)]
        if len(labels) != len(content.words):
            raise ValueError(f"{len(labels)} labels for {len(content.words)} words: each word needs one")
        return Labelled(content, labels)
    if isinstance(given, str) and options.label_separator is not None:
        given = given.split(options.label_separator)
    if not isinstance(given, list):
        return Labelled(content, read_label(given, repr(name)), is_cell)
    labels = [read_label(label, f"{name!r}, entry {i}") for i, label in enumerate(given, start=1)]
    return Labelled(content, labels)


def read_content(values: Fields, options: RowOptions) -> Content:
    choices = ("text", "tokens", "messages") if options.column("text") is None else ()
    name = column_names.find_name(values, options.column("text"), choices, option="--columns text=")
    pair = options.column("text_pair") or "text_pair"
    is_pair = options.column("text_pair") is not None or column_names.look_up(values, pair) is not None
    value = column_names.look_up(values, name)
    if is_pair:
        return TextPair(read_text(value, name), read_text(column_names.look_up(values, pair), pair))
    if name == "messages":
        return build_chat(require_list(values, name), {key: values[key] for key in ("tools",) if key in values})
    if isinstance(value, list):
        words = require_items(value, name)
        return Words(tuple(read_text(word, f"{name}, word {i}") for i, word in enumerate(words, start=1)))
    return read_text(value, name)


def read_text(value: Any, name: str) -> str:
    return check_unicode(require_text({name: value}, name))


def require_items(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} is {quote(value)}, expected a list with an entry for each word")
    return value


def read_label(value: Any, where: str) -> Label:
    """A label, unchanged except for whitespace around a name. Raises ValueError for an invalid or missing one."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        name = check_unicode(value.strip())
        if not name or name.lower() == "nan":
            raise ValueError(f"{where} is {quote(value)}: the row has no label")
        if any(unicodedata.category(character) in NO_NAME for character in name):
            raise ValueError(f"{where} is {quote(value)}: a label's name must be one line without control characters")
        return name
    if isinstance(value, int | float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}: the row has no label")
        return value
    if value is None:
        raise ValueError(f"{where} is missing or null: the row has no label")
    raise ValueError(f"{where} is {quote(value)}, expected a name, a number, or a list of these")


def is_ignored(label: Label) -> bool:
    """Whether the label marks a word without a class."""
    return label == IGNORED and not isinstance(label, str)


INTEGER = re.compile(r"[+-]?\d{1,18}")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
MAX_CLASSES = 100_000  # most names held
FEW_ROWS = 20  # with so few rows, each may have its own label
KINDS = {
    "name": "a name",
    "integer": "an integer",
    "number": "a number",
    "list": "a list of labels",
    "words": "a label for each word",
}


@dataclass
class LabelCounts:
    """The labels of some rows, with the first place of each. Its size does not grow with the rows."""

    kinds: dict[str, str] = field(default_factory=dict)  # key of KINDS -> its first place
    names: dict[str, str] = field(default_factory=dict)  # name -> its first place
    has_fraction: bool = False  # a number that is not an integer
    has_numbers_in_lists: bool = False  # numbers not written as integers
    num_rows: int = 0

    def add_row(self, row: Labelled, place: str) -> None:
        self.num_rows += 1
        labels = row.label if isinstance(row.label, list) else [row.label]
        labels = [label for label in labels if not is_ignored(label)]
        kind = "words" if isinstance(row.content, Words) else "list" if isinstance(row.label, list) else None
        self.kinds.setdefault(kind or find_kind(row.label, is_cell=row.is_cell), place)
        if kind is not None:
            self.has_numbers_in_lists |= any(isinstance(label, float) for label in labels)
        for label in labels:
            name = name_label(label)
            self.has_fraction |= kind is None and INTEGER.fullmatch(name) is None
            if len(self.names) < MAX_CLASSES:
                self.names.setdefault(name, place)

    def add(self, other: "LabelCounts") -> None:
        self.num_rows += other.num_rows
        self.kinds = other.kinds | self.kinds
        self.has_fraction |= other.has_fraction
        self.has_numbers_in_lists |= other.has_numbers_in_lists
        for name in other.names.keys() - self.names.keys() if len(self.names) < MAX_CLASSES else ():
            self.names[name] = other.names[name]


def find_kind(label: Label, *, is_cell: bool) -> str:
    """The kind of a single label: a key of KINDS. A table's cell is a number if it reads as one."""
    if isinstance(label, str):
        if not is_cell or NUMBER.fullmatch(label) is None:
            return "name"
        return "integer" if INTEGER.fullmatch(label) else "number"
    return "integer" if isinstance(label, int) else "number"


def name_label(label: Label) -> str:
    """A class's name: for a whole number, its digits."""
    if isinstance(label, float) and label.is_integer() and abs(label) < 1e15:
        return str(int(label))
    return str(label)


@dataclass(frozen=True)
class Labels:
    """The meaning of a data set's labels. `task.label_names` are the classes, in order."""

    task: DataTask
    takes_indices: bool  # an integer that is not a name is the number of a class

    @cached_property
    def classes(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.task.label_names)}

    def encode(self, row: Labelled) -> list[float] | list[int]:
        """The row's target; for words, the class of each. Raises ValueError for an unknown label."""
        task, is_list = self.task, isinstance(row.label, list)
        if (task.objective == TOKENS) != isinstance(row.content, Words):
            given = "words with a label each" if isinstance(row.content, Words) else "one label for the whole text"
            raise ValueError(f"the row has {given}, but the data is for {task.objective}")
        if task.objective == TOKENS:
            return [IGNORED if is_ignored(label) else self.find_class(label) for label in row.label]
        if task.label_type == "regression":
            return self.encode_values(row.label if is_list else [row.label])
        if is_list != (task.label_type == "multi"):
            given = "a list of labels" if is_list else f"the one label {row.label!r}"
            wanted = "one label" if is_list else "a list of labels"
            raise ValueError(f"the row has {given}; --label-type {task.label_type} needs {wanted}")
        if not is_list:
            return [float(self.find_class(row.label))]
        target = [0.0] * task.num_labels
        for label in row.label:
            found = self.find_class(label)
            if target[found]:
                raise ValueError(
                    f"the label {label!r} occurs twice: several labels are a list of those that apply, by name or"
                    " number, not a 0 or 1 for each"
                )
            target[found] = 1.0
        return target

    def encode_values(self, labels: Sequence[Label]) -> list[float]:
        if len(labels) != self.task.num_labels:
            raise ValueError(f"the row has {len(labels)} values, but the first row has {self.task.num_labels}")
        if no_numbers := [label for label in labels if isinstance(label, str) and NUMBER.fullmatch(label) is None]:
            raise ValueError(f"the label {no_numbers[0]!r} is not a number, which --label-type regression needs")
        values = [float(np.float32(float(label))) for label in labels]
        if not np.isfinite(values).all():
            raise ValueError(f"the label {labels!r} exceeds the range of 32-bit floats")
        return values

    def find_class(self, label: Label) -> int:
        found = self.classes.get(name_label(label))
        if found is None and self.takes_indices and INTEGER.fullmatch(name_label(label)):
            found = int(label) if 0 <= int(label) < self.task.num_labels else None
        if found is None:
            raise ValueError(f"the label {label!r} is not among {describe_names(self.task.label_names)}")
        return found


def decide_labels(
    counts: LabelCounts,
    *,
    first: Labelled | None,
    label_type: LabelType | None,
    label_names: Sequence[str],
    known: DataTask | None,
) -> Labels:
    """The meaning of the labels. `known`: the task of another data set with the same labels; `first`: the first row.
    Raises ValueError, naming the option to set, if the meaning is ambiguous."""
    if known is not None:
        if label_type not in (None, known.label_type):
            raise ValueError(f"--label-type {label_type}: the labels of --labels-from are for {describe_task(known)}")
        return Labels(known, takes_indices=takes_indices(known.label_names))
    kinds = {*counts.kinds}
    are_numbers = kinds == {"integer", "number"} and label_type != "multi"
    are_names = kinds <= {"integer", "number", "name"} and label_type == "single"
    if len(kinds) > 1 and not (are_numbers or are_names):
        found = " and ".join(f"{KINDS[kind]} ({counts.kinds[kind]})" for kind in KINDS if kind in kinds)
        raise ValueError(f"labels are of several kinds: {found}; fix the rows, or name one kind with --label-type")
    objective = TOKENS if "words" in counts.kinds else SEQUENCES
    label_type = choose_label_type(counts, label_type)
    if label_type == "regression":
        if label_names:
            raise ValueError("--label-names has no effect: regression labels have no names")
        num_values = len(first.label) if first is not None and isinstance(first.label, list) else 1
        return Labels(DataTask(objective, label_type, (), num_values), takes_indices=False)
    are_integers = all(map(INTEGER.fullmatch, counts.names))
    names = tuple(label_names) or tuple(sorted(counts.names, key=int if are_integers else None))
    if len(names) < 2 and label_type == "single":
        raise ValueError(
            f"all labels are {next(iter(counts.names), None)!r}: at least two classes are needed; list all possible"
            " classes with --label-names, or check --columns label="
        )
    return Labels(DataTask(objective, label_type, names, len(names)), takes_indices=takes_indices(names))


def takes_indices(names: Sequence[str]) -> bool:
    return not any(INTEGER.fullmatch(name) for name in names)


def choose_label_type(counts: LabelCounts, given: LabelType | None) -> LabelType:
    """The label type: `given`, or inferred. Raises ValueError if it is ambiguous, or if `given` is impossible."""
    kinds = {*counts.kinds}
    if "words" in kinds:
        if given not in (None, "single"):
            raise ValueError(f"--label-type {given}: rows of words have one label per word (single)")
        return "single"
    if "list" in kinds:
        if given == "single":
            raise ValueError(f"--label-type single: a row has a list of labels ({counts.kinds['list']})")
        if given is None and counts.has_numbers_in_lists:
            raise ValueError("labels are lists of numbers: pass --label-type regression if they are values to predict")
        return given or "multi"
    if given == "multi":
        place = next(iter(counts.kinds.values()))
        raise ValueError(f"--label-type multi: a row has one label, but a list is needed ({place})")
    if given is not None:
        return given
    num_classes = len(counts.names)
    if "number" in kinds and not counts.has_fraction:
        raise ValueError(
            f"labels are whole numbers with a decimal point, such as {min(counts.names)}.0: pass --label-type"
            " regression if they are values to predict, or --label-type single if they are classes"
        )
    if "number" in kinds:
        return "regression"
    if counts.num_rows > FEW_ROWS and 2 * num_classes > counts.num_rows:
        raise ValueError(
            f"{num_classes:,} different labels in {counts.num_rows:,} rows: if --columns label= is right, pass"
            " --label-type single, or regression if they are values to predict"
        )
    return "single"


def read_known_labels(path: str) -> DataTask:
    """The labels of a data set that process_data.py wrote, named by its file or by its sidecar."""
    sidecar = Path(path if path.endswith(".meta.json") else f"{path}.meta.json")
    try:
        known = read_object(sidecar)
    except ValueError as error:
        raise ValueError(f"--labels-from {path}: not a data set's sidecar: {error}") from None
    task = read_task(known, named=str(sidecar))
    if task.label_type is None:
        raise ValueError(f"--labels-from {path}: is a data set for {describe_task(task)}, without labels")
    return task


def find_declared_names(sources: Sequence[Source], label_field: str | None) -> tuple[str, ...]:
    """The names that the package datasets stored in Parquet files for the label's integers; () if there are none.
    Raises ValueError if files disagree."""
    declared: dict[tuple[str, ...], Source] = {}
    for source in sources:
        is_plain = source.ending == ".parquet" and source.compression is None
        if is_plain and (names := find_class_label(read_metadata(source), label_field)):
            declared.setdefault(names, source)
    if len(declared) > 1:
        (first, one), (second, other) = list(declared.items())[:2]
        raise ValueError(
            f"{one} names its labels {describe_names(first)}, but {other} {describe_names(second)}: use"
            " files that agree"
        )
    return next(iter(declared), ())


def read_metadata(source: Source) -> dict[str, Any]:
    """The features of the columns that `datasets` stored; empty if unreadable, as reading the rows reports damage."""
    try:
        with source.open() as file:
            return read_features(pq.read_schema(file))
    except (OSError, ValueError):
        return {}


def find_class_label(features: dict[str, Any], label_field: str | None) -> tuple[str, ...]:
    """The names of the label column's `ClassLabel`, or of the one of its lists' entries; empty if there is none."""
    for name in ("label", "labels") if label_field is None else (label_field,):
        feature = features.get(name)
        while isinstance(feature, dict | list):
            feature = feature[0] if isinstance(feature, list) else feature
            if feature.get("_type") == "ClassLabel":
                return tuple(map(str, feature.get("names") or ()))
            feature = feature.get("feature")
    return ()


def count_classes(targets: Sequence[float] | Sequence[int], task: DataTask) -> Counter[str]:
    """Count of each label in a row's target."""
    if task.label_type == "regression":
        return Counter()
    if task.label_type == "multi":
        return Counter(task.label_names[i] for i, value in enumerate(targets) if value)
    return Counter(task.label_names[int(target)] for target in targets if target != IGNORED)
