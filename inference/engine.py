"""The door for engines: what computes answers (`open_engine` in inference/choice.py chooses one)."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inference.prompts import Prompt


@dataclass(frozen=True)
class Request:
    """One answer that is wanted: the prompt's index among all prompts, and the answer's number for that prompt."""

    index: int
    sample: int
    prompt: Prompt

    @property
    def key(self) -> tuple[int, int]:
        return self.index, self.sample


@dataclass(frozen=True)
class Answer:
    """What a model said. `num_tokens` counts the token that ended it; None where a server does not say."""

    text: str
    finish_reason: str  # stop: by itself; length: it had no more room
    num_prompt_tokens: int | None
    num_tokens: int | None


class Engine(Protocol):
    """Something that answers."""

    def describe(self) -> dict[str, Any]:
        """What its answers depend on, beside how they are sampled: model, dtype, versions. JSON."""
        ...

    def answer(
        self, requests: Sequence[Request], *, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Request, Answer]]:
        """The answers of this rank's share of the requests, as they come, in any order."""
        ...

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """One answer in pieces; it ends when the iterator is closed."""
        ...


def require(module: str, *, flag: str) -> None:
    """Raises a ValueError that names what to install if `module` cannot be imported."""
    if importlib.util.find_spec(module) is None:
        package = {"sklearn": "scikit-learn"}.get(module, module)
        raise ValueError(f"{flag} needs the package {package}, which is not installed: pip install {package}")
