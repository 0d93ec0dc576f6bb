"""Messages that tables hold as JSON text, since their cells have one type: read as if the row had the list itself."""

from collections.abc import Iterable
from typing import Any

from corpus.columns import TURNS, Fields
from corpus.strict_json import parse_json, read_embedded_json

ANSWERS = ("prompt", "completion", "generation", "chosen", "chosen_response", "rejected", "rejected_response")


def parse_turns(row: Fields, names: Iterable[str] = ANSWERS) -> Fields:
    """The row with lists of messages in place of their JSON texts, in `messages`, `conversations` and the columns
    `names`, which may hold other texts. ValueError if `messages` or `conversations` begin a list that is no JSON."""
    parsed = {
        name: read_embedded_json(row[name], repr(name)) if name in TURNS else parse_if_turns(row[name])
        for name in (*TURNS, *names)
        if begins_list(row.get(name))
    }
    return row | parsed if parsed else row


def begins_list(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip()[:1] == "["


def parse_if_turns(text: str) -> Any:
    """The messages, or turns of ShareGPT, that the text is the JSON of; other texts as they are."""
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return value if value and isinstance(value, list) and all(map(is_turn, value)) else text


def is_turn(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or {"from", "value"} <= value.keys())
