"""This process: its parent, its number among those started together, its garbage collector, and its open files.

Imports of torch and transformers make over half a million objects, which live as long as the process. The collector
would scan them all eight times: over one CPU second of the six until a tiny model's first step
(benchmarks/start_up.py).
"""

import contextlib
import gc
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT = 600.0  # seconds for all ranks to join

NAMES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))  # torchrun's and srun's variables
# Read at import, since this process is re-parented once torchrun has died.
PARENT = os.getppid()


def find_task() -> tuple[int, int] | None:
    """This process's number, from 1, and the number of processes; None if there is only one."""
    for names in NAMES:
        number, count = (os.environ.get(name, "") for name in names)
        if number.isdecimal() and count.isdecimal() and int(count) > 1:
            return int(number) + 1, int(count)
    return None


def check_tasks() -> None:
    """ValueError for one of several tasks of srun without torchrun: each would be a separate run, on one GPU."""
    task = find_task()
    if task is not None and "RANK" not in os.environ:
        raise ValueError(
            f"srun has started {task[1]} tasks without torchrun, and each would be a separate run. For one run start"
            f" torchrun once per node, which starts the ranks, as examples/clusters/multi_node.sbatch does: srun"
            " --ntasks-per-node=1 torchrun ...; for a run each: torchrun --standalone --nproc-per-node=1 ..."
        )


def pause_collector() -> None:
    """Stops automatic collections; a script calls this before its heavy imports."""
    gc.disable()


def resume_collector() -> None:
    """Resumes automatic collections, which never scan what exists now."""
    gc.freeze()
    gc.enable()


@contextmanager
def without_collector() -> Iterator[None]:
    """Stops automatic collections for as long as the block runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


OTHER_FILES = 64  # open files of a rank besides its connections: libraries, data sets, checkpoints, pipes, own sockets


def count_open_files(world_size: int, group_sizes: Sequence[int] = ()) -> int:
    """Open files of rank 0, which has the most: gloo's, the lifeline's connections, and others.

    gloo opens at most N + 3 files for a group of N ranks: it connects two ranks when they first exchange something, and
    all ranks do so with rank 0. `group_sizes`: sizes of the groups besides the one of all ranks.
    """
    return sum(size + 3 for size in (world_size, *group_sizes)) + world_size - 1 + OTHER_FILES


def list_group_sizes(world_size: int, num_shards: int, num_sharing: int | None) -> list[int]:
    """Sizes of a rank's other groups: its model replica, its peers in other replicas, the ranks that share its rows."""
    sizes = [] if num_shards == world_size else [num_shards, world_size // num_shards]
    return sizes if num_sharing is None else [*sizes, num_sharing]


def raise_open_file_limit() -> None:
    """Raises the soft limit on open files to the hard one, as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS reports a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def find_missing_files(needed: int, world_size: int) -> str | None:
    """Why `world_size` ranks cannot start under this process's hard limit; None if they can."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return None
    return (
        f"{world_size:,} ranks need up to {needed:,} open files in a process, and the hard limit is {hard:,}"
        f" (ulimit -Hn): raise it to at least {needed:,}, in limits.conf, with systemd's LimitNOFILE or with the"
        " container's nofile limit"
    )


def check_open_files(world_size: int, group_sizes: Sequence[int] = ()) -> None:
    """ValueError if this process cannot open as many files as a rank of `world_size` needs."""
    reason = find_missing_files(count_open_files(world_size, group_sizes), world_size) if world_size > 1 else None
    if reason is not None:
        raise ValueError(reason)


def may_be_launcher(pid: int) -> bool:
    """False if process `pid` has merely adopted this one, because torchrun died before this process read its parent.

    torchrun is a Python program; a wrapper between it and this program has torchrun's environment variables.
    """
    process = Path(f"/proc/{pid}")
    try:
        if b"python" in (process / "cmdline").read_bytes().split(b"\0")[0].lower():
            return True
    except OSError:
        return True  # Unknown; a false alarm would end a healthy run.
    try:
        # A process can change its name.
        is_python = "python" in os.readlink(process / "exe").lower()
        return is_python or b"\0TORCHELASTIC_RUN_ID=" in b"\0" + (process / "environ").read_bytes()
    except OSError:
        return False  # another user's process, such as init


def count_local_ranks() -> int:
    """Number of ranks per node, from torchrun's environment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
