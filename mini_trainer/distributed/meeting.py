"""Startup barrier: each rank registers in the store of torchrun's rendezvous and waits for the others.

Until then there is neither a process group nor a lifeline, so only the store knows which ranks are missing.
"""

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mini_trainer.distributed import process
from mini_trainer.distributed.ending import ExitCode, RunError, log
from mini_trainer.distributed.messages import describe_ranks, say
from mini_trainer.options.reading import read_text

SECONDS_PER_LOOK = 2.0  # between looks for a newer start
MOST_NODES = 8  # nodes that a message lists one by one
NEWEST = "newest start"  # key of the store
ARRIVED, NUM_ARRIVED, ALL_ARRIVED, COMPLETE = "arrived", "num_arrived", "all_arrived", "complete"  # keys of a start


def meet(rank: int, world_size: int, *, timeout: float = process.START_TIMEOUT) -> dist.Store:
    """Returns this start's part of the store that torchrun's environment names, once every rank has registered there.
    While ranks are missing, the first rank of each node lists them every 30 s; RunError after `timeout` s."""
    deadline, seconds_per_notice = time.monotonic() + timeout, min(process.SECONDS_PER_NOTICE, timeout / 2)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        with late_notice(process.SECONDS_UNTIL_TOLD, f"waiting for the rendezvous at {host}, port {port}"):
            store = open_store(host, port, rank, world_size, timeout=timeout)
        start = Start(store, rank, world_size)
        while not start.is_complete(min(seconds_per_notice, deadline - time.monotonic())):
            missing = "other ranks"  # Only one rank of a node reads who has arrived: for all it would be N² bytes.
            if is_first_of_node():
                missing = start.describe_missing()
            if time.monotonic() >= deadline:
                raise RunError(
                    ExitCode.PEER_DIED,
                    f"{missing} did not join within {timeout:g} s (--start-timeout): never started, or exited early;"
                    " see the output there",
                )
            print_notice(f"still waiting at startup for {missing}, until --start-timeout {timeout:g}")
    except dist.DistError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(
            ExitCode.PEER_DIED, f"no rendezvous at {host}, port {port} (--start-timeout {timeout:g}): {reason}"
        ) from None
    return start.store


def open_store(host: str, port: int, rank: int, world_size: int, *, timeout: float) -> dist.Store:
    """The store of torchrun's agent, or one hosted by rank 0 if there is no agent."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_agent and rank == 0 and takes_machines_later():
        log.warning(
            "warning: torchrun --nnodes MIN:MAX: a machine that joins later would wait forever for the address of"
            f" torchrun's store: set {process.NO_AGENT_STORE}=1 for torchrun on every machine"
        )
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=not has_agent and rank == 0,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def takes_machines_later() -> bool:
    """Whether torchrun, the parent process, was started for a range of machines, by option or environment."""
    words = f"--nnodes {os.environ.get('PET_NNODES', '')}"
    with suppress(OSError):  # a system without /proc
        words += read_text(Path(f"/proc/{os.getppid()}/cmdline")).replace("\0", " ")
    return re.search(r"--nnodes[= ]\d+:\d", words) is not None


class Start:
    """One start of all ranks, in a store that may also hold those before torchrun restarted them. Rank 0 names it, and
    confirms that it is complete, so that no rank takes an earlier one for its own. torchrun's count of restarts does
    not tell them apart: every node has its own, and a node that joins later begins at 0."""

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self.all_starts, self.rank, self.world_size = store, rank, world_size
        self.store, self.name, self.is_over = store, "", True
        if rank == 0:
            store.set(NEWEST, f"{secrets.token_hex(8)} of {world_size}")

    def is_complete(self, seconds: float) -> bool:
        """Waits at most this long for all ranks to arrive; returns whether they have."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and has_key(self.all_starts, NEWEST, left):
            self._join(self.all_starts.get(NEWEST).decode())
            look = min(SECONDS_PER_LOOK, left)
            if self.is_over:
                time.sleep(look)
            elif has_key(self.store, ALL_ARRIVED if self.rank == 0 else COMPLETE, look):
                self.store.set(COMPLETE, "yes")
                return True
        return False

    def _join(self, newest: str) -> None:
        """Registers in the newest start, unless this rank has."""
        if newest == self.name:
            return
        self.name, self.store = newest, dist.PrefixStore(newest, self.all_starts)
        # One string for all arrivals: reading it takes one request, not one per rank.
        self.store.append(ARRIVED, f"{self.rank} {socket.gethostname()}\n")
        number = self.store.add(NUM_ARRIVED, 1)
        self.is_over = number > self.world_size or not newest.endswith(f" of {self.world_size}")
        if number == self.world_size:
            self.store.set(ALL_ARRIVED, "yes")

    def describe_missing(self) -> str:
        if self.is_over:
            return "rank 0"
        return describe_missing(self.store.get(ARRIVED).decode(), self.world_size, process.count_local_ranks())


def has_key(store: dist.Store, key: str, seconds: float) -> bool:
    """Waits at most this long for the key to be set."""
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.001)))
    except dist.DistStoreError:
        return False
    return True


def describe_missing(arrived: str, world_size: int, num_local: int) -> str:
    """Lists the ranks missing from `arrived`, node by node, with their hosts if known. Each line of `arrived` holds a
    rank and its host. A node has `num_local` consecutive ranks."""
    hosts = {int(rank): host for rank, host in (line.split(" ", 1) for line in arrived.splitlines())}
    host_of_node = {rank // num_local: host for rank, host in hosts.items()}
    by_node: dict[int, list[int]] = {}
    for rank in range(world_size):
        if rank not in hosts:
            by_node.setdefault(rank // num_local, []).append(rank)
    places = {node: host_of_node.get(node, f"node {node}, no rank has joined") for node in by_node}
    nodes = [f"{describe_ranks(ranks)} ({places[node]})" for node, ranks in list(by_node.items())[:MOST_NODES]]
    more = f" and those of {len(by_node) - MOST_NODES} more nodes" if len(by_node) > MOST_NODES else ""
    return f"{', '.join(nodes)}{more} ({world_size - len(hosts)} of {world_size} ranks missing)"


@contextmanager
def late_notice(seconds: float, text: str) -> Iterator[None]:
    """Prints `text` if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, print_notice, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_notice(text: str) -> None:
    """Prints to stderr, once per node; rank 0's logger would not do, since rank 0 itself may be missing."""
    if is_first_of_node():
        say(f"[rank {os.environ['RANK']}] {text}", is_error=True)


def is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
