"""torchrun whose ranks are forked from it, not started: torchrun.py ARGUMENT_OF_TORCHRUN...

For forked.py, whose server has imported what torchrun and the ranks need. It is torchrun in all else: the ranks'
parent, their environment, their store, the signals that it gets and gives.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main

from mini_trainer.distributed import watch


class Rank:
    """The part of subprocess.Popen that torchrun uses."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], **_: object):
        _, unbuffered, *argv = args
        assert unbuffered == "-u"
        self.process = multiprocessing.get_context("fork").Process(target=become, args=(argv, env))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.process.exitcode


def become(argv: list[str], env: dict[str, str]) -> None:
    """In the new process: becomes `python *argv`."""
    os.setsid()
    os.environ.clear()
    os.environ |= env
    watch.PARENT = os.getppid()  # which a process of its own reads as it imports this
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


subprocess_handler.Popen = Rank
main(sys.argv[1:])
