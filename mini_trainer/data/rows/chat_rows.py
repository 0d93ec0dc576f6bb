"""Reads rows of the formats messages, sharegpt and alpaca as chats, and checks their messages, tools and arguments;
rows with images become conversations with bare image parts, and the place of each image.

| where the row has its images                                                             |
|------------------------------------------------------------------------------------------|
| in parts: {"type": "image", "image": X}, or "path" or "url" for "image"                  |
| in parts: {"type": "image_url", "image_url": {"url": X}}                                 |
| in a column, images or image: X for each <image> in a text, or each {"type": "image"}    |

X is the path of a file, relative to the row's file; a data: URL; {"path": ..., "bytes": ...}; or bytes.

Cells of tables that hold messages as JSON text, and chats whose last messages answer a prompt, are read here too.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mini_trainer.data.chat import conversation
from mini_trainer.data.chat.normalizing import normalize
from mini_trainer.data.rows.column_names import TURNS, Fields
from mini_trainer.data.rows.values import read_message, refuse_non_json
from mini_trainer.data.stores.image_files import as_data_url
from mini_trainer.data.stores.json_lines import parse_json, quote, read_embedded_json

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "tool_call",
}  # fmt: skip


def read_messages(row: Fields) -> conversation.Chat | conversation.Document:
    """Reads {"messages": [{"role": ..., "content": ...}, ...]}, or a single message of the role `pretrain`."""
    messages = require_list(row, "messages")
    if len(messages) == 1 and isinstance(messages[0], dict) and messages[0].get("role") == conversation.PRETRAIN:
        return conversation.Document(require_text(messages[0], "content", "message 1 (pretrain): "))
    return build_chat(messages, row)


def read_sharegpt(row: Fields) -> conversation.Chat:
    """Reads {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}."""
    turns = [read_turn(turn, number) for number, turn in enumerate(require_list(row, "conversations"), start=1)]
    return build_chat(read_system(row) + turns, row)


def read_turn(turn: Any, number: int) -> Fields:
    """A turn of ShareGPT as a message. Keys other than `from` and `value` stay."""
    if not isinstance(turn, dict):
        raise ValueError(f"turn {number} is {quote(turn)}, expected an object with 'from' and 'value'")
    if "role" in turn and "from" not in turn:
        return turn
    speaker = turn.get("from")
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise ValueError(f"turn {number} is from {quote(speaker)}, allowed: {', '.join(SHAREGPT_ROLES)}")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    value = turn.get("value")
    if speaker == "function_call":
        value = read_embedded_json(value, f"turn {number} (function_call): 'value'")
    return {"role": role, "content": value} | others


def read_alpaca(row: Fields, asked: str = "instruction", answered: str = "output") -> conversation.Chat:
    """Reads {"instruction": ..., "input": ..., "output": ...}: a non-empty input follows after a blank line. `asked`,
    `answered`: other names of instruction and output; one of them may be input."""
    instruction, output = require_text(row, asked), require_text(row, answered)
    extra, history = ("" if asked == "input" else row.get("input")) or "", row.get("history") or []
    if not isinstance(extra, str):
        raise ValueError(f"'input' is {quote(extra)}, expected text")
    is_pairs = isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    if not is_pairs:
        raise ValueError(f"'history' is {quote(history)}, expected a list of [question, answer]")
    turns = [*history, (f"{instruction}\n\n{extra}" if extra else instruction, output)]
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    return build_chat(read_system(row) + messages, row)


TEMPLATE_ARGS = "chat_template_kwargs"  # column of the template's arguments for a row


def build_chat(messages: list[Any], row: Fields) -> conversation.Chat:
    """A chat with checked messages and the row's `unmask` and `tools`."""
    unmask = row.get("unmask")
    if not isinstance(unmask, bool | None):
        raise ValueError(f"'unmask' is {quote(unmask)}, allowed: true, false")
    numbered, changes = normalize(messages)
    messages = []
    for number, message in numbered:
        message = read_message(message, number)
        check_message(message, number)
        messages.append(read_marks(message, number))
    tools, template_args = read_tools(row), read_template_args(row)
    return conversation.Chat(messages, bool(unmask), tools, template_args=template_args, changes=changes)


def count_prompt(messages: list[Any]) -> int:
    """How many messages a chat has of this prompt, which begins it. ValueError for one that an answer may continue."""
    if (found := [message for _, message in normalize(messages)[0]]) and isinstance(found[-1], dict):
        check_prompt(found)
    return len(found)


def read_template_args(row: Fields) -> Fields | None:
    """The template's arguments for this row: an object, or one as JSON text."""
    given = row.get(TEMPLATE_ARGS)
    given = read_embedded_json(given, f"{TEMPLATE_ARGS!r}") if isinstance(given, str) and given.strip() else given
    if not isinstance(given, dict | None) and given != "":
        raise ValueError(f"{TEMPLATE_ARGS!r} is {quote(given)}, expected an object of arguments")
    refuse_non_json(given, repr(TEMPLATE_ARGS))
    return given or None


def read_marks(message: Fields, number: int) -> Fields:
    """The message with Axolotl's `training` as `train`."""
    if "training" not in message:
        return message
    translated = {key: value for key, value in message.items() if key != "training"}
    if message["training"] is None:
        return translated
    if message.get("train") is not None:
        where = f"message {number} ({message['role']})"
        raise ValueError(f"{where} has both 'train' and 'training', which mean the same: leave one out")
    return translated | {"train": message["training"]}


def check_message(message: Any, number: int) -> None:
    """Raises ValueError for an invalid message, or one with an unsupported field."""
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is {quote(message)}, expected an object with 'role' and 'content'")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        alone = " ('pretrain' only as a row's single message)" if role == conversation.PRETRAIN else ""
        raise ValueError(f"message {number} has the role {quote(role)}, allowed: {', '.join(ROLES)}{alone}")
    where = f"message {number} ({role})"
    for key in ("function_call", "function_calls"):
        if message.get(key) is not None:
            raise ValueError(f"{where} has {key!r}, OpenAI's form before 'tool_calls': write it as 'tool_calls'")
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None) or not all(isinstance(call, dict) for call in calls or []):
        raise ValueError(f"{where} has the tool_calls {quote(calls)}, expected a list of objects")
    if calls and role != "assistant":
        raise ValueError(f"{where} has tool_calls, which only an assistant's message can have")
    may_be_empty = role != "assistant" or bool(calls) or conversation.IMAGE_PART in conversation.list_parts(message)
    text = join_parts(content, where) if isinstance(content, list) else content
    if not (isinstance(text, str) or (text is None and calls)) or not (may_be_empty or text.strip()):
        raise ValueError(f"{where} has the content {quote(content)}, expected text")


def join_parts(content: list[Any], where: str) -> str:
    """The text of a content in OpenAI's format, [{"type": "text", "text": ...}, ...]; templates get the list itself."""
    parts = [part for part in content if part != conversation.IMAGE_PART]
    for part in parts:
        if not conversation.is_text_part(part):
            raise ValueError(f"{where} has the content part {quote(part)}, expected {{'type': 'text', 'text': ...}}")
    return "".join(part["text"] for part in parts)


def read_tools(row: Fields) -> list[Fields] | None:
    """The functions that a template describes to the model: a list of objects, or such a list as JSON text."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = read_embedded_json(tools, "'tools'") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"'tools' is {quote(tools)}, expected a list of objects")
    refuse_non_json(tools, "'tools'")
    return tools


def read_system(row: Fields) -> list[Fields]:
    """The `system` column as the first message; no message if it is empty."""
    return [{"role": "system", "content": require_text(row, "system")}] if row.get("system") else []


def require_list(row: Fields, key: str) -> list[Any]:
    value = row.get(key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key!r} must be a list of at least one message, got {quote(value)}")
    return value


def require_text(row: Fields, key: str, where: str = "") -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}{key!r} is {quote(value)}, expected text")
    return value


def require_one_text(row: Fields, *keys: str) -> str:
    """The text under the only one of `keys` that the row has."""
    found = [key for key in keys if row.get(key) is not None]
    if len(found) > 1:
        raise ValueError(f"has both {found[0]!r} and {found[1]!r}: leave one out")
    return require_text(row, found[0] if found else keys[0])


MARKER = "<image>"  # LLaVA's marker
IMAGE_COLUMNS = ("images", "image")
CONTENT_KEYS = {"messages": "content", "conversations": "value"}


@dataclass(frozen=True)
class ImageFolders:
    """Directories of images: of each file of rows, by its name, and of the data set."""

    of_files: dict[str, Path]
    of_data: Path

    def find_path(self, value: Any, file: str) -> str:
        """An image as stored in the data set: a path relative to its directory, a web URL, or a data: URL."""
        if isinstance(value, dict):
            value = next((value[name] for name in ("bytes", "path", "url") if value.get(name)), None)
        if isinstance(value, bytes):
            return as_data_url(value)
        if not isinstance(value, str) or not value:
            raise ValueError(f"an image is {quote(value)}, expected a path, a data: URL or bytes")
        if value.startswith("data:") or "://" in value:
            return value
        return os.path.relpath(self.of_files[file] / value, self.of_data)


def take_images(fields: Fields) -> tuple[Fields, list[Any]]:
    """The row with bare image parts, and the value of each of them, in the order of the text."""
    waiting = read_column(fields)
    num_given = len(waiting)
    if (key := next((key for key in CONTENT_KEYS if isinstance(fields.get(key), list)), None)) is None:
        if waiting:
            raise ValueError("has images but no messages or conversations")
        return fields, []
    found: list[Any] = []
    turns = [take_from_turn(turn, CONTENT_KEYS[key], waiting, found, has_column=num_given > 0) for turn in fields[key]]
    if waiting:
        raise ValueError(f"{num_given} images, but the texts have places for {num_given - len(waiting)} ({MARKER})")
    return {**fields, key: turns}, found


def read_column(fields: Fields) -> list[Any]:
    """The values of the row's column of images."""
    columns = parse_lists({name: fields[name] for name in IMAGE_COLUMNS if name in fields}, IMAGE_COLUMNS)
    if (given := columns.get("images", columns.get("image"))) is None:
        return []
    return list(given) if isinstance(given, list) else [given]


def take_from_turn(turn: Any, key: str, waiting: list[Any], found: list[Any], *, has_column: bool) -> Any:
    """The message with bare image parts. Appends the value of each to `found`, or else the next of `waiting`."""
    if not isinstance(turn, dict):
        return turn
    key = "content" if key not in turn else key
    content = turn.get(key)
    if isinstance(content, str) and has_column and MARKER in content:
        content = [
            part
            for i, text in enumerate(content.split(MARKER))
            for part in ([conversation.IMAGE_PART] * (i > 0) + [{"type": "text", "text": text}] * bool(text))
        ]
    if not isinstance(content, list):
        return turn
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("image", "image_url"):
            parts.append(part)
            continue
        value = next((part[name] for name in ("image", "image_url", "path", "url") if name in part), None)
        if value is None and not waiting:
            raise ValueError("more places for images than images")
        found.append(waiting.pop(0) if value is None else value)
        parts.append(conversation.IMAGE_PART)
    return {**turn, key: parts}


def check_ends(messages: list[conversation.Message], num_prompt: int, name: str) -> None:
    """Raises ValueError for a prompt that ends within the assistant's turn, and an answer that ends outside of it."""
    check_prompt(messages[:num_prompt])
    if messages[-1]["role"] != conversation.ASSISTANT:
        raise ValueError(f"{name} ends with the role {messages[-1]['role']!r}, expected an assistant's message")


def check_prompt(prompt: list[conversation.Message]) -> None:
    """Raises ValueError for a prompt that ends within the assistant's turn."""
    if prompt[-1].get("role") == conversation.ASSISTANT:
        raise ValueError(
            "the prompt ends with an assistant's message, and it is not known whether the answer continues it or is"
            " another message: make it part of the answer, or end the prompt with a user's message"
        )


def leave_untrained(chat: conversation.Chat, num_messages: int) -> conversation.Chat:
    """The chat, of which the first messages are not trained."""
    prompt = [{key: value for key, value in message.items() if key != "weight"} for message in chat.messages]
    untrained = [message | {"train": False} for message in prompt[:num_messages]]
    return replace(chat, messages=[*untrained, *chat.messages[num_messages:]])


PRINTED = re.compile(r"\[\{'(?:role|content|from|value|tool_calls)':")  # how pandas writes lists to .csv
PRINTED_WORDS = re.compile(r"\[(?:'[^']*'|\"[^\"]*')[,\]\s]")
ANSWERS = ("prompt", "completion", "generation", "chosen", "chosen_response", "rejected", "rejected_response")


def parse_turns(row: Fields, names: Iterable[str] = ANSWERS) -> Fields:
    """The row with lists of messages in place of their JSON texts, in `messages`, `conversations` and the columns
    `names`, which may hold other texts. ValueError if `messages` or `conversations` begin a list that is not JSON, and
    for lists as Python prints them."""
    parsed = {}
    for name in (*TURNS, *names):
        text = row.get(name)
        if not begins_list(text):
            continue
        if PRINTED.match(text) and text.rstrip().endswith("]"):
            raise ValueError(f"{name!r} is a list of messages as Python prints it, not JSON: write it with json.dumps")
        parsed[name] = read_embedded_json(text, repr(name)) if name in TURNS else parse_if_turns(text)
    return row | parsed if parsed else row


def parse_lists(row: Fields, names: Iterable[str]) -> Fields:
    """The row with lists of texts and numbers for their JSON texts. ValueError for lists as Python prints them."""
    parsed = {}
    for name in names:
        text = row.get(name)
        if not begins_list(text):
            continue
        if PRINTED_WORDS.match(text):
            raise ValueError(f"{name!r} is a list as Python prints it, not JSON: write it with json.dumps")
        value = parse_text(text)
        if isinstance(value, list) and value and all(isinstance(one, str | int | float) for one in value):
            parsed[name] = value
    return row | parsed if parsed else row


def begins_list(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip()[:1] == "["


def parse_if_turns(text: str) -> Any:
    """Parses messages or ShareGPT turns from JSON text; other texts stay unchanged."""
    value = parse_text(text)
    if not value or not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return text
    return value if all("role" in one or {"from", "value"} <= one.keys() for one in value) else text


def parse_text(text: str) -> Any:
    """The JSON value of the text; the text itself if it is not JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return text
