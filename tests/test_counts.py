"""A training step does no more than it did: counts of collectives, kernels, casts, copies and allocations.

What ranks exchange beside training grows with the ranks, not with their square.
"""

import json
import operator

import counts
import pytest
from breadth import wide
from forked import succeed


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", ["full", *(wide(case) for case in counts.CASES if case != "full")])
def test_no_count_of_a_step_grows(case, tmp_path):
    """Beyond those that benchmarks/counts.py has written."""
    counts.save_models(tmp_path)
    succeed(counts.NUM_RANKS, "benchmarks/counts.py", "--worker", tmp_path, case)
    written = json.loads((tmp_path / "counts.json").read_text())[case]
    known, needed = counts.read_counts(counts.RESULTS.read_text())[case], counts.find_needed(case)
    found = {name: counts.Cost(*parts) for name, parts in written.items()}
    grown = {name: (cost, known[name]) for name, cost in found.items() if any(map(operator.gt, cost, known[name]))}
    assert grown == {} and found.keys() == known.keys()
    assert all(found[name] == cost for name, cost in needed.items() if "bytes" not in name and any(cost))


def test_a_count_that_is_not_linear_is_refused():
    numbers = {size: size[0] * size[1] for size in counts.SIZES}
    found = {size: counts.Counter(copies=number + 5) for size, number in numbers.items()}
    assert counts.split_counts(found) == {"copies": counts.Cost(1, 0, 0, 5)}
    found[counts.SIZES[-1]]["copies"] += 1
    with pytest.raises(AssertionError, match="copies: 7, 9, 11, 18"):
        counts.split_counts(found)


FEW, MANY = 8, 32
# N² would be 16 times as much. A ring of all ranks is the step's own collective, as those of the gradients.
MOST_GROWTH = 1.5 * MANY / FEW
RING = "a step's row of results"
REMOVAL = "a checkpoint, and the older one's removal"


@pytest.mark.long
@pytest.mark.slow
def test_messages_and_bytes_grow_with_the_ranks_and_not_with_their_square():
    found = {}
    for num_ranks in (FEW, MANY):
        words = ("--json", "--ranks", num_ranks, "--hang-timeout", 0)
        done = succeed(0, "benchmarks/side_channels.py", *words, timeout=120)
        found[num_ranks] = {row["channel"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert found[FEW].keys() == found[MANY].keys() >= {RING, REMOVAL, "equal options", "a rank dies"}
    for num_ranks, channels in found.items():
        assert channels[REMOVAL]["removed"] == num_ranks + 2, "rank 0 removes all ranks' files, state, manifest"
    for channel, few in found[FEW].items():
        many = found[MANY][channel]
        growths = {count: many[count] / max(few[count], 1) for count in ("messages", "bytes")}
        if channel == RING:
            assert growths["messages"] > MOST_GROWTH, "what counts messages does not see N² of them"
            continue
        assert max(growths.values()) < MOST_GROWTH, f"{channel}: {few} and {many}"
