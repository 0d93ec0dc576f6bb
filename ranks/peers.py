"""What this rank knows of every rank of the run, itself included, and whether the run hangs."""

from collections.abc import Sequence
from dataclasses import dataclass

from ranks.lock import ERRORS_DIR

SLOW_LIMIT = 3600.0  # seconds without progress while loading, saving, or compiling in the first step
SECONDS_PER_HEARTBEAT = 1.0
MOST_RUNS = 20  # runs of consecutive ranks that a message lists


@dataclass
class Peer:
    """A rank, as its heartbeats tell. Rank 0 knows all of them, the others know rank 0 and themselves.

    Times are those of `Lifeline.clock`.
    """

    host: str
    pid: int
    heard: float  # time of its last message
    moved: float  # time of its training thread's last sign of progress
    limit: float = SLOW_LIMIT  # seconds that it may stand still where it is
    where: str = "the start"
    said_goodbye: bool = False


def is_hanging(peers: dict[int, Peer], clock: float, hang_timeout: float, *, is_rank0: bool) -> bool:
    """Whether a rank is silent or does not move on. Ranks other than 0 judge rank 0 alone, and later than it does."""
    if not is_rank0:
        return 0 in peers and clock - peers[0].heard > 1.1 * hang_timeout + 2
    return any(clock - peer.heard > hang_timeout or clock - peer.moved > peer.limit for peer in peers.values())


def describe_death(rank: int, peer: Peer) -> str:
    """What is said of a rank whose connection has ended without a report."""
    return (
        f"rank {rank} (pid {peer.pid} on {peer.host}) died without a word, last seen in {peer.where}: killed, perhaps"
        " for lack of memory, or crashed"
    )


def describe_hang(peers: dict[int, Peer], clock: float) -> str:
    """Which ranks are silent; if none is, where each has come to."""
    silent = {rank: peer for rank, peer in peers.items() if clock - peer.heard > 3 * SECONDS_PER_HEARTBEAT}
    stacks = f"the stacks of those that could answer are in {ERRORS_DIR}/"
    if silent:
        names = [
            f"rank {rank} (pid {peer.pid} on {peer.host}) has given no sign of life for {clock - peer.heard:.0f} s,"
            f" last seen in {peer.where}"
            for rank, peer in sorted(silent.items())
        ]
        return f"{'; '.join(names)}: stopped, or cut off from the network; {stacks}"
    places: dict[str, list[int]] = {}
    for rank, peer in sorted(peers.items()):
        places.setdefault(peer.where, []).append(rank)
    seconds = max(clock - peer.moved for peer in peers.values())
    found = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} in {where}" for where, ranks in places.items()
    )
    return f"every rank is alive, and for {seconds:.0f} s not all have moved on (--hang-timeout): {found}; {stacks}"


def describe_ranks(ranks: Sequence[int]) -> str:
    """Text for ascending ranks: "rank 3", "ranks 0-7, 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:MOST_RUNS]]
    more = f" and {sum(map(len, runs[MOST_RUNS:]))} more" if len(runs) > MOST_RUNS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(names)}{more}"
