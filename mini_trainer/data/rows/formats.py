"""Converts rows of any format to `Chat`, `Completion` or `Document`; unusable rows are refused with a reason.

| format     | keys                                          | becomes                                          |
|------------|-----------------------------------------------|--------------------------------------------------|
| messages   | messages, tools, unmask                       | chat; a single `pretrain` message: a document    |
| sharegpt   | conversations (from, value), system, tools    | chat                                             |
| alpaca     | instruction, input, output, system, history   | chat; instruction, blank line, input is the user |
| completion | prompt, and completion or generation          | text whose completion is trained                 |
|            | the same, lists of messages; system, tools    | chat whose completion is trained                 |
| document   | document or text                              | text that is all trained                         |
| pairs      | question and answer, and other names (PAIRS)  | chat, as of alpaca                               |
"""

import contextlib
import difflib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from mini_trainer.data.chat.conversation import IMAGE_PART, Chat, Completion, Document, Example, list_parts
from mini_trainer.data.rows import chat_rows, column_names
from mini_trainer.data.rows.column_names import Fields
from mini_trainer.data.rows.files import Chunk, iterate_rows
from mini_trainer.data.rows.lines import parse_row
from mini_trainer.data.stores.json_lines import quote
from mini_trainer.options.doors import TEXT_FORMATS

MOST_PATHS = 40  # most paths listed in a message


PATHS = ("messages", "prompt", "completion", "text", "system")  # of --columns, those of the detected formats


@dataclass(frozen=True)
class FieldPaths:
    """Paths in rows to the values that their format reads under other names; a dot leads to a nested key. `ignored`:
    columns to ignore, even if the format would read them. `data_format`: the rows' if the user has named it."""

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    system: str | None = None
    ignored: tuple[str, ...] = ()
    data_format: str | None = None

    @property
    def given(self) -> dict[str, str]:
        """The paths that are set, by name."""
        paths = {name: getattr(self, name) for name in PATHS}
        return {name: path for name, path in paths.items() if path is not None}

    def rename(self, name: str) -> str:
        """The name under which the rows' format reads a value."""
        return IN_ALPACA.get(name, name) if self.data_format == "alpaca" else name


OWN_NAMES = FieldPaths()


def read_text_row(
    values: Fields,
    chunk: Chunk,
    tally: Counter[str],
    *,
    is_given: bool,
    paths: FieldPaths = OWN_NAMES,
    folders: chat_rows.ImageFolders | None = None,
) -> list[Example]:
    """The row's example. `is_given`: the user has set the chunk's format, and may know better. With `folders`, chats
    have images. Raises RefusedColumn for an unread column that changes the objective; counts the others in `tally`."""
    also_read = chat_rows.IMAGE_COLUMNS if folders is not None else ()
    fields, found = read_fields(values, chunk.format, paths=paths, tally=tally, also_read=also_read), []
    if folders is not None:
        fields, found = chat_rows.take_images(fields)
    example = read_example(fields, chunk.format, is_given=is_given, takes_images=folders is not None)
    if folders is not None and isinstance(example, Chat):
        return [replace(example, images=tuple(folders.find_path(value, chunk.file) for value in found))]
    if found:
        raise ValueError("has images but is not a conversation: write its text as a user's message")
    return [example]


def read_fields(
    row: Fields, data_format: str | None, *, paths: FieldPaths, tally: Counter[str], also_read: tuple[str, ...] = ()
) -> Fields:
    """The row under its format's names, without ignored columns. RefusedColumn for one that changes the objective."""
    row = column_names.drop_ignored(row, paths.ignored, tally)
    answered = list_conversation(row, paths) if data_format in (None, "completion") else ()
    also_read = (*also_read, *OF_CHATS) if answered else also_read
    given = paths.given
    own = {"messages": ("messages", "conversations"), "text": ("text", "document")}
    replaced = {name for key in given for name in own.get(key, (paths.rename(key),))}
    own_columns = list_formats()[data_format].columns if data_format in list_formats() else ()
    read = {*own_columns, *also_read} - replaced
    why = f"The {data_format} format does not read such columns" if data_format else "No format reads such columns"
    # Chats often repeat their first question in a column; an answer chosen by a path may lack its question. A prompt's
    # columns are no reason to refuse rows that have nothing else to train.
    without = {column_names.PROMPTING: data_format is None, column_names.ASKING: not given and data_format not in PAIRS}
    meanings = [meaning for meaning in column_names.MEANINGS if not without.get(meaning, False)]
    column_names.check_columns(
        row, read=read, paths=given.values(), ignored=paths.ignored, why=why, meanings=meanings, tally=tally
    )
    fields = chat_rows.parse_turns(rename_fields(row, paths, also_read), answered)
    return column_names.check_messages(fields, paths.ignored, tally, also=answered)


def detect_format(chunk: Chunk, paths: FieldPaths = OWN_NAMES) -> str | None:
    """The format of the first row that has one."""
    for row in iterate_rows(chunk):
        with contextlib.suppress(ValueError):  # an unreadable row is refused, with its reason, when it is read
            values = parse_row(row.value, chunk.encoding) or {}
            fields = rename_fields(column_names.drop_ignored(values, paths.ignored, Counter()), paths)
            if (found := find_format(fields)) is not None:
                return found
    return None


def check_paths(chunk: Chunk, paths: FieldPaths) -> None:
    """Raises ValueError, listing existing paths, for a path that no row of the chunk has."""
    rows = []
    for row in iterate_rows(chunk):
        with contextlib.suppress(ValueError):  # an unreadable row is refused, with its reason, when it is read
            rows.append(parse_row(row.value, chunk.encoding) or {})
    for name, path in paths.given.items():
        if rows and all(column_names.look_up(row, path) is None for row in rows):
            found = sorted({path for row in rows for path in column_names.list_paths(row)})
            close = difflib.get_close_matches(path, found, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            more = f" and {len(found) - MOST_PATHS} more" if len(found) > MOST_PATHS else ""
            raise ValueError(
                f"--columns {name}={path}: none of the first {len(rows)} rows of {chunk.file} has"
                f" it{hint}; they have {', '.join(found[:MOST_PATHS])}{more}"
            )


def rename_fields(row: Fields, paths: FieldPaths, also_read: tuple[str, ...] = ()) -> Fields:
    """The row with the values at `paths` under the names of its format. Of its other columns, only those that this
    format reads and `also_read` are kept. Raises ValueError if the row lacks a path."""
    if not (given := paths.given):
        return chat_rows.parse_turns(row, ())
    found = chat_rows.parse_turns({name: column_names.look_up(row, path) for name, path in given.items()}, ())
    for name, value in found.items():
        if value is None and name != "system":
            raise ValueError(f"no {given[name]!r} (--columns {name}=) or it is empty: the row has {quote(sorted(row))}")
    beside = BESIDE["completion" if "prompt" in found or "completion" in found else next(iter(found))]
    turns = found.get("messages")
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and "from" in first and "role" not in first:
        found["conversations"], beside = found.pop("messages"), BESIDE["conversations"]
    if "completion" in found:
        beside = ("prompt",)
    if paths.data_format in ("alpaca", "sharegpt"):
        beside = TEXT_FORMATS[paths.data_format].columns
        found = {paths.rename(name): value for name, value in found.items()}
    return {name: row[name] for name in (*beside, *also_read) if name in row} | found


@cache  # every row asks
def list_formats() -> dict[str, "TextFormat"]:
    """The formats that are detected, in the order in which they are tried."""
    return {**TEXT_FORMATS, **PAIRS}


def find_format(fields: Fields) -> str | None:
    """The first format whose keys a row has, but no pair if it has two; null counts as missing, because tables cannot
    leave keys out."""
    has = {key for key, value in fields.items() if value is not None}
    found = [name for name, known in list_formats().items() if all(has & set(choices) for choices in known.keys)]
    return None if not found or (found[0] in PAIRS and len(found) > 1) else found[0]


def read_example(row: Fields, data_format: str | None, *, is_given: bool, takes_images: bool = False) -> Example:
    """The row's example. Raises ValueError for a row of a format other than the file's, or with invalid values."""
    found = find_format(row)
    if data_format is None or (found is None and not is_given):
        expected = "; ".join(" and ".join(map(" or ".join, known.keys)) for known in list_formats().values())
        wanted = f"not a {data_format} row" if data_format else "unrecognised format"
        texts = [key for key, value in row.items() if isinstance(value, str)]
        asked, answered = map(column_names.quote_name, texts[:2] if len(texts) > 1 else ("QUESTION", "ANSWER"))
        raise ValueError(
            f"{wanted}: its keys are {quote(sorted(row))}; for a chat of a question and an answer pass --format alpaca"
            f" --columns prompt={asked} completion={answered}, for messages --columns messages=NAME; expected"
            f" {expected}"
        )
    if found != data_format and not is_given:
        raise ValueError(f"format differs from the file's: {found}, but the first row is {data_format}")
    example = list_formats()[data_format].read(row)
    if isinstance(example, Chat) and not takes_images:
        refuse_images(example)
    return example


def refuse_images(chat: Chat) -> None:
    for number, message in enumerate(chat.messages, start=1):
        if IMAGE_PART in list_parts(message):
            where = f"message {number} ({message['role']})"
            raise ValueError(f"{where} has the content part {quote(IMAGE_PART)}: process_data.py --images reads images")


def list_conversation(row: Fields, paths: FieldPaths = OWN_NAMES) -> tuple[str, ...]:
    """The names of prompt and completion if both are messages (or their JSON text), as in TRL; empty otherwise."""
    prompt = column_names.look_up(row, paths.prompt or "prompt")
    for name in ("completion", "generation"):
        both = chat_rows.parse_turns({"prompt": prompt, name: column_names.look_up(row, paths.completion or name)})
        if all(isinstance(value, list) for value in both.values()):
            return "prompt", name
    return ()


def read_completion(row: Fields) -> Completion | Chat:
    """Reads {"prompt": ..., "completion": ...} or {"prompt": ..., "generation": ...}, texts or lists of messages. Of
    these only the assistant's of the completion are trained."""
    if not (names := list_conversation(row)):
        text = chat_rows.require_text(row, "prompt")
        return Completion(text, chat_rows.require_one_text(row, "completion", "generation"))
    prompt, answer = (chat_rows.require_list(chat_rows.parse_turns(row, names), name) for name in names)
    prompt = chat_rows.read_system(row) + prompt
    chat, num_prompt = chat_rows.build_chat([*prompt, *answer], row), chat_rows.count_prompt(prompt)
    if any(message.get("train") for message in chat.messages[:num_prompt]):
        raise ValueError("has 'train': true in a message of the prompt: only the completion's messages are trained")
    return chat_rows.leave_untrained(chat, num_prompt)


def read_document(row: Fields) -> Document:
    """Reads {"document": ...} or {"text": ...}."""
    return Document(chat_rows.require_one_text(row, "document", "text"))


BESIDE_MESSAGES = ("tools", "unmask", chat_rows.TEMPLATE_ARGS)
OF_CHATS = ("system", *BESIDE_MESSAGES)
OF_COMPLETIONS = ("prompt", "completion", "generation")
IN_ALPACA = {"prompt": "instruction", "completion": "output"}


@dataclass(frozen=True)
class TextFormat:
    """A format of rows with texts (options.doors.TEXT_FORMATS)."""

    read: Callable[[Fields], Example]
    keys: tuple[tuple[str, ...], ...]  # a row has one key of each tuple
    columns: tuple[str, ...]  # that it reads


MESSAGES = TextFormat(chat_rows.read_messages, (("messages",),), ("messages", *BESIDE_MESSAGES))
SHAREGPT = TextFormat(chat_rows.read_sharegpt, (("conversations",),), ("conversations", *OF_CHATS))
ALPACA = TextFormat(
    chat_rows.read_alpaca, (("instruction",), ("output",)), ("instruction", "input", "output", "history", *OF_CHATS)
)
COMPLETION = TextFormat(read_completion, (("prompt",), ("completion", "generation")), OF_COMPLETIONS)
DOCUMENT = TextFormat(read_document, (("document", "text"),), ("document", "text"))
NAMES = (("question", "answer"), ("prompt", "response"), ("instruction", "response"), ("input", "output"))
PAIRS = {
    f"{asked} and {answered}": TextFormat(
        partial(chat_rows.read_alpaca, asked=asked, answered=answered),
        ((asked,), (answered,)),
        (asked, answered, *(("input",) if asked == "instruction" else ()), *OF_CHATS),
    )
    for asked, answered in NAMES
}  # chats of a question and an answer

# Columns that a format reads in addition to those set by a path.
BESIDE = {
    "messages": BESIDE_MESSAGES,
    "conversations": OF_CHATS,
    "completion": OF_COMPLETIONS,
    "text": (),
    "system": OF_COMPLETIONS,
}
