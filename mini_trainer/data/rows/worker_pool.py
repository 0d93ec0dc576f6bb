"""Runs a function over a stream of items in worker processes, in order, and ends cleanly.

Each worker has its own pipe and its own thread of this process, which sends it an item and waits for the result. A
worker that dies closes its pipe, so its thread notices at once, regardless of the queue. The standard library's
ProcessPoolExecutor has one queue for all workers; in Python 3.11.2, Debian 12's version, it waits forever if a worker
dies while that queue is full.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, TypeVar

from mini_trainer.distributed.process import without_collector

Item = TypeVar("Item")
Result = TypeVar("Result")
EXIT_SECONDS = 5.0  # to wait for a dying worker's exit code
THREADS = "worker"  # name prefix of the workers' threads


class WorkerDied(Exception):
    """A worker ended without a result, with this exit code."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    @property
    def reason(self) -> str:
        if self.exit_code == -signal.SIGVTALRM:  # the CPU time limit of data/chat/rendering.py
            return (
                "a worker process was ended, because one operation of the chat template takes too long and cannot be"
                " interrupted: nothing was written; use another template (--chat-template)"
            )
        return "a worker process was killed, perhaps out of memory: nothing was written; try a smaller --num-proc"


def run_in_order(
    process: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> Iterator[tuple[Item, Result]]:
    """Yields items and their results, in order, from `num_workers` processes, or from this one if that is 1."""
    if num_workers == 1:
        yield from ((item, run_without_collector(process, item)) for item in items)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    try:
        with start_workers(process, num_workers) as submit:
            for item in items:
                pending.append((item, submit(item)))
                if len(pending) > 2 * num_workers:  # keeps all workers busy; more would only fill memory
                    item, future = pending.popleft()
                    yield item, future.result()
            while pending:
                item, future = pending.popleft()
                yield item, future.result()
    except WorkerDied as death:
        raise ValueError(death.reason) from None


@contextmanager
def start_workers(process: Callable[[Any], Any], num_workers: int) -> Iterator[Callable[[Any], Future[Any]]]:
    """A function that passes an item to the next free worker. On exit all workers are ended, busy or not."""
    # Forked workers share the tokenizer that is already loaded. Forking is safe only on Linux.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    workers, free = [], SimpleQueue()
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix=THREADS)
    try:
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            with closing(theirs):  # the worker's end must be open only there, or its death would not be noticed
                workers.append(context.Process(target=serve, args=(process, theirs)))
                workers[-1].start()
            free.put((ours, workers[-1]))
        yield lambda item: threads.submit(exchange, item, free)
    finally:
        started = [worker for worker in workers if worker.pid is not None]
        for worker in started:
            worker.kill()  # it has nothing to save; a thread that waits for its result gets an EOFError
        threads.shutdown(cancel_futures=True)
        for worker in started:
            worker.join()


def exchange(item: Item, free: "SimpleQueue[tuple[Connection, BaseProcess]]") -> Any:
    """The item's result from a free worker. Raises the worker's exception, or WorkerDied if the worker ended."""
    connection, worker = free.get()
    try:
        connection.send(item)
        result, error = connection.recv()
    except (EOFError, OSError):
        worker.join(EXIT_SECONDS)  # its end of the pipe is closed when it ends
        raise WorkerDied(worker.exitcode) from None
    finally:
        free.put((connection, worker))
    if error is not None:
        raise error
    return result


def serve(process: Callable[[Any], Any], connection: Connection) -> None:
    """A worker's main loop. Only the parent handles Ctrl-C and SIGTERM, and ends the workers; they end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            item = connection.recv()
            try:
                answer = run_without_collector(process, item), None
            except Exception as error:
                error.add_note(f"in a worker process:\n{traceback.format_exc()}")
                answer = None, error
            connection.send(answer)


def end_with_parent() -> None:
    """Exits when the parent does: a killed parent cannot end its workers, which would wait for items forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def run_without_collector(process: Callable[[Item], Result], item: Item) -> Result:
    """process(item) without garbage collection: cycles are rare, and searching millions of objects takes time."""
    with without_collector():
        return process(item)
