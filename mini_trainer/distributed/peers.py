"""Ranks as their heartbeats show them: which are silent or make no progress, with the messages about them."""

from dataclasses import dataclass

from mini_trainer.distributed.lock import ERRORS_DIR
from mini_trainer.distributed.messages import describe_ranks

SLOW_LIMIT = 3600.0  # seconds allowed without progress while loading, saving, or compiling in the first step
SECONDS_PER_HEARTBEAT = 1.0
MOST_DETAILS = 4  # silent ranks that a message describes one by one
MOST_PLACES = 12  # phases that a message lists with the ranks in them


@dataclass
class Peer:
    """A rank's state, from its heartbeats. Rank 0 knows all ranks, the others know rank 0 and themselves.

    Times are in `Watch.clock`'s seconds.
    """

    host: str
    pid: int
    heard: float  # time of its last message
    moved: float  # time of its training thread's last sign of progress
    limit: float = SLOW_LIMIT  # seconds allowed without progress in the current phase
    where: str = "the start"
    said_goodbye: bool = False


def is_hanging(peers: dict[int, Peer], clock: float, hang_timeout: float, *, is_rank0: bool) -> bool:
    """Whether a rank is silent or makes no progress. Ranks other than 0 judge rank 0 only, and later than it does."""
    if not is_rank0:
        return 0 in peers and clock - peers[0].heard > 1.1 * hang_timeout + 2
    return any(clock - peer.heard > hang_timeout or clock - peer.moved > peer.limit for peer in peers.values())


def describe_death(rank: int, peer: Peer) -> str:
    """Message about a rank whose connection closed without a report."""
    return (
        f"rank {rank} (pid {peer.pid} on {peer.host}) died without a report, last seen in {peer.where}: it crashed or"
        f" was killed, perhaps because it ran out of memory"
    )


def describe_hang(peers: dict[int, Peer], clock: float) -> str:
    """Lists the silent ranks; if there are none, where each rank is."""
    silent = {rank: peer for rank, peer in peers.items() if clock - peer.heard > 3 * SECONDS_PER_HEARTBEAT}
    stacks = f"stack traces of the responsive ranks are in {ERRORS_DIR}/"
    if silent:
        names = [
            f"rank {rank} (pid {peer.pid} on {peer.host}) has sent no heartbeat for {clock - peer.heard:.0f} s,"
            f" last seen in {peer.where}"
            for rank, peer in sorted(silent.items())[:MOST_DETAILS]
        ]
        others = sorted(silent)[MOST_DETAILS:]
        more = f"; nor {'has' if len(others) == 1 else 'have'} {describe_ranks(others)}" if others else ""
        return f"{'; '.join(names)}{more}: stopped, or cut off from the network; {stacks}"
    places: dict[str, list[int]] = {}
    for rank, peer in sorted(peers.items()):
        places.setdefault(peer.where, []).append(rank)
    seconds = max(clock - peer.moved for peer in peers.values())
    found = "; ".join(f"{describe_ranks(ranks)} in {where}" for where, ranks in list(places.items())[:MOST_PLACES])
    if len(places) > MOST_PLACES:
        found += f"; {sum(map(len, list(places.values())[MOST_PLACES:]))} ranks elsewhere"
    return f"all ranks are alive, but some made no progress for {seconds:.0f} s (--hang-timeout): {found}; {stacks}"
