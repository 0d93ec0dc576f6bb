"""Printing to readers that may end first, as in `| head`."""

import os
from typing import TextIO


def print_as_is(text: str, stream: TextIO) -> None:
    """Prints `text` at once. If nobody reads the stream any more, it is lost, and no error ends the work."""
    try:
        print(text, end="", file=stream, flush=True)
    except BrokenPipeError:
        leave_unread(stream)


def leave_unread(stream: TextIO) -> None:
    """Sends what is in the stream's buffer, and all that follows, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
