"""Conversion of batch sizes that count packs to tokens, and of fractional epochs to samples."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mini_trainer.tools.importers.rules import DIFFERS, MISSING, Conversion

MOST_LENGTHS = 20_000  # maximum number of samples to pack; with more, the share no longer changes


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
    """Sets `batch_size` from the other trainer's batch, or `batch_tokens` if its rows are packs: as many tokens as
    these have on average, if there is tokenized data, else as many as they can hold."""
    try:
        batch = describe_batch(to)
    except ValueError as error:
        to.told["batch_size"] = f"{MISSING}: {error}"
        return
    if batch.pack_length is None:
        to.train["batch_size"] = batch.rows
        to.told["batch_size"] = f"batch_size: {batch.rows} ({batch.product})"
        return
    packs = f"{batch.rows} packs of {batch.pack_length:,} tokens ({batch.product})"
    if to.lengths is None:
        to.train["batch_tokens"] = batch.rows * batch.pack_length
        how_full = "all of them full; --tokenized-data measures how full they are"
    else:
        fill, longest = measure_packs(to.lengths, batch.pack_length)
        to.train["batch_tokens"] = max(longest, round(batch.rows * batch.pack_length * fill))
        how_full = f"which are {fill:.1%} full on the tokenized data, by best-fit packing"
    to.told["batch_tokens"] = (
        f"batch_tokens: {to.train['batch_tokens']}; {DIFFERS}: samples with as many tokens as {packs}, {how_full}"
    )


def measure_packs(lengths: np.ndarray, pack_length: int) -> tuple[float, int]:
    """Share of tokens in the packs that best-fit decreasing fills with the samples no longer than a pack (at most
    MOST_LENGTHS of them), and the longest of these."""
    fitting = lengths[lengths <= pack_length]
    if len(fitting) == 0:
        raise ValueError(f"no sample of the tokenized data fits a pack of {pack_length:,} tokens")
    longest = int(fitting.max())
    if len(fitting) > MOST_LENGTHS:
        fitting = np.random.default_rng(0).choice(fitting, MOST_LENGTHS, replace=False)
    room: list[int] = []  # tokens left in each pack, ascending
    for length in sorted(fitting.tolist(), reverse=True):
        place = bisect.bisect_left(room, length)
        left = room.pop(place) if place < len(room) else pack_length
        bisect.insort(room, left - length)
    return int(fitting.sum()) / (len(room) * pack_length), longest


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
