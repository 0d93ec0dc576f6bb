"""Reads the tensors that a model is filled with on a thread, ahead of their use, within a limit of memory."""

import functools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from torch import Tensor

from mini_trainer.model.stored_tensors import Reader

AHEAD_BYTES = 1 << 30  # no further tensor is begun while this much has been read and not been used


class ReadAhead:
    """Reads tensors in `order` on one thread, so that readers need not be safe for several.

    Holds at most `AHEAD_BYTES` and one tensor more. `take` returns any of them, also out of order.
    """

    def __init__(self, readers: dict[str, Reader], order: Iterable[str]):
        self.readers, self.waiting = readers, deque(order)
        self.begun: dict[str, Future[Tensor]] = {}
        self.num_held, self.is_reading = 0, False  # bytes read and not taken; whether the next ones are being read
        self.lock = threading.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")

    def take(self, name: str) -> Tensor:
        """The tensor of this name, once; raises its reader's error."""
        with self.lock:
            if name not in self.begun:
                if name in self.waiting:
                    self.waiting.remove(name)
                self.begin(name)
            future = self.begun.pop(name)
        tensor = future.result()
        with self.lock:
            self.num_held -= tensor.nbytes
            self.continue_reading()
        return tensor

    def begin(self, name: str) -> None:
        self.begun[name] = self.thread.submit(self.read, name)

    def read(self, name: str) -> Tensor:
        tensor = self.readers.pop(name)()
        with self.lock:
            self.num_held += tensor.nbytes
            self.is_reading = False
            self.continue_reading()
        return tensor

    def continue_reading(self) -> None:
        if self.waiting and not self.is_reading and self.num_held < AHEAD_BYTES:
            self.is_reading = True
            self.begin(self.waiting.popleft())

    def close(self) -> None:
        """Drops all that was not taken, and waits for the tensor that is being read."""
        with self.lock:
            self.waiting.clear()
        self.thread.shutdown(cancel_futures=True)


@contextmanager
def reading_ahead(readers: dict[str, Reader], module_names: Iterable[str]) -> Iterator[None]:
    """Makes all `readers` return tensors that are read ahead, in the order of `module_names`, inside this block."""
    if not readers:  # not on rank 0
        yield
        return
    by_module: dict[str, list[str]] = {}
    for name in readers:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    order = [name for module in dict.fromkeys(module_names) for name in by_module.get(module, ())]
    ahead = ReadAhead(dict(readers), order)
    readers |= {name: functools.partial(ahead.take, name) for name in readers}
    try:
        ahead.continue_reading()
        yield
    finally:
        ahead.close()
