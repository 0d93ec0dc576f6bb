"""Messages of tables and of answers: cells that hold JSON text, and chats whose last messages answer a prompt."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mini_trainer.data.chat.conversation import ASSISTANT, Chat, Message
from mini_trainer.data.rows.column_names import TURNS, Fields
from mini_trainer.data.stores.json_lines import parse_json, read_embedded_json


def check_ends(messages: list[Message], num_prompt: int, name: str) -> None:
    """Raises ValueError for a prompt that ends within the assistant's turn, and an answer that ends outside of it."""
    check_prompt(messages[:num_prompt])
    if messages[-1]["role"] != ASSISTANT:
        raise ValueError(f"{name} ends with the role {messages[-1]['role']!r}, expected an assistant's message")


def check_prompt(prompt: list[Message]) -> None:
    """Raises ValueError for a prompt that ends within the assistant's turn."""
    if prompt[-1]["role"] == ASSISTANT:
        raise ValueError(
            "the prompt ends with an assistant's message, and it is not known whether the answer continues it or is"
            " another message: make it part of the answer, or end the prompt with a user's message"
        )


def leave_untrained(chat: Chat, num_messages: int) -> Chat:
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
    """The row with lists of texts and numbers in place of their JSON texts. ValueError for lists as Python prints
    them."""
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
