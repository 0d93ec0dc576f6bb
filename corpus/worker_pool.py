"""Runs a function over a stream of items in worker processes, in order, and ends cleanly.

Each worker has a pipe and a thread of this process of its own, which sends it an item and waits for the result. A
worker that dies closes its pipe, so its thread hears of it at once, whatever else is in the queue. The standard
library's ProcessPoolExecutor has one queue for all workers; in Python 3.11.2, which Debian 12 comes with, it waits for
ever if a worker dies while that queue is full.
"""

import gc
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

Item = TypeVar("Item")
Result = TypeVar("Result")
EXIT_SECONDS = 5.0  # to wait for a dying worker's exit code
THREADS = "worker"  # how the threads that speak to the workers are called


class WorkerDied(Exception):
    """A worker ended without a result, with this exit code."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    @property
    def reason(self) -> str:
        if self.exit_code == -signal.SIGVTALRM:  # the CPU time limit of chat/rendering.py
            return (
                "a worker process was ended, because one operation of the chat template takes too long and cannot be"
                " interrupted: nothing was written; use another template (--chat-template)"
            )
        return "a worker process was killed, perhaps for want of memory: nothing was written; try a smaller --num-proc"


def run_in_order(
    process: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> Iterator[tuple[Item, Result]]:
    """Items and their results, in order, by `num_workers` processes, or in this one if that is 1."""
    if num_workers == 1:
        yield from ((item, run_without_collector(process, item)) for item in items)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    try:
        with start_workers(process, num_workers) as submit:
            for item in items:
                pending.append((item, submit(item)))
                if len(pending) > 2 * num_workers:  # enough to keep all busy; more would only fill memory
                    item, future = pending.popleft()
                    yield item, future.result()
            while pending:
                item, future = pending.popleft()
                yield item, future.result()
    except WorkerDied as death:
        raise ValueError(death.reason) from None


@contextmanager
def start_workers(process: Callable[[Any], Any], num_workers: int) -> Iterator[Callable[[Any], Future[Any]]]:
    """A function that gives an item to the next free worker. Afterwards no worker is left, whatever it was doing."""
    # Forked workers share the tokenizer that is already loaded. Elsewhere than on Linux forking is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    workers, free = [], SimpleQueue()
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix=THREADS)
    try:
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            with closing(theirs):  # a worker's end is open in that worker only, or its death would not be heard
                workers.append(context.Process(target=serve, args=(process, theirs)))
                workers[-1].start()
            free.put((ours, workers[-1]))
        yield lambda item: threads.submit(exchange, item, free)
    finally:
        started = [worker for worker in workers if worker.pid is not None]
        for worker in started:
            worker.kill()  # it holds nothing that has to be saved; its thread, if it waits for a result, hears of it
        threads.shutdown(cancel_futures=True)
        for worker in started:
            worker.join()


def exchange(item: Item, free: "SimpleQueue[tuple[Connection, BaseProcess]]") -> Any:
    """The item's result, from a worker that is free. Raises what the worker raised, and WorkerDied if it ended."""
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
    """A worker's life. The parent alone hears Ctrl-C and SIGTERM, and ends the workers; they end with it."""
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
    """A parent that is killed cannot end its workers, which would wait for items for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def run_without_collector(process: Callable[[Item], Result], item: Item) -> Result:
    """Holds off the collection of cycles: there are few, and to look for them among millions of objects takes time."""
    gc.disable()
    try:
        return process(item)
    finally:
        gc.enable()
