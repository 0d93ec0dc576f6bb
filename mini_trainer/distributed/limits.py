"""Limits on the time and memory of other people's templates and patterns."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mini_trainer.options.reading import read_text


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after this time. Only the main thread of a process can be interrupted, and
    workers run there; elsewhere there is no limit. A single operation on huge values cannot be interrupted. After twice
    the limit of CPU time the kernel ends the process with SIGVTALRM, unless the program handles that signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise TimeoutError(f"takes longer than {seconds:g} seconds")

    handler = signal.signal(signal.SIGALRM, give_up)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    virtual = signal.setitimer(signal.ITIMER_VIRTUAL, 2 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *virtual)
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Raises MemoryError in the block once it needs this much more memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    address_space = int(read_text(Path("/proc/self/statm")).split()[0]) * os.sysconf("SC_PAGE_SIZE")
    wanted = address_space + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == resource.RLIM_INFINITY else min(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
