"""Starting over with smaller micro-batches, after a start whose automatic choice had no room."""

import contextlib
import os
import sys
from typing import NoReturn

from mini_trainer.distributed.ending import ExitCode

FEWER_TOKENS = "MINI_TRAINER_FEWER_TOKENS"  # environment: the most tokens of a micro-batch after a start without room
MOST_DESCRIPTORS = 2**16


def start_over(most_tokens: int) -> NoReturn:
    """Runs this process's command again, from the beginning, with at most this many tokens in a micro-batch."""
    os.environ[FEWER_TOKENS] = str(most_tokens)
    os.closerange(3, MOST_DESCRIPTORS)  # the device's, which would keep its memory, and those of peers
    with contextlib.suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    os._exit(ExitCode.OUT_OF_MEMORY)
