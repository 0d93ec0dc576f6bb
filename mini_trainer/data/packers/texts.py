"""Packs samples under one cap, tokens: `batch_packer.pack_batch` calls it for samples without images.

A heuristic in time O(n log n) per plan and memory O(n + K * num_ranks):

1. Count steps: first-fit decreasing, then a wider search per bin, then longest-processing-time-first (LPT)
   over the cap, repaired by exchanges between bins, with K by bisection between those and total / capacity.
2. For that K, make up to three level plans (dense ones if none fits), let pairs of bins exchange samples until
   their costs are equal, sort bins by cost, group each `num_ranks` neighbours into a step, keep the best plan.

Sources: first-fit decreasing needs at most 11/9 OPT + 6/9 bins (Dosa 2007); LPT is Graham 1969; the search
per bin is a simplified minimum bin slack (Gupta and Ho 1999).

Terms: a bin is the micro-batch of one rank in one step; bins and samples are numbers, samples counted in
descending order of length (so position 0 is the longest); `weights` are the quantity that a plan levels, costs
or tokens, and never increase with position. Compiled code adds floats in a fixed order, without fast-math, and
has no product that a compiler could fuse with a sum: the result is the same on every machine.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit

NUM_ROUNDS = 8  # rounds of exchanges between pairs of bins; later ones gain less than 0.02 %
MAX_EXCHANGES = 4  # maximum number of exchanges of a pair of bins in one round
SEARCH_WIDTH = 32  # second samples to try in a bin when first-fit decreasing needs too many bins
LEAST_GAP = 2.0**-30  # gaps below this share of a load are ignored; a power of two, so the product is exact
CLOSE_ENOUGH = 1 + 1e-5  # no further plan is tried below this multiple of the cost's lower bound

compiled = njit(nogil=True)  # nogil: a prefetch thread runs it


def compile_kept(function: Callable) -> Callable:
    """Compiles a function that Python calls, and keeps it on the disk where there is a place (`options.places`), else
    every process compiles, for seconds."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba finds no directory that it may write to
        return njit(nogil=True)(function)


# --- Filling bins -----------------------------------------------------------------------------------------
# `next_free` (n + 1,) links any position to the first sample at or after it that is not yet in a bin.


@compiled
def _find_free(next_free, position):
    """Returns the first free sample at or after `position`, n if none, in nearly constant time."""
    while next_free[position] != position:
        next_free[position] = next_free[next_free[position]]  # halves the path for later calls
        position = next_free[position]
    return position


@compiled
def _find_fitting(lengths, weights, next_free, room, budget, low):
    """Returns the longest free sample at or after `low` within `room` tokens and `budget`; n if none."""
    high = len(lengths)
    while low < high:
        middle = (low + high) // 2
        if lengths[middle] <= room and weights[middle] <= budget:
            high = middle
        else:
            low = middle + 1
    return _find_free(next_free, low)


@compiled
def _take_greedily(lengths, weights, next_free, position, room, budget, bin_of, bin_index):
    """Takes `position`, then the longest that fits, and so on; a dry run if `bin_index` is -1."""
    while position < len(lengths):
        room -= lengths[position]
        budget -= weights[position]
        if bin_index >= 0:
            bin_of[position] = bin_index
            next_free[position] = position + 1
        position = _find_fitting(lengths, weights, next_free, room, budget, position + 1)
    return room, budget


@compiled
def _fill_bin(lengths, weights, next_free, cap, budget, width, bin_of, bin_index):
    """Fills a bin, starting with the longest free sample, and returns the remaining budget. With width 1, successive
    bins are those of first-fit decreasing; otherwise `width` second samples of different lengths are tried, and the one
    that leaves the least room wins."""
    seed = _find_free(next_free, 0)
    bin_of[seed] = bin_index
    next_free[seed] = seed + 1
    room = cap - lengths[seed]
    budget -= weights[seed]
    second = best = _find_fitting(lengths, weights, next_free, room, budget, seed + 1)
    least_room = cap
    for _ in range(width if width > 1 else 0):
        if second == len(lengths) or least_room == 0:
            break
        left, _unused = _take_greedily(lengths, weights, next_free, second, room, budget, bin_of, -1)
        if left < least_room:
            best, least_room = second, left
        second = _find_fitting(lengths, weights, next_free, lengths[second] - 1, budget, second + 1)
    return _take_greedily(lengths, weights, next_free, best, room, budget, bin_of, bin_index)[1]


@compiled
def _fill_densely(lengths, cap, width, bin_of):
    """Fills each bin as far as possible and returns the number of bins."""
    weightless, next_free = np.zeros(len(lengths)), np.arange(len(lengths) + 1)
    num_bins = 0
    while _find_free(next_free, 0) < len(lengths):
        _fill_bin(lengths, weightless, next_free, cap, 0.0, width, bin_of, num_bins)
        num_bins += 1
    return num_bins


@compiled
def _sift_down(heap, keys, size):
    """Restores the heap order of `heap[:size]`, least key first, after its top changed."""
    top, parent, child = heap[0], 0, 1
    while child < size:
        if child + 1 < size and keys[heap[child + 1]] < keys[heap[child]]:
            child += 1
        if keys[heap[child]] >= keys[top]:
            break
        heap[parent] = heap[child]
        parent, child = child, 2 * child + 1
    heap[parent] = top


@compiled
def _fill_level(lengths, weights, cap, num_steps, num_ranks, bin_of):
    """LPT under the cap, after whole steps for outliers; returns whether every sample found a bin.

    A sample heavier than the mean of the open bins determines the cost of its step, so that step's bins are
    filled up to it first; spreading the rest over all bins would leave them idle next to the outlier. The
    last step takes the rest, so this always succeeds if the cap never binds.
    """
    num_samples, num_bins = len(lengths), num_steps * num_ranks
    next_free = np.arange(num_samples + 1)
    remaining = 0.0
    for weight in weights:
        remaining += weight
    first_bin = position = 0
    while first_bin < num_bins - num_ranks and weights[position] * (num_bins - first_bin) > remaining:
        outlier = weights[position]
        for bin_index in range(first_bin, first_bin + num_ranks):
            left = _fill_bin(lengths, weights, next_free, cap, outlier, 1, bin_of, bin_index)
            remaining -= outlier - left
            position = _find_free(next_free, position)
            if position == num_samples:
                return True
        first_bin += num_ranks

    heap = np.arange(first_bin, num_bins)
    size = num_bins - first_bin
    load, tokens = np.zeros(num_bins), np.zeros(num_bins, np.int64)
    while position < num_samples:
        while size > 0 and tokens[heap[0]] + lengths[position] > cap:
            size -= 1  # closes the lightest bin, which is out of tokens
            heap[0] = heap[size]
            _sift_down(heap, load, size)
        if size == 0:
            return False
        bin_of[position] = heap[0]
        tokens[heap[0]] += lengths[position]
        load[heap[0]] += weights[position]
        _sift_down(heap, load, size)
        position = _find_free(next_free, position + 1)
    return True


# --- Exchanges between bins ---------------------------------------------------------------------------------


class Bins(NamedTuple):
    head: np.ndarray  # (num_bins,) longest sample, -1 in an empty bin
    following: np.ndarray  # (n,) next sample of the same bin in descending order, -1 after the last
    tokens: np.ndarray  # (num_bins,)
    load: np.ndarray  # (num_bins,) sum of weights


@compiled
def _link_bins(lengths, weights, num_bins, bin_of):
    """Returns the bins as linked lists of their samples, in memory linear in samples and bins."""
    empty = np.full(num_bins, -1)
    bins = Bins(empty, np.full(len(lengths), -1), np.zeros(num_bins, np.int64), np.zeros(num_bins))
    for position in range(len(lengths) - 1, -1, -1):
        bin_index = bin_of[position]
        bins.following[position] = bins.head[bin_index]
        bins.head[bin_index] = position
        bins.tokens[bin_index] += lengths[position]
        bins.load[bin_index] += weights[position]
    return bins


@compiled
def _move(lengths, weights, bins, position, source, target):
    """Moves a sample between the ordered lists of two bins."""
    for bin_index, sign in ((source, -1), (target, 1)):
        bins.tokens[bin_index] += sign * lengths[position]
        bins.load[bin_index] += sign * weights[position]
        before, after = -1, bins.head[bin_index]
        while after != -1 and after < position:
            before, after = after, bins.following[after]
        if sign < 0:
            after = bins.following[position]
        else:
            bins.following[position] = after
            after = position
        if before == -1:
            bins.head[bin_index] = after
        else:
            bins.following[before] = after


@compiled
def _find_exchange(lengths, weights, cap, bins, heavy, light):
    """Returns the samples that `heavy` gives and `light` gives back (-1: none) to bring their loads closest. The
    desired difference is half the gap. Both lists are descending, so a single pass over both finds it."""
    wanted = (bins.load[heavy] - bins.load[light]) / 2
    least_error = wanted - LEAST_GAP * bins.load[heavy]
    give, take = -1, -1
    mine, theirs = bins.head[heavy], bins.head[light]
    while mine != -1:
        while True:
            difference = weights[mine] - (weights[theirs] if theirs != -1 else 0)
            growth = lengths[mine] - (lengths[theirs] if theirs != -1 else 0)
            error = abs(difference - wanted)
            if error < least_error and bins.tokens[light] + growth <= cap:
                least_error, give, take = error, mine, theirs
            if theirs == -1 or difference >= wanted:
                break
            theirs = bins.following[theirs]
        mine = bins.following[mine]
    return give, take


@compiled
def _level_pair(lengths, weights, cap, bins, one, other):
    """Exchanges samples between two bins while that brings their loads closer; returns whether it exchanged any."""
    for exchange in range(MAX_EXCHANGES):
        heavy, light = (one, other) if bins.load[one] >= bins.load[other] else (other, one)
        give, take = _find_exchange(lengths, weights, cap, bins, heavy, light)
        if give == -1:
            return exchange > 0
        _move(lengths, weights, bins, give, heavy, light)
        if take != -1:
            _move(lengths, weights, bins, take, light, heavy)
    return True


@compiled
def _sort_descending(bins, keys):
    """Shell sort in place, fast on nearly sorted bins; np.argsort takes seconds more to compile."""
    gap = 1
    while gap < len(bins) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, len(bins)):
            inserted, slot = bins[i], i
            while slot >= gap and keys[bins[slot - gap]] < keys[inserted]:
                bins[slot] = bins[slot - gap]
                slot -= gap
            bins[slot] = inserted
        gap //= 3


@compiled
def _level_bins(lengths, weights, cap, num_bins, group, bin_of):
    """Levels each group of bins neighbouring in load, renumbers bins from the heaviest, returns the loads. Over the
    rounds, the heaviest bin of a group is paired with the lightest, then the second lightest, and so on. No group's
    largest load ever grows."""
    bins = _link_bins(lengths, weights, num_bins, bin_of)
    order, idle_rounds = np.arange(num_bins), 0
    _sort_descending(order, bins.load)
    for turn in range(NUM_ROUNDS):
        idle_rounds += 1
        for first in range(0, num_bins, group):
            for i in range(group):
                j = (group - 1 - turn - i) % group
                if i < j and _level_pair(lengths, weights, cap, bins, order[first + i], order[first + j]):
                    idle_rounds = 0
        _sort_descending(order, bins.load)
        if idle_rounds >= group:
            break
    loads = np.empty(num_bins)
    for new_index in range(num_bins):
        loads[new_index] = bins.load[order[new_index]]
        position = bins.head[order[new_index]]
        while position != -1:
            bin_of[position] = new_index
            position = bins.following[position]
    return loads


# --- The search ---------------------------------------------------------------------------------------------


@compiled
def _level_tokens(lengths, cap, num_steps, num_ranks, bin_of):
    """LPT over the cap, then exchanges between all bins; returns whether all bins end up under the cap."""
    weights, num_bins = lengths.astype(np.float64), num_steps * num_ranks
    no_cap = lengths.sum()
    fits = _fill_level(lengths, weights, no_cap, num_steps, num_ranks, bin_of)
    return fits and _level_bins(lengths, weights, no_cap, num_bins, num_bins, bin_of)[0] <= cap


@compiled
def _count_steps(lengths, cap, num_ranks, bin_of):
    """Returns the fewest steps that a dense or a levelled plan reaches, and leaves that plan in `bin_of`."""
    other = np.empty_like(bin_of)
    least = -(-lengths.sum() // (cap * num_ranks))
    steps = -(-_fill_densely(lengths, cap, 1, bin_of) // num_ranks)
    if steps > least:
        searched = -(-_fill_densely(lengths, cap, SEARCH_WIDTH, other) // num_ranks)
        if searched < steps:
            steps, bin_of[:] = searched, other
    while least < steps:
        middle = (least + steps) // 2
        if _level_tokens(lengths, cap, middle, num_ranks, other):
            steps, bin_of[:] = middle, other
        else:
            least = middle + 1
    return steps


@compiled
def _fill_evenly(kind, lengths, costs, cap, num_steps, num_ranks, bin_of):
    """Makes one of three level plans; returns whether it respects the cap. 0 levels cost over all bins, 1 leaves that
    to each step (better with outliers), 2 levels tokens (which still fits where samples nearly fill the bins)."""
    if kind == 2:
        return _level_tokens(lengths, cap, num_steps, num_ranks, bin_of)
    fits = _fill_level(lengths, costs, cap, num_steps, num_ranks, bin_of)
    if fits and kind == 0:
        _level_bins(lengths, costs, cap, num_steps * num_ranks, num_steps * num_ranks, bin_of)
    return fits


@compile_kept  # the only entry point, so there is one cache file: compiling takes seconds
def assign_bins(lengths, costs, cap, num_ranks):
    """Returns the bin of each sample, int64 (n,), and the number of steps; step k is bins k*R to k*R + R-1. `lengths`
    int64 (n,) and `costs` float64 (n,) in descending order, no length above `cap`."""
    counted = np.empty(len(lengths), np.int64)
    num_steps = _count_steps(lengths, cap, num_ranks, counted)
    bound = 0.0
    for cost in costs:
        bound += cost
    bound = max(bound / num_ranks, costs[0])
    best, best_cost = counted, np.inf
    for kind in range(4):
        if best_cost <= bound * CLOSE_ENOUGH or (kind == 3 and best_cost < np.inf):
            break
        bin_of = counted if kind == 3 else np.empty_like(counted)
        if kind == 3 or _fill_evenly(kind, lengths, costs, cap, num_steps, num_ranks, bin_of):
            loads = _level_bins(lengths, costs, cap, num_steps * num_ranks, num_ranks, bin_of)
            cost = 0.0
            for k in range(num_steps):
                cost += loads[k * num_ranks]
            if cost < best_cost:
                best, best_cost = bin_of, cost
    return best, num_steps
