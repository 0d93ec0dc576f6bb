"""Progress on a terminal: bars on rank 0's stderr, and log lines that do not tear them. Without a terminal, none."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

ERASE_LINE = "\r\x1b[K"


def shows_progress() -> bool:
    """Whether somebody sits before this process's stderr, and it is rank 0's."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


def show_progress(items: Iterable[Any], what: str, *, unit: str) -> tqdm:
    """The same items, with a bar that is gone when they are."""
    return tqdm(items, desc=what, unit=unit, leave=False, dynamic_ncols=True, disable=not shows_progress())


@contextlib.contextmanager
def without_library_bars() -> Iterator[None]:
    """Without transformers' own progress bars, which would tear ours, and the line of a running training."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    were_shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            enable_progress_bar()


class LinesAboveBars(logging.Handler):
    """Writes each message to stderr above the bars, if any, and redraws them below it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def leave_bars() -> str:
    """What to print before a last message, so that it begins on an empty line."""
    return ERASE_LINE if sys.stderr.isatty() else ""
