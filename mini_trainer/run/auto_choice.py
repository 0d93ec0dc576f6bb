"""Resolves "auto": the largest micro-batch that fits, and how much of it has to be recomputed.

One decision for runs, which measure on the built model, and for plans, which simulate: a `Measure` gives the memory of
a micro-batch of some tokens.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mini_trainer.data.tokenized.by_row import find_top_row
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.devices import GIB
from mini_trainer.options import ShardingOptions

NUM_BATCHES = 50  # global batches to look ahead when choosing a micro-batch size
TOKEN_MULTIPLE = 64  # the chosen number of tokens is a multiple of this
MOST_PROBES = 8


@dataclass(frozen=True)
class Probe:
    """Requirements of micro-batches of some tokens: the maximum over ranks."""

    tokens: int
    bytes: int
    activation_bytes: int  # what the micro-batch adds to what is there without it
    excess_bytes: int  # bytes that are missing; below 0: bytes left over
    seconds: float | None = None  # of forward and backward, if measured
    bytes_per_token: float | None = None  # by how much each extra token raises the bytes, where one probe shows it

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


Measure = Callable[[int], Probe]


@dataclass(frozen=True)
class Room:
    """Number of tokens of a micro-batch that fit, 0 if too few, and the probes that show it."""

    num_tokens: int
    probes: list[Probe]

    @property
    def seconds(self) -> float:
        """Duration of their forward and backward passes, if measured."""
        return max(0.0, extrapolate(self.probes, "seconds", self.num_tokens))


def choose_mode(find: Callable[[str], Room], modes: Sequence[str], *, enough: int, is_timed: bool) -> tuple[str, Room]:
    """The mode of activation checkpointing to use, and its room. `modes` are in order of recomputation; the search ends
    at one that fits `enough` tokens. If times are measured, the mode whose largest micro-batch is fastest per token
    wins, otherwise the last one tried. If none fits, the last one.
    """
    rooms: dict[str, Room] = {}
    for mode in modes:
        rooms[mode] = find(mode)
        if rooms[mode].num_tokens >= enough:
            break
    if is_timed:
        usable = {mode: room.seconds / room.num_tokens for mode, room in rooms.items() if room.num_tokens > 0}
        mode = min(usable, key=usable.__getitem__, default=mode)
    return mode, rooms[mode]


def has_room_gathered(room: Room, sharding: ShardingOptions, *, weights_bytes: int) -> bool:
    """Whether all weights can stay gathered, beside the largest micro-batch. Its peak contains them, `weights_bytes`,
    only with --reshard-after-forward never."""
    more = 0 if sharding.reshard_after_forward == "never" else weights_bytes
    return room.num_tokens > 0 and extrapolate(room.probes, "excess_bytes", room.num_tokens) + more <= 0


def find_room(measure: Measure, *, first: int, least: int, most: int, plenty: float) -> Room:
    """The most tokens up to `most` that fit, or 0 if fewer than `least` do.

    As no sequence is longer than the longest sample, memory grows evenly, so that each probe, from `first` tokens on,
    shows how far the next may go. With more than `plenty` bytes left at `most` no more is tried.
    """
    num_tokens, probes = first, []
    while True:
        probes.append(measure(num_tokens))
        largest = find_largest(probes, least=least, most=most)
        if len(probes) > 2 and extrapolate(probes, "excess_bytes", most) < -plenty:
            return Room(most, probes)
        if num_tokens == most or largest <= num_tokens or len(probes) == MOST_PROBES:
            return Room(largest if largest >= least else 0, probes)
        num_tokens = min(2 * num_tokens, largest)


def find_largest(probes: list[Probe], *, least: int, most: int) -> int:
    """The most tokens that fit: a multiple of `TOKEN_MULTIPLE`, `least`, `most`, or a number below `least`.
    Extrapolates the line through the two largest probes. After a single probe without a slope, assumes that activations
    grow in proportion, which overestimates them, and at most doubles its tokens.
    """
    last = probes[-1]
    if len(probes) == 1 and last.bytes_per_token is None:
        room = -last.excess_bytes / max(1, last.activation_bytes) * last.tokens
        return min(most, int(last.tokens + min(room, last.tokens)))
    slope = extrapolate(probes, "excess_bytes", last.tokens + 1) - last.excess_bytes
    room = -last.excess_bytes / slope if slope > 0 else most
    largest = min(most, int(last.tokens + room))
    return largest if largest <= least or largest == most else round_tokens(largest, longest=least, most=most)


def extrapolate(probes: list[Probe], key: str, num_tokens: int) -> float:
    """Estimates `key` at `num_tokens`, by the line through the last two probes, or by the last one's own slope."""
    before, last = probes[max(0, len(probes) - 2)], probes[-1]
    if last.bytes_per_token is not None and key in ("bytes", "excess_bytes"):
        slope = last.bytes_per_token
    else:
        slope = (getattr(last, key) - getattr(before, key)) / max(1, last.tokens - before.tokens)
    return getattr(last, key) + slope * (num_tokens - last.tokens)


def round_tokens(num_tokens: float, *, longest: int, most: int) -> int:
    """`num_tokens` as a multiple of `TOKEN_MULTIPLE`, but at least the longest sample and at most `most`."""
    return max(longest, min(most, int(num_tokens) // TOKEN_MULTIPLE * TOKEN_MULTIPLE))


def count_useful_tokens(data: Mixture, batches: Iterator[np.ndarray], *, world_size: int) -> tuple[int, int]:
    """Tokens of the longest sample, and those beyond which a larger micro-batch would not save one.

    Of the next `NUM_BATCHES` global batches the largest, dealt out evenly, and a sample more, since samples are whole.
    """
    largest = max(int(data.sizes[rows].sum()) for rows in itertools.islice(batches, NUM_BATCHES))
    longest = data.longest
    return longest, min(largest, -(-largest // world_size) + longest)


def refuse_longest(data: Mixture, room: Room) -> str:
    """Error message if not even the longest sample fits, with advice."""
    longest = data.longest
    path, row = data.locate(find_top_row(data.sizes, data.kept))
    needed = extrapolate(room.probes, "bytes", longest)
    limit = int(needed - extrapolate(room.probes, "excess_bytes", longest))
    return (
        f"--max-tokens-per-gpu auto: the longest sample, row {row} of {path} with {longest:,} tokens, needs about"
        f" {needed / GIB:,.2f} GiB, and {limit / GIB:,.2f} GiB may be used: use more GPUs,"
        " --activation-checkpointing full, --tiled-mlp, --offload-activations, a larger --memory-budget-gb, or drop"
        " long samples with process_data.py --max-sample-num-tokens"
    )
