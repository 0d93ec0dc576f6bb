"""What is tokenized: chats, texts to be gone on with, documents."""

from dataclasses import dataclass
from typing import Any

ASSISTANT = "assistant"
PRETRAIN = "pretrain"
SYSTEM_ROLES = ("system", "developer")

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation. Messages may say `train` (true or false) or `weight` (0 to 1) for themselves; otherwise the
    assistant's are trained, and with `unmask` all roles' but system's."""

    messages: list[Message]
    unmask: bool = False
    tools: list[dict[str, Any]] | None = None
    images: tuple[str, ...] = ()  # of each image part in turn the path or the data: URL


@dataclass(frozen=True)
class Completion:
    """A text to be gone on with, without a chat template: only what follows the prompt is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Text to be trained whole, ended by the tokenizer's end-of-text token."""

    text: str


Example = Chat | Completion | Document
