"""Open files: how many a rank of a large run needs, and this process's limit."""

import contextlib
import resource
from collections.abc import Sequence

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
