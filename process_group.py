"""torchrun's environment: which rank this is, its device, the process group, and what only rank 0 does."""

import datetime
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from run_control import SLOW_LIMIT, RunControl, describe_error
from training_args import ExitCode, RunError

Result = TypeVar("Result")

# Collectives give up only after the watchdog of run_control.py, which knows who is missing, has had its say.
SECONDS_AFTER_WATCHDOG = 300.0

log = logging.getLogger("mini_trainer")


@dataclass(frozen=True)
class World:
    """This process among all that torchrun started; one process alone is a world of size 1."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh  # 1-D, over all ranks
    control: dist.ProcessGroup  # gloo, on the CPU: for waiting on rank 0


def init_world(*, hang_timeout: float = 0.0) -> World:
    """Joins the process group that torchrun's environment describes: NCCL on CUDA, gloo on CPU."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    timeout = datetime.timedelta(seconds=max(SLOW_LIMIT, hang_timeout) + SECONDS_AFTER_WATCHDOG)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    control = dist.new_group(backend="gloo", timeout=timeout)
    return World(rank, world_size, device, init_device_mesh(device.type, (world_size,)), control)


def connect_lifeline(world: World, control: RunControl) -> None:
    """Ties every rank's monitor to rank 0's; the process group carries the port and the token."""
    if world.world_size > 1:
        control.connect(*call_on_rank0(world, control.listen))


def setup_logging(level: str) -> None:
    """Rank 0 prints from `level` on, the other ranks only errors."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    log.setLevel(level if os.environ.get("RANK", "0") == "0" else "ERROR")


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


def gather_on_rank0(world: World, value: Result) -> list[Result] | None:
    """Every rank's `value`, in the order of ranks, on rank 0; None on the others."""
    values = [None] * world.world_size if world.rank == 0 else None
    dist.gather_object(value, values, dst=0, group=world.control)
    return values
