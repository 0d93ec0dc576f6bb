"""Training examples: chats, prompts with completions, documents."""

from dataclasses import dataclass
from typing import Any

ASSISTANT = "assistant"
PRETRAIN = "pretrain"
SYSTEM_ROLES = ("system", "developer")

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation. A message may set `train` (true or false) or `weight` (0 to 1); by default the assistant's
    messages are trained, with `unmask` all messages but the system's."""

    messages: list[Message]
    unmask: bool = False
    tools: list[dict[str, Any]] | None = None
    images: tuple[str, ...] = ()  # path or data: URL of each image part, in order
    template_args: dict[str, Any] | None = None  # arguments of the template for this row


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion, without a chat template: only the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Text to be trained whole, ended by the tokenizer's end-of-text token."""

    text: str


Example = Chat | Completion | Document
