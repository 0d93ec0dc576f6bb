"""What chat templates are given, and limits for them, which are other people's programs: errors, time, memory.

transformers runs them in jinja's sandbox, which keeps them from files and processes, but not from running for ever.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from chat.examples import Message
from chat.placeholders import REASONING_KEYS

RENDER_SECONDS = 20.0  # for one call: a thousand ordinary chats take less than one
RENDER_BYTES = 4 << 30  # of memory, for trying a template
LONGEST_REASON = 400  # characters of an error that are told
TOO_MUCH_MEMORY = 3  # exit code

EXCHANGE = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]

T = TypeVar("T")


@contextmanager
def template_errors() -> Iterator[None]:
    """A template is someone else's program, and can fail in any way: what it raises becomes a ValueError."""
    try:
        with time_limit(RENDER_SECONDS):
            yield
    except Exception as error:
        raise ValueError(f"the chat template fails: {str(error) or type(error).__name__}") from None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after this time. Only the main thread of a Unix process can be interrupted,
    which is where worker processes work; elsewhere there is no limit."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise TimeoutError(f"takes longer than {seconds:g} seconds")

    handler = signal.signal(signal.SIGALRM, give_up)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
        signal.signal(signal.SIGALRM, handler)


def check_in_child(function: Callable[[], object]) -> None:
    """Calls `function` in a process that can be ended, whatever it does: one operation on huge numbers or texts cannot
    be interrupted. Raises ValueError if it takes too long or too much memory. Only on Linux, where forking is safe."""
    if sys.platform != "linux":
        return

    def run() -> None:
        import resource  # not everywhere

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with open("/proc/self/statm") as memory:
            used = int(memory.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + RENDER_BYTES,) * 2)
        try:
            function()
        except MemoryError:
            os._exit(TOO_MUCH_MEMORY)

    child = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    child.start()
    child.join(RENDER_SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        raise ValueError(f"takes longer than {RENDER_SECONDS:g} seconds")
    if child.exitcode == TOO_MUCH_MEMORY:
        raise ValueError(f"needs more than {RENDER_BYTES >> 30} GiB")
    if child.exitcode != 0:
        raise ValueError(f"ends its process with code {child.exitcode}")


def prepare_messages(messages: Sequence[Message]) -> list[Message]:
    """As `apply_chat_template` does, of late: templates see missing fields, not nulls, and reasoning whatever it is
    called, since gpt-oss reads "thinking" and others "reasoning_content"."""
    prepared = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
        named = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        prepared.append({key: value for key, value in named.items() if value is not None})
    return prepared


def prepare_for(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """The messages in the form that the tokenizer's chat template reads. Rows and prompts both go through here, so that
    a model is prompted with the text that it was trained on."""
    prepared = prepare_messages(messages)
    return [as_parts(message) for message in prepared] if takes_parts(tokenizer) else prepared


def takes_parts(tokenizer: Any) -> bool:
    """Whether the template writes contents only if they are lists of parts, as those of some multi-modal models do."""
    template = tokenizer.chat_template
    return find_form(tokenizer, template if isinstance(template, str) else repr(template))


@lru_cache(maxsize=8)
def find_form(tokenizer: Any, _template: str) -> bool:
    """`takes_parts`, found once per tokenizer and template."""

    def writes(messages: list[Message]) -> bool:
        try:
            with template_errors():
                text = tokenizer.apply_chat_template(messages, tokenize=False)
        except ValueError:
            return False
        return all(message["content"] in text for message in EXCHANGE)

    return not writes(EXCHANGE) and writes([as_parts(message) for message in EXCHANGE])


def as_parts(message: Message) -> Message:
    """The message with its text as a list of one part, the only way in which some multi-modal templates write it."""
    content = message.get("content")
    is_text = isinstance(content, str) and content != ""
    return {**message, "content": [{"type": "text", "text": content}]} if is_text else message


def catch_error(function: Callable[..., T], value: Any, *args: Any, **options: Any) -> T | ValueError:
    """function(value, *args, **options), or the ValueError that it raised or that an argument already is."""
    for argument in (value, *args):
        if isinstance(argument, ValueError):
            return argument
    try:
        return function(value, *args, **options)
    except ValueError as error:
        return error


def one_line(error: Exception) -> str:
    """What an error says, on one line and not too long: templates and libraries can say pages."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " ..."
