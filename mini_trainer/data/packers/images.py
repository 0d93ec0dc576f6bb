"""Packs samples with images under two caps, tokens and patches: `batch_packer.pack_batch` calls it if both apply.

As in data/packers/texts.py, it minimizes the number of steps, then the sum over steps of the costliest micro-batch.
With two sizes per sample there is no descending order, which that search relies on. This one is simpler, in time O(n *
bins): first-fit over three orders, level plans (each sample to the cheapest bin that has room) with fewer steps by
bisection, then moves and swaps between bins of a step. Source: first-fit decreasing for vectors (Panigrahy, Talwar,
Uyeda and Wieder 2011, "Heuristics for vector bin packing").

n samples, R ranks, K steps; bins k*R to k*R + R-1 are step k. The compiled code adds floats in a fixed order, without
fast-math: the same table on every machine.
"""

import numpy as np
from numba import njit

from mini_trainer.data.packers.texts import compile_kept

NUM_ROUNDS = 8  # rounds of exchanges between the bins of each step
LEAST_GAIN = 2.0**-30  # minimum gain of an exchange, as a share of the load

compiled = njit(nogil=True)


def assign_with_images(
    sizes: np.ndarray, costs: np.ndarray, caps: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, int]:
    """Returns the bin of each sample, int64 (n,), and the number of steps; the costliest step comes first. `sizes`
    int64 (n, 2), tokens and patches, none above `caps` int64 (2,); `costs` float64 (n,)."""
    shares = sizes / caps
    orders = np.stack([np.argsort(-key, kind="stable") for key in (shares.max(axis=1), shares.sum(axis=1), costs)])
    return _assign(sizes, costs, caps, orders, num_ranks)


@compiled
def _has_room(sizes, caps, filled, sample, bin_index):
    has_tokens = filled[bin_index, 0] + sizes[sample, 0] <= caps[0]
    return has_tokens and filled[bin_index, 1] + sizes[sample, 1] <= caps[1]


@compiled
def _fill_first(sizes, caps, order, bin_of):
    """First-fit: each sample into the first bin with room; returns the number of bins."""
    filled, num_bins = np.zeros((len(order), 2), np.int64), 0
    for sample in order:
        bin_index = 0
        while bin_index < num_bins and not _has_room(sizes, caps, filled, sample, bin_index):
            bin_index += 1
        num_bins = max(num_bins, bin_index + 1)
        bin_of[sample] = bin_index
        filled[bin_index] += sizes[sample]
    return num_bins


@compiled
def _fill_level(sizes, costs, caps, order, num_bins, bin_of):
    """Puts each sample into the cheapest bin with room; returns whether all found one."""
    filled, load = np.zeros((num_bins, 2), np.int64), np.zeros(num_bins)
    for sample in order:
        found = -1
        for bin_index in range(num_bins):
            is_cheaper = found == -1 or load[bin_index] < load[found]
            if is_cheaper and _has_room(sizes, caps, filled, sample, bin_index):
                found = bin_index
        if found == -1:
            return False
        bin_of[sample] = found
        filled[found] += sizes[sample]
        load[found] += costs[sample]
    return True


@compiled
def _exchange(sizes, costs, caps, bin_of, heavy, light, load, filled):
    """Moves a sample from `heavy` to `light`, or swaps two, to best level their loads; returns whether it did."""
    wanted = (load[heavy] - load[light]) / 2
    least_error = wanted - LEAST_GAIN * load[heavy]
    give, take = -1, -1
    mine, theirs = np.flatnonzero(bin_of == heavy), np.flatnonzero(bin_of == light)
    for one in mine:
        for j in range(-1, len(theirs)):
            other = theirs[j] if j >= 0 else -1
            error = abs(costs[one] - (costs[other] if j >= 0 else 0.0) - wanted)
            if error >= least_error:
                continue
            fits = True
            for i in range(2):
                growth = sizes[one, i] - (sizes[other, i] if j >= 0 else 0)
                fits &= filled[light, i] + growth <= caps[i] and filled[heavy, i] - growth <= caps[i]
            if fits:
                least_error, give, take = error, one, other
    for sample, source, target in ((give, heavy, light), (take, light, heavy)):
        if sample >= 0:
            bin_of[sample] = target
            filled[source] -= sizes[sample]
            filled[target] += sizes[sample]
            load[source] -= costs[sample]
            load[target] += costs[sample]
    return give >= 0


@compiled
def _level_steps(sizes, costs, caps, num_steps, num_ranks, bin_of):
    """Sorts bins by cost, levels each `num_ranks` neighbours, and returns the sum of the costliest of each step."""
    num_bins = num_steps * num_ranks
    filled, load = np.zeros((num_bins, 2), np.int64), np.zeros(num_bins)
    for sample in range(len(bin_of)):
        filled[bin_of[sample]] += sizes[sample]
        load[bin_of[sample]] += costs[sample]
    order = np.argsort(-load, kind="mergesort")
    for turn in range(NUM_ROUNDS):
        has_changed = False
        for first in range(0, num_bins, num_ranks):
            for i in range(num_ranks):
                j = (num_ranks - 1 - turn - i) % num_ranks
                if i < j:
                    one, other = order[first + i], order[first + j]
                    heavy, light = (one, other) if load[one] >= load[other] else (other, one)
                    has_changed |= _exchange(sizes, costs, caps, bin_of, heavy, light, load, filled)
        order = order[np.argsort(-load[order], kind="mergesort")]
        if not has_changed and turn >= num_ranks:
            break
    renumbered = np.empty(num_bins, np.int64)
    total = 0.0
    for i in range(num_bins):
        renumbered[order[i]] = i
        if i % num_ranks == 0:
            total += load[order[i]]
    for sample in range(len(bin_of)):
        bin_of[sample] = renumbered[bin_of[sample]]
    return total


@compile_kept  # the only entry point, so there is one cache file
def _assign(sizes, costs, caps, orders, num_ranks):
    # Find the fewest steps with first-fit or a level plan.
    best, plan = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    steps, least = len(sizes) + 1, 1
    for order in orders:
        needed = -(-_fill_first(sizes, caps, order, plan) // num_ranks)
        if needed < steps:
            steps, best[:] = needed, plan
    for i in range(2):
        least = max(least, -(-sizes[:, i].sum() // (caps[i] * num_ranks)))
    while least < steps:
        middle, fits = (least + steps) // 2, False
        for order in orders:
            if _fill_level(sizes, costs, caps, order, middle * num_ranks, plan):
                fits, best[:] = True, plan
                break
        if fits:
            steps = middle
        else:
            least = middle + 1

    # Choose the cheapest plan with that many steps.
    best_cost = _level_steps(sizes, costs, caps, steps, num_ranks, best)
    for order in orders:
        if _fill_level(sizes, costs, caps, order, steps * num_ranks, plan):
            cost = _level_steps(sizes, costs, caps, steps, num_ranks, plan)
            if cost < best_cost:
                best[:], best_cost = plan, cost
    return best, steps
