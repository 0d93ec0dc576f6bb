"""One form of a chat, before anything renders it: rows say the same in many forms, and templates read one of them.

| a row has                                                      | becomes                                           |
|----------------------------------------------------------------|---------------------------------------------------|
| no content, or null, beside calls                              | the content ""                                    |
| reasoning as `thinking` or `reasoning`                         | `reasoning_content`                               |
| Harmony's channels: analysis, commentary to a function, final  | one message's reasoning, calls and content        |
| messages of the roles `tool_call` and `tool_response`          | calls of the assistant's message, `tool`          |
| `<think>...</think>`, or a line `</think>`, before an answer   | `reasoning_content`, if the template writes that  |

Nothing is invented, and a message of which it is not certain what it says is refused. Only the last line depends on the
template: `normalize` is for rows, `separate_reasoning` for everything that renders a chat.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mini_trainer.data.chat import conversation
from mini_trainer.data.chat.conversation import ASSISTANT, REASONING_KEYS, Chat, Message
from mini_trainer.data.chat.reasoning import THOUGHT, split_reasoning
from mini_trainer.data.chat.rendering import EXCHANGE, cached_by_template, make_tool, prepare_contents, try_template
from mini_trainer.data.stores.json_lines import quote, read_embedded_json

REASONING = REASONING_KEYS[0]
CHANNELS = "Harmony's channels"
CALLS = "messages of calls"
EMPTY = "null or missing contents beside calls"
NAMED = "reasoning under another key"
WITHIN = "reasoning within contents"
OF_HARMONY = ("channel", "recipient", "content_type")
TOOL_ROLES = {"tool_call": ASSISTANT, "tool_response": "tool"}  # of ms-swift


def normalize(messages: Sequence[Any]) -> tuple[list[tuple[int, Any]], tuple[str, ...]]:
    """The row's messages in one form, each with its number in the row, and what was changed. Values that are no
    messages stay, to be refused with their reason. ValueError for messages of which it is not certain what they say."""
    found: list[tuple[int, Any]] = []
    changes: dict[str, None] = {}
    for number, message in enumerate(messages, start=1):
        if isinstance(message, dict) and isinstance(message.get("role"), str) and not is_usual(message):
            where = f"message {number} ({message['role']})"
            kept = {key: message[key] for key in message if says_something(key, message[key])}
            message, change = read_piece(kept, where)
            changes |= {} if change is None else {change: None}
            if change is not None and found and continues(found[-1][1], message, where):
                first, before = found.pop()
                calls = [*read_calls(before.get("tool_calls", []), where), *message.pop("tool_calls", [])]
                number, message = first, {**before, "tool_calls": calls, **message}
        found.append((number, message))
    for i, (number, message) in enumerate(found):
        if isinstance(message, dict) and message.get("role") == ASSISTANT:
            message, own = read_answer(message, f"message {number} ({ASSISTANT})")
            found[i] = number, message
            changes |= dict.fromkeys(own)
    return found, tuple(changes)


def is_usual(message: Message) -> bool:
    return len(message) == 2 and message["role"] not in TOOL_ROLES and message.get("content") is not None


def says_something(key: str, value: Any) -> bool:
    """Whether a key of a message counts: null is as good as missing, and so are no calls and an empty reasoning."""
    if key == "tool_calls":
        return value not in (None, [], "")
    return key == "content" or (value is not None and not (key in REASONING_KEYS and value == ""))


def read_piece(message: Message, where: str) -> tuple[Message, str | None]:
    """The message, or the part of the assistant's message that it is, and what was changed."""
    role = message["role"]
    channel, recipient, content_type = (message.get(key) for key in OF_HARMONY)
    if role not in TOOL_ROLES and channel is None and recipient is None:
        return message, None
    others = {key: value for key, value in message.items() if key not in OF_HARMONY}
    if role in ("tool", "tool_response"):
        name = message.get("name")
        named = {"name": name.removeprefix("functions.")} if isinstance(name, str) else {}
        return others | named | {"role": "tool"}, CHANNELS if role == "tool" else CALLS
    if role not in (ASSISTANT, "tool_call"):
        return message, None
    content = others.pop("content", None)
    if beside := [key for key in ("tool_calls", *REASONING_KEYS) if key in others]:
        raise ValueError(f"{where} has {beside[0]!r} beside a part of the turn that has messages of its own")
    if role == "tool_call":
        return others | {"role": ASSISTANT, "tool_calls": read_calls(content, where)}, CALLS
    text, name = join_text(content), None
    if text is None:
        raise ValueError(f"{where} has the content {quote(content)} on a channel, expected text")
    if isinstance(recipient, str):
        name = recipient.removeprefix("functions.")
    if channel == "final" and recipient in (None, "all"):
        return others | {"content": text}, CHANNELS
    if channel == "analysis" and recipient in (None, "all"):
        return others | ({REASONING: text} if text else {}), CHANNELS
    if channel == "commentary" and name and name != "all" and "json" in str(content_type or "json"):
        return others | {"tool_calls": read_calls([{"name": name, "arguments": text}], where)}, CHANNELS
    raise ValueError(
        f"{where} has the channel {quote(channel)} and the recipient {quote(recipient)}, for which templates have no"
        " place; read are: analysis (as reasoning), commentary to a function with JSON (as its call), and final"
    )


def read_calls(given: Any, where: str) -> list[Any]:
    """Calls of a message: one, a list, or their JSON text; each in OpenAI's form."""
    calls = read_embedded_json(given, f"{where}: 'content'") if isinstance(given, str) else given
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and ("name" in call or "function" in call) for call in calls):
        raise ValueError(f"{where} has the calls {quote(given)}, expected objects with 'name' and 'arguments'")
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]


def join_text(content: Any) -> str | None:
    """The text of a content; None if it has anything else."""
    if isinstance(content, list) and all(map(conversation.is_text_part, content)):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else None


def continues(before: Any, piece: Message, where: str) -> bool:
    """Whether the piece belongs to the message before it. ValueError if they do not fit together."""
    if not isinstance(before, dict) or (before.get("role"), piece["role"]) != (ASSISTANT, ASSISTANT):
        return False
    has_said = bool(before.get("tool_calls")) or before.get("content") is not None
    if "tool_calls" not in piece and has_said:
        return False
    if "content" not in piece and "tool_calls" not in piece:
        raise ValueError(f"{where} is a second reasoning before one answer: join them")
    for key in (before.keys() | piece.keys()) - {"role", "content", "tool_calls", "id", *REASONING_KEYS}:
        if before.get(key) != piece.get(key):
            raise ValueError(f"{where} is one turn with the message before it, but has another {key!r}")
    return True


def read_answer(message: Message, where: str) -> tuple[Message, list[str]]:
    """An assistant's message in one form, and what was changed."""
    changes = []
    if message.get("tool_calls") and message.get("content") is None:
        message = message | {"content": ""}
        changes.append(EMPTY)
    if not (given := {key: message[key] for key in REASONING_KEYS if message.get(key) is not None}):
        return message, changes
    first, *others = given.values()
    if any(other != first for other in others):
        raise ValueError(f"{where} has different reasoning in {' and '.join(map(repr, given))}: leave one out")
    message = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    within = split_reasoning(join_text(message.get("content")) or "")
    if first and within is not None and within[0]:
        if not isinstance(first, str) or within[0].strip() != first.strip():
            raise ValueError(
                f"{where} has different reasoning in {next(iter(given))!r} and in its content: leave one out"
            )
        return message, [*changes, NAMED]
    return message | {REASONING: first}, [*changes, NAMED] if REASONING not in given else changes


def separate_reasoning(tokenizer: Any, chat: Chat) -> Chat:
    """The chat with reasoning out of the assistant's contents, if the chat template writes it from a key of its own.
    ValueError for reasoning on a channel that the template cannot write."""
    is_separate = CHANNELS in chat.changes and any(REASONING in message for message in chat.messages)
    if is_separate and not writes_reasoning(tokenizer):
        raise ValueError("has reasoning on a channel of its own, which the chat template does not write")
    taken = [take_out(message) for message in chat.messages]
    if not any(taken) or not writes_reasoning(tokenizer):
        return chat
    messages = [other or message for other, message in zip(taken, chat.messages, strict=True)]
    return replace(chat, messages=messages, changes=(*chat.changes, WITHIN))


def take_out(message: Message) -> Message | None:
    """The assistant's message with its content's reasoning under its key; None for others, and for one whose content
    has none, or no answer after it."""
    if message["role"] != ASSISTANT or REASONING in message:
        return None
    content = message.get("content")
    text = content if isinstance(content, str) else join_text(content) if len(content or ()) == 1 else None
    parts = split_reasoning(text) if text else None
    if parts is None or not parts[0] or not (parts[1] or conversation.has_calls(message)):
        return None
    said = parts[1] if isinstance(content, str) else [{"type": "text", "text": parts[1]}]
    return message | {"content": said, REASONING: parts[0]}


@cached_by_template
def writes_reasoning(tokenizer: Any) -> bool:
    """Whether the template writes the reasoning of a conversation's last answer from a key of its own."""
    question, answer = EXCHANGE
    messages = prepare_contents(tokenizer, [question, {**answer, REASONING: THOUGHT}])
    return any(THOUGHT in (try_template(tokenizer, messages, tools) or "") for tools in (None, [make_tool({})]))
