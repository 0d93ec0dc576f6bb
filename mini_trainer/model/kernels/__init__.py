"""Kernels in Triton, imported where there are CUDA and a compiler: faster, and otherwise equal to the eager code.

Triton compiles when a kernel first runs: it needs a C compiler, Python's headers and a folder that it may write to.
"""

import functools
import importlib.util

import torch

from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0, gather_on_rank0
from mini_trainer.model.check import check_model
from mini_trainer.objectives.objective import Objective, PackedModel


@functools.cache
def are_usable(device: torch.device) -> bool:
    """Whether Triton's kernels, and those of torch.compile, can be compiled and run here; says once why not."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    try:
        from mini_trainer.model.kernels.trial import run_trial

        run_trial(device)
    except Exception as error:  # of the compiler, the driver or the file system
        reason = next(iter(str(error).splitlines()), "")
        log.warning(f"no Triton kernels, so steps are slower: {type(error).__name__}: {reason}")
        return False
    return True


def find_obstacle(device: torch.device) -> str | None:
    """Why a model's modules cannot have fused kernels on a device; None if they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install liger-kernel)"
    return None if are_usable(device) else "Triton's kernels do not run here"


def find_any(obstacle: str | None, world: World) -> str | None:
    """The obstacle of one of the ranks; None if none has any. All ranks call this together."""
    obstacles = gather_on_rank0(world, obstacle)
    return call_on_rank0(world, lambda: next(filter(None, obstacles), None))


def check_with_kernels(model: PackedModel, objective: Objective, *, world: World) -> None:
    """The start-up check, and the kernels' gradients; where only these fail, training continues without kernels."""
    from mini_trainer.model.kernels.layers import find_fault

    try:
        if fault := find_any(find_fault(model.kernels, world.device, model.compute_dtype), world):
            raise ValueError(fault)
        check_model(model, objective, world=world)
    except ValueError as error:
        model.kernels.num_modules = 0
        model.kernels.is_on = False
        check_model(model, objective, world=world)
        log.warning(f"warning: steps are slower, without fused kernels, since with them: {error}")


def settle_kernels(asked: str, device: torch.device, world: World | None) -> str:
    """Eager kernels where no fused ones can be had; ValueError if these are asked for."""
    obstacle = find_obstacle(device) if world is None else find_any(find_obstacle(device), world)
    if obstacle is None:
        return asked
    if asked == "fused":
        raise ValueError(f"--kernels fused (--use-liger-kernels) needs a CUDA device and liger-kernel: {obstacle}")
    log.info(f"kernels: eager, since {obstacle}")
    return "eager"
