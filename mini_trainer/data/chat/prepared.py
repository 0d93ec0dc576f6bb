"""Conversations prepared for masking: messages as the template sees them, and the loss weight of each."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mini_trainer.data.chat.examples import ASSISTANT, SYSTEM_ROLES, Chat, Message
from mini_trainer.data.chat.placeholders import IMAGE_PART, PLACEHOLDER, Outline, is_text, list_parts, make_outline

ONLY_FOR_MASKING = ("train", "weight")  # a message's fields that templates never see


@dataclass(frozen=True)
class PreparedChat:
    """A conversation without the fields that are only for masking, and the weight of each message.

    `is_plain`: each message has only a role and a text, so the outline follows from the roles and need not be made.
    """

    messages: list[Message]
    weights: list[float]
    tools: list[dict[str, Any]] | None
    is_plain: bool
    images: tuple[str, ...] = ()

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

    @property
    def key(self) -> tuple[Any, ...]:
        """A key shared by conversations with the same outline."""
        texts = [(*message, message["role"]) for message in self.messages] if self.is_plain else [self.outline.text]
        return (*sorted(self.unmasked), *texts, repr(self.tools))


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
    if chat.tools and PLACEHOLDER.search(repr(chat.tools)):
        raise ValueError("'tools' contain text that looks like a placeholder used for masking")
    num_images = sum(part == IMAGE_PART for message in messages for part in list_parts(message))
    if num_images != len(chat.images):
        raise ValueError(f"image parts: {num_images}, images: {len(chat.images)}")
    is_plain = all(len(message) == 2 and is_text(message.get("content")) for message in messages)
    return PreparedChat(messages, weights, chat.tools, is_plain, chat.images)


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
