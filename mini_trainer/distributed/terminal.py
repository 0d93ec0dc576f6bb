"""Progress bars on rank 0's stderr, if it is a terminal, and log lines that do not garble them."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

ERASE_LINE = "\r\x1b[K"


def shows_progress() -> bool:
    """Whether this is rank 0 and its stderr is a terminal."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


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
    return ERASE_LINE if sys.stderr.isatty() else ""
