"""torchrun's environment: this process's rank and device, the process group, ranks that share packed rows
(--context-parallel), and helpers for work on rank 0 only.
"""

import logging
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import pad

from mini_trainer.distributed.devices import memory_limit
from mini_trainer.distributed.ending import RunError, describe_error, ending_with_message, log
from mini_trainer.distributed.hang import LONGEST, keep_records, limit_slow
from mini_trainer.distributed.messages import CleanFormatter, LinesAboveBars, shows_progress
from mini_trainer.distributed.process import START_TIMEOUT, count_local_ranks, raise_open_file_limit
from mini_trainer.distributed.watch import RunControl
from mini_trainer.options import ShardingOptions


@dataclass(frozen=True)
class RowGroup:
    """The ranks that share a row with this one."""

    group: dist.ProcessGroup
    rank: int  # this rank's index in the group, and its part of each row
    size: int  # N

    def swap(self, tensor: Tensor, *, split_dim: int, join_dim: int) -> Tensor:
        """All-to-all: sends the i-th of N parts along `split_dim` to rank i; joins the received ones along `join_dim`.
        Differentiable. All ranks of the group call this with tensors of the same shape."""
        parts = torch.stack(tensor.chunk(self.size, split_dim))  # (N, ...)
        received = all_to_all_single_autograd(parts, None, None, self.group)
        return torch.cat(received.unbind(), join_dim)

    def gather(self, part: Tensor, *, dim: int) -> Tensor:
        """All-gather: the parts of all ranks, concatenated along `dim`. Not differentiable."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)


@dataclass(frozen=True)
class RowPlace:
    """This rank among all, with the same attributes as `World`; the defaults describe a single process."""

    rank: int = 0
    world_size: int = 1
    row_group: RowGroup | None = None


def count_sharing(row_group: RowGroup | None) -> int:
    """Number of ranks that share a row; 1 without a group."""
    return 1 if row_group is None else row_group.size


def sum_parts(tensor: Tensor, row_group: RowGroup | None) -> Tensor:
    """Sum of `tensor` over the ranks that share a row. Not differentiable."""
    if row_group is None:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total, group=row_group.group)
    return total


def check_sharing(world_size: int, num_sharing: int | None) -> None:
    """ValueError if the ranks cannot be divided into groups of `num_sharing`; None: no sharing."""
    if num_sharing is not None and world_size % num_sharing != 0:
        raise ValueError(
            f"--context-parallel {num_sharing}: cannot divide {world_size} rank{'' if world_size == 1 else 's'} into"
            f" groups of {num_sharing}: give a number that divides the number of ranks, or change the number of ranks"
        )


def make_row_group(
    rank: int, world_size: int, num_sharing: int | None, timeout: timedelta | None = None
) -> RowGroup | None:
    """This rank's group; None without sharing. All ranks call this."""
    check_sharing(world_size, num_sharing)
    if num_sharing is None:
        return None
    group = make_own_group(torch.arange(world_size).view(-1, num_sharing).tolist(), timeout)
    return RowGroup(group, rank % num_sharing, num_sharing)


def make_own_group(groups: Sequence[Sequence[int]], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Makes the group among `groups`, a partition of all ranks, that this rank belongs to. All ranks call this.
    dist.new_subgroups_by_enumeration would let every rank wait for all at every group: groups x ranks requests."""
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    return dist.new_group(own, timeout=timeout, use_local_synchronization=True)


Result = TypeVar("Result")

# Collectives time out later than the watchdog of distributed/watch.py, which knows which ranks are missing.
SECONDS_AFTER_WATCHDOG = 300.0
HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class World:
    """This process among all that torchrun started; a single process is a world of size 1."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh  # ("shard",) over all ranks, or ("replicate", "shard"): each row of ranks holds the whole model
    row_group: RowGroup | None = None  # the ranks that share packed rows; None: each rank has its own rows
    timeout: timedelta | None = None  # for collectives of additional groups; None: torch's default
    memory: int | None = None  # bytes of its GPU that this rank may use; None: on a CPU, or not known

    @property
    def control(self) -> dist.ProcessGroup:
        """The group of all ranks, for collectives on CPU tensors: gloo handles them on every device."""
        return dist.group.WORLD

    @property
    def shard_mesh(self) -> DeviceMesh:
        """1-D mesh of the ranks that hold this rank's copy of the model."""
        return self.mesh["shard"]

    @property
    def num_shards(self) -> int:
        """Number of ranks that share one copy of the model; ranks 0 to `num_shards` - 1 share the first one."""
        return self.shard_mesh.size()


def init_world(*, hang_timeout: float = 600.0, start_timeout: float = START_TIMEOUT) -> World:
    """Joins the process group that torchrun's environment describes: NCCL on CUDA, gloo on CPU. All ranks share one
    copy of the model, until `divide_world`. RunError if not all ranks join within `start_timeout` seconds."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    raise_open_file_limit()
    timeout = timedelta(seconds=max(limit_slow(hang_timeout), LONGEST) + SECONDS_AFTER_WATCHDOG)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    keep_records()
    # gloo would connect every rank to every other one, which takes N² connections and requests to the store.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if "RANK" in os.environ:
        from mini_trainer.distributed.meeting import meet

        store = meet(rank, world_size, timeout=start_timeout)
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    memory = memory_limit(None, device) if device.type == "cuda" else None
    mesh = make_mesh(device.type, world_size, world_size)
    world = World(rank, world_size, device, mesh, timeout=timeout, memory=memory)
    # Makes the connections that `gather_on_rank0` and `call_on_rank0` use. From now on the death of a rank closes one,
    # on which the others wait until the lifeline is connected; a first connection to a rank that is gone would be tried
    # until the timeout.
    gather_on_rank0(world, None)
    return world


def divide_world(world: World, sharding: ShardingOptions) -> World:
    """Returns the world with the process groups that `sharding` requires; all ranks call this with the same options.
    With hybrid sharding, every `shard_size` ranks (default: those of a node) hold a copy of the model. ValueError if
    this gives fewer than two copies, or if the ranks cannot be divided into groups that share rows."""
    num_shards, num_sharing = world.world_size, sharding.context_parallel
    if sharding.sharding == "hybrid":
        num_shards = count_shards(world.world_size, count_local_ranks(), sharding.shard_size)
    mesh = world.mesh
    if num_shards < world.world_size:
        mesh = make_mesh(world.device.type, world.world_size, num_shards, world.timeout)
    row_group = make_row_group(world.rank, world.world_size, num_sharing, world.timeout)
    return replace(world, mesh=mesh, row_group=row_group)


def count_shards(world_size: int, ranks_per_node: int, shard_size: int | None) -> int:
    """Ranks per copy of the model with --sharding hybrid; ValueError if there are fewer than two copies."""
    num_shards = ranks_per_node if shard_size is None else shard_size
    if num_shards < 2 or world_size % num_shards != 0 or num_shards == world_size:
        raise ValueError(
            f"--sharding hybrid: cannot divide {world_size} ranks into several copies of the model on {num_shards}"
            f" ranks each ({'the ranks of a node' if shard_size is None else '--shard-size'}); give a --shard-size"
            " of at least 2 that divides the number of ranks, or use --sharding full"
        )
    return num_shards


def make_mesh(device_type: str, world_size: int, num_shards: int, timeout: timedelta | None = None) -> DeviceMesh:
    """Makes `World.mesh`, with one copy of the model per `num_shards` ranks; `timeout` applies to its collectives."""
    if num_shards == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    ranks = torch.arange(world_size).view(-1, num_shards)
    groups = [make_own_group(rows.tolist(), timeout) for rows in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def connect_lifeline(world: World, control: RunControl) -> None:
    """Connects every rank's watch to rank 0's; the process group broadcasts the address."""
    if world.world_size > 1:
        control.lifeline.connect(call_on_rank0(world, control.lifeline.listen))


def setup_logging(level: str) -> None:
    """Makes rank 0 log from `level` up, and the other ranks only errors."""
    handler = LinesAboveBars() if shows_progress() else logging.StreamHandler()
    handler.setFormatter(CleanFormatter())
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    log.setLevel(level if os.environ.get("RANK", "0") == "0" else "ERROR")


def call_with_world(
    work: Callable[[World], None], *, when_interrupted: str = "interrupted; start the same command again to resume"
) -> None:
    """Runs `work` for a script without a run directory; user errors and Ctrl-C end it with one message."""
    setup_logging("WARNING")
    world = init_world()
    with ending_with_message(when_interrupted=when_interrupted):
        work(world)
    dist.destroy_process_group()


def call_on_rank0(world: World, function: Callable[[], Result]) -> Result:
    """Calls `function` on rank 0 and broadcasts its result; a ValueError or OSError becomes a RunError on every rank.
    The error is sent as data, so no rank waits for one that has already failed."""
    outcome = [attempt(function) if world.rank == 0 else None]
    dist.broadcast_object_list(outcome, src=0, group=world.control, device=torch.device("cpu"))
    if isinstance(outcome[0], RunError):
        raise outcome[0]
    return outcome[0]


def call_on_each_node(world: World, function: Callable[[], None]) -> None:
    """Calls `function` on the first rank of each node; the first ValueError or OSError is a RunError on all ranks."""
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    outcomes = gather_on_rank0(world, attempt(function) if is_first else None)
    call_on_rank0(world, lambda: next((one for one in outcomes if isinstance(one, RunError)), None))


def attempt(function: Callable[[], Result]) -> Result | RunError:
    """The function's result, or a RunError in place of its ValueError or OSError."""
    try:
        return function()
    except (ValueError, OSError) as error:
        code, message, _ = describe_error(error)
        return RunError(code, message)


def broadcast_from_rank0(
    value: Tensor | None, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Rank 0's `value`, as `dtype`, on every rank's `device`; other ranks' values are ignored. A half-precision value
    for a wider `dtype` is cast on arrival, which changes no number."""
    is_source = dist.get_rank() == 0
    is_narrow = is_source and value.dtype in HALF_TYPES and dtype.itemsize > value.dtype.itemsize
    sent = torch.tensor(HALF_TYPES.index(value.dtype) if is_narrow else -1, device="cpu")
    dist.broadcast(sent, src=0)  # on the CPU: the other ranks do not wait for their devices
    received = torch.empty(shape, dtype=dtype if sent < 0 else HALF_TYPES[sent], device=device)
    if is_source:
        received.copy_(value)
    dist.broadcast(received, src=0)
    return received.to(dtype)


def gather_on_rank0(world: World, value: Result) -> list[Result] | None:
    """On rank 0, every rank's `value`, in rank order; None on the others. Takes a few messages per rank.
    dist.gather_object would first exchange the sizes among all ranks, N² messages."""
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = gather_rows(world, torch.tensor(len(own), device="cpu"))
    largest = call_on_rank0(world, lambda: int(sizes.max()))
    rows = gather_rows(world, pad(own, (0, largest - len(own))))
    if rows is None:
        return None
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]


def gather_rows(world: World, row: Tensor) -> Tensor | None:
    """On rank 0, every rank's CPU tensor of the same shape, stacked in rank order; None on the others."""
    rows = row.new_empty(world.world_size, *row.shape) if world.rank == 0 else None
    dist.gather(row, None if rows is None else list(rows.unbind()), dst=0, group=world.control)
    return rows
