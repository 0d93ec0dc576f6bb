"""Printed messages, stripped of terminal control sequences, passwords and keys; progress bars in a terminal.

Much of what we print comes from models, data, servers and other people's files.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from mini_trainer.options.urls import HIDDEN, hide_credentials, is_secret

LONGEST_REASON = 400  # characters of an error that are shown


def print_as_is(text: str, stream: TextIO) -> None:
    """Prints `text` at once. If nobody reads the stream any more, it is lost, and no error ends the work."""
    try:
        print(text, end="", file=stream, flush=True)
    except BrokenPipeError:  # the stream's buffer, and everything after it, goes to the null device
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


# Control characters, bidirectional formatting characters, and surrogates (from file names that are not UTF-8), which
# cannot be printed.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
SHORTEST_SECRET = 6  # characters; shorter values would hide ordinary words
MOST_RUNS = 20  # ranges of consecutive ranks that a message lists


def make_visible(text: str) -> str:
    """Escapes control characters in `text`, except tabs and newlines."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def hide_secrets(text: str) -> str:
    """Removes the credentials in URLs, and the values of secret environment variables, from `text`."""
    secrets = [value for name, value in os.environ.items() if is_secret(name) and len(value) >= SHORTEST_SECRET]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return hide_credentials(text)


def say_note(message: str) -> None:
    """Prints a line beside a program's results."""
    say(message, is_error=True)


def hide_in(value: Any) -> Any:
    """JSON's `value` without secrets in its texts, for files that others can read."""
    if isinstance(value, dict):
        return {key: hide_in(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(hide_in, value))
    return hide_secrets(value) if isinstance(value, str) else value


def clean(text: str) -> str:
    return make_visible(hide_secrets(text))


def say(text: str, *, is_error: bool = False) -> None:
    print_as_is(f"{clean(text)}\n", sys.stderr if is_error else sys.stdout)


class CleanFormatter(logging.Formatter):
    """Cleans log lines."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def describe_ranks(ranks: Sequence[int]) -> str:
    return describe_numbers("rank", ranks)


def describe_numbers(name: str, numbers: Sequence[int]) -> str:
    """Formats ascending numbers of something: "rank 3", "ranks 0-7, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:MOST_RUNS]]
    more = f" and {sum(map(len, runs[MOST_RUNS:]))} more" if len(runs) > MOST_RUNS else ""
    return f"{name}{'s' * (len(numbers) > 1)} {', '.join(names)}{more}"


def has_colours() -> bool:
    """Whether text may be coloured or bold: in a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def shows_progress() -> bool:
    """Whether this is rank 0 and its stderr is a terminal with room: some, of containers, have no columns."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        return False
    return os.get_terminal_size(sys.stderr.fileno()).columns > 0


def show_progress(items: Iterable[Any], what: str, *, unit: str) -> tqdm:
    """Yields the items behind a progress bar, which is erased at the end."""
    return tqdm(items, desc=what, unit=unit, leave=False, dynamic_ncols=True, disable=not shows_progress())


@contextlib.contextmanager
def without_library_bars() -> Iterator[None]:
    """Disables transformers' own progress bars, which would garble ours and the live training line."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    were_shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            enable_progress_bar()


class LinesAboveBars(logging.Handler):
    """Writes each message to stderr above any progress bars, and redraws them below it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def leave_bars() -> str:
    """Text to print before a final message, so that it starts on an empty line."""
    return "\r\x1b[K" if sys.stderr.isatty() else ""


def one_line(error: Exception) -> str:
    """The error's message on one line, shortened: templates and libraries can raise pages of text."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " ..."


def describe_error(error: BaseException) -> str:
    """An exception's type and first line, without secrets."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return hide_secrets(f"{type(error).__name__}: {line[:300]}")
