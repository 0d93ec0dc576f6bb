"""The engine for servers with an OpenAI-compatible API: vLLM, SGLang, TensorRT-LLM, llama.cpp, or OpenAI's own.

Chats go to /chat/completions, texts to continue to /completions. Requests run concurrently; the client retries
transient failures (no connection, too many requests, server errors) with exponential backoff.
"""

import os
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import unquote, urlsplit

from inference.engine import Answer, Key, Request
from inference.prompts import Prompt, as_protocol
from inference.sampling import make_seed
from options import EngineOptions, SamplingOptions
from options.problems.packages import require
from options.urls import list_http_errors
from ranks.messages import HIDDEN, hide_secrets

NUM_RETRIES = 6  # with exponential backoff, up to the client's 8 seconds
SECONDS_FOR_AN_ANSWER = 1800.0
MALFORMED = (AttributeError, TypeError, LookupError)  # raised when a response does not follow the protocol
MAX_SHOWN = 200  # characters of such a response in messages
NO_KEY = "none"  # placeholder for servers that need no key


def read_text(part: Any) -> str:
    """The text of a choice, a message or a streamed delta; "" if null. TypeError if it is not text."""
    text = part.content if hasattr(part, "content") else part.text
    if not isinstance(text, str | None):
        raise TypeError(f"a text is {text!r}")
    return text or ""


class OpenAIEngine:
    """A model on a server (see `inference.engine.Engine`)."""

    def __init__(self, model: str, engine: EngineOptions, sampling: SamplingOptions):
        require("openai", flag="--engine openai")
        from openai import OpenAI

        self.model, self.sampling, self.engine = model, sampling, engine
        address, key = urlsplit(engine.base_url), os.environ.get(engine.api_key_env)
        self.address = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()
        login = f"{unquote(address.username or '')}:{unquote(address.password or '')}"
        given = (key, address.password or address.username, login != ":" and b64encode(login.encode()).decode())
        self.secrets = [form for secret in given if secret for form in (secret, unquote(secret))]
        self.client = OpenAI(
            base_url=engine.base_url,
            api_key=key or NO_KEY,
            max_retries=NUM_RETRIES,
            timeout=SECONDS_FOR_AN_ANSWER,
        )

    def describe(self) -> dict[str, Any]:
        return {"engine": "openai", "model": self.model, "base_url": self.address}

    def answer(
        self, requests: Sequence[Request], *, done: Collection[Key] = (), rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Request, Answer]]:
        """Yields answers as they arrive; if one fails, pending requests are cancelled."""
        pool = ThreadPoolExecutor(self.engine.concurrency)
        waiting = (request for request in requests if request.key not in done)
        running: dict[Future, Request] = {}
        try:
            while True:
                while len(running) < self.engine.concurrency and (request := next(waiting, None)) is not None:
                    running[pool.submit(self.ask, request)] = request
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, request: Request) -> Answer:
        """Requests one answer; ValueError if the server refuses or gives no valid answer."""
        response = self.send(request.prompt, make_seed(self.sampling.seed, *request.key), stream=False)
        try:
            choice, usage = response.choices[0], response.usage
            return Answer(
                read_text(choice if request.prompt.messages is None else choice.message),
                choice.finish_reason or "stop",
                None if usage is None else usage.prompt_tokens,
                None if usage is None else usage.completion_tokens,
            )
        except MALFORMED:
            shown = self.hide(repr(response))[:MAX_SHOWN]
            raise ValueError(f"{self.where}: returned no answer to {request.prompt.place}: {shown}") from None

    def stream(self, prompt: Prompt) -> Iterator[str]:
        from openai import APIError

        pieces = self.send(prompt, self.sampling.seed, stream=True)
        try:
            for piece in pieces:
                if piece.choices:
                    choice = piece.choices[0]
                    yield read_text(choice if prompt.messages is None else choice.delta)
        except (*list_http_errors(), APIError, ValueError, *MALFORMED) as error:
            raise ValueError(f"{self.where}: the stream was interrupted: {self.hide(str(error))[:MAX_SHOWN]}") from None
        finally:
            pieces.close()

    @property
    def where(self) -> str:
        return f"--base-url {self.address}, --model {self.model}"

    def send(self, prompt: Prompt, seed: int, *, stream: bool) -> Any:
        """Sends one request. `top_k` is not in OpenAI's API; other servers accept it as an extra parameter."""
        sampling = self.sampling
        common: dict[str, Any] = {"model": self.model, "stream": stream, "temperature": sampling.temperature}
        common["max_tokens"] = sampling.max_new_tokens
        if sampling.temperature > 0:
            common["seed"] = seed % 2**31  # a range that all servers accept
        if sampling.top_p is not None:
            common["top_p"] = sampling.top_p
        if sampling.top_k is not None:
            common["extra_body"] = {"top_k": sampling.top_k}
        if prompt.messages is None:
            return self.call(lambda: self.client.completions.create(prompt=prompt.text, **common))
        tools = {"tools": prompt.tools} if prompt.tools else {}
        messages = as_protocol(prompt.messages)
        return self.call(lambda: self.client.chat.completions.create(messages=messages, **tools, **common))

    def call(self, request: Callable[[], Any]) -> Any:
        """What the client returns; ValueError, which names the server, for its errors."""
        from openai import APIConnectionError, APIError, APIStatusError

        try:
            return request()
        except APIStatusError as error:
            raise ValueError(f"{self.where}: refused ({error.status_code}): {self.hide(error.message)}") from None
        except APIConnectionError as error:
            raise ValueError(f"{self.where}: cannot be reached: {self.hide(str(error.__cause__ or error))}") from None
        except (APIError, ValueError) as error:  # ValueError: the response is not JSON
            raise ValueError(f"{self.where}: {self.hide(str(error))}") from None

    def hide(self, text: str) -> str:
        """Removes the key and the credentials, encoded or not, from a message of the server or the client."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return hide_secrets(text)
