"""Starting over with smaller micro-batches, after a start whose automatic choice had no room."""

import contextlib
import os
import sys
from typing import NoReturn

from mini_trainer.distributed.ending import ExitCode

FEWER_TOKENS = "MINI_TRAINER_FEWER_TOKENS"  # environment: the most tokens of a micro-batch after a start without room


def start_over(most_tokens: int) -> NoReturn:
    """Runs this process's command again, from the beginning, with at most this many tokens in a micro-batch."""
    os.environ[FEWER_TOKENS] = str(most_tokens)
    # The device's, which would keep its memory, and those of peers close with the threads that wait on them: gloo's
    # ends the process if one closes before.
    for descriptor in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            os.set_inheritable(int(descriptor), int(descriptor) < 3)
    with contextlib.suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    os._exit(ExitCode.OUT_OF_MEMORY)
