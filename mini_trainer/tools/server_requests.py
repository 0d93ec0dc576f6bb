"""Requests that transformers' server answers as they ask: its parameters, its model's name and context.

The server itself ignores parameters that it does not know, and generates beyond the context.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from mini_trainer.data.chat.rendering import select_args
from mini_trainer.model.config import load_generation_config
from mini_trainer.use.inference.loading import FoundModel

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEFAULT_ANSWER = 1024  # tokens, transformers' own default
MAX_SHOWN = 100  # characters of a refused value


def is_number(given: Any) -> bool:
    return type(given) in (int, float)  # isinstance would take JSON's true


def is_list(given: Any, kind: type) -> bool:
    """Whether it is a list of objects or texts that are not empty."""
    return isinstance(given, list) and all(isinstance(one, kind) and one for one in given)


# Parameters that the server behind honours: the values that are allowed, in words and as a check.
COMMON: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a text", lambda given: isinstance(given, str)),
    "stream": ("true or false", lambda given: isinstance(given, bool)),
    "max_tokens": ("a whole number from 1", lambda given: type(given) is int and given > 0),
    "temperature": ("a number from 0 to 2", lambda given: is_number(given) and 0 <= given <= 2),
    "top_k": ("a whole number from 1", lambda given: type(given) is int and given > 0),
    "top_p": ("a number above 0, at most 1", lambda given: is_number(given) and 0 < given <= 1),
    "seed": ("a whole number from 0 to 2^63 - 1", lambda given: type(given) is int and 0 <= given < 1 << 63),
    "stop": ("a text or texts, none empty", lambda given: is_list([given] if isinstance(given, str) else given, str)),
}
PARAMETERS = {
    CHAT: {
        "messages": ("a list of objects", lambda given: is_list(given, dict)),
        "max_completion_tokens": COMMON["max_tokens"],
        "tools": ("a list of objects", lambda given: is_list(given, dict)),
        "chat_template_kwargs": ("an object", lambda given: isinstance(given, dict)),
        **COMMON,
    },
    TEXT: {"prompt": ("a text", lambda given: isinstance(given, str)), **COMMON},
}
# Values that change nothing, as null does for every parameter. The server behind would ignore other values, take a
# frequency_penalty for a repetition penalty, and append a suffix to the answer. Its streams always end with the usage.
NEUTRAL: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("best_of", "n"), (1,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("echo", "logprobs", "store"), (False,)),
    **dict.fromkeys(("logit_bias", "metadata"), ({},)),
    **dict.fromkeys(("stop", "tools"), ([],)),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),
    "suffix": ("",),
    "tool_choice": ("auto",),
}
NAMES_OF_CALLERS = ("user", "safety_identifier", "prompt_cache_key")  # no answer depends on them


class Refused(ValueError):
    """A request to answer with an error: an HTTP status, the reason, and OpenAI's code for it if there is one."""

    def __init__(self, status: int, reason: str, code: str | None = None) -> None:
        super().__init__(status, reason, code)
        self.status, self.reason, self.code = status, reason, code


@dataclass(frozen=True)
class Served:
    """A model on the server, and the requests that it can answer."""

    name: str  # for clients
    directory: str  # its name on the server behind
    tokenizer: PreTrainedTokenizerBase
    context: int | None = None  # tokens of prompt and answer
    takes_images: bool = False
    generation: dict[str, Any] = field(default_factory=lambda: {"do_sample": True})  # the model's own config
    created: int = field(default_factory=lambda: int(time.time()))

    def list_models(self) -> dict[str, Any]:
        """OpenAI's list of models, with vLLM's name for the context."""
        entry = {"id": self.name, "object": "model", "created": self.created, "owned_by": "mini_trainer"}
        return {"object": "list", "data": [entry | {"max_model_len": self.context}]}

    def prepare(self, path: str, body: bytes) -> dict[str, Any]:
        """The parameters for the server behind; Refused for a request that it cannot answer as asked."""
        request = read_parameters(path, body)
        if (name := request.get("model", self.name)) != self.name:
            raise Refused(404, f"model: given {shorten(name)}, served: {self.name}", "model_not_found")
        if "stop" in request:
            if request.get("stream"):
                raise Refused(400, "stop: a stream cannot be cut at stop texts: leave out stop or stream")
            request["stop"] = [request["stop"]] if isinstance(request["stop"], str) else request["stop"]
        limit = request.pop("max_completion_tokens", request.get("max_tokens"))
        room = self.measure_room(path, request, limit)
        # What the server behind takes only as a whole generation config: top_k, and that a greedy model samples.
        changed = {"top_k": request.pop("top_k")} if "top_k" in request else {}
        if request.get("temperature") and not self.generation["do_sample"]:
            changed["do_sample"] = True
        if changed:
            request["generation_config"] = json.dumps(self.generation | changed)
        return request | {"model": self.directory, "max_tokens": limit or min(room, DEFAULT_ANSWER)}

    def measure_room(self, path: str, request: Mapping[str, Any], limit: int | None) -> int:
        """Tokens that the context leaves for the answer; Refused if they are fewer than `limit`, or none."""
        try:
            num_tokens = self.count_chat(request) if path == CHAT else len(self.tokenizer(request["prompt"]).input_ids)
        except Exception as error:  # of any type: a chat template is a third-party program
            raise Refused(400, f"no prompt can be made: {type(error).__name__}: {error}") from None
        if num_tokens == 0:
            raise Refused(400, "prompt: has no tokens, so there is nothing to continue")
        if self.context is None:
            return DEFAULT_ANSWER
        if (room := self.context - num_tokens) < (limit or 1):
            reason = f"This model's maximum context length is {self.context} tokens: the prompt has {num_tokens}"
            asked = f", and max_tokens asks for {limit}" if limit else ", which leaves none for an answer"
            raise Refused(400, reason + asked, "context_length_exceeded")
        return room

    def count_chat(self, request: Mapping[str, Any]) -> int:
        """Number of tokens of the chat as the server behind reads it; an image counts as its placeholder."""
        from transformers.cli.serving.utils import BaseHandler, Modality

        contents = (message.get("content") for message in request["messages"])
        for part in (part for content in contents if isinstance(content, list) for part in content):
            is_image = self.takes_images and part["type"] == "image_url"
            if part["type"] != "text" and not (is_image and part["image_url"]["url"].startswith("data:")):
                others = ", image_url with a data: URL" if self.takes_images else ""
                raise ValueError(f"messages: given a part {part['type']}, allowed: text{others}")
        if "tools" in request and "tools" not in str(self.tokenizer.chat_template):
            raise ValueError("tools: the chat template does not read them")
        template_args = select_args(self.tokenizer, request.get("chat_template_kwargs", {}))
        modality = Modality.VLM if self.takes_images else Modality.LLM
        messages = BaseHandler.get_processor_inputs_from_messages(request["messages"], modality)
        encoded = self.tokenizer.apply_chat_template(
            messages, tools=request.get("tools"), add_generation_prompt=True, return_dict=True, **template_args
        )
        return len(encoded["input_ids"])


def find_served(found: FoundModel) -> Served:
    """A model that has been checked, as it is served."""
    generation = load_generation_config(found.directory, found.config)
    return Served(
        found.base_name,
        found.directory,
        found.tokenizer,
        context=getattr(found.config.get_text_config(decoder=True), "max_position_embeddings", None),
        takes_images=hasattr(found.config, "vision_config"),
        generation=json.loads(generation.to_json_string(use_diff=False)),
    )


def read_parameters(path: str, body: bytes) -> dict[str, Any]:
    """A request's parameters, without neutral ones; Refused for any that the server behind does not honour."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Refused(400, f"the body is {shorten(given)}, allowed: an object")
    known = PARAMETERS[path]
    kept = {name: value for name, value in given.items() if not is_neutral(name, value)}
    for name, value in kept.items():
        if name not in known and name not in NEUTRAL:
            raise Refused(400, f"{shorten(name)} is not supported, allowed: {', '.join(known)}")
        neutral = ", ".join(map(json.dumps, NEUTRAL.get(name, ())))
        allowed, is_allowed = known.get(name, (neutral, lambda _: False))
        if not is_allowed(value):
            raise Refused(400, f"{name}: given {shorten(value)}, allowed: {allowed}")
    if (prompt := next(iter(known))) not in kept:
        raise Refused(400, f"{prompt} is missing")
    return kept


def is_neutral(name: str, value: Any) -> bool:
    """Whether the value changes nothing. In Python 0 equals False, but the former asks for logprobs."""
    same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL.get(name, ()))
    return value is None or name in NAMES_OF_CALLERS or any(same)


def shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
