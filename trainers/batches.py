"""Samples per optimizer step from batches that count packs, and epochs that are not whole."""

import bisect
import math
from dataclasses import dataclass

import numpy as np

from trainers.rules import DIFFERS, Conversion

MOST_LENGTHS = 20_000  # sampled for packing: the ratio no longer moves


@dataclass(frozen=True)
class PeerBatch:
    """How a trainer counts one optimizer step."""

    rows: int  # of a step, over all GPUs
    product: str  # how they are counted, in words
    pack_length: int | None  # tokens of a pack, where a row is one; None: a row is a sample


def count_batch(to: Conversion, batch: PeerBatch | None) -> None:
    """Sets `batch_size`; where rows are packs it takes the user's own samples, and `needs_data` says so."""
    if batch is None:
        return
    if batch.pack_length is None:
        to.train["batch_size"] = batch.rows
        to.told["batch_size"] = f"batch_size: {batch.rows} ({batch.product})"
        return
    if to.lengths is None:
        to.needs_data = (
            f"batches count packs: {batch.rows} packs ({batch.product}) of {batch.pack_length:,} tokens a step. How"
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
    """Samples no longer than a pack, and the packs that they fill, by best-fit decreasing on at most MOST_LENGTHS."""
    fitting = lengths[lengths <= pack_length]
    if len(fitting) == 0:
        raise ValueError(f"no sample of the tokenized data is as short as a pack of {pack_length:,} tokens")
    if len(fitting) > MOST_LENGTHS:
        fitting = np.random.default_rng(0).choice(fitting, MOST_LENGTHS, replace=False)
    room: list[int] = []  # what each pack has left, ascending
    for length in sorted(fitting.tolist(), reverse=True):
        place = bisect.bisect_left(room, length)
        left = room.pop(place) if place < len(room) else pack_length
        bisect.insort(room, left - length)
    return len(fitting), len(room)


def count_epochs(to: Conversion) -> None:
    """Epochs as whole ones, or, where they are not whole, as samples of the tokenized data."""
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
            f"max_epochs: {math.ceil(epochs)}; {DIFFERS}: given {epochs}, which --tokenized-data would make samples"
        )
