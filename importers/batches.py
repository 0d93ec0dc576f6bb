"""Conversion of batch sizes that count packs, and of fractional epochs, to samples."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from importers.rules import DIFFERS, MISSING, Conversion

MOST_LENGTHS = 20_000  # maximum number of samples to pack; with more, the ratio no longer changes


@dataclass(frozen=True)
class PeerBatch:
    """Another trainer's batch of one optimizer step."""

    rows: int  # rows per step, over all GPUs
    product: str  # their factors, as messages print them
    pack_length: int | None  # tokens per pack, if a row is a pack; None: a row is a sample


def describe_device_batch(to: Conversion, *, pack_length: int | float | None) -> PeerBatch:
    """The batch of trainers that use transformers.TrainingArguments."""
    a_gpu = to.get_number("per_device_train_batch_size", default=8)
    accumulated = to.get_number("gradient_accumulation_steps", default=1)
    return multiply_rows(a_gpu, accumulated, to.num_gpus, pack_length=pack_length)


def multiply_rows(
    a_gpu: int | float, accumulated: int | float, num_gpus: int | float, *, pack_length: int | float | None
) -> PeerBatch:
    """A batch of `a_gpu` rows on each of `num_gpus` GPUs, `accumulated` times."""
    rows, product = int(a_gpu * accumulated * num_gpus), f"{a_gpu} x {accumulated} x {num_gpus} GPUs"
    return PeerBatch(rows, product, None if pack_length is None else int(pack_length))


def count_batch(to: Conversion, describe_batch: Callable[[Conversion], PeerBatch]) -> None:
    """Sets `batch_size` from the other trainer's batch. Packs are converted to samples with tokenized data; without it,
    `needs_data` is set."""
    try:
        batch = describe_batch(to)
    except ValueError as error:
        to.told["batch_size"] = f"{MISSING}: {error}"
        return
    if batch.pack_length is None:
        to.train["batch_size"] = batch.rows
        to.told["batch_size"] = f"batch_size: {batch.rows} ({batch.product})"
        return
    if to.lengths is None:
        to.needs_data = (
            f"batches count packs: {batch.rows} packs ({batch.product}) of {batch.pack_length:,} tokens per step. How"
            " many samples that is depends on your data"
        )
        return
    num_samples, num_packs = count_packs(to.lengths, batch.pack_length)
    a_pack = num_samples / num_packs
    to.train["batch_size"] = max(1, round(batch.rows * a_pack))
    to.told["batch_size"] = (
        f"batch_size: {to.train['batch_size']}; {DIFFERS}: {batch.rows} packs of {batch.pack_length:,} tokens"
        f" ({batch.product}) hold {a_pack:.1f} samples each on the tokenized data, by best-fit packing"
    )


def count_packs(lengths: np.ndarray, pack_length: int) -> tuple[int, int]:
    """Number of samples no longer than a pack (at most MOST_LENGTHS), and of packs they fill by best-fit decreasing."""
    fitting = lengths[lengths <= pack_length]
    if len(fitting) == 0:
        raise ValueError(f"no sample of the tokenized data fits a pack of {pack_length:,} tokens")
    if len(fitting) > MOST_LENGTHS:
        fitting = np.random.default_rng(0).choice(fitting, MOST_LENGTHS, replace=False)
    room: list[int] = []  # tokens left in each pack, ascending
    for length in sorted(fitting.tolist(), reverse=True):
        place = bisect.bisect_left(room, length)
        left = room.pop(place) if place < len(room) else pack_length
        bisect.insort(room, left - length)
    return len(fitting), len(room)


def count_epochs(to: Conversion) -> None:
    """Sets `max_epochs`, or for fractional epochs `max_samples`, using the tokenized data."""
    epochs = to.epochs
    if epochs is None:
        return
    if epochs == int(epochs):
        to.train["max_epochs"] = int(epochs)
    elif to.lengths is not None:
        to.train["max_samples"] = max(1, round(epochs * len(to.lengths)))
        to.told["max_samples"] = f"max_samples: {to.train['max_samples']} ({epochs} epochs of the tokenized data)"
    else:
        to.train["max_epochs"] = math.ceil(epochs)
        to.told["max_epochs"] = (
            f"max_epochs: {math.ceil(epochs)}; {DIFFERS}: given {epochs}; with --tokenized-data it becomes max_samples"
        )
