"""From a tokenized data set to this rank's micro-batches: the infinite order, the global batch, prefetch.

Everything about a step is a pure function of (data, seed, step): every rank plans the same global batch and the same
table of micro-batches without talking to the others, and then reads its own rows only.
"""

import functools
import gc
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from batch_packer import pack_batch
from corpus.reader import TokenizedData
from objectives.micro_batch import MicroBatch
from objectives.objective import Objective
from options import DataOptions, EndOptions

Item = TypeVar("Item")


@dataclass(frozen=True)
class RunPosition:
    """How far a run has come: steps taken, and samples and tokens trained in them."""

    step: int = 0
    num_samples: int = 0  # also the position in the stream
    num_tokens: int = 0

    def after(self, batch: "Batch") -> "RunPosition":
        """Where the run is once it has trained `batch`."""
        return RunPosition(
            step=batch.step + 1,
            num_samples=self.num_samples + len(batch.sample_ids),
            num_tokens=self.num_tokens + int(batch.lengths.sum()),
        )

    def __str__(self) -> str:
        return f"{self.step:,} steps, {self.num_samples:,} samples and {self.num_tokens:,} tokens done"


@dataclass(frozen=True)
class Batch:
    """One optimizer step: what all ranks train together, and this rank's part of it."""

    step: int
    sample_ids: np.ndarray  # (batch_size,) rows of the data set
    lengths: np.ndarray  # (batch_size,) tokens
    num_loss_tokens: int  # trained targets, over all ranks
    table: list[list[list[int]]]  # table[k][rank]: indices into sample_ids
    micro_batches: list[MicroBatch]  # this rank's column of the table


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def permute_epoch(seed: int, epoch: int, num_samples: int) -> np.ndarray:  # (num_samples,)
    """Epoch `epoch` of the stream: a permutation drawn from (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def draw_samples(data: TokenizedData, *, seed: int, start: int, count: int) -> np.ndarray:  # (count,)
    """Rows at positions [start, start + count) of the infinite stream."""
    num_samples = len(data.kept)
    parts = []
    while count > 0:
        epoch, offset = divmod(start, num_samples)
        part = permute_epoch(seed, epoch, num_samples)[offset : offset + count]
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return data.kept[np.concatenate(parts)]


def count_steps(
    data: TokenizedData, options: DataOptions, end: EndOptions, *, start: RunPosition = RunPosition()
) -> int | None:
    """The run's steps, those before `start` included, until it reaches the first given end; None if none is given."""
    epoch_length = len(data.kept)
    num_samples = [n for n in (end.max_samples, None if end.max_epochs is None else end.max_epochs * epoch_length) if n]
    if end.max_tokens is not None:
        epoch, rest = divmod(end.max_tokens, int(data.lengths[data.kept].sum(dtype=np.int64)))
        order = data.kept[permute_epoch(options.seed, epoch, epoch_length)]
        in_epoch = int(np.searchsorted(np.cumsum(data.lengths[order], dtype=np.int64), rest)) + 1 if rest else 0
        num_samples.append(epoch * epoch_length + in_epoch)
    ends = [start.step + max(0, -(-(n - start.num_samples) // options.batch_size)) for n in num_samples]
    ends += [] if end.max_steps is None else [end.max_steps]
    return min(ends, default=None)


def derive_seed(seed: int, step: int, rank: int) -> int:
    """One seed for each (seed, step, rank), so that there is no generator state to keep."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


def iterate_batches(
    data: TokenizedData,
    options: DataOptions,
    *,
    objective: Objective,
    start: RunPosition = RunPosition(),
    num_steps: int | None,
    attention_cost: float,
    rank: int,
    world_size: int,
) -> Iterator[Batch]:
    """The global batches from `start` up to `num_steps` (None: without end), each with this rank's micro-batches."""
    step, num_drawn = start.step, start.num_samples
    while num_steps is None or step < num_steps:
        sample_ids = draw_samples(data, seed=options.seed, start=num_drawn, count=options.batch_size)
        lengths = data.lengths[sample_ids]
        table = pack_batch(lengths, options.max_tokens_per_gpu, world_size, attention_cost)
        micro_batches = []
        for row in table:
            samples = [data.read(sample_ids[i]) for i in row[rank]]
            micro_batches.append(objective.pack(samples or [objective.make_idle_sample()]))
        num_loss_tokens = int(data.num_loss_tokens[sample_ids].sum())
        data.release_pages()
        yield Batch(step, sample_ids, lengths, num_loss_tokens, table, micro_batches)
        step, num_drawn = step + 1, num_drawn + options.batch_size


def pin_memory(batches: Iterator[Batch]) -> Iterator[Batch]:
    """`batches`, with their micro-batches in memory from which copies to a GPU need not be waited for."""
    for batch in batches:
        yield replace(batch, micro_batches=[micro_batch.pin_memory() for micro_batch in batch.micro_batches])


def prefetch(items: Iterator[Item], *, depth: int = 2) -> Iterator[Item]:
    """`items`, made up to `depth` ahead by a background thread; its exceptions are raised here."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(kind: str, value: Any) -> None:
        while not closed.is_set():
            try:
                return ready.put((kind, value), timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for item in items:
                put("item", item)
                if closed.is_set():
                    return
            put("end", None)
        except BaseException as error:  # whatever it is, it belongs to the thread that trains
            put("error", error)

    threading.Thread(target=produce, name="prefetch", daemon=True).start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        closed.set()


def collect_garbage_between(items: Iterator[Item], *, every: int = 100) -> Iterator[Item]:
    """`items`, with Python's garbage collector running only before each `every`-th of them.

    Left alone it runs in the middle of some step, on another rank each time, and all others wait. What there is at
    the start is never looked through again.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for i, item in enumerate(items, start=1):
            if i % every == 0:
                gc.collect()
            yield item
    finally:
        gc.unfreeze()
        gc.enable()
