"""Columns of rows, and keys of messages, that change the objective of a row.

Such a column must be read by the row's format or ignored by the user (`--ignore-columns`); otherwise the file is
refused: a row that is marked as a bad answer must not be trained as a good one. Other unread columns are counted for
the report.
"""

import re
import reprlib
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from mini_trainer.data.stores.json_lines import quote

Fields = dict[str, Any]
Names = Collection[str]

WEIGHING = "which parts of a row are trained, and how much they count"
PROMPTING = "what the model sees before its answer"
VISION_MODELS = "what the model sees or hears"
ASKING = "what the answer is to"
# Patterns of names by their meaning for the row; names are matched in lower case, with underscores between words.
MEANINGS = {
    "which of several answers is better": (
        *("chosen*", "*_chosen", "rejected*", "*_rejected", "preferred*", "non_preferred*", "dispreferred*"),
        *("preference*", "margin*", "winner*", "loser*", "positive_messages", "negative_messages"),
    ),
    "whether an answer is good or bad": (
        *("label", "labels", "kto*", "desirable*", "undesirable*", "thumb", "thumbs", "thumb_*", "thumbs_*"),
        *("feedback", "correct", "is_correct", "is_good", "is_bad", "is_chosen", "is_rejected", "is_preferred"),
        *("correctness*", "resolved", "is_resolved", "solved", "is_solved", "passed", "is_passed", "success"),
        *("is_success", "successful", "is_successful", "verified", "is_verified", "*_verify"),
        "is_reasoning_complete",
    ),
    "how good an answer is": ("score*", "reward*", "rating*", "rank", "ranks", "ranking*", "advantage*"),
    WEIGHING: (
        *("loss*", "weight*", "*_weight", "*_weights", "mask", "masks", "mask_*", "*_mask", "*_masks", "unmask"),
        *("train", "trainable", "training", "train_on_*", "train_detail", "training_detail"),
        *("*_train_detail", "*_training_detail"),
    ),
    PROMPTING: ("system", "system_prompt", "tools", "functions", "history", "chat_template", "chat_template_kwargs"),
    ASKING: ("prompt", "question", "instruction", "input", "context", "query"),
    VISION_MODELS: ("image", "images", "video", "videos", "audio", "audios"),
}
OF_MESSAGES = tuple(meaning for meaning in MEANINGS if meaning not in (PROMPTING, ASKING, VISION_MODELS))
HINTS = {
    **dict.fromkeys(("chosen", "rejected"), "--format preference reads chosen and rejected answers"),
    **dict.fromkeys(("label", "labels"), "--format classification reads labels"),
    **dict.fromkeys(("image", "images"), "--images reads images of chats"),
    "functions": "OpenAI's form before 'tools': write them as tools, and each function_call as tool_calls",
    **dict.fromkeys(("system", "system_prompt"), "a system prompt can be a message of its own"),
    "loss": "a message's loss (true or false) is its train here",
    "loss_scale": "a message's loss_scale is its weight here, from 0 to 1",
}
TURNS = ("messages", "conversations")
MARKS = ("train", "training", "weight")  # keys of messages that are read
NUM_COLUMNS_SHOWN = 30
MAX_NUM_COLUMNS = 200  # further unread columns are counted together
WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")


class RefusedColumn(ValueError):
    """An unread column that changes the objective of rows; the file is refused, even with --skip-invalid."""


@lru_cache(maxsize=4096)
def find_meaning(name: str) -> str | None:
    """The meaning for training of a column or key with this name; None if it has none."""
    normalized = WORD_BORDER.sub("_", name).strip("_").lower()
    for meaning, patterns in MEANINGS.items():
        if any(fnmatchcase(normalized, pattern) for pattern in patterns):
            return meaning
    return None


def check_columns(
    row: Fields, *, read: Names, paths: Names, ignored: Names, why: str, meanings: Names, tally: Counter[str]
) -> None:
    """Counts the row's columns that are neither in `read` nor on one of the `paths`; null and empty values do not
    count. RefusedColumn, with the reason `why`, if one of them has one of the `meanings`."""
    refused = {}
    for name, value in list_unread(row, read, paths):
        if says_nothing(value):
            continue
        own_name = name if name in row else name.rpartition(".")[2]
        if name not in ignored and find_meaning(own_name) in meanings:
            refused[name] = value
        count_column(tally, name)
    if refused:
        raise refuse_columns(refused, why)


def says_nothing(value: Any) -> bool:
    return value is None or value in ("", [], {})


def look_up(row: Fields, path: str) -> Any:
    """The row's value under the name `path`, or else under its dot-separated names, nested; None if missing."""
    if path in row:
        return row[path]
    value = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def find_name(values: Fields, given: str | None, choices: Sequence[str], *, option: str) -> str:
    """The name of the row's column: `given`, or the only one of `choices` that the row has."""
    found = [name for name in ([given] if given else choices) if look_up(values, name) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"has both {found[0]!r} and {found[1]!r}: name one with {option}")
    names = " or ".join(repr(name) for name in ([given] if given else choices))
    raise ValueError(f"{names} is missing or empty; the row has {quote(sorted(values))} ({option})")


def list_paths(row: Fields) -> list[str]:
    """The paths by which `look_up` finds a row's values."""
    paths = []
    for name, value in row.items():
        paths.append(name)
        paths += [f"{name}.{path}" for path in list_paths(value)] if isinstance(value, dict) else []
    return paths


def list_unread(row: Fields, read: Names, paths: Names) -> Iterator[tuple[str, Any]]:
    """The unread columns; for an object that a path leads into, its unread keys, by their paths."""
    for name, value in row.items():
        if name in read or name in paths:
            continue
        inner = [path.removeprefix(f"{name}.") for path in paths if path.startswith(f"{name}.")]
        if inner and isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in list_unread(value, (), inner))
        else:
            yield name, value


def refuse_columns(refused: Mapping[str, Any], why: str) -> RefusedColumn:
    """The error for unread columns that change the objective."""
    found = [
        f"{name!r} ({reprlib.repr(value)}), which says {find_meaning(name) or find_meaning(name.rpartition('.')[2])}"
        for name, value in refused.items()
    ]
    keys = [name.rpartition(".")[2] for name in refused]
    hints = "".join(f"; {hint}" for hint in dict.fromkeys(HINTS[key] for key in keys if key in HINTS))
    without = "it" if len(refused) == 1 else "them"
    return RefusedColumn(
        f"has {', and '.join(found)}. {why}, so the file is refused. Remove the rows that should not be trained as they"
        f" are, and pass --ignore-columns {quote_names(refused)} to train on the others without {without}{hints}"
    )


def show_name(name: str) -> str:
    """A column's name on one line; quoted if it is empty or cannot be printed."""
    return name if name.strip() and name.isprintable() else repr(name)


def quote_name(name: str) -> str:
    """A column's name as an argument of a shell command."""
    return shlex.quote(name) if name.isprintable() else f"${name!r}"


def quote_names(names: Iterable[str]) -> str:
    return " ".join(map(quote_name, names))


def count_column(tally: Counter[str], name: str, count: int = 1) -> None:
    tally[name if name in tally or len(tally) < MAX_NUM_COLUMNS else "other columns"] += count


def drop_ignored(row: Fields, ignored: Names, tally: Counter[str]) -> Fields:
    """The row without the `ignored` columns; counts these."""
    if not ignored:
        return row
    for name in ignored:
        if row.get(name) is not None:
            count_column(tally, name)
    return {name: value for name, value in row.items() if name not in ignored}


def check_messages(
    row: Fields,
    ignored: Names,
    tally: Counter[str],
    *,
    marks: Names = MARKS,
    meanings: Names = OF_MESSAGES,
    also: Names = (),
) -> Fields:
    """The row without the `ignored` keys of its messages and of their contents' parts. RefusedColumn for a key with one
    of the `meanings`, except for the `marks`, which are read. `also`: other columns of messages."""
    names = [name for name in TURNS if isinstance(row.get(name), list)][:1]
    return row | {
        name: [check_keys(turn, name, ignored, tally, marks=marks, meanings=meanings) for turn in row[name]]
        for name in (*names, *also)
    }


def check_keys(message: Any, prefix: str, ignored: Names, tally: Counter[str], *, marks: Names, meanings: Names) -> Any:
    """The message, or the part of its content, without the `ignored` keys, which are named `prefix`.KEY; RefusedColumn
    as in `check_messages`."""
    if not isinstance(message, dict):
        return message
    checked, refused = {}, {}
    for key, value in message.items():
        name = f"{prefix}.{key}"
        if name in ignored:
            count_column(tally, name)
            continue
        if key == "content" and isinstance(value, list):
            value = [check_keys(part, name, ignored, tally, marks=(), meanings=(WEIGHING,)) for part in value]
        elif not says_nothing(value) and key not in marks and find_meaning(key) in meanings:
            refused[name] = value
        checked[key] = value
    if refused:
        raise refuse_columns(refused, "Such keys of messages, and of their contents' parts, are not read")
    return checked


def describe_unread(tally: Counter[str], ignored: Names, keys: Mapping[str, int]) -> list[str]:
    """A note on unread columns and `keys` of messages, with their rows. ValueError if no row has an `ignored` one."""
    unread = {name: count for name, count in sorted(tally.items()) if name not in ignored}
    if missing := [name for name in ignored if name not in tally]:
        others = f"; unread columns: {', '.join(map(show_name, unread))}" if unread else ""
        raise ValueError(f"--ignore-columns {quote_names(missing)}: no row has a value there{others}")
    listed = []
    for kind, counts in (("columns", unread), ("keys of messages", keys)):
        shown = [f"{show_name(name)} ({count:,} {'row' if count == 1 else 'rows'})" for name, count in counts.items()]
        more = f" and {len(shown) - NUM_COLUMNS_SHOWN} more" if len(shown) > NUM_COLUMNS_SHOWN else ""
        listed += [f"{kind} {', '.join(shown[:NUM_COLUMNS_SHOWN])}{more}"] if shown else []
    return [f"not read: {'; '.join(listed)}"] if listed else []
