"""Reads the messages of rows whose values may be missing or text: tool calls as OpenAI's API and tables have them.

Arguments of calls become objects, also those that are given as JSON text; how the chat template takes them is decided
where it renders (data/chat/calls.py). Keys that are null or hold no calls are left out, as they mean the same.
"""

from typing import Any

from mini_trainer.data.rows.values import refuse_non_json
from mini_trainer.data.stores.strict_json import parse_json, quote, read_embedded_json

WITHOUT_ARGUMENTS = {"name", "id", "type", "index"}  # keys of a call that needs none


def read_message(message: Any, number: int) -> Any:
    """The message without keys that say nothing, with arguments of calls as objects; values of another type stay, to be
    refused with their reason. ValueError for arguments that are no object, and for values that JSON does not have."""
    if not isinstance(message, dict):
        return message
    if len(message) == 2 and isinstance(message.get("content"), str) and "role" in message:
        return message
    where = f"message {number} ({message.get('role')})"
    refuse_non_json({key: value for key, value in message.items() if key != "content"}, where)
    read = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "tool_calls" not in read:
        return read
    calls = read.pop("tool_calls")
    if isinstance(calls, str):
        calls = read_embedded_json(calls, f"{where}: 'tool_calls'") if calls.strip() else []
    if calls in ([], None):
        return read
    if isinstance(calls, list):
        calls = [read_call(call, f"{where}: call {i}") for i, call in enumerate(calls, start=1)]
    return {**read, "tool_calls": calls}


def read_call(call: Any, where: str) -> Any:
    """The call with its arguments as an object, at either of their places."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        if "arguments" in call:
            raise ValueError(f"{where} has 'arguments' beside 'function': they belong in it")
        return {**call, "function": read_call(call["function"], where)}
    if "name" not in call:
        return call
    if "arguments" not in call and not call.keys() <= WITHOUT_ARGUMENTS:
        raise ValueError(f"{where} has no 'arguments', but the keys {quote(sorted(call))}: name them 'arguments'")
    return {**call, "arguments": read_arguments(call.get("arguments"), where)}


def read_arguments(given: Any, where: str) -> dict[str, Any]:
    """The arguments of a call; none if they are missing, null or an empty text."""
    arguments = given
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            raise ValueError(
                f"{where} has the arguments {quote(given)}, expected an object, or its JSON text: {error}"
            ) from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} has the arguments {quote(given)}, expected an object, or its JSON text")
    return arguments
