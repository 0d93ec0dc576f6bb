"""What ranks exchange beside training grows with the ranks, not with their square."""

import json

import pytest
from forked import run_forked

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
        done = run_forked(0, "benchmarks/side_channels.py", *words, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        found[num_ranks] = {row["channel"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert found[FEW].keys() == found[MANY].keys() >= {RING, REMOVAL, "equal options", "a rank dies"}
    assert found[FEW][REMOVAL]["removed"] == found[MANY][REMOVAL]["removed"] == 3, "a rank's file, state, manifest"
    for channel, few in found[FEW].items():
        many = found[MANY][channel]
        growths = {count: many[count] / max(few[count], 1) for count in ("messages", "bytes")}
        if channel == RING:
            assert growths["messages"] > MOST_GROWTH, "what counts messages does not see N² of them"
            continue
        assert max(growths.values()) < MOST_GROWTH, f"{channel}: {few} and {many}"
