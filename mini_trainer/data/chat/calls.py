"""The form in which a chat template takes the arguments of tool calls: as an object, or as that object's JSON text.

OpenAI's API sends text, most templates take objects, and some write nothing useful for one of the two: a text is quoted
a second time, an object is printed as Python prints it. The form is tried out, once for each template.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from mini_trainer.data.chat.examples import ASSISTANT, Message
from mini_trainer.data.chat.placeholders import has_calls, replace_arguments

WORDS = "two, three"  # an argument that each notation writes as it is
ARGUMENTS = (
    {"terms": WORDS, "note": "it's", "deep": True, "n": 2},  # quotes, booleans and numbers: JSON differs from Python
    {"terms": WORDS},  # for templates that take only texts
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in ARGUMENTS[0]}},
    },
}
RESULT = {"role": "tool", "content": "sum: 5", "tool_call_id": "call00001", "name": "add"}


def make_calling(arguments: dict[str, Any] | str) -> list[Message]:
    """A conversation with a call that has these arguments."""
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "How much are both?"},
        {"role": ASSISTANT, "content": "", "tool_calls": [call]},
        RESULT,
        {"role": ASSISTANT, "content": "It is 5."},
    ]


def takes_text(render: Callable[[list[Message]], str | None]) -> bool:
    """Whether a template takes arguments as JSON text only: its rendering has them whole if they are given so, and not
    if they are an object. `render` returns None for conversations that the template refuses."""
    for arguments in ARGUMENTS:
        rendered = render(make_calling(arguments))
        if rendered is not None and (holds_json(rendered, arguments) or holds_other(rendered, arguments)):
            return False
    texts = [(arguments, render(make_calling(write_json(arguments)))) for arguments in ARGUMENTS]
    written = [holds_json(rendered, arguments) for arguments, rendered in texts if rendered is not None]
    return bool(written) and all(written)


def holds_json(text: str, arguments: dict[str, Any]) -> bool:
    """Whether `text` has JSON that reads as these arguments."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            if decoder.raw_decode(text, at)[0] == arguments:
                return True
        except ValueError:
            pass
        at = text.find("{", at + 1)
    return False


def holds_other(text: str, arguments: dict[str, Any]) -> bool:
    """Whether `text` has the arguments in a notation of the template's own, which is not Python's."""
    return repr(arguments) not in text and WORDS in text and all(key in text for key in arguments)


def write_json(arguments: Any) -> str:
    """Arguments as templates write them with `tojson`."""
    return json.dumps(arguments, ensure_ascii=False)


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of calls as JSON text."""
    return [
        {**message, "tool_calls": [replace_arguments(call, write_json) for call in message["tool_calls"]]}
        if has_calls(message)
        else message
        for message in messages
    ]
