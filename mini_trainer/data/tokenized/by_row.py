"""Rows and their values, read as arrays without being held as such, and random orders of rows: an array, or for very
many rows arithmetic that needs no memory.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

CHUNK = 1 << 20  # rows that are read at once
BLOCK = 256  # values between those before which a running sum is kept


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows, indexed like the array (rows,) int32 of their numbers; elements are made when read."""

    first: int
    size: int

    dtype = np.dtype(np.int32)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.size))

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:  # (places,) int32
        if isinstance(places, slice):
            start, stop, step = places.indices(self.size)
            return np.arange(self.first + start, self.first + stop, step, dtype=self.dtype)
        places = np.asarray(places)
        numbers = np.flatnonzero(places) if places.dtype == bool else places
        return (numbers + self.first).astype(self.dtype)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def __add__(self, number: int) -> "RowRange":
        return RowRange(self.first + number, self.size)

    def within(self, first: int, size: int) -> slice:
        """The rows in common with `size` rows from `first` on, counted from there."""
        start, stop = (min(max(place - first, 0), size) for place in (self.first, self.first + self.size))
        return slice(start, stop)


Rows = np.ndarray | RowRange


class RowNumbers:
    """The rows of several data sets, numbered consecutively in the order of the sets."""

    def __init__(self, sizes: Iterable[int]):
        self.firsts = np.cumsum([0, *sizes])  # (data sets + 1,)

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def source_of(self, rows: np.ndarray) -> np.ndarray:  # (rows,) int64
        """Index of each row's data set."""
        return np.searchsorted(self.firsts, rows, side="right") - 1

    def find(self, row: int) -> tuple[int, int]:
        """The index of a row's data set, and the row's number there, from 0."""
        source = int(self.source_of(np.array(row)))
        return source, row - int(self.firsts[source])

    def divide(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields for each data set which of the rows are its own, (rows,) bool, and their numbers there."""
        source_of = self.source_of(rows)
        for i, first in enumerate(self.firsts[:-1].tolist()):
            yield source_of == i, rows[source_of == i] - first


class Joined:
    """The values of several data sets by consecutive rows, indexed like their concatenation, which is not made."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts, self.numbers = parts, RowNumbers(map(len, parts))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        if np.ndim(rows) == 0:
            part, own_row = self.numbers.find(rows)
            return self.parts[part][own_row]
        values = np.empty(len(rows), self.parts[0].dtype)
        for part, (is_own, own_rows) in zip(self.parts, self.numbers.divide(rows), strict=True):
            values[is_own] = part[own_rows]
        return values

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(self.parts).astype(dtype or self.parts[0].dtype)


Values = np.ndarray | Joined  # by row


def join_values(parts: Sequence[np.ndarray]) -> Values:
    return parts[0] if len(parts) == 1 else Joined(parts)


def iterate_chunks(rows: Rows) -> Iterator[np.ndarray]:
    """Yields the rows in arrays of at most `CHUNK`."""
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]


def sum_values(values: Values, rows: Rows) -> int:
    """The sum of some rows' values."""
    if isinstance(rows, RowRange) and isinstance(values, np.ndarray):
        return int(values[rows.first : rows.first + rows.size].sum(dtype=np.int64))
    return sum(int(values[part].sum(dtype=np.int64)) for part in iterate_chunks(rows))


def find_top_row(values: Values, rows: Rows) -> int:
    """The first of some rows, at least one, with the largest value."""
    if isinstance(rows, RowRange) and isinstance(values, np.ndarray):
        return rows.first + int(values[rows.first : rows.first + rows.size].argmax())
    largest = [int(part[values[part].argmax()]) for part in iterate_chunks(rows)]
    return max(largest, key=lambda row: values[row])


class RunningSums:
    """Sums of the values before any place, walked once, up to the furthest place asked for: 8 / `BLOCK` bytes a value.
    One thread asks, unless all has been walked."""

    def __init__(self, read: Callable[[int, int], np.ndarray], size: int, *, total: int):
        """`read`: the values from one place to another, of `size` whose sum is `total`."""
        self.read, self.size, self.total = read, size, total
        self._before_blocks = np.zeros(1 + -(-size // BLOCK), np.int64)
        self._num_read = 0  # values

    def before(self, place: int) -> int:
        """The sum of the first `place` values."""
        if self.size - place < BLOCK:  # from the end: the number of a run's steps needs no walk
            return self.total - int(self.read(place, self.size).sum(dtype=np.int64))
        block = place // BLOCK
        self.walk(block * BLOCK)
        return int(self._before_blocks[block]) + int(self.read(block * BLOCK, place).sum(dtype=np.int64))

    def walk(self, end: int) -> None:
        """Reads the values up to `end`, a multiple of `BLOCK` or the last one."""
        while self._num_read < end:  # in parts, between which other threads can run
            part = self.read(self._num_read, min(self._num_read + max(BLOCK, CHUNK // BLOCK * BLOCK), self.size))
            sums = np.add.reduceat(part, np.arange(0, len(part), BLOCK), dtype=np.int64)
            first = self._num_read // BLOCK
            self._before_blocks[first + 1 : first + 1 + len(sums)] = self._before_blocks[first] + np.cumsum(sums)
            self._num_read += len(part)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts; one range if each part is one and begins where the one before it ends."""
    ranges = [part for part in parts if isinstance(part, RowRange)]
    if len(ranges) == len(parts) and all(a.first + a.size == b.first for a, b in itertools.pairwise(ranges)):
        return RowRange(ranges[0].first, sum(map(len, ranges)))
    return parts[0] if len(parts) == 1 else np.concatenate([part[:] for part in parts])


ARITHMETIC_ABOVE = 1 << 24  # rows; a larger permutation is computed where it is read
NUM_ROUNDS = 6
MULTIPLIERS = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))  # of MurmurHash3's finalizer


class FeistelPermutation:
    """A permutation of range(size), computed at the positions that are read; `size` is at most 2**31.

    A Feistel network permutes the numbers of 2 * `half_bits` bits. A result beyond `size` goes through it again until
    one is within ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002); fewer than four
    passes on average.
    """

    def __init__(self, size: int, seed: Sequence[int]):
        assert 0 < size <= 1 << 31, size
        self.size = size
        self.half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        # The stream of a SeedSequence is the same in all versions of numpy.
        self.keys = np.random.SeedSequence(seed).generate_state(2 * NUM_ROUNDS).reshape(NUM_ROUNDS, 2)

    def __getitem__(self, places: slice) -> np.ndarray:  # (count,) int64
        found = self._encrypt(np.arange(*places.indices(self.size), dtype=np.uint32))
        beyond = np.flatnonzero(found >= self.size)
        while len(beyond):
            found[beyond] = self._encrypt(found[beyond])
            beyond = beyond[found[beyond] >= self.size]
        return found.astype(np.int64)

    def _encrypt(self, numbers: np.ndarray) -> np.ndarray:  # (count,) uint32
        half = np.uint32(self.half_bits)
        mask = np.uint32((1 << self.half_bits) - 1)
        left, right = numbers >> half, numbers & mask
        for multiplier, summand in self.keys:
            mixed = right * (multiplier | np.uint32(1)) + summand
            mixed ^= mixed >> np.uint32(16)
            mixed *= MULTIPLIERS[0]
            mixed ^= mixed >> np.uint32(13)
            mixed *= MULTIPLIERS[1]
            mixed ^= mixed >> np.uint32(16)
            left, right = right, left ^ (mixed & mask)
        return (left << half) | right


Permutation = np.ndarray | FeistelPermutation  # read by slices


def draw_permutation(size: int, seed: Sequence[int]) -> Permutation:
    """A random permutation of range(size), a pure function of its arguments."""
    if size > ARITHMETIC_ABOVE:
        return FeistelPermutation(size, seed)
    return np.random.default_rng(seed).permutation(size)


PERMUTATION = "permutation"  # the rule of an array


def name_rule(sizes: Sequence[int]) -> str:
    """Identifies the rule that orders sets of these sizes: by another one, a resumed run would see other samples."""
    return f"arithmetic above {ARITHMETIC_ABOVE} samples" if max(sizes) > ARITHMETIC_ABOVE else PERMUTATION
