"""Random orders of a data set's rows: an array, or for very many rows arithmetic that needs no memory."""

from collections.abc import Sequence

import numpy as np

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

    def __len__(self) -> int:
        return self.size

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
    """Identifies the rule that draws the orders of sets of these sizes: a run that resumes by another rule would see
    other samples."""
    return f"arithmetic above {ARITHMETIC_ABOVE} samples" if max(sizes) > ARITHMETIC_ABOVE else PERMUTATION
