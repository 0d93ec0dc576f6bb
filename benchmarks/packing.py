"""Compares batch_packer with three alternatives: micro-batches, cost over a lower bound, and time.

    python benchmarks/packing.py                              # every case, a couple of minutes
    python benchmarks/packing.py --quick                      # batches of 128 and 1,024 only
    python benchmarks/packing.py --lengths-file data.jsonl    # adds lengths drawn from a file

All alternatives keep the packer's contract: no micro-batch over the cap, and as many micro-batches on every
rank. A line shows steps K (the bound in brackets), the sum over steps of the costliest micro-batch in percent
over its lower bound, and milliseconds; the packer's time is that of the public function, lists included, the
alternatives' that of the assignment alone. A line ends in `worse` where an alternative has fewer steps, or as
many and a cost lower by more than 0.01 % of the bound.

The generated GSM8K lengths follow quantiles of the 7,473 training examples, at 3.6 characters per token.
"""

import argparse
import heapq
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paths
from numba import njit
from step_costs import sum_step_costs

from mini_trainer.batch_packer import cost_samples, pack_batch

GSM8K_PERCENTS = [0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.9, 100]
GSM8K_TOKENS = [34, 57, 71, 81, 96, 109, 121, 134, 149, 167, 189, 224, 253, 315, 405, 469]
ATTENTION_COST = 1 / 8192  # a sample of 8,192 tokens costs twice as much per token as a short one
TOLERANCE = 1e-4  # of the bound, in comparisons
CHARACTERS_PER_TOKEN = 3.6


# --- Lengths ------------------------------------------------------------------------------------------------


def draw_bimodal(rng: np.random.Generator, n: int) -> np.ndarray:
    lengths = np.where(rng.random(n) < 0.85, rng.normal(300, 60, n), rng.normal(2500, 400, n))
    return np.where(rng.random(n) < 0.01, 8000, lengths)


def draw_long_mixture(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random(n) < 0.7, rng.lognormal(7, 0.8, n), rng.uniform(8000, 32768, n))


def draw_triplets(rng: np.random.Generator, n: int) -> np.ndarray:
    """Three samples fill a micro-batch exactly: hard for every greedy packer (Falkenauer 1996)."""
    first = rng.integers(1024, 2049, -(-n // 3))
    second = rng.integers(1024, 2049 + 1024 - first)
    return np.concatenate([first, second, 4096 - first - second])[:n]


DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], int]] = {
    "gsm8k": (lambda rng, n: np.interp(100 * rng.random(n), GSM8K_PERCENTS, GSM8K_TOKENS), 4096),
    "chats": (lambda rng, n: rng.lognormal(6.2, 1.0, n), 16384),
    "bimodal": (draw_bimodal, 8192),
    "power": (lambda rng, n: 64 * (1 + rng.pareto(1.2, n)), 32768),
    "long": (draw_long_mixture, 32768),
    "triplets": (draw_triplets, 4096),
}
CHAT_LIKE = ("gsm8k", "chats", "file")


def draw_lengths(name: str, n: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """Returns integer lengths (n,) between 16 and the cap, and the cap in tokens."""
    draw, cap = DISTRIBUTIONS[name]
    return np.clip(draw(np.random.default_rng(seed), n), 16, cap).astype(np.int64), cap


def read_lengths(path: Path) -> np.ndarray:
    """Returns tokens per line of a JSONL: `len` or `input_ids` if tokenized, else estimated from messages."""
    lengths = []
    for line in path.open(encoding="utf-8"):
        sample = json.loads(line)
        if "messages" in sample:
            characters = sum(len(message["content"] or "") for message in sample["messages"])
            lengths.append(max(1, round(characters / CHARACTERS_PER_TOKEN)))
        else:
            lengths.append(sample.get("len") or len(sample["input_ids"]))
    return np.asarray(lengths, np.int64)


# --- Lower bounds -------------------------------------------------------------------------------------------


def bound_bins(lengths: np.ndarray, cap: int) -> int:
    """Returns the lower bound L2 on bins (Martello and Toth 1990); `lengths` descending.

    For a threshold t <= cap / 2, samples over cap - t share a bin with none of at least t, and samples over
    cap / 2 have a bin each. What is in [t, cap / 2] must fit beside those of (cap / 2, cap - t] or in bins
    of its own.
    """
    ascending = lengths[::-1]
    tokens = np.concatenate([[0], np.cumsum(ascending)])
    thresholds = np.unique(np.concatenate([[1], ascending[2 * ascending <= cap]]))
    alone = np.searchsorted(ascending, cap - thresholds, side="right")
    half = np.searchsorted(2 * ascending, cap, side="right")
    small = np.searchsorted(ascending, thresholds, side="left")
    room = (alone - half) * cap - (tokens[alone] - tokens[half])
    extra = -(-(tokens[half] - tokens[small] - room) // cap)
    return int((len(lengths) - half + np.maximum(extra, 0)).max())


def bound_cost(lengths: np.ndarray, costs: np.ndarray, cap: int, num_ranks: int, num_steps: int) -> float:
    """Returns a lower bound of the sum of step costs for tables of `num_steps`; inputs descending.

    Let b_0 >= b_1 >= ... be the costs of the M = K*R bins. Whatever the steps, the j-th costliest step costs
    at least b_{jR}, since the steps before it hold only jR bins; so the sum is at least that of all b_{jR}.
    (1) F(i), the most cost that i bins can hold: at most the first i*cap tokens of the longest samples, which
        cost the most per token, the last one in part.
    (2) b_i >= (total - F(i)) / (M - i): the mean of the bins after the first i.
    (3) b_i >= cost of sample p, if samples 0..p have more than i*cap tokens: they do not fit into i bins.
    (4) b_i >= cost of sample i, if it is longer than cap / 2: samples 0..i need a bin each.
    (5) The b_{jR} from step k on sum to at least the mean over ranks, (total - F(kR)) / R.
    So for every k: (2), (3) or (4) for the steps before k, plus (5) for the rest. With k = 0 this is total/R.
    (6) The costliest step alone: samples 0..qM put q + 1 into one bin, at least the q + 1 least of them.
    """
    num_bins, firsts = num_steps * num_ranks, np.arange(num_steps) * num_ranks
    tokens, total = np.concatenate([[0], np.cumsum(lengths)]), costs.sum()
    cost_before = np.concatenate([[0], np.cumsum(costs)])
    after = total - np.interp(np.append(firsts, num_bins) * cap, tokens, cost_before)  # total - F
    at_least = after[:-1] / (num_bins - firsts)
    outside = np.searchsorted(tokens, firsts * cap, side="right") - 1
    for sample, holds in ((outside, True), (firsts, lengths[np.minimum(firsts, len(lengths) - 1)] * 2 > cap)):
        known = holds & (sample < len(lengths))
        cost = costs[np.minimum(sample, len(lengths) - 1)]
        at_least = np.maximum(at_least, np.where(known, cost, 0))
    by_steps = np.concatenate([[0], np.cumsum(at_least)]) + after / num_ranks
    shared = range((len(lengths) - 1) // num_bins + 1)
    by_pigeonhole = max(costs[q * num_bins - q : q * num_bins + 1].sum() for q in shared)
    return float(max(by_steps.max(), by_pigeonhole))


# --- Alternatives: (lengths, costs, cap, num_ranks) -> bin of each sample, number of steps -----------------


def sum_grouped_costs(bin_of: np.ndarray, costs: np.ndarray, num_ranks: int) -> float:
    """Returns the sum of step costs when bins sorted by cost form steps: the best grouping of given bins."""
    loads = np.sort(np.bincount(bin_of, weights=costs))[::-1]
    return float(loads[::num_ranks].sum())


@njit(cache=True)
def _fill_best_fit(lengths, cap):
    bin_of, room, num_bins = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64), 0
    for i in range(len(lengths)):
        best = -1
        for b in range(num_bins):
            if room[b] >= lengths[i] and (best < 0 or room[b] < room[best]):
                best = b
        if best < 0:
            best = num_bins
            room[best] = cap
            num_bins += 1
        room[best] -= lengths[i]
        bin_of[i] = best
    return bin_of, num_bins


def pack_best_fit_decreasing(lengths, costs, cap, num_ranks):
    """Each sample, longest first, into the fullest bin that takes it; quadratic time."""
    bin_of, num_bins = _fill_best_fit(lengths, cap)
    return bin_of, -(-num_bins // num_ranks)


@njit(cache=True)
def _spread_prefix(lengths, order, start, end, cap, num_ranks, bin_of, first_bin):
    """LPT of samples order[start:end], longest first, over one step; returns whether the cap holds."""
    tokens = np.zeros(num_ranks, np.int64)
    for i in np.sort(order[start:end]):  # samples are numbered longest first
        rank = np.argmin(tokens)
        tokens[rank] += lengths[i]
        bin_of[i] = first_bin + rank
        if tokens[rank] > cap:
            return False
    return True


def pack_prefix_greedy(lengths, costs, cap, num_ranks):
    """Step by step the longest prefix, in the order of arrival, that LPT spreads over the ranks."""
    order = np.random.default_rng(1).permutation(len(lengths))
    bin_of, start, step = np.empty(len(lengths), np.int64), 0, 0
    while start < len(lengths):
        fits, too_many = start + 1, len(lengths) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if _spread_prefix(lengths, order, start, middle, cap, num_ranks, bin_of, step * num_ranks):
                fits = middle
            else:
                too_many = middle
        _spread_prefix(lengths, order, start, fits, cap, num_ranks, bin_of, step * num_ranks)
        start, step = fits, step + 1
    return bin_of, step


def split_karmarkar_karp(weights: np.ndarray, num_bins: int) -> np.ndarray:
    """Returns the bin of each sample by the largest differencing method (Karmarkar and Karp 1982).

    A node is a partial split: sums of its nonempty bins, descending, with the first and last sample of each
    bin's linked list. The two nodes of the widest spread merge, largest sums with smallest.
    """
    following = np.full(len(weights), -1)
    nodes = {i: (np.array([float(w)]), np.array([i]), np.array([i])) for i, w in enumerate(weights)}
    heap = [(-float(w), i) for i, w in enumerate(weights)]
    heapq.heapify(heap)
    for new in range(len(weights), 2 * len(weights) - 1):
        sums, heads, tails = nodes.pop(heapq.heappop(heap)[1])
        other_sums, other_heads, other_tails = nodes.pop(heapq.heappop(heap)[1])
        num_shared = max(0, len(sums) + len(other_sums) - num_bins)
        shared = np.arange(len(sums) - 1, len(sums) - 1 - num_shared, -1)  # smallest first
        sums[shared] += other_sums[:num_shared]
        following[tails[shared]] = other_heads[:num_shared]
        tails[shared] = other_tails[:num_shared]
        sums = np.concatenate([sums, other_sums[num_shared:]])
        by_sum = np.argsort(-sums, kind="stable")
        heads = np.concatenate([heads, other_heads[num_shared:]])[by_sum]
        tails = np.concatenate([tails, other_tails[num_shared:]])[by_sum]
        nodes[new] = (sums[by_sum], heads, tails)
        spread = sums.max() - (sums.min() if len(sums) == num_bins else 0)
        heapq.heappush(heap, (-float(spread), new))
    bin_of = np.empty(len(weights), np.int64)
    for bin_index, sample in enumerate(next(iter(nodes.values()))[1]):
        while sample >= 0:
            bin_of[sample] = bin_index
            sample = following[sample]
    return bin_of


def pack_karmarkar_karp(lengths, costs, cap, num_ranks):
    """Splits into K*R bins by tokens and by cost, the better of the two; K grows until the cap holds.

    K grows by 3 % where that is more than 1: without it 1,024 triplets would take seconds a case.
    """
    num_steps = -(-int(lengths.sum()) // (cap * num_ranks))
    while True:
        plans = [split_karmarkar_karp(weights, num_steps * num_ranks) for weights in (lengths, costs)]
        plans = [bin_of for bin_of in plans if np.bincount(bin_of, weights=lengths).max() <= cap]
        if plans:
            return min(plans, key=lambda bin_of: sum_grouped_costs(bin_of, costs, num_ranks)), num_steps
        num_steps += max(1, num_steps // 32)


ALTERNATIVES = {"prefix": pack_prefix_greedy, "bfd": pack_best_fit_decreasing, "kk": pack_karmarkar_karp}


# --- Measuring ----------------------------------------------------------------------------------------------


def time_call(function: Callable, *args: object, repeats: int = 1) -> tuple[float, object]:
    """Returns the least milliseconds of `repeats` calls, and the result."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = function(*args)
        best = min(best, 1e3 * (time.perf_counter() - start))
    return best, result


def measure_case(lengths: np.ndarray, cap: int, num_ranks: int, attention_cost: float) -> dict:
    """Returns {method: (steps, percent over the bound, ms)} and the bound on steps."""
    descending = -np.sort(-lengths)
    costs = cost_samples(descending, attention_cost)
    ms, table = time_call(pack_batch, lengths.tolist(), cap, num_ranks, attention_cost, repeats=5)
    found = {"packer": (len(table), sum_step_costs(table, lengths, attention_cost), ms)}
    for name, pack in ALTERNATIVES.items():
        ms, (bin_of, steps) = time_call(pack, descending, costs, cap, num_ranks)
        assert np.bincount(bin_of, weights=descending).max() <= cap, f"{name} breaks the cap of {cap}"
        found[name] = (steps, sum_grouped_costs(bin_of, costs, num_ranks), ms)
    # Every method is held against the bound for the packer's number of steps.
    bound = bound_cost(descending, costs, cap, num_ranks, len(table))
    over = {name: (steps, 100 * (cost / bound - 1), ms) for name, (steps, cost, ms) in found.items()}
    return {"methods": over, "least_steps": -(-bound_bins(descending, cap) // num_ranks)}


def is_worse(methods: dict) -> bool:
    """Whether an alternative beats the packer in steps, or in cost at no more steps."""
    steps, over, _ = methods["packer"]
    rivals = [value for name, value in methods.items() if name != "packer"]
    return any(s < steps or (s == steps and o < over - 100 * TOLERANCE) for s, o, _ in rivals)


def print_case(title: str, case: dict) -> None:
    cells = "  ".join(f"{k:>5} {over:8.3f} {ms:9.2f}" for k, over, ms in case["methods"].values())
    print(f"{title} [{case['least_steps']:>4}] {cells} {'worse' if is_worse(case['methods']) else ''}", flush=True)


def measure_first_call() -> None:
    """Prints the first call of a new process, with an empty cache of compiled code and with a filled one."""
    program = (
        "import time; start = time.perf_counter(); import numba; loaded = time.perf_counter();"
        "from mini_trainer.batch_packer import pack_batch; pack_batch([3, 2, 1], 4, 2);"
        "print(loaded - start, time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as cache:
        env = {"NUMBA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "PATH": "", "PYTHONPATH": str(paths.ROOT)}
        command = [sys.executable, "-c", program]
        runs = [subprocess.check_output(command, env=env, text=True).split() for _ in range(6)]
    first, *later = [[float(seconds) for seconds in run] for run in runs]
    loaded, called = sorted(later, key=lambda run: run[1])[len(later) // 2]
    print(f"first call ever in an empty cache, with imports: {first[1]:.1f} s")
    print(f"first call of a later process: {called:.2f} s, import numba {loaded:.2f} s of it")


def measure_large() -> None:
    """Prints time and memory at 65,536 samples on 1,024 ranks."""
    for name in DISTRIBUTIONS:
        lengths, cap = draw_lengths(name, 65536)
        ms, table = time_call(pack_batch, lengths.tolist(), cap, 1024, ATTENTION_COST, repeats=3)
        tracemalloc.start()
        pack_batch(lengths, cap, 1024, ATTENTION_COST)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        slots = len(lengths) + 1024 * len(table)
        per_slot = f"{peak / slots:.0f} peak bytes per sample and bin"
        print(f"65536 x 1024 {name:9} K={len(table):<3} {ms:7.1f} ms  {per_slot}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths-file", type=Path, help="JSONL of messages or of tokenized samples")
    parser.add_argument("--cap", type=int, default=8192, help="tokens per micro-batch for --lengths-file")
    parser.add_argument("--quick", action="store_true", help="batches of 128 and 1,024 only, nothing larger")
    args = parser.parse_args()
    if args.lengths_file is not None:
        pool = np.minimum(read_lengths(args.lengths_file), args.cap)
        DISTRIBUTIONS["file"] = (lambda rng, n: rng.choice(pool, n), args.cap)

    pack_batch([1], 1, 1)  # compiles
    for pack in ALTERNATIVES.values():
        pack(np.array([1]), np.array([1.0]), 1, 1)
    head = "".join(f"{name + ': K, % over, ms':>26}" for name in ("packer", *ALTERNATIVES))
    print(f"{'lengths, c, samples x ranks':30} [  lb] {head}")
    cases = {}
    for name in DISTRIBUTIONS:
        for attention_cost in (0.0, ATTENTION_COST):
            for n in (128, 1024) if args.quick or name == "triplets" else (128, 1024, 8192):
                for ranks in (2, 8, 64):
                    case = measure_case(*draw_lengths(name, n), ranks, attention_cost)
                    cases[name, attention_cost, n, ranks] = case
                    print_case(f"{name:9} {attention_cost:<8.2g} {n:>5} x {ranks:<3}", case)
    print_summary(cases)
    measure_first_call()
    if not args.quick:
        measure_large()


def print_summary(cases: dict) -> None:
    packer = {key: case["methods"]["packer"] for key, case in cases.items()}
    above = [key for key, case in cases.items() if packer[key][0] > case["least_steps"]]
    worse = [key for key, case in cases.items() if is_worse(case["methods"])]
    print(f"\n{len(cases)} cases; worse than an alternative: {worse or 'none'}")
    print(f"more steps than the lower bound: {[(*key, packer[key][0]) for key in above] or 'none'}")
    # With few samples per micro-batch no table comes near the bound, so these cases stand apart.
    many = {key for key in cases if key[0] in CHAT_LIKE and key[2] >= 8 * key[3] * packer[key][0]}
    for label, group in (("chat-like, 8 or more samples per micro-batch", many), ("other", set(cases) - many)):
        for sign, keys in (("=", [k for k in group if k[1] == 0]), (">", [k for k in group if k[1] > 0])):
            key = max(keys, key=lambda key: packer[key][1])
            print(f"most over the bound, c {sign} 0, {label}: {packer[key][1]:.3f} % at {key}")
    for n, ranks in ((1024, 8), (8192, 64)):
        times = {key: packer[key][2] for key in cases if key[2:] == (n, ranks)}
        if times:
            key = max(times, key=times.get)
            print(f"slowest of {n} x {ranks}: {times[key]:.2f} ms at {key}")


if __name__ == "__main__":
    main()
