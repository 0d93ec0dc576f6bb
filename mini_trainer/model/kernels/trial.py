"""A kernel that shows that kernels run."""

import torch
import triton
import triton.language as tl


def run_trial(device: torch.device) -> None:
    """Compiles and runs a kernel, and waits for it; raises what fails."""
    total = torch.zeros(1, device=device)
    _add_one[(1,)](total)
    total.item()


@triton.jit
def _add_one(total):
    tl.store(total, tl.load(total) + 1)
