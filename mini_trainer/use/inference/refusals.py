"""Prompts that a server refuses as too long: how servers say so, and how much room a context leaves."""

import re
from typing import Any

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


class PromptTooLong(ValueError):
    """A request was refused because prompt and answer do not fit into the model's context; `reason` is the server's."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return PromptTooLong, (*self.args, self.reason), self.__dict__  # pickle would call it with `args` alone


def is_too_long(error: Any) -> bool:
    """Whether an openai.APIStatusError refuses a prompt for its length."""
    if error.status_code == CLIENT_TOO_LARGE:
        return True
    return error.status_code in STATUSES and TOO_LONG.search(error.message) is not None


def read_words(error: Any) -> str:
    """The message in an openai.APIStatusError's body; without one, all of it."""
    body = error.body
    words = body.get("message") if isinstance(body, dict) else None
    return words if isinstance(words, str) and words else error.message


def read_context(reason: str) -> int | None:
    """The model's context in tokens, as a refusal names it."""
    found = CONTEXT.search(reason)
    return None if found is None else int(found[1])
