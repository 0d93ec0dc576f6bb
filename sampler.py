"""Samples this rank's micro-batches from a tokenized data set: the infinite order, the global batch, prefetch.

Everything about a step is a pure function of (data, seed, step): every rank plans the same global batch and the same
table of micro-batches without communication, and then reads only its own rows.
"""

import bisect
import functools
import gc
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from mini_trainer.batch_packer import batch_lengths_to_minibatches, pack_batch  # noqa: F401 - sampler had it first
from mini_trainer.data.tokenized import by_row
from mini_trainer.data.tokenized.mixture import Mixture, interleave
from mini_trainer.distributed.world import RowGroup, RowPlace, World, count_sharing
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.objective import Objective, Unlabeled
from mini_trainer.options import DataOptions, EndOptions

Item = TypeVar("Item")


@dataclass(frozen=True)
class RunPosition:
    """Progress of a run: steps taken, and samples and tokens trained in them."""

    step: int = 0
    num_samples: int = 0  # also the position in the stream
    num_tokens: int = 0
    num_in_step: int = 0  # samples of the last step

    def after(self, batch: "Batch") -> "RunPosition":
        """The position after training `batch`."""
        return RunPosition(
            step=batch.step + 1,
            num_samples=self.num_samples + len(batch.sample_ids),
            num_tokens=self.num_tokens + int(batch.lengths.sum()),
            num_in_step=len(batch.sample_ids),
        )

    def __str__(self) -> str:
        return f"{self.step:,} steps, {self.num_samples:,} samples and {self.num_tokens:,} tokens done"


@dataclass(frozen=True)
class Batch:
    """One optimizer step: the global batch of all ranks, and this rank's part of it."""

    step: int
    sample_ids: np.ndarray  # (samples,) rows of the data set
    lengths: np.ndarray  # (samples,) tokens
    num_loss_tokens: int  # trained targets, over all ranks
    divisors: dict[str, float]  # of sums over the global batch, by name (see `Objective.weigh`)
    table: list[list[list[int]]]  # table[k][rank]: indices into sample_ids; table[k][group] if ranks share rows
    micro_batches: list[MicroBatch]  # this rank's column of the table
    data: Mixture  # source of the rows
    num_sharing: int = 1  # ranks that share each packed row
    own: int = 0  # this rank's column of the table
    old: "Batch | None" = None  # the samples of --keep beside these, in micro-batches of their own

    @property
    def parts(self) -> list["Batch"]:
        """The new samples and, if there are any, the old ones: the micro-batches of a step, in order."""
        return [self] if self.old is None else [self, self.old]

    @property
    def column(self) -> list[list[int]]:
        """Indices into `sample_ids` of each of this rank's micro-batches."""
        return [row[self.own] for row in self.table]


@functools.lru_cache(maxsize=256)
def epoch_permutations(seed: tuple[int, ...], num_samples: int) -> Callable[[int], by_row.Permutation]:
    """A data set's order in each epoch: a permutation (num_samples,) drawn from (seed, epoch)."""

    @functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
    def permute(epoch: int) -> by_row.Permutation:
        return by_row.draw_permutation(num_samples, [seed[0], epoch, *seed[1:]])

    return permute


def draw_from(kept: by_row.Rows, *, seed: tuple[int, ...], start: int, count: int) -> np.ndarray:  # (count,)
    """Rows at positions [start, start + count) of the infinite stream of one data set's rows `kept`."""
    parts = [kept[:0]]
    while count > 0:
        epoch, offset = divmod(start, len(kept))
        part = kept[epoch_permutations(seed, len(kept))(epoch)[offset : offset + count]]
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return np.concatenate(parts)


def stream_seeds(data: Mixture, seed: int) -> list[tuple[int, ...]]:
    """Seeds of each data set's permutations."""
    return [(seed,)] if len(data.sources) == 1 else [(seed, i) for i in range(len(data.sources))]


def draw_samples(data: Mixture, *, seed: int, start: int, count: int) -> np.ndarray:  # (count,)
    """Rows at positions [start, start + count) of the infinite stream, which interleaves the data sets."""
    sources, before = interleave(data.shares, start=start, count=count)
    rows = np.empty(count, dtype=data.kept.dtype)
    for i, source_seed in enumerate(stream_seeds(data, seed)):
        here = sources == i
        rows[here] = draw_from(data.kept_of[i], seed=source_seed, start=int(before[i]), count=int(here.sum()))
    return rows


def count_drawn(data: Mixture, num_samples: int) -> np.ndarray:  # (sources,)
    """Number of samples from each data set among the first `num_samples` of the stream."""
    return interleave(data.shares, start=num_samples, count=0)[1]


class StreamTokens:
    """Cumulated tokens of the stream at any position: at most the epoch that it lies in is walked, once.
    Holds the tokens of every `BLOCK` samples for two epochs of each data set: 16 / `BLOCK` bytes a sample."""

    def __init__(self, data: Mixture, *, seed: int):
        self.data = data
        self._counts = [
            cumulate_epochs(data.lengths, kept, seed=source_seed)
            for kept, source_seed in zip(data.kept_of, stream_seeds(data, seed), strict=True)
        ]
        means = [count(len(kept)) / len(kept) for count, kept in zip(self._counts, data.kept_of, strict=True)]
        self.mean_length = float(data.shares @ means)  # of the samples that are drawn

    def count(self, num_samples: int) -> int:
        """Number of tokens of the first `num_samples` of the stream."""
        numbers = count_drawn(self.data, num_samples).tolist()
        return sum(count(drawn) for count, drawn in zip(self._counts, numbers, strict=True))

    def find(self, num_tokens: int, *, start: int = 0) -> int:
        """The first position of the stream at which `num_tokens`, at least one, have been read; sought from `start`."""
        expected = start + int((num_tokens - self.count(start)) / self.mean_length)
        width = 64  # doubled until the position is less than this far from the expected one
        while self.count(max(0, expected - width)) >= num_tokens or self.count(expected + width) < num_tokens:
            width *= 2
        first = max(0, expected - width)
        return first + bisect.bisect_left(range(first, expected + width), num_tokens, key=self.count)


def cumulate_epochs(lengths: by_row.Values, kept: by_row.Rows, *, seed: tuple[int, ...]) -> Callable[[int], int]:
    """Returns the function from a number of draws from one data set's rows `kept` to the number of their tokens."""
    num_tokens, size, permute = by_row.sum_values(lengths, kept), len(kept), epoch_permutations(seed, len(kept))

    @functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
    def open_epoch(epoch: int) -> by_row.RunningSums:
        return by_row.RunningSums(lambda start, end: lengths[kept[permute(epoch)[start:end]]], size, total=num_tokens)

    def count(num_drawn: int) -> int:
        epoch, offset = divmod(num_drawn, size)
        return epoch * num_tokens + (open_epoch(epoch).before(offset) if offset else 0)

    return count


@dataclass(frozen=True)
class SampleBatches:
    """Batches of `size` samples: t is positions [t * size, (t + 1) * size) of the stream."""

    size: int

    @property
    def flag(self) -> str:
        """The option that sets the batches, with its value."""
        return f"--batch-size {self.size}"

    @property
    def mean_samples(self) -> float:
        return self.size

    def __str__(self) -> str:
        return f"{self.size:,} samples"

    def find_end(self, start: int, *, num_batches: int = 1) -> int:
        """The position after `num_batches` batches, the first of which begins at position `start`."""
        return start + num_batches * self.size

    def count(self, start: int, end: int) -> int:
        """Number of batches from the one that begins at position `start` to the one that reaches `end`."""
        return max(0, -(-(end - start) // self.size))


@dataclass(frozen=True)
class TokenBatches:
    """Batches of about `size` tokens: t is the samples whose first token lies in [t * size, (t + 1) * size) of the
    stream's cumulated tokens.

    No sample is longer than `size`. So no batch is empty: the first tokens of neighbours are at most `size` apart, and
    none of the intervals lies between two of them. The first t batches have at least t * size tokens, and fewer than
    one sample more; a single batch has `size` tokens to within one sample. A batch is found from its first position
    alone, so that is all there is to resume from.
    """

    size: int
    stream: StreamTokens

    @property
    def flag(self) -> str:
        return f"--batch-tokens {self.size}"

    @property
    def mean_samples(self) -> float:
        return self.size / self.stream.mean_length

    def __str__(self) -> str:
        return f"{self.size:,} tokens, {self.mean_samples:,.1f} samples on average"

    def find_end(self, start: int, *, num_batches: int = 1) -> int:
        return self.stream.find((self.stream.count(start) // self.size + num_batches) * self.size, start=start)

    def count(self, start: int, end: int) -> int:
        if end <= start:
            return 0
        return self.stream.count(end - 1) // self.size - self.stream.count(start) // self.size + 1


Batching = SampleBatches | TokenBatches  # the rule that divides the stream into global batches, one after another


def choose_batching(data: Mixture, options: DataOptions) -> Batching:
    """The rule of --batch-size or --batch-tokens. ValueError for a sample longer than --batch-tokens."""
    if options.batch_tokens is None:
        return SampleBatches(options.samples_per_step)
    longest = by_row.find_top_row(data.lengths, data.kept)
    if data.lengths[longest] > options.batch_tokens:
        path, row = data.locate(longest)
        raise ValueError(
            f"--batch-tokens {options.batch_tokens}: the longest sample, row {row} of {path}, has"
            f" {data.lengths[longest]} tokens: raise it to at least that, or drop long samples with process_data.py"
            " --max-sample-num-tokens"
        )
    return TokenBatches(options.batch_tokens, StreamTokens(data, seed=options.seed))


def draw_batches(data: Mixture, batching: Batching, *, seed: int, start: int) -> Iterator[np.ndarray]:
    """Yields the rows of each global batch, endlessly, from the one that begins at position `start`."""
    while True:
        end = batching.find_end(start)
        yield draw_samples(data, seed=seed, start=start, count=end - start)
        start = end


def count_steps(
    data: Mixture, batching: Batching, end: EndOptions, *, seed: int, start: RunPosition = RunPosition()
) -> int | None:
    """The run's number of steps, including those before `start`, up to the first given end; None without an end.
    Computed, not counted: with C(n) tokens in the stream's first n samples, a run from its beginning to its n-th sample
    takes ceil(n / --batch-size) steps, or floor(C(n - 1) / --batch-tokens) + 1."""
    epoch_length = len(data.kept)
    num_samples = [n for n in (end.max_samples, None if end.max_epochs is None else end.max_epochs * epoch_length) if n]
    if end.max_tokens is not None:
        num_samples.append(StreamTokens(data, seed=seed).find(end.max_tokens))
    ends = [start.step + batching.count(start.num_samples, n) for n in num_samples]
    ends += [] if end.max_steps is None else [end.max_steps]
    return min(ends, default=None)


def derive_seed(seed: int, step: int, rank: int) -> int:
    """A seed for each (seed, step, rank), so that no generator state has to be kept."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


def iterate_batches(
    data: Mixture,
    options: DataOptions,
    *,
    objective: Objective | Unlabeled,
    batching: Batching | None = None,
    start: RunPosition = RunPosition(),
    num_steps: int | None,
    attention_cost: float,
    world: World | RowPlace,
) -> Iterator[Batch]:
    """Yields the global batches from `start` to `num_steps` (None: endlessly), each with this rank's micro-batches.
    `batching`: the rule for the data and options, if it is known; a new one reads all lengths."""
    batching = batching or choose_batching(data, options)
    num_drawn, num_sharing = start.num_samples, count_sharing(world.row_group)
    cap, own = options.max_tokens_per_gpu * num_sharing, world.rank // num_sharing
    num_rows = world.world_size // num_sharing
    steps = itertools.count(start.step) if num_steps is None else range(start.step, num_steps)
    batches = draw_batches(data, batching, seed=options.seed, start=num_drawn)
    for step, sample_ids in zip(steps, batches, strict=False):
        lengths = data.lengths[sample_ids]
        table = pack_batch(lengths, cap, num_rows, attention_cost, data.load_of(sample_ids))
        micro_batches = [
            read_micro_batch(data, sample_ids[row[own]], objective, row_group=world.row_group) for row in table
        ]
        counts = data.num_loss_tokens[sample_ids]  # (samples,)
        num_targets, num_tokens = int(counts.sum()), int(lengths[counts > 0].sum())
        divisors = objective.weigh(num_targets, num_tokens, map(data.read, sample_ids.tolist()))
        data.release_pages()
        yield Batch(step, sample_ids, lengths, num_targets, divisors, table, micro_batches, data, num_sharing, own)
        num_drawn += len(sample_ids)


def read_micro_batch(
    data: Mixture,
    rows: np.ndarray,
    objective: Objective | Unlabeled,
    *,
    row_group: RowGroup | None = None,
    by_sample: bool = False,
) -> MicroBatch:
    """The packed rows, with their sources if there are several data sets; an idle micro-batch without rows.
    `by_sample`: every row is a separate source."""
    sources, num_sources = None, len(data.sources)
    if len(rows) and by_sample:
        sources, num_sources = np.arange(len(rows)), len(rows)
    elif len(rows) and num_sources > 1:
        sources = data.numbers.source_of(rows)
    samples = [data.read(row) for row in rows.tolist()] or [objective.make_idle_sample()]
    return objective.pack(samples, sources=sources, num_sources=num_sources, row_group=row_group)


def pin_memory(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields `batches` with micro-batches in pinned memory, for asynchronous copies to a GPU."""
    for batch in batches:
        pinned = [replace(part, micro_batches=[one.pin_memory() for one in part.micro_batches]) for part in batch.parts]
        yield pinned[0] if batch.old is None else replace(pinned[0], old=pinned[1])


def prefetch(items: Iterator[Item], *, depth: int = 2) -> Iterator[Item]:
    """Yields `items`, made up to `depth` ahead by a background thread; its exceptions are raised here."""
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
        except BaseException as error:  # any error belongs to the training thread
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
    """Yields `items`, with Python's garbage collector running only before each `every`-th of them. Otherwise it runs in
    the middle of some step, on another rank each time, and all others wait. Objects that exist at the start are never
    scanned again, not even after the last item, as the run ends then."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for i, item in enumerate(items, start=1):
            if i % every == 0:
                gc.collect()
            yield item
    finally:
        gc.enable()
