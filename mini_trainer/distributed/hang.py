"""A hang: which ranks are silent or stand still, what each waits for, and the end of those that cannot end themselves.

A rank whose watch is alive says where its training thread stands, and which collective it has entered last: torch's
flight recorder keeps the last ones (TORCH_FR_BUFFER_SIZE). Reads no source file, since file systems can hang as well.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_trainer.distributed.lock import ERRORS_DIR
from mini_trainer.distributed.messages import describe_ranks
from mini_trainer.options.reading import read_bytes, read_text

SLOW_FACTOR, LEAST_SLOW = 6, 120.0  # the limit of slow phases: in units of --hang-timeout, and at least in seconds
LONGEST = 6 * 3600.0  # seconds that phases may take at least in which others than the ranks are at work: rows, uploads
SECONDS_PER_HEARTBEAT = 1.0
SECONDS_TO_DIE = 0.5  # after SIGKILL
MOST_DETAILS = 4  # silent ranks that a message describes one by one
MOST_PLACES = 12  # phases that a message lists with the ranks in them
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # torch's, of GPUs and of CPUs
BUFFER_SIZE, NUM_RECORDED = "TORCH_FR_BUFFER_SIZE", "2000"  # collectives; torch's default differs by version

Stand = dict[str, Any]  # where a rank stands, as `look` finds it
Process = tuple[int, str, int]  # rank, host, pid


@dataclass
class Peer:
    """A rank's state, from its heartbeats. Rank 0 knows all ranks, the others know rank 0 and themselves. Times are in
    `Watch.clock`'s seconds."""

    host: str
    pid: int
    heard: float  # time of its last message
    moved: float  # time of its training thread's last sign of progress
    limit: float  # seconds allowed without progress in the current phase
    where: str = "the start"
    said_goodbye: bool = False
    stand: Stand | None = None


def limit_slow(hang_timeout: float) -> float:
    """Seconds allowed without progress while starting, loading, saving, or compiling in the first step."""
    return max(SLOW_FACTOR * hang_timeout, LEAST_SLOW)


def is_hanging(peers: Mapping[int, Peer], clock: float, hang_timeout: float, *, is_rank0: bool) -> bool:
    """Whether a rank is silent or makes no progress. Ranks other than 0 judge rank 0 only, and later than it does."""
    if not is_rank0:
        return 0 in peers and clock - peers[0].heard > 1.1 * hang_timeout + 2
    return any(clock - peer.heard > hang_timeout or clock - peer.moved > peer.limit for peer in peers.values())


def find_silent(peers: Mapping[int, Peer], clock: float) -> dict[int, Peer]:
    """The ranks that send no heartbeats, and have not said where they stand."""
    is_late = {rank: clock - peer.heard > 3 * SECONDS_PER_HEARTBEAT for rank, peer in peers.items()}
    return {rank: peer for rank, peer in sorted(peers.items()) if is_late[rank] and peer.stand is None}


def describe_hang(peers: Mapping[int, Peer], clock: float) -> str:
    """The silent ranks; if there are none, where each rank is; and who has not entered a collective."""
    silent = find_silent(peers, clock)
    stacks = "; ".join([*compare(peers), f"what each responsive rank did is in {ERRORS_DIR}/"])
    if silent:
        names = [
            f"rank {rank} (pid {peer.pid} on {peer.host}) has sent no heartbeat for {clock - peer.heard:.0f} s,"
            f" last seen in {peer.where}"
            for rank, peer in list(silent.items())[:MOST_DETAILS]
        ]
        others = list(silent)[MOST_DETAILS:]
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


def compare(peers: Mapping[int, Peer]) -> Iterator[str]:
    """For each group of ranks that have not entered the same collectives: who is furthest behind, and at which."""
    stands = {rank: peer.stand["collectives"] for rank, peer in sorted(peers.items()) if peer.stand is not None}
    for group in sorted({group for stand in stands.values() for group in stand}):
        entered = {rank: tuple(stand[group]) for rank, stand in stands.items() if group in stand}
        (least, first), (most, last) = min(entered.values()), max(entered.values())
        if least < most:
            behind = describe_ranks([rank for rank, (number, _) in entered.items() if number == least])
            yield f"the last collective of {behind} is {first} {least:,}, others have entered {last} {most:,}"


def describe_stands(peers: Mapping[int, Peer]) -> str:
    """The stacks of all training threads, equal ones together."""
    groups: dict[str, list[int]] = {}
    for rank, peer in sorted(peers.items()):
        if peer.stand is not None:
            groups.setdefault(peer.stand["stack"], []).append(rank)
    return "\n".join(f"{describe_ranks(ranks)}:\n{stack}\n" for stack, ranks in groups.items())


# On the rank itself.


def look() -> Stand:
    """Where this process's training thread stands, and the last collective that it has entered in each group."""
    frames = sys._current_frames()[threading.main_thread().ident]
    stack = traceback.StackSummary.extract(traceback.walk_stack(frames), lookup_lines=False)
    collectives: dict[str, tuple[int, str]] = {}
    with contextlib.suppress(Exception):  # of another version of torch: the stacks are worth more than its records
        for entry in (entry for trace in read_recorders().values() for entry in trace.get("entries", ())):
            if not entry.get("is_p2p"):
                name = ", ".join(map(str, entry["process_group"]))
                last = (int(entry["collective_seq_id"]), str(entry["profiling_name"]))
                collectives[name] = max(collectives.get(name, last), last)
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(stack)]
    return {"stack": "\n".join(lines), "collectives": collectives}


def keep_records() -> None:
    """Turns torch's flight recorder on, unless the environment says otherwise; before the first process group."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its former name
        os.environ.setdefault(BUFFER_SIZE, NUM_RECORDED)


def read_recorders() -> dict[str, Any]:
    """What torch's flight recorders hold, by their functions; empty if this process has no torch."""
    torch = sys.modules.get("torch")
    c10d = None if torch is None else getattr(torch._C, "_distributed_c10d", None)
    found = {name: getattr(c10d, name, None) for name in RECORDERS}
    return {name: json.loads(dump(True, False)) for name, dump in found.items() if dump is not None}


def end_silent(silent: Iterable[Process], host: str) -> list[str]:
    """Kills those of these ranks that were started on this `host` by the same parent; a line about each that the kernel
    does not end. Another container can have the same name, and in it each number is another process's."""
    own = [pid for rank, where, pid in silent
           if where == host and read_status(pid)[1] == os.getppid() and is_rank(pid, rank)]  # fmt: skip
    for pid in own:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    if own:
        time.sleep(SECONDS_TO_DIE)
    return [
        f"pid {pid} on {host} is in an uninterruptible call of the kernel, for a disk, a network file system or a"
        " driver, and is left: it ends when the call returns"
        for pid in own
        if read_status(pid)[0] == "D"
    ]


def is_rank(pid: int, rank: int) -> bool:
    """Whether a process of the same parent is this rank: it was not started as another one, and is not this process."""
    with contextlib.suppress(OSError):
        found = re.search(rb"\0RANK=(\d+)\0", b"\0" + read_bytes(Path(f"/proc/{pid}/environ")))
        return pid != os.getpid() and (found is None or int(found[1]) == rank)
    return False


def read_status(pid: int) -> tuple[str, int]:
    """State and parent of a process, as Linux has them; "", 0 if it is gone."""
    try:
        state, parent, *_ = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    except OSError:
        return "", 0
    return state, int(parent)
