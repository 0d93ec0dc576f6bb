"""From a tokenized data set to this rank's micro-batches: the infinite order, the global batch, prefetch.

Everything about a step is a pure function of (data, seed, step): every rank plans the same global batch and the same
table of micro-batches without talking to the others, and then reads its own rows only.
"""

import functools
import gc
import json
import mmap
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from batch_packer import pack_batch

IGNORED = -100  # label of a token that is not trained
COLUMNS = ("input_ids", "labels", "len", "num_loss_counted_tokens")
WEIGHTS_COLUMN = "loss_weights"  # only in data sets that use weights

Sample = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # input_ids, labels, weights: (len,) each
Item = TypeVar("Item")


@dataclass  # not frozen: of those, torch.compile would compile again for each new value of each field
class MicroBatch:
    """Sequences packed into one row, for one forward and backward on one rank: T tokens, n sequences."""

    input_ids: Tensor  # (1, T) int64
    position_ids: Tensor  # (1, T) int64, restarts at 0 in every sequence
    cu_seqlens: Tensor  # (n + 1,) int32, cumulative lengths
    targets: Tensor  # (T,) int64: the next token's label; IGNORED where nothing is trained or the sequence ends
    trained_index: Tensor  # (N,) int64: where targets is not IGNORED
    target_weights: Tensor | None  # (T,) fp32, of each target's loss; None: all are 1
    max_seqlen: int
    seq_lengths: list[int]

    def to(self, device: torch.device) -> "MicroBatch":
        """On `device`; the copy does not wait if the memory is pinned."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        return self._map_tensors(Tensor.pin_memory)

    def _map_tensors(self, function) -> "MicroBatch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(value) for name, value in values.items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class RunPosition:
    """How far a run has come: steps taken, and samples and tokens trained in them."""

    step: int = 0
    num_samples: int = 0  # also the position in the stream
    num_tokens: int = 0

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


class TokenizedData:
    """A tokenized data set, memory-mapped: lengths, counts and the order are all that is held, 28 bytes a sample."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        table, self._maps = open_table(self.path)
        self.lengths = read_column(table, "len")
        self.num_loss_tokens = read_column(table, "num_loss_counted_tokens")
        self.kept = np.arange(len(self.lengths), dtype=np.int32)  # the stream draws from these rows
        self._input_ids = [list_views(chunk) for chunk in table.column("input_ids").chunks]
        self._labels = [list_views(chunk) for chunk in table.column("labels").chunks]
        self._weights = None
        if WEIGHTS_COLUMN in table.column_names:
            self._weights = [list_views(chunk) for chunk in table.column(WEIGHTS_COLUMN).chunks]
        self._starts = np.cumsum([0] + [len(offsets) - 1 for offsets, _ in self._input_ids])
        if len(self.lengths) == 0:
            raise ValueError(f"{path}: holds no samples")
        self.release_pages()

    @property
    def has_weights(self) -> bool:
        """Whether the tokens' losses are weighted."""
        return self._weights is not None

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that is kept."""
        return int(self.lengths[self.kept].max())

    def release_pages(self) -> None:
        """Unmaps what was read: it stays in the system's cache, but no longer counts as this process's memory."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def read(self, row: int, *, vocab_size: int) -> Sample:
        """`input_ids`, `labels` and weights of a row; ValueError naming the row if they break the contract."""
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1
        i = row - int(self._starts[chunk])
        input_ids, labels, weights = (
            None if column is None else column[chunk][1][column[chunk][0][i] : column[chunk][0][i + 1]]
            for column in (self._input_ids, self._labels, self._weights)
        )
        where = f"{self.path}: row {row + 1}"
        if not len(input_ids) == len(labels) == self.lengths[row]:
            raise ValueError(f"{where}: {len(input_ids)} input_ids, {len(labels)} labels and len {self.lengths[row]}")
        if weights is not None and not (len(weights) == len(labels) and weights.min() >= 0 and weights.max() <= 1):
            raise ValueError(f"{where}: {WEIGHTS_COLUMN} has to hold {len(labels)} numbers from 0 to 1")
        if input_ids.min() < 0 or max(input_ids.max(), labels.max()) >= vocab_size:
            raise ValueError(f"{where}: token ids beyond the model's vocabulary of {vocab_size}")
        num_targets = np.count_nonzero(labels[1:] != IGNORED)
        if num_targets != self.num_loss_tokens[row]:
            raise ValueError(
                f"{where}: num_loss_counted_tokens is {self.num_loss_tokens[row]}, but {num_targets} labels after the"
                " first are not -100: tokenize the data again with process_data.py"
            )
        return input_ids, labels, weights

    def fit_to(self, max_tokens_per_gpu: int, *, drop_overlong: bool) -> int:
        """Takes samples longer than `max_tokens_per_gpu` out of the stream and counts them; refuses unless told to."""
        overlong = self.lengths > max_tokens_per_gpu
        num_overlong = int(np.count_nonzero(overlong))
        if num_overlong and not drop_overlong:
            row = int(np.argmax(self.lengths))
            raise ValueError(
                f"{self.path}: {num_overlong:,} of {len(overlong):,} samples are longer than --max-tokens-per-gpu"
                f" {max_tokens_per_gpu}; the longest, row {row + 1}, has {self.lengths[row]} tokens. Raise"
                " --max-tokens-per-gpu to at least that, or drop these samples with --drop-overlong"
            )
        if num_overlong == len(overlong):
            raise ValueError(f"{self.path}: every sample is longer than --max-tokens-per-gpu {max_tokens_per_gpu}")
        self.kept = np.flatnonzero(~overlong).astype(np.int32)
        return num_overlong


def open_table(path: Path) -> tuple[pa.Table, list[mmap.mmap]]:
    """The table behind a data set and its memory maps; .parquet and .jsonl are first converted to Arrow, once."""
    if path.suffix not in (".arrow", ".parquet", ".jsonl"):
        raise ValueError(f"--data-path {path}: must end in .arrow, .parquet or .jsonl")
    try:
        if not path.stat().st_size:
            raise ValueError(f"--data-path {path}: holds no samples")
        tables, maps = zip(*map(map_table, [path] if path.suffix == ".arrow" else convert_to_arrow(path)), strict=True)
        table = pa.concat_tables(tables)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"--data-path {path}: cannot be read as a data set of process_data.py: {error}") from None
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise ValueError(
            f"--data-path {path}: no column {', '.join(missing)}; found {', '.join(table.column_names)}."
            " Tokenize the data with process_data.py"
        )
    for name in COLUMNS:
        column = table.column(name)
        kind = column.type.value_type if name in COLUMNS[:2] and pa.types.is_list(column.type) else column.type
        if not pa.types.is_integer(kind) or column.null_count:
            raise ValueError(f"--data-path {path}: column {name} is {column.type} with {column.null_count} nulls")
    if WEIGHTS_COLUMN in table.column_names:
        column = table.column(WEIGHTS_COLUMN)
        if not pa.types.is_list(column.type) or not pa.types.is_floating(column.type.value_type) or column.null_count:
            raise ValueError(f"--data-path {path}: column {WEIGHTS_COLUMN} is {column.type}, expected a list of floats")
    return table, list(maps)


def map_table(path: Path) -> tuple[pa.Table, mmap.mmap]:
    """An Arrow file, in the file or the stream format, as a table of views into its memory map."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    buffer = pa.py_buffer(mapped)
    is_file_format = mapped[:6] == b"ARROW1"
    return (pa.ipc.open_file if is_file_format else pa.ipc.open_stream)(buffer).read_all(), mapped


def convert_to_arrow(path: Path) -> list[Path]:
    """A .parquet or .jsonl file as Arrow files in the cache of `datasets`, which converts it once."""
    import datasets

    if os.environ.get("LOCAL_RANK", "0") != "0":
        datasets.disable_progress_bars()
    read = datasets.Dataset.from_parquet if path.suffix == ".parquet" else datasets.Dataset.from_json
    try:
        return [Path(file["filename"]) for file in read(str(path)).cache_files]
    except (datasets.exceptions.DatasetGenerationError, pa.ArrowException) as error:
        raise OSError(str(error.__cause__ or error)) from None


def read_column(table: pa.Table, name: str) -> np.ndarray:  # (rows,) int32
    return np.concatenate([view(chunk) for chunk in table.column(name).chunks] or [[]]).astype(np.int32)


def view(array: pa.Array) -> np.ndarray:
    """The array's numbers where they lie; `to_numpy` would import pandas, half a second of every start."""
    return np.from_dlpack(array)


def list_views(chunk: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, values) of a list column's chunk as views into the mapped file: nothing is read yet."""
    return view(chunk.offsets), view(chunk.values)


def read_sidecar(data_path: str | Path, *, num_samples: int) -> dict[str, Any] | None:
    """What process_data.py recorded beside the data set of `num_samples`; None where there is no such file."""
    path = Path(f"{data_path}.meta.json")
    try:
        sidecar = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if sidecar.get("num_samples", num_samples) != num_samples:
        raise ValueError(
            f"{path} belongs to another data set: it says {sidecar['num_samples']:,} samples, and {data_path} has"
            f" {num_samples:,}; tokenize the data again with process_data.py"
        )
    return sidecar


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
    data: TokenizedData,
    *,
    batch_size: int,
    seed: int,
    start: RunPosition = RunPosition(),
    max_steps: int | None,
    max_epochs: int | None,
    max_samples: int | None,
    max_tokens: int | None,
) -> int | None:
    """The run's steps, those before `start` included, until it reaches the first given end; None if none is given."""
    num_samples = [n for n in (max_samples, None if max_epochs is None else max_epochs * len(data.kept)) if n]
    if max_tokens is not None:
        epoch, rest = divmod(max_tokens, int(data.lengths[data.kept].sum(dtype=np.int64)))
        order = data.kept[permute_epoch(seed, epoch, len(data.kept))]
        in_epoch = int(np.searchsorted(np.cumsum(data.lengths[order], dtype=np.int64), rest)) + 1 if rest else 0
        num_samples.append(epoch * len(data.kept) + in_epoch)
    ends = [start.step + max(0, -(-(n - start.num_samples) // batch_size)) for n in num_samples]
    ends += [] if max_steps is None else [max_steps]
    return min(ends, default=None)


def derive_seed(seed: int, step: int, rank: int) -> int:
    """One seed for each (seed, step, rank), so that there is no generator state to keep."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


def iterate_batches(
    data: TokenizedData,
    *,
    batch_size: int,
    seed: int,
    start: RunPosition = RunPosition(),
    num_steps: int | None,
    max_tokens_per_gpu: int,
    attention_cost: float,
    rank: int,
    world_size: int,
    vocab_size: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """The global batches from `start` up to `num_steps` (None: without end), each with this rank's micro-batches."""
    step, num_drawn = start.step, start.num_samples
    while num_steps is None or step < num_steps:
        sample_ids = draw_samples(data, seed=seed, start=num_drawn, count=batch_size)
        lengths = data.lengths[sample_ids]
        table = pack_batch(lengths, max_tokens_per_gpu, world_size, attention_cost)
        micro_batches = []
        for row in table:
            samples = [data.read(sample_ids[i], vocab_size=vocab_size) for i in row[rank]]
            micro_batch = pack_samples(samples or [idle_sample()])
            micro_batches.append(micro_batch.pin_memory() if pin_memory else micro_batch)
        num_loss_tokens = int(data.num_loss_tokens[sample_ids].sum())
        data.release_pages()
        yield Batch(step, sample_ids, lengths, num_loss_tokens, table, micro_batches)
        step, num_drawn = step + 1, num_drawn + batch_size


def idle_sample() -> Sample:
    """What a rank without work trains on: two tokens, no target, so that it takes part in every collective."""
    return np.zeros(2, dtype=np.int64), np.full(2, IGNORED), None


def pack_samples(samples: list[Sample]) -> MicroBatch:
    """Packs samples into one row; either all have weights or none.

    Where no sample has more than one token, an idle one joins them: torch.compile takes 0 and 1 for constants, and
    would compile such a row by itself, whenever it comes.
    """
    if max(len(input_ids) for input_ids, _, _ in samples) == 1:
        ids, labels, _ = idle_sample()
        samples = [*samples, (ids, labels, None if samples[0][2] is None else np.zeros(len(ids), dtype=np.float32))]
    lengths = [len(input_ids) for input_ids, _, _ in samples]
    cu_seqlens = np.cumsum([0, *lengths])
    targets = np.full(cu_seqlens[-1], IGNORED, dtype=np.int64)
    target_weights = None if samples[0][2] is None else np.zeros(cu_seqlens[-1], dtype=np.float32)
    for start, (_, labels, weights) in zip(cu_seqlens, samples, strict=False):
        predicting = slice(start, start + len(labels) - 1)  # a sequence's last token predicts nothing
        targets[predicting] = labels[1:]
        if target_weights is not None:
            target_weights[predicting] = weights[1:]
    input_ids = np.concatenate([input_ids for input_ids, _, _ in samples]).astype(np.int64)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids)[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        targets=torch.from_numpy(targets),
        trained_index=torch.from_numpy(np.flatnonzero(targets != IGNORED)),
        target_weights=None if target_weights is None else torch.from_numpy(target_weights),
        max_seqlen=max(lengths),
        seq_lengths=lengths,
    )


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
