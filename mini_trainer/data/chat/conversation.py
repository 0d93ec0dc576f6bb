"""Conversations: training examples, prepared for masking, their outlines with a placeholder for each text, and their
tokens.

The *leaves* of a conversation are the texts, names, numbers and ids in it: contents, reasoning, the names of calls,
the values of their arguments. Its *outline* is the conversation with a numbered placeholder for each leaf. In calls'
arguments, keys, booleans, null, "", {} and [] cannot have a placeholder: these *constants* stay in the outline, and
are located by changing them (see data/chat/placing.py).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mini_trainer.data.columns.base import IGNORED

ASSISTANT = "assistant"
PRETRAIN = "pretrain"
SYSTEM_ROLES = ("system", "developer")

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the names that transformers knows

IMAGE_PART = {"type": "image"}  # in a content that is a list; its path or URL is kept separately
# Templates test their input: a text's placeholder is letters and digits, as long as the ids that Mistral's templates
# accept; a number's is a number.
PLACEHOLDER = re.compile(r"xQ(\d{5})Qx|7391(\d{5})1937")
MAX_NUM_LEAVES = 99_990
STAND_IN = "xQ99999Qx"  # content of a stand-in assistant turn
OTHER_STAND_IN = "xQ99998Qx"  # content of a stand-in user turn
ANOTHER_TEXT = "xQuite"  # replaces constants to locate them

ECHOED = ("id", "name")  # kinds of leaves that templates also write with the call's result

ONLY_FOR_MASKING = ("train", "weight")  # a message's fields that templates never see

NORMALIZED = "normalized"  # kind of the remark on a row that was read in another form
DIVIDED = "divided"  # kind of the remark on a row whose passages did not begin with tokens of their own


@dataclass(frozen=True)
class Chat:
    """A conversation. A message may set `train` (true or false) or `weight` (0 to 1); by default the assistant's
    messages are trained on, with `unmask` all messages but the system's."""

    messages: list[Message]
    unmask: bool = False
    tools: Tools = None
    images: tuple[str, ...] = ()  # path or data: URL of each image part, in order
    template_args: dict[str, Any] | None = None  # arguments of the template for this row
    changes: tuple[str, ...] = field(default=(), compare=False)  # what normalizing has changed, in words


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion, without a chat template: only the completion is trained on."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Text to train on as a whole, ended by the tokenizer's end-of-text token."""

    text: str


Example = Chat | Completion | Document


@dataclass(frozen=True)
class Leaf:
    """A text, name, number or id of a conversation."""

    message: int  # index into the messages
    kind: str  # content, reasoning, name, argument, number, id
    value: Any
    call: int = -1  # counts the calls of the conversation; -1 outside of calls


@dataclass(frozen=True)
class Outline:
    """A conversation with placeholders, and the leaves they stand for."""

    messages: list[Message]
    leaves: list[Leaf]

    @cached_property
    def text(self) -> str:
        return repr(self.messages)

    def is_echoed(self, leaf: int) -> bool:
        return self.leaves[leaf].kind in ECHOED

    def is_assistants(self, leaf: int) -> bool:
        return self.messages[self.leaves[leaf].message]["role"] == ASSISTANT


def make_outline(messages: list[Message], *, only: str | None = None) -> Outline:
    """The outline of a conversation, with placeholders in all messages or `only` in those with this role. Empty texts
    stay as they are, because templates treat them as missing."""
    holder = LeafHolder()
    held = [
        holder.hold_message(message, i, holds_texts=only is None or message["role"] == only)
        for i, message in enumerate(messages)
    ]
    if len(holder.leaves) > MAX_NUM_LEAVES:
        raise ValueError(f"has {len(holder.leaves):,} texts, allowed: at most {MAX_NUM_LEAVES:,}")
    return Outline(held, holder.leaves)


@dataclass
class LeafHolder:
    """Replaces leaves by placeholders and collects the leaves. A result shares the placeholders of the latest call
    with its id and name, so the same id can occur again in each round."""

    leaves: list[Leaf] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    num_calls: int = 0

    def hold_message(self, message: Message, i: int, *, holds_texts: bool) -> Message:
        held = dict(message)
        if holds_texts and "content" in message:
            held["content"] = self.hold_content(message["content"], i)
        for key in REASONING_KEYS:
            if key in message and message["role"] == ASSISTANT:
                held[key] = self.hold_text(message[key], i, "reasoning")
        if "tool_call_id" in message:
            held["tool_call_id"] = self.hold_again(self.ids, message["tool_call_id"], i, "id")
        if "name" in message and message["role"] == "tool":
            held["name"] = self.hold_again(self.names, message["name"], i, "name")
        if isinstance(message.get("tool_calls"), list):
            held["tool_calls"] = [self.hold_call(call, i) for call in message["tool_calls"]]
        return held

    def hold_content(self, content: Any, i: int) -> Any:
        if isinstance(content, list):
            return [
                {**part, "text": self.hold_text(part["text"], i, "content")} if is_text_part(part) else part
                for part in content
            ]
        return self.hold_text(content, i, "content")

    def hold_call(self, call: dict[str, Any], i: int) -> dict[str, Any]:
        held = dict(call)
        for key, known in (("id", self.ids), ("name", self.names)):
            if is_text(call.get(key)):
                held[key] = known[call[key]] = self.hold_text(call[key], i, key, self.num_calls)
        if "arguments" in call:
            held["arguments"] = self.hold_argument(call["arguments"], i)
        if isinstance(call.get("function"), dict):
            held["function"] = self.hold_call(call["function"], i)
        else:
            self.num_calls += 1
        return held

    def hold_argument(self, value: Any, i: int) -> Any:
        if isinstance(value, dict):
            return {key: self.hold_argument(item, i) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hold_argument(item, i) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.leaves.append(Leaf(i, "number", value, self.num_calls))
            return int(f"7391{len(self.leaves) - 1:05}1937")
        return self.hold_text(value, i, "argument", self.num_calls)

    def hold_again(self, known: dict[str, str], value: Any, i: int, kind: str) -> Any:
        if isinstance(value, str) and value in known:
            return known[value]
        return self.hold_text(value, i, kind)

    def hold_text(self, value: Any, i: int, kind: str, call: int = -1) -> Any:
        if not is_text(value):
            return value
        self.leaves.append(Leaf(i, kind, value, call))
        return f"xQ{len(self.leaves) - 1:05}Qx"


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def is_simple(message: Message) -> bool:
    """Whether the message has only a role and a text."""
    return len(message) == 2 and is_text(message.get("content"))


def list_parts(message: Message) -> list[Any]:
    """The parts of a message's content; empty if it is not a list."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def text_of(message: Message) -> str:
    """The text of a message's content; of a list, that of its text parts."""
    parts = list_parts(message)
    return "".join(part.get("text", "") for part in parts) if parts else message.get("content") or ""


def is_text_part(part: Any) -> bool:
    """Whether this part of a content is {"type": "text", "text": ...}."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def replace_placeholders(value: Any, exchange: Callable[[int, Any], Any]) -> Any:
    """`value` with each placeholder replaced by exchange(leaf, placeholder)."""
    if isinstance(value, dict):
        return {key: replace_placeholders(item, exchange) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_placeholders(item, exchange) for item in value]
    if isinstance(value, str | int) and (match := PLACEHOLDER.fullmatch(str(value))):
        return exchange(int(match[1] or match[2]), value)
    return value


def split_at_placeholders(text: str) -> tuple[list[int], list[str]]:
    """The leaves in `text`, in order, and the text before, between and after them."""
    parts = PLACEHOLDER.split(text)  # literal, text's number, number's number, literal, ...
    return [int(a or b) for a, b in zip(parts[1::3], parts[2::3], strict=True)], parts[::3]


def replace_arguments(call: dict[str, Any], exchange: Callable[[Any], Any]) -> dict[str, Any]:
    """The call with its arguments replaced by exchange(arguments) if they are a dictionary."""
    changed = dict(call)
    if isinstance(call.get("arguments"), dict):
        changed["arguments"] = exchange(call["arguments"])
    if isinstance(call.get("function"), dict):
        changed["function"] = replace_arguments(call["function"], exchange)
    return changed


def list_calls(message: Message) -> list[Any]:
    return message.get("tool_calls") or []


def has_calls(message: Message) -> bool:
    return bool(list_calls(message))


def mark_keys(call: dict[str, Any], first: int) -> tuple[dict[str, Any], list[str]]:
    """The call with a placeholder before each key of its arguments, and the keys by number. Placeholders are numbered
    from `first` in the order of the keys, so that templates that sort keys do not reorder them."""
    keys: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, list):
            return [mark(item) for item in value]
        if not isinstance(value, dict):
            return value
        marks = {}
        for key in sorted(value, key=str.lower):
            marks[key] = f"xQ{first + len(keys):05}Qx"
            keys.append(key)
        return {marks[key] + key: mark(item) for key, item in value.items()}

    return replace_arguments(call, mark), keys


def list_constants(call: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each constant of the call's arguments, with the call in which only that one is changed."""
    if isinstance(call.get("arguments"), dict):
        yield from ((found, call | {"arguments": changed}) for found, changed in change_each(call["arguments"]))
    if isinstance(call.get("function"), dict):
        yield from ((found, call | {"function": changed}) for found, changed in list_constants(call["function"]))


def change_each(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each constant in the value, with the value in which only that one is changed."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from ((found, value | {key: changed}) for found, changed in change_each(item))
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from ((found, [*value[:i], changed, *value[i + 1 :]]) for found, changed in change_each(item))
    elif isinstance(value, bool):
        yield value, not value
    elif value == {}:
        yield value, {ANOTHER_TEXT: ANOTHER_TEXT}
    elif value == []:
        yield value, [ANOTHER_TEXT]
    elif value is None or value == "":
        yield value, ANOTHER_TEXT


@dataclass(frozen=True)
class PreparedChat:
    """A conversation without the fields that are only for masking, and the weight of each message. `is_plain`: each
    message has only a role and a text, so the outline follows from the roles and need not be made."""

    messages: list[Message]
    weights: list[float]
    tools: Tools
    is_plain: bool
    images: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def unmasked(self) -> set[int]:
        """The trained messages of roles other than the assistant."""
        pairs = enumerate(zip(self.messages, self.weights, strict=True))
        return {i for i, (message, weight) in pairs if weight > 0 and message["role"] != ASSISTANT}

    @cached_property
    def outline(self) -> Outline:
        return make_outline(self.messages)

    @property
    def values(self) -> list[Any]:
        """The values of the outline's leaves."""
        if self.is_plain:
            return [message["content"] for message in self.messages]
        return [leaf.value for leaf in self.outline.leaves]

    @cached_property
    def tools_text(self) -> str:
        """The tools as one text, for keys and searches."""
        return repr(self.tools)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key shared by conversations with the same outline."""
        texts = [(*message, message["role"]) for message in self.messages] if self.is_plain else [self.outline.text]
        return (*sorted(self.unmasked), *texts, self.tools_text)


def prepare_chat(chat: Chat) -> PreparedChat:
    """The chat, prepared; ValueError if its fields for masking are invalid."""
    messages, weights = [], []
    for number, message in enumerate(chat.messages, start=1):
        by_default = message["role"] == ASSISTANT or (chat.unmask and message["role"] not in SYSTEM_ROLES)
        try:
            weights.append(read_weight(message, by_default))
        except ValueError as error:
            raise ValueError(f"message {number} ({message['role']}) {error}") from None
        is_bare = message.keys().isdisjoint(ONLY_FOR_MASKING)
        messages.append(message if is_bare else {key: message[key] for key in message if key not in ONLY_FOR_MASKING})
    num_images = sum(part == IMAGE_PART for message in messages for part in list_parts(message))
    if num_images != len(chat.images):
        raise ValueError(f"image parts: {num_images}, images: {len(chat.images)}")
    prepared = PreparedChat(messages, weights, chat.tools, all(map(is_simple, messages)), chat.images, chat.changes)
    if chat.tools and PLACEHOLDER.search(prepared.tools_text):
        raise ValueError("'tools' contain text that looks like a placeholder used for masking")
    return prepared


def read_weight(message: Message, by_default: bool) -> float:
    """The weight of a message's tokens in the loss; 0: not trained."""
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise ValueError(f"has 'train': {train!r}, allowed: true, false")
    is_trained = by_default if train is None else train
    if weight is None:
        return float(is_trained)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not (0 <= weight <= 1):
        raise ValueError(f"has 'weight': {weight!r}, allowed: numbers from 0 to 1")
    if weight > 0 and not is_trained:
        raise ValueError(f"has 'weight': {weight!r} but is not trained; add 'train': true, or remove the weight")
    return float(weight)


@dataclass(frozen=True)
class Passage:
    """Trained characters [start, end) of a rendered row, with their role and loss weight."""

    start: int
    end: int
    role: str
    weight: float = 1.0


class TrainedSpan(Passage):
    """The same, of a row's tokens."""

    @property
    def num_targets(self) -> int:
        """Number of tokens, without the row's first, which is never predicted."""
        return self.end - max(self.start, 1)


@dataclass(frozen=True)
class Pictures:
    """The images of a row: path or data: URL, height and width, and tokens of each."""

    references: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]  # tokens [start, end) from each image's first to its last
    num_tokens: int
    input_ids: tuple[int, ...]  # the row as tokenized by the processor


@dataclass(frozen=True)
class Remark:
    """A remark on a row's turns (data/chat/prompting.py): its kind, the end of the prompt, and the row's text there.
    For an unread key, `prompted` is the message's role and `rendered` the key."""

    kind: str
    prompted: str = ""
    rendered: str = ""


@dataclass(frozen=True)
class TokenizedChat:
    """Token ids and their trained spans, in order. `is_weighted`: a message of the row has a weight."""

    input_ids: list[int]
    spans: list[TrainedSpan]
    is_weighted: bool = False
    pictures: Pictures | None = None
    is_stop_appended: bool = False  # by --missing-stop-token append
    remarks: tuple[Remark, ...] = ()

    @property
    def labels(self) -> list[int]:
        """One label per token, unshifted; IGNORED if not trained."""
        labels = [IGNORED] * len(self.input_ids)
        for span in self.spans:
            labels[span.start : span.end] = self.input_ids[span.start : span.end]
        return labels

    @property
    def loss_weights(self) -> list[float] | None:
        """One weight per token, 0 if not trained; None unless a message of the row has a weight."""
        if not self.is_weighted:
            return None
        weights = [0.0] * len(self.input_ids)
        for span in self.spans:
            weights[span.start : span.end] = [span.weight] * (span.end - span.start)
        return weights

    @property
    def num_loss_counted_tokens(self) -> int:
        return sum(span.num_targets for span in self.spans)

    @property
    def summary(self) -> str:
        images = "" if self.pictures is None else f", {len(self.pictures.references):,} images"
        return f"{len(self.input_ids):,} tokens, {self.num_loss_counted_tokens:,} trained{images}"

    @property
    def shown(self) -> tuple[tuple[str, "TokenizedChat"], ...]:
        """The parts of a preview, each with its title."""
        return (("", self),)


@dataclass(frozen=True)
class Located:
    """A rendered row and its trained passages."""

    text: str
    passages: list[Passage]
    is_weighted: bool = False
    pictures: Pictures | None = None
    is_stop_appended: bool = False
    remarks: tuple[Remark, ...] = ()
