"""Kernels in Triton, imported where there are CUDA and a compiler: faster, and otherwise equal to the eager code.

Triton compiles when a kernel first runs: it needs a C compiler, Python's headers and a folder that it may write to.
"""

import functools
import importlib.util

import torch

from mini_trainer.distributed.ending import log


@functools.cache
def are_usable(device: torch.device) -> bool:
    """Whether Triton's kernels, and those of torch.compile, can be compiled and run here; says once why not."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    try:
        from mini_trainer.distributed.compilation import choose_cache_dir
        from mini_trainer.model.kernels.trial import run_trial

        choose_cache_dir()
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
