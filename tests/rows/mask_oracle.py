"""The rule of masks, checked without the masker: each thing that is said in a chat is changed, the chat is rendered
again, and what differs has to be trained if the assistant said it, and must not be if anybody else did.

It knows only what `apply_chat_template` renders and which characters of that have trained tokens.
"""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from stock_templates import TEMPLATES

from mini_trainer.data.chat.conversation import Chat, TokenizedChat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.columns.base import IGNORED

PART_OF_TAG = re.compile(r"<[^<>]*\Z")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
MARK = "Zq"  # is put into texts; no template and no chat of the tests has it


@dataclass(frozen=True)
class Change:
    """A chat in which one thing is changed. `marks`: the change only puts MARK into texts, so that removing it gives
    the rendering there was."""

    messages: list[dict]
    message: int
    what: str
    marks: bool = True


def list_changes(messages: list[dict]) -> Iterator[Change]:
    """Every content, reasoning, name, argument and number of arguments and calls, changed alone."""
    for i, message in enumerate(messages):
        yield from change_text(messages, i, ["content"])
        for key in REASONING_KEYS:
            yield from change_text(messages, i, [key])
        for j, call in enumerate(message.get("tool_calls") or []):
            path = ["tool_calls", j, "function"]
            yield from change_name(messages, i, path)
            yield from change_arguments(messages, i, [*path, "arguments"])
            more = copy.deepcopy(messages)
            more[i]["tool_calls"].insert(j + 1, {**copy.deepcopy(call), "id": "zqzqzqzqz"})
            yield Change(more, i, f"one call more than call {j + 1}", marks=False)


def look_up(message: dict, path: list) -> object:
    value = message
    for step in path:
        value = value[step] if not isinstance(value, dict) or step in value else None
    return value


def with_value(messages: list[dict], i: int, path: list, value: object) -> list[dict]:
    changed = copy.deepcopy(messages)
    at = changed[i]
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return changed


def mark(text: str) -> str:
    """Before its last letter or digit, where nothing trims it."""
    at = max(k for k, character in enumerate(text) if character.isalnum())
    return text[:at] + MARK + text[at:]


def change_text(messages: list[dict], i: int, path: list) -> Iterator[Change]:
    value = look_up(messages[i], path)
    what = ".".join(map(str, path))
    if isinstance(value, str) and value.strip():
        yield Change(with_value(messages, i, path, mark(value)), i, what)
    elif isinstance(value, list) and path == ["content"]:
        for k, part in enumerate(value):
            if part.get("type") == "text" and part["text"].strip():
                yield from change_text(messages, i, [*path, k, "text"])


def change_name(messages: list[dict], i: int, path: list) -> Iterator[Change]:
    """Another name; an id that has the name in it, as Kimi's have, follows."""
    name, call = look_up(messages[i], [*path, "name"]), messages[i]["tool_calls"][path[1]]
    changed = with_value(messages, i, [*path, "name"], mark(name))
    old = call.get("id") or ""
    if name in old:
        for message in changed:
            for other in message.get("tool_calls") or []:
                if other.get("id") == old:
                    other["id"] = old.replace(name, mark(name))
            if message.get("tool_call_id") == old:
                message["tool_call_id"] = old.replace(name, mark(name))
    yield Change(changed, i, f"{name}: name")


def change_arguments(messages: list[dict], i: int, path: list) -> Iterator[Change]:
    value = look_up(messages[i], path)
    where = "arguments" + "".join(f".{step}" for step in path[4:])
    if isinstance(value, dict):
        yield Change(with_value(messages, i, path, {**value, "zq": "zq"}), i, f"{where}: one more", marks=False)
        for key in value:
            renamed = {(k + MARK if k == key else k): item for k, item in value.items()}
            yield Change(with_value(messages, i, path, renamed), i, f"{where}.{key}: another key", marks=False)
            yield from change_arguments(messages, i, [*path, key])
    elif isinstance(value, list):
        yield Change(with_value(messages, i, path, [*value, 1]), i, f"{where}: one more", marks=False)
        for k in range(len(value)):
            yield from change_arguments(messages, i, [*path, k])
    elif isinstance(value, bool):
        yield Change(with_value(messages, i, path, not value), i, where, marks=False)
    elif isinstance(value, int | float):
        yield Change(with_value(messages, i, path, value + 1), i, where, marks=False)
    elif isinstance(value, str) and value.strip():
        yield Change(with_value(messages, i, path, mark(value)), i, where)
    else:  # null or ""
        yield Change(with_value(messages, i, path, "zq"), i, where, marks=False)


def render(masker: ChatMasker, messages: list[dict], tools: list[dict] | None, *, prompt: bool = False) -> str:
    named = []
    for message in messages:  # older versions of transformers do not name it twice by themselves
        thought = next(
            (message[key] for key in ("reasoning_content", "thinking", "reasoning") if message.get(key)), None
        )
        named.append({"thinking": thought, **message, "reasoning_content": thought})
    named = [{key: value for key, value in message.items() if value is not None} for message in named]

    def apply(given: list[dict]) -> str:
        given = list(map(with_arguments_as_text, given)) if masker.tokenizer.chat_template in AS_TEXT else given
        return masker.tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=prompt)

    try:
        text = apply(named)
    except Exception:
        if all(only_text(message) is None for message in named):
            raise
        return apply(list(map(with_text, named)))
    texts = [only_text(message) for message in named]
    is_read = all(said is None or (said.strip() in text and LIST not in text.replace('"', "'")) for said in texts)
    return text if is_read else apply(list(map(with_text, named)))


LIST = "'type': 'text'"
# Templates whose source joins the arguments of calls to texts, or prints them as Python does.
AS_TEXT = [TEMPLATES[name][0] for name in ("trl:deepseekv3", "closed on a new line") if name in TEMPLATES]


def with_arguments_as_text(message: dict) -> dict:
    """The message with the arguments of its calls as OpenAI's API has them."""
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        arguments = call["function"].get("arguments")
        call["function"]["arguments"] = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
    return {**message, "tool_calls": calls}


def only_text(message: dict) -> str | None:
    """The text of a content that is a list of one part."""
    content = message.get("content")
    return content[0].get("text") if isinstance(content, list) and len(content) == 1 else None


def with_text(message: dict) -> dict:
    said = only_text(message)
    return message if said is None else {**message, "content": said}


def find_trained_characters(masker: ChatMasker, masked: TokenizedChat, text: str) -> list[bool]:
    """Which characters of the rendered chat have trained tokens."""
    encoding = masker.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoding["input_ids"] == masked.input_ids, "apply_chat_template returns other token ids"
    trained = [False] * len(text)
    for (start, end), label in zip(encoding["offset_mapping"], masked.labels, strict=True):
        if label != IGNORED:
            trained[start:end] = [True] * (end - start)
    return trained


def find_places(before: str, after: str, *, marks: bool) -> list[tuple[int, int]] | None:
    """The parts [start, end) of `before` that differ in `after`; None if marks were not all that was put in."""
    if marks:
        if after.replace(MARK, "") != before:
            return None
        at, places = after.find(MARK), []
        while at >= 0:
            position = at - len(MARK) * len(places)
            places.append((position, position + 1))
            at = after.find(MARK, at + len(MARK))
        return places
    shorter = min(len(before), len(after))
    start = next((k for k in range(shorter) if before[k] != after[k]), shorter)
    same = next((k for k in range(shorter - start) if before[-1 - k] != after[-1 - k]), shorter - start)
    return [] if before == after else [(start, len(before) - same)]


def is_inside(trained: list[bool], start: int, end: int) -> bool:
    """Whether the characters are trained; of a place between two characters, whether both sides are."""
    return all(trained[start:end] if start < end else trained[max(start - 1, 0) : start + 1])


def find_faults(masker: ChatMasker, messages: list[dict], tools: list[dict] | None) -> list[str] | ValueError:
    """What is wrong with the mask of this chat by the rule; a ValueError if the masker refuses it."""
    (masked,) = masker.mask([Chat(messages, tools=tools)])
    if isinstance(masked, ValueError):
        return masked
    text = render(masker, messages, tools)
    trained = find_trained_characters(masker, masked, text)
    faults = []
    for change in list_changes(messages):
        fault = find_fault_of_change(masker, change, text, trained, tools)
        if fault is not None:
            faults.append(f"message {change.message + 1} ({messages[change.message]['role']}), {change.what}: {fault}")
    return faults + find_prompt_trained(masker, messages, text, trained, tools)


def find_fault_of_change(
    masker: ChatMasker, change: Change, text: str, trained: list[bool], tools: list[dict] | None
) -> str | None:
    try:
        changed = render(masker, change.messages, tools)
    except Exception:  # a template may refuse what the change gives it
        return None
    places = find_places(text, changed, marks=change.marks)
    role = change.messages[change.message]["role"]
    is_own, can_echo = role == "assistant", change.what.endswith(": name") or "more than call" in change.what
    if places is None:
        return None  # the template counts or cuts texts: it cannot be seen what is whose
    if not places and "more than call" in change.what:
        return None  # some templates write one call and no more
    if not places:
        is_dropped = "reasoning" in change.what or "thinking" in change.what or change.what.startswith("content")
        return None if is_own and is_dropped and was_written_last(masker, change, tools) else "is not written"
    if not is_own:
        return None if not any(any(trained[start:end]) for start, end in places) else "is trained"
    inside = [is_inside(trained, *place) for place in places]
    if "more than call" in change.what:  # ids of later calls can be counted: only the beginning is certain
        start, _ = places[0]
        return None if trained[start - 1] else "is not trained"
    if any(inside) if can_echo else all(inside):
        return None
    return "is not trained" if not any(inside) else "is also written where it is not trained"


def was_written_last(masker: ChatMasker, change: Change, tools: list[dict] | None) -> bool:
    """Templates leave out of earlier turns what need not be remembered, and some know no reasoning at all."""
    if change.what.startswith("content"):
        cut = change.messages[: change.message + 1]
        return change.message < len(change.messages) - 1 and MARK in render(masker, cut, tools)
    return True


def find_prompt_trained(
    masker: ChatMasker, messages: list[dict], text: str, trained: list[bool], tools: list[dict] | None
) -> list[str]:
    """The assistant's turns of which something is trained that the generation prompt writes."""
    faults = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        try:
            plain = render(masker, messages[:i], tools)
            prompted = render(masker, messages[:i], tools, prompt=True)
        except Exception:  # a template may not allow a chat to end there
            continue
        if prompted == plain or not text.startswith(plain):
            continue
        end = next((k for k, (a, b) in enumerate(zip(prompted, text, strict=False)) if a != b), len(prompted))
        if end < len(prompted):  # what continues otherwise shares no half of a tag with the prompt, and no whitespace
            end = len(PART_OF_TAG.sub("", text[:end]).rstrip())
        if any(trained[len(plain) : end]):
            faults.append(f"message {i + 1}: {text[len(plain) : end]!r} of the generation prompt is trained")
    return faults


def list_trained(masked: TokenizedChat) -> list[list[int]]:
    """The trained stretches: the bounds are where labels begin and end."""
    flags = [False, *(label != IGNORED for label in masked.labels), False]
    edges = [k for k, (a, b) in enumerate(pairwise(flags)) if a != b]
    return [masked.input_ids[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]


def list_trained_texts(masked: TokenizedChat, masker: ChatMasker) -> list[str]:
    return list(map(masker.tokenizer.decode, list_trained(masked)))
