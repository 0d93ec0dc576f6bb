"""Start-up checks of --output-dir on several nodes: whether it is one directory that all of them can write to.

Only the output directory and its checkpoints have to be shared: data sets and models are compared by their content.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mini_trainer.data.stores.disk import remove_quietly
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.meeting import MOST_NODES, late_notice
from mini_trainer.distributed.messages import describe_ranks
from mini_trainer.distributed.process import count_local_ranks
from mini_trainer.distributed.world import World, call_on_rank0, gather_on_rank0
from mini_trainer.options.reading import read_text
from mini_trainer.run.preflight import MADE, find_failure

SECONDS_TO_APPEAR = 75.0  # an NFS client may cache a directory's content for 60 s (acdirmax)
SECONDS_BETWEEN_LOOKS, SECONDS_UNTIL_NOTICE = 0.2, 5.0
TOKEN, PARTS = "token", "parts"  # the file that every node leaves, and its directory
MOST_SHOWN = 16  # nodes that are printed


@dataclass(frozen=True)
class Node:
    """A node as its first rank describes it."""

    host: str
    ranks: range
    problem: str | None  # with the output directory

    def __str__(self) -> str:
        return f"{self.host} ({describe_ranks(self.ranks)})"


def check_nodes(world: World, output_dir: Path) -> None:
    """Prints the hosts and ranks of several nodes; the same RunError on every rank if a node has another disk in place
    of rank 0's, or cannot write there as a run does. All ranks call this, rank 0 after it has made the directory."""
    check_launch()
    check_directory(world, output_dir, shows_nodes=True)
    checkpoints = output_dir / "checkpoints"
    if call_on_rank0(world, checkpoints.is_dir):  # it may be a link, or a mount of its own
        check_directory(world, checkpoints, shows_nodes=False)


def check_directory(world: World, directory: Path, *, shows_nodes: bool) -> None:
    made = directory / MADE
    try:
        token = call_on_rank0(world, lambda: leave_token(made))
        nodes = gather_nodes(world, lambda: find_token(directory, token))
        if shows_nodes and world.rank == 0:
            log.info(f"{len(nodes)} nodes: {describe_nodes(nodes)}")
        call_on_rank0(world, lambda: refuse_problems(directory, nodes))
        # As a checkpoint is written: rank 0 makes a directory, all others put their files there at once.
        call_on_rank0(world, (made / PARTS).mkdir)
        nodes = gather_nodes(world, lambda: try_writing(made / PARTS / str(world.rank), token))
        call_on_rank0(world, lambda: refuse_problems(directory, find_unseen(made / PARTS, nodes, token)))
    finally:
        if world.rank == 0:
            remove_quietly(made)


def gather_nodes(world: World, find_problem: Callable[[], str | None]) -> list[Node]:
    """On rank 0 all nodes, whose first ranks call the function; empty on the others."""
    own = None
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        ranks = range(world.rank, world.rank + count_local_ranks())
        own = Node(socket.gethostname(), ranks, find_problem())
    return [node for node in gather_on_rank0(world, own) or () if node is not None]


def check_launch() -> None:
    """ValueError if srun has started several torchruns on a node, of which each starts ranks for all GPUs."""
    num_tasks, num_nodes = (os.environ.get(f"SLURM_STEP_NUM_{name}", "") for name in ("TASKS", "NODES"))
    if num_tasks.isdecimal() and num_nodes.isdecimal() and int(num_tasks) > int(num_nodes):
        raise ValueError(
            f"srun has started {num_tasks} torchruns on {num_nodes} nodes, but one per node starts all of its ranks:"
            " pass --ntasks-per-node=1 to sbatch or srun, and the number of ranks to torchrun (--nproc-per-node)"
        )


def leave_token(made: Path) -> str:
    """Makes the directory and leaves a new token in it; returns the token."""
    token = secrets.token_hex(8)
    remove_quietly(made)
    made.mkdir()
    (made / TOKEN).write_text(token)
    return token


def find_token(directory: Path, token: str) -> str | None:
    """Why this node does not see what rank 0 wrote, if so."""
    notice = f"waiting for rank 0's file in {directory} to appear on {socket.gethostname()}"
    with late_notice(SECONDS_UNTIL_NOTICE, notice):
        if appears(directory / MADE / TOKEN, token, time.monotonic() + SECONDS_TO_APPEAR):
            return None
    return "it is another directory than rank 0's" if directory.is_dir() else "there is no such directory"


def try_writing(own: Path, token: str) -> str | None:
    """Why this node cannot write as a run does, if so; makes the directory `own` and leaves a token there."""
    try:
        own.mkdir()
        (own / TOKEN).write_text(token)
        return find_failure(own)
    except FileNotFoundError:
        return "a new directory of rank 0 is not visible at once"
    except OSError as error:
        return f"it cannot be written: {error}"


def find_unseen(parts: Path, nodes: Sequence[Node], token: str) -> list[Node]:
    """Rank 0: the nodes, with a problem if their files are not seen here."""
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    unseen = f"files written there do not appear on {nodes[0].host}"
    return [
        node
        if node.problem is not None or appears(parts / str(node.ranks.start) / TOKEN, token, deadline)
        else replace(node, problem=unseen)
        for node in nodes
    ]


def refuse_problems(directory: Path, nodes: Sequence[Node]) -> None:
    """ValueError that lists the nodes that have one."""
    problems = [f"\n  {node}: {node.problem}" for node in nodes if node.problem is not None]
    more = f"\n  and {len(problems) - MOST_NODES} more nodes" if len(problems) > MOST_NODES else ""
    if problems:
        raise ValueError(
            f"--output-dir: {directory} has to be one directory for all nodes, to which each can write:"
            f"{''.join(problems[:MOST_NODES])}{more}\nUse a network file system that all nodes mount, such as NFS or"
            " Lustre; a bucket mounted as a directory does not work. Data sets and models may be on local disks"
        )


def appears(path: Path, token: str, deadline: float) -> bool:
    """Waits until the file has this content; False if it has not by the `deadline` of the monotonic clock."""
    while True:
        with suppress(OSError):
            # An NFS client asks its server again about a directory that is opened.
            for parent in (path.parents[2], path.parents[1], path.parents[0]):
                os.close(os.open(parent, os.O_RDONLY))
        with suppress(OSError):
            if read_text(path) == token:
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(SECONDS_BETWEEN_LOOKS)


def describe_nodes(nodes: Sequence[Node]) -> str:
    """Hosts with their ranks: "n01 (ranks 0-7), n02 (ranks 8-15)"."""
    num_more = len(nodes) - MOST_SHOWN
    return ", ".join(map(str, nodes[:MOST_SHOWN])) + (f" and {num_more} more" if num_more > 0 else "")
