"""Protocol of inference engines; sampling in which an answer depends only on its prompt, number and seed."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from mini_trainer.data.chat.conversation import Message
from mini_trainer.data.rows.prompts import Prompt
from mini_trainer.options.doors import ENGINES
from mini_trainer.options.tools import EngineOptions, SamplingOptions
from mini_trainer.use.inference.loading import FoundModel


class OwnNoise(transformers.LogitsProcessor):
    """Adds Gumbel noise to the logits, whose argmax is then a sample from their softmax (Gumbel-max trick). Each row of
    the batch has its own generator, seeded by the answer's key, so that sampling depends neither on the rest of the
    batch nor on the number of processes or restarts."""

    def __init__(self, keys: Sequence[tuple[int, int]], seed: int, device: torch.device):
        self.generators = [torch.Generator(device).manual_seed(make_seed(seed, *key)) for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (rows, vocab)
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() - noise.log()


def make_seed(*numbers: int) -> int:
    """Hashes the numbers into a 63-bit seed, so that neighbouring numbers give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 1


def make_processors(
    sampling: SamplingOptions, keys: Sequence[tuple[int, int]], device: torch.device
) -> transformers.LogitsProcessorList:
    """The logits processors to apply before the argmax; none for greedy decoding."""
    if sampling.temperature == 0:
        return transformers.LogitsProcessorList()
    processors = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    processors.append(OwnNoise(keys, sampling.seed, device))
    return processors


Key = tuple[int, int]  # of a request
REFUSED = "refused"  # a finish reason


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
    # stop: a stop token; length: the length limit; refused: the prompt is too long; servers: tool_calls and others
    finish_reason: str
    num_prompt_tokens: int | None
    num_tokens: int | None
    message: Message | None = None  # of a server, which separates reasoning and calls from the content, `text`
    served_by: dict[str, Any] | None = None  # the server's description of its model, with this answer
    reason: str | None = None  # why the prompt was refused


def refuse(reason: str, *, served_by: dict[str, Any] | None = None) -> Answer:
    """The answer to a prompt that is too long for the model's context."""
    return Answer("", REFUSED, None, None, served_by=served_by, reason=reason)


class Engine(Protocol):
    """A backend that generates answers. Its class takes what `open_engine` passes on."""

    def describe(self) -> dict[str, Any]:
        """Everything besides sampling that its answers depend on: model, dtype, versions. JSON-serializable."""
        ...

    def answer(
        self, requests: Sequence[Request], *, done: Collection[Key] = (), rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Request, Answer]]:
        """Yields the answers to this rank's share of the requests that are not `done`, as they are completed, in any
        order. They do not depend on the requests that are done."""
        ...

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Yields one answer in pieces; closing the iterator stops generation."""
        ...


def open_engine(
    found: FoundModel | None, name: str, engine: EngineOptions, sampling: SamplingOptions, *, device: torch.device
) -> Engine:
    """Opens the engine that the options name; `found` is None for a server, which knows the model by `name`."""
    return ENGINES[engine.engine](found, name, engine, sampling, device=device)
