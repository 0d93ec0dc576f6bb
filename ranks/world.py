"""torchrun's environment: which rank this is, its device, the process group, and what only rank 0 does."""

import datetime
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from options import ShardingOptions
from ranks.ending import ExitCode, RunError, describe_error, exit_with_message, log
from ranks.meeting import START_TIMEOUT, count_local_ranks, meet
from ranks.messages import CleanFormatter
from ranks.monitor import RunControl
from ranks.open_files import check_open_files, list_group_sizes, raise_open_file_limit
from ranks.peers import SLOW_LIMIT
from ranks.row_group import RowGroup, check_sharing, make_row_group
from ranks.terminal import LinesAboveBars, shows_progress

Result = TypeVar("Result")

# Collectives give up only after the watchdog of ranks/monitor.py, which knows who is missing, has had its say.
SECONDS_AFTER_WATCHDOG = 300.0


@dataclass(frozen=True)
class World:
    """This process among all that torchrun started; one process alone is a world of size 1."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh  # ("shard",) over all ranks, or ("replicate", "shard"): each row of ranks holds the whole model
    row_group: RowGroup | None = None  # the ranks that share packed rows; None: each has rows of its own
    timeout: datetime.timedelta | None = None  # of the collectives of further groups; None: torch's

    @property
    def control(self) -> dist.ProcessGroup:
        """The group of all ranks, for collectives of CPU tensors: gloo carries them on every device."""
        return dist.group.WORLD

    @property
    def shard_mesh(self) -> DeviceMesh:
        """1-D: the ranks that this one shares one copy of the model with."""
        return self.mesh["shard"]

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the model; ranks 0 to `num_shards` - 1 share the first one."""
        return self.shard_mesh.size()


def init_world(*, hang_timeout: float = 0.0, start_timeout: float = START_TIMEOUT) -> World:
    """Joins the process group that torchrun's environment describes: NCCL on CUDA, gloo on CPU.

    All ranks hold one copy of the model, until `divide_world`. RunError if not all ranks arrive within `start_timeout`
    seconds; ValueError if this process may not open as many files as it needs.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    raise_open_file_limit()
    check_open_files(world_size)
    timeout = datetime.timedelta(seconds=max(SLOW_LIMIT, hang_timeout) + SECONDS_AFTER_WATCHDOG)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    if "RANK" in os.environ:
        store = meet(rank, world_size, timeout=start_timeout)
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return World(rank, world_size, device, make_mesh(device.type, world_size, world_size), timeout=timeout)


def divide_world(world: World, sharding: ShardingOptions) -> World:
    """The world with the groups of ranks that `sharding` asks for; all ranks call this with the same options.

    With hybrid sharding each `shard_size` ranks, by default those of a node, hold a copy of the model; ValueError
    if there are not several, or if the ranks cannot be divided into groups that share rows.
    """
    num_shards, num_sharing = world.world_size, sharding.context_parallel
    match sharding.sharding:
        case "full":
            pass
        case "hybrid":
            num_shards = count_shards(world.world_size, count_local_ranks(), sharding.shard_size)
        case _:
            raise ValueError(f"--sharding {sharding.sharding}: is not implemented")
    check_sharing(world.world_size, num_sharing)
    check_open_files(world.world_size, list_group_sizes(world.world_size, num_shards, num_sharing))
    mesh = world.mesh
    if num_shards < world.world_size:
        mesh = make_mesh(world.device.type, world.world_size, num_shards, world.timeout)
    row_group = make_row_group(world.rank, world.world_size, num_sharing, world.timeout)
    return replace(world, mesh=mesh, row_group=row_group)


def count_shards(world_size: int, ranks_per_node: int, shard_size: int | None) -> int:
    """Ranks that share one copy of the model with --sharding hybrid; ValueError if there are not several copies."""
    num_shards = ranks_per_node if shard_size is None else shard_size
    if num_shards < 2 or world_size % num_shards != 0 or num_shards == world_size:
        raise ValueError(
            f"--sharding hybrid: cannot divide {world_size} ranks into several copies of the model on {num_shards}"
            f" ranks each ({'the ranks of a node' if shard_size is None else '--shard-size'}); give a --shard-size"
            " of at least 2 that divides the number of ranks, or --sharding full"
        )
    return num_shards


def make_mesh(
    device_type: str, world_size: int, num_shards: int, timeout: datetime.timedelta | None = None
) -> DeviceMesh:
    """`World.mesh` of ranks of which every `num_shards` hold one copy of the model; collectives take `timeout`."""
    if num_shards == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    ranks = torch.arange(world_size).view(-1, num_shards)
    groups = [dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)[0] for rows in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def connect_lifeline(world: World, control: RunControl) -> None:
    """Ties every rank's monitor to rank 0's; the process group carries the port and the token."""
    if world.world_size > 1:
        control.connect(*call_on_rank0(world, control.listen))


def setup_logging(level: str) -> None:
    """Rank 0 prints from `level` on, the other ranks only errors."""
    handler = LinesAboveBars() if shows_progress() else logging.StreamHandler()
    handler.setFormatter(CleanFormatter())
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    log.setLevel(level if os.environ.get("RANK", "0") == "0" else "ERROR")


def call_with_world(
    work: Callable[[World], None], *, when_interrupted: str = "interrupted; start the same command again to resume"
) -> None:
    """A script's whole work, which computes and has no run: one message for a user's errors and for Ctrl-C."""
    setup_logging("WARNING")
    world = init_world()
    try:
        work(world)
    except (ValueError, OSError) as error:
        exit_with_message(str(error))
    except KeyboardInterrupt:
        exit_with_message(when_interrupted, code=ExitCode.INTERRUPTED)
    dist.destroy_process_group()


def call_on_rank0(world: World, function: Callable[[], Result]) -> Result:
    """Calls `function` on rank 0 and gives every rank its result, or the same RunError for a ValueError or OSError.

    The outcome travels as data, so that no rank waits for one that has already failed.
    """
    outcome: list[tuple[Literal["returned"], Result] | tuple[ExitCode, str]] = [None]
    if world.rank == 0:
        try:
            outcome = [("returned", function())]
        except (ValueError, OSError) as error:
            code, message, _ = describe_error(error)
            outcome = [(code, message)]
    dist.broadcast_object_list(outcome, src=0, group=world.control, device=torch.device("cpu"))
    kind, value = outcome[0]
    if kind != "returned":
        raise RunError(kind, value)
    return value


def broadcast_from_rank0(
    value: Tensor | None, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Rank 0's `value`, as `dtype`, on every rank's `device`; the others' is not looked at."""
    received = torch.empty(shape, dtype=dtype, device=device)
    if dist.get_rank() == 0:
        received.copy_(value)
    dist.broadcast(received, src=0)
    return received


def gather_on_rank0(world: World, value: Result) -> list[Result] | None:
    """Every rank's `value`, in the order of ranks, on rank 0; None on the others."""
    values = [None] * world.world_size if world.rank == 0 else None
    dist.gather_object(value, values, dst=0, group=world.control)
    return values
