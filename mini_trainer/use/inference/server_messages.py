"""Reads messages of servers with an OpenAI-compatible API into the form that rows have."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from mini_trainer.data.chat.examples import ASSISTANT, Message
from mini_trainer.data.chat.placeholders import REASONING_KEYS

BEGIN_REASONING, END_REASONING = "<think>\n", "\n</think>\n\n"  # around streamed reasoning


def check_text(text: Any) -> str:
    """The text; "" if null. TypeError if it is not text."""
    if not isinstance(text, str | None):
        raise TypeError(f"a text is {text!r}")
    return text or ""


def read_reasoning(part: Any) -> str:
    """The reasoning of a message or a streamed delta, under any of its names: servers add it to OpenAI's protocol."""
    extra = part.model_extra or {}
    return next((text for name in REASONING_KEYS if (text := check_text(extra.get(name)))), "")


def read_message(message: Any) -> Message:
    """A response's message as a row has it: reasoning and calls beside the content, arguments as objects.

    AttributeError, TypeError or LookupError if it does not follow the protocol.
    """
    calls, reasoning = [read_call(call) for call in message.tool_calls or []], read_reasoning(message)
    content = check_text(message.content) or check_text(getattr(message, "refusal", None))
    found: Message = {"role": ASSISTANT, "content": content or (None if calls else "")}
    return found | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def read_call(call: Any) -> dict[str, Any]:
    function = call.function
    if not isinstance(function.name, str):
        raise TypeError(f"a function's name is {function.name!r}")
    known = {"id": call.id} if call.id else {}
    called = {"name": function.name, "arguments": read_arguments(function.arguments)}
    return known | {"type": "function", "function": called}


def read_arguments(arguments: Any) -> Any:
    """An object; text that is not one in JSON, as a model may write it, stays as it is."""
    if isinstance(arguments, dict):
        return arguments
    try:
        found = json.loads(check_text(arguments))
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def join_deltas(deltas: Iterable[Any]) -> Iterator[str]:
    """Yields a streamed message as text: reasoning within <think> and </think>, then the content, then any calls."""
    is_reasoning, calls = False, {}
    for delta in deltas:
        if reasoning := read_reasoning(delta):
            yield reasoning if is_reasoning else BEGIN_REASONING + reasoning
            is_reasoning = True
        if content := check_text(delta.content):
            yield END_REASONING + content if is_reasoning else content
            is_reasoning = False
        for call in delta.tool_calls or []:
            parts = calls.setdefault(call.index, {"name": "", "arguments": ""})
            for name in parts:
                parts[name] += check_text(getattr(call.function, name))
    if is_reasoning:
        yield END_REASONING
    for call in calls.values():
        yield f"\n{json.dumps(call | {'arguments': read_arguments(call['arguments'])}, ensure_ascii=False)}"
