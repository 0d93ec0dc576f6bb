"""Protocol of inference engines (`open_engine` in use/inference/choice.py chooses one)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mini_trainer.data.chat.examples import Message
from mini_trainer.use.inference.prompts import Prompt

Key = tuple[int, int]  # of a request


@dataclass(frozen=True)
class Request:
    """A request for one answer: the prompt's index among all prompts, and the answer's number for that prompt."""

    index: int
    sample: int
    prompt: Prompt

    @property
    def key(self) -> Key:
        return self.index, self.sample


@dataclass(frozen=True)
class Answer:
    """A model's answer. `num_tokens` includes the stop token; counts are None if a server does not report them."""

    text: str
    finish_reason: str  # stop: a stop token; length: the length limit; servers: also tool_calls and others
    num_prompt_tokens: int | None
    num_tokens: int | None
    message: Message | None = None  # of a server, which separates reasoning and calls from the content, `text`
    served_by: dict[str, Any] | None = None  # what a server says of its model with this answer


class Engine(Protocol):
    """A backend that generates answers."""

    def describe(self) -> dict[str, Any]:
        """Everything besides sampling that its answers depend on: model, dtype, versions. JSON-serializable."""
        ...

    def answer(
        self, requests: Sequence[Request], *, done: Collection[Key] = (), rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Request, Answer]]:
        """Yields the answers to this rank's share of the requests that are not `done`, as they are completed, in any
        order. They do not depend on what is done."""
        ...

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Yields one answer in pieces; closing the iterator stops generation."""
        ...
