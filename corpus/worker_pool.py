"""Runs a function over a stream of items in worker processes, in order, and ends cleanly."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_in_order(
    process: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> Iterator[tuple[Item, Result]]:
    """Items and their results, in order, by `num_workers` processes, or in this one if that is 1."""
    if num_workers == 1:
        yield from ((item, run_without_collector(process, item)) for item in items)
        return
    pool = ProcessPoolExecutor(
        num_workers,
        # forked workers share the tokenizer that is already loaded; elsewhere than on Linux forking is not safe
        mp_context=multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn"),
        initializer=start_worker,
        initargs=(process,),
    )
    pending: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            pending.append((item, pool.submit(run_in_worker, item)))
            if len(pending) > 2 * num_workers:  # enough to keep all busy; more would only fill memory
                item, future = pending.popleft()
                yield item, future.result()
        while pending:
            item, future = pending.popleft()
            yield item, future.result()
    except BrokenProcessPool:
        raise ValueError(
            "a worker process was killed, perhaps for want of memory: nothing was written; try a smaller --num-proc"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(process: Callable[[Any], Any]) -> None:
    """Called once in each worker. The parent alone hears Ctrl-C, and ends the workers; they end with it."""
    global process_in_worker
    process_in_worker = process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """A parent that is killed cannot end its workers, which would wait for items for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def run_in_worker(item: Any) -> Any:
    return run_without_collector(process_in_worker, item)


def run_without_collector(process: Callable[[Item], Result], item: Item) -> Result:
    """Holds off the collection of cycles: there are few, and to look for them among millions of objects takes time."""
    gc.disable()
    try:
        return process(item)
    finally:
        gc.enable()
