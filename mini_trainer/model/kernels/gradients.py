"""Whether a model's fused kernels run on a device, with the results and gradients of plain code."""

import torch
from torch import Tensor

from mini_trainer.model.kernels.layers import Trial, draw
from mini_trainer.objectives.objective import KernelSwitch

MOST = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # relative error


def find_fault(kernels: KernelSwitch, device: torch.device, dtype: torch.dtype) -> str | None:
    """What the first kernel of a model does wrong on random numbers; None if none does."""
    for trial in kernels.trials:
        try:
            error = compare(trial, device, dtype)
        except Exception as failure:  # of the compiler, the driver or the kernel
            return f"{trial.kernel.__name__}: {type(failure).__name__}: {failure}"
        if not error <= MOST[dtype]:
            return f"{trial.kernel.__name__}: a result or a gradient differs by {error:.2g} of its size"
    return None


def compare(trial: Trial, device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative error of the kernel's results and gradients."""
    drawn = [draw(len(trial.shapes), *shape)[i].to(device, dtype) for i, shape in enumerate(trial.shapes)]
    both = []
    for compute in (trial.kernel, trial.plain):
        given = [each.clone().requires_grad_() for each in drawn]  # kernels may write into what they keep
        results = compute(trial.kind, *given)
        results = (results,) if isinstance(results, Tensor) else results
        slopes = [each.detach().cos() for each in results]
        both.append([*results, *torch.autograd.grad(results, given, slopes)])
    return max(((a - b).float().norm() / b.float().norm()).item() for a, b in zip(*both, strict=True))
