"""The engine for servers with an OpenAI-compatible API: vLLM, SGLang, TensorRT-LLM, llama.cpp, or OpenAI's own.

Chats go to /chat/completions, texts to continue to /completions. Requests run concurrently; the client retries
transient failures (no connection, too many requests, server errors) with exponential backoff. Messages of the server
are read into the form that rows have. A prompt that is too long for the model is answered by a refusal.
"""

import json
import os
import re
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import unquote, urlsplit

from mini_trainer.data.chat.conversation import ASSISTANT, REASONING_KEYS, Message
from mini_trainer.data.rows.prompts import Prompt, as_protocol
from mini_trainer.data.stores.remote import make_error
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.messages import HIDDEN, hide_secrets
from mini_trainer.options.problems.finding import require
from mini_trainer.options.tools import EngineOptions, SamplingOptions
from mini_trainer.options.urls import list_http_errors
from mini_trainer.use.inference.engine import Answer, Key, Request, make_seed, refuse

# How servers refuse a prompt as too long.
CLIENT_TOO_LARGE, STATUSES = 413, (400, 422, 500)  # 500: llama.cpp before September 2025
# Words of vLLM, SGLang, TensorRT-LLM, llama.cpp, TGI, and of OpenAI and other services, their codes among them.
TOO_LONG = re.compile(
    r"context[ _-](length|size|window)|maximum (allowed )?(model|prompt|input) length|max_model_len|max_total_tokens"
    r"|max_tokens must be at least 1|max_(seq_len|num_tokens|input_len)|`inputs` (must have less|tokens \+)"
    r"|(prompt|input|request) (is )?too (long|large)|reduce the length of",
    re.IGNORECASE,
)
CONTEXT = re.compile(
    r"(?:context[ _-](?:length|size|window)|max_model_len|`max_new_tokens` must be <)\D{0,20}(\d+)", re.IGNORECASE
)
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character of UTF-16, which JSON can escape on its own
BEGIN_REASONING, END_REASONING = "<think>\n", "\n</think>\n\n"  # around streamed reasoning


def check_text(text: Any) -> str:
    """The text; "" if null. TypeError if it is not text, or has half a character, which no file can store."""
    if not isinstance(text, str | None) or SURROGATE.search(text or ""):
        raise TypeError(f"expected a text of whole characters, given {text!r:.{MAX_SHOWN}}")
    return text or ""


def read_reasoning(part: Any) -> str:
    """The reasoning of a message or a streamed delta, under any of its names: servers add it to OpenAI's protocol."""
    extra = part.model_extra or {}
    return next((text for name in REASONING_KEYS if (text := check_text(extra.get(name)))), "")


def read_message(message: Any) -> Message:
    """A response's message as a row has it: reasoning and calls beside the content, arguments as objects. One of
    `MALFORMED` if it does not follow the protocol."""
    calls, reasoning = [read_call(call) for call in message.tool_calls or []], read_reasoning(message)
    content = check_text(message.content) or check_text(getattr(message, "refusal", None))
    found: Message = {"role": ASSISTANT, "content": content or (None if calls else "")}
    found |= ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
    check_text(json.dumps(found, ensure_ascii=False))
    return found


def read_call(call: Any) -> dict[str, Any]:
    function = call.function
    if not isinstance(function.name, str):
        raise TypeError(f"a function's name is {function.name!r}")
    called = {"name": function.name, "arguments": read_arguments(function.arguments)}
    return ({"id": call.id} if call.id else {}) | {"type": "function", "function": called}


def read_arguments(arguments: Any) -> Any:
    """Parses a JSON object; other text, as a model may write it, stays unchanged."""
    if isinstance(arguments, dict):
        return arguments
    try:
        found = json.loads(check_text(arguments))
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # no JSON, or half a character within it, which stays escaped
        return arguments
    return found if isinstance(found, dict) else arguments


def join_deltas(deltas: Iterable[Any]) -> Iterator[str]:
    """Yields a streamed message as text: reasoning within <think> and </think>, then the content, then any calls."""
    is_reasoning, calls = False, {}
    for delta in deltas:
        if reasoning := read_reasoning(delta):
            yield reasoning if is_reasoning else BEGIN_REASONING + reasoning
            is_reasoning = True
        if content := check_text(delta.content):
            yield END_REASONING + content if is_reasoning else content
            is_reasoning = False
        for call in delta.tool_calls or []:
            parts = calls.setdefault(call.index, {"name": "", "arguments": ""})
            for name in parts:
                parts[name] += check_text(getattr(call.function, name))
    if is_reasoning:
        yield END_REASONING
    for call in calls.values():
        yield f"\n{json.dumps(call | {'arguments': read_arguments(call['arguments'])}, ensure_ascii=False)}"


def join_message(*parts: str) -> str:
    """An error's parts, from the outermost to the innermost; a chat in the terminal has no place."""
    return ": ".join(filter(None, parts))


class PromptTooLong(RunError):
    """A request was refused because prompt and answer do not fit into the model's context; `reason` is the server's."""

    def __init__(self, message: str, reason: str):
        super().__init__(ExitCode.BAD_INPUT, message)
        self.reason = reason


def is_too_long(error: Any) -> bool:
    """Whether an openai.APIStatusError refuses a prompt for its length."""
    words = f"{error.type} {error.code} {read_words(error)}"
    return error.status_code == CLIENT_TOO_LARGE or (error.status_code in STATUSES and bool(TOO_LONG.search(words)))


def read_words(error: Any) -> str:
    """The message in an openai.APIStatusError's body, or FastAPI's `detail`; without one, the client's own."""
    words = error.body
    while isinstance(words, dict):
        words = next((words[name] for name in ("message", "detail", "error") if words.get(name)), None)
    if isinstance(words, list):  # what FastAPI finds wrong with parameters
        words = "; ".join(str(one.get("msg")) for one in words if isinstance(one, dict))
    return words if isinstance(words, str) and words else error.message


def read_context(reason: str) -> int | None:
    """The model's context in tokens, as a refusal names it."""
    found = CONTEXT.search(reason)
    return None if found is None else int(found[1])


NUM_RETRIES = 6  # with exponential backoff, up to the client's 8 seconds
SECONDS_FOR_AN_ANSWER = 1800.0  # without a byte: the server may be generating
SECONDS_TO_CONNECT = 60.0
MAX_RESPONSE = 1 << 29  # bytes, far above any answer
# Raised when a response does not follow the protocol.
MALFORMED = (AttributeError, TypeError, LookupError, RecursionError)
MAX_SHOWN = 200  # characters of such a response in messages
MAX_REASON = 1000  # characters of a refusal
OF_SERVER = (401, 404)  # the statuses for a wrong key, address or model's name
# Fields of the server's list of models that depend on the model and its settings: of vLLM and SGLang, of llama.cpp.
LISTED = ("root", "parent", "max_model_len", "owned_by", "meta")
LISTING_RETRIES = 1


def bound_response(response: Any) -> None:
    """Lets a response of httpx end with an APIError after `MAX_RESPONSE` bytes, read at once or streamed."""
    from openai import APIError

    iter_bytes = response.iter_bytes

    def iter_bounded(chunk_size: int | None = None) -> Iterator[bytes]:
        num_bytes = 0
        for piece in iter_bytes(chunk_size):
            num_bytes += len(piece)
            if num_bytes > MAX_RESPONSE:
                raise APIError(f"the response has more than {MAX_RESPONSE:,} bytes", response.request, body=None)
            yield piece

    response.iter_bytes = iter_bounded


class OpenAIEngine:
    """A model on a server (see `use.inference.engine.Engine`)."""

    def __init__(
        self, found: None, model: str, engine: EngineOptions, sampling: SamplingOptions, *, device: Any = None
    ):
        require("openai", flag="--engine openai")
        from openai import DefaultHttpxClient, OpenAI, Timeout

        self.model, self.sampling, self.engine = model, sampling, engine
        self.listed: dict[str, Any] = {}  # by `look_up`
        address, key = urlsplit(engine.base_url), os.environ.get(engine.api_key_env)
        self.address = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()
        login = f"{unquote(address.username or '')}:{unquote(address.password or '')}"
        given = (key, address.password or address.username, login != ":" and b64encode(login.encode()).decode())
        self.secrets = [form for secret in given if secret for form in (secret, unquote(secret))]
        self.client = OpenAI(
            base_url=engine.base_url,
            api_key=key or "none",  # for servers that need no key
            max_retries=NUM_RETRIES,
            timeout=Timeout(SECONDS_FOR_AN_ANSWER, connect=SECONDS_TO_CONNECT),
            http_client=DefaultHttpxClient(event_hooks={"request": [self.check_host], "response": [bound_response]}),
        )

    def check_host(self, request: Any) -> None:
        """APIError for a redirect to another host, which was not named to get the prompts."""
        from openai import APIError

        if request.url.host != self.client.base_url.host:
            other = f"{request.url.scheme}://{request.url.netloc.decode()}"
            raise APIError(f"redirects to {other}: give that as --base-url if you mean it", request, body=None)

    def describe(self) -> dict[str, Any]:
        return {"engine": "openai", "model": self.model, "base_url": self.address}

    def answer(
        self, requests: Sequence[Request], *, done: Collection[Key] = (), rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Request, Answer]]:
        """Yields answers as they arrive; if one fails, pending requests are cancelled."""
        self.listed = self.look_up()
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
        """Requests one answer: a refusal if the prompt is too long. ValueError if the server refuses for another reason
        or gives no valid answer."""
        try:
            try:
                return self.ask_within(request, self.longest_answer)
            except PromptTooLong as refused:
                return self.ask_within(request, self.measure_room(request, refused))
        except PromptTooLong as error:
            return refuse(error.reason, served_by=self.listed)

    @property
    def longest_answer(self) -> int:
        """`max_new_tokens`, or the context left after a prompt of one token if the server reports its length: some
        servers refuse to generate more."""
        longest = self.sampling.max_new_tokens
        return longest if self.context is None else max(1, min(longest, self.context - 1))

    @property
    def context(self) -> int | None:
        context = self.listed.get("max_model_len")
        return context if isinstance(context, int) else None

    def measure_room(self, request: Request, refused: PromptTooLong) -> int:
        """Tokens that the context leaves for an answer. The server counts the prompt as it answers with one token.
        PromptTooLong if the prompt itself is too long, or if nothing says how long the context is."""
        num_tokens = self.ask_within(request, 1).num_prompt_tokens
        if (context := self.context or read_context(refused.reason)) is None or num_tokens is None:
            raise refused
        return max(1, context - num_tokens - 1)  # SGLang counts one token more

    def ask_within(self, request: Request, max_tokens: int) -> Answer:
        seed = make_seed(self.sampling.seed, *request.key)
        response = self.send(request.prompt, seed, max_tokens=max_tokens, stream=False)
        try:
            choice, usage = response.choices[0], response.usage
            said = {"model": response.model, "system_fingerprint": getattr(response, "system_fingerprint", None)}
            message = None if request.prompt.messages is None else read_message(choice.message)
            return Answer(
                check_text(choice.text) if message is None else message["content"] or "",
                check_text(choice.finish_reason) or "stop",
                None if usage is None else usage.prompt_tokens,
                None if usage is None else usage.completion_tokens,
                message,
                # Its description of its model, to notice another one behind the same address.
                {name: check_text(value) for name, value in said.items() if value is not None} | self.listed,
            )
        except MALFORMED as error:
            shown = self.hide(f"{error}; {response!r}")[:MAX_SHOWN]
            raise ValueError(join_message(request.prompt.place, self.where, f"returned no answer: {shown}")) from None

    def look_up(self) -> dict[str, Any]:
        """The model's entry in the server's list of models; empty if it has no such list."""
        from openai import APIError

        try:
            entries = self.client.with_options(max_retries=LISTING_RETRIES).models.list().data
            fields = next((entry.to_dict() for entry in entries if entry.id == self.model), {})
            check_text(json.dumps(fields, ensure_ascii=False))
        except (APIError, ValueError, *MALFORMED):  # the list is not needed for answers; real problems show there
            return {}
        return {name: fields[name] for name in LISTED if fields.get(name) is not None}

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Yields the answer as the model would write it: see `join_deltas`."""
        from openai import APIError

        pieces = self.send(prompt, self.sampling.seed, max_tokens=self.longest_answer, stream=True)
        try:
            choices = (piece.choices[0] for piece in pieces if piece.choices)
            if prompt.messages is None:
                yield from (check_text(choice.text) for choice in choices)
            else:
                yield from join_deltas(choice.delta for choice in choices)
        except (*list_http_errors(), APIError, ValueError, *MALFORMED) as error:
            reason = self.hide(str(error))[:MAX_SHOWN]
            raise make_error(error, f"{self.where}: the stream was interrupted: {reason}") from None
        finally:
            pieces.close()

    @property
    def where(self) -> str:
        return f"--base-url {self.address}, --model {self.model}"

    def send(self, prompt: Prompt, seed: int, *, max_tokens: int, stream: bool) -> Any:
        """Sends one request. `top_k` and a template's arguments are not in OpenAI's API: other servers take them."""
        sampling, is_chat = self.sampling, prompt.messages is not None
        extra = {"top_k": sampling.top_k, "chat_template_kwargs": (prompt.template_args or None) if is_chat else None}
        given = {
            "seed": seed % 2**31 if sampling.temperature > 0 else None,  # a range that all servers accept
            "top_p": sampling.top_p,
            "tools": (prompt.tools or None) if is_chat else None,
            "extra_body": {name: value for name, value in extra.items() if value is not None} or None,
        }
        common: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        common |= dict(model=self.model, stream=stream, temperature=sampling.temperature, max_tokens=max_tokens)
        if not is_chat:
            return self.call(lambda: self.client.completions.create(prompt=prompt.text, **common), prompt.place)
        messages, create = as_protocol(prompt.messages), self.client.chat.completions.create
        return self.call(lambda: create(messages=messages, **common), prompt.place)

    def call(self, request: Callable[[], Any], place: str = "") -> Any:
        """The client's result. ValueError for its errors names the server, and the place of the prompt unless any other
        one would fail as well."""
        from openai import APIConnectionError, APIError, APIStatusError

        try:
            return request()
        except APIStatusError as error:
            reason = f"refused ({error.status_code}): {self.hide(read_words(error))}"[:MAX_REASON]
            message = join_message("" if error.status_code in OF_SERVER else place, self.where, reason)
            if is_too_long(error):
                raise PromptTooLong(message, reason) from None
            raise make_error(error, message) from None
        except APIConnectionError as error:
            reason = self.hide(str(error.__cause__ or error))
            raise make_error(error, f"{self.where}: cannot be reached: {reason}") from None
        except (APIError, ValueError, RecursionError) as error:  # no JSON, or nested too deeply
            raise ValueError(join_message(place, self.where, self.hide(str(error)))) from None

    def hide(self, text: str) -> str:
        """Removes the key and the credentials, encoded or not, from a message; escapes halves of characters."""
        text = text.encode(errors="backslashreplace").decode()
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return hide_secrets(text)
