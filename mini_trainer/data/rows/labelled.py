"""Converts rows for classifiers to `Labelled`: a text, a pair of texts, words or a chat, with its labels.

| keys                     | becomes                                               |
|--------------------------|-------------------------------------------------------|
| text, label              | a text                                                |
| text, text_pair, label   | two texts                                             |
| tokens, labels           | words, each with a label of its own                   |
| messages, tools, label   | a chat, which the chat template renders               |

The kinds and classes of labels are determined over all rows (`data.rows.labels`).
"""

import math
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mini_trainer.data.chat.conversation import Chat
from mini_trainer.data.chat.rendering import check_unicode
from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.chat_rows import build_chat, require_list
from mini_trainer.data.rows.column_names import (
    WEIGHING,
    Fields,
    check_columns,
    check_messages,
    drop_ignored,
    find_name,
    look_up,
)
from mini_trainer.data.rows.files import Chunk
from mini_trainer.data.rows.turn_texts import parse_lists, parse_turns
from mini_trainer.data.stores.json_lines import quote
from mini_trainer.options import RowOptions

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
    """A content and its label: one, several, or one for each word. `is_cell`: from a text table, where the text 1 may
    be a number."""

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
    values = parse_turns(drop_ignored(values, options.ignore_columns, tally), ())
    label, text = options.column("label"), options.column("text")
    labels = ("label", "labels") if label is None else (label,)
    values = parse_lists(values, (*(("tokens",) if text is None else ()), *labels))
    texts = ("text", "tokens", "messages") if text is None else (text,)
    read = {"tools", *texts, options.column("text_pair") or "text_pair", *labels}
    ignored, meanings, why = options.ignore_columns, (WEIGHING,), "Classification does not read such columns"
    check_columns(values, read=read, paths=read, ignored=ignored, why=why, meanings=meanings, tally=tally)
    return check_messages(values, ignored, tally, marks=(), meanings=meanings)


def read_row(values: Fields, options: RowOptions, *, is_cell: bool) -> Labelled:
    """The row's content and label. Raises ValueError if one is missing or there are two contents."""
    content = read_content(values, options)
    name = find_name(values, options.column("label"), ("label", "labels"), option="--columns label=")
    given = look_up(values, name)
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
    """The content to classify."""
    choices = ("text", "tokens", "messages") if options.column("text") is None else ()
    name = find_name(values, options.column("text"), choices, option="--columns text=")
    pair = options.column("text_pair") or "text_pair"
    is_pair = options.column("text_pair") is not None or look_up(values, pair) is not None
    value = look_up(values, name)
    if is_pair:
        return TextPair(read_text(value, name), read_text(look_up(values, pair), pair))
    if name == "messages":
        return build_chat(require_list(values, name), {key: values[key] for key in ("tools",) if key in values})
    if isinstance(value, list):
        words = require_items(value, name)
        return Words(tuple(read_text(word, f"{name}, word {i}") for i, word in enumerate(words, start=1)))
    return read_text(value, name)


def read_text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name!r} is {quote(value)}, expected text")
    return check_unicode(value)


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
