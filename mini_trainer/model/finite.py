"""Check that refuses weights with NaN or infinite values, naming them: anything computed from them is meaningless."""

import math

import torch
from torch import Tensor


def check_finite(tensor: Tensor, name: str, *, where: object) -> Tensor:
    """Returns `tensor`; ValueError, with its name and `where` it is from, unless all its numbers are finite."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or is_finite(tensor):
        return tensor
    numbers = tensor.float()
    num_nan, num_inf = int(numbers.isnan().sum()), int(numbers.isinf().sum())
    found = " and ".join(f"{count:,} {what}" for count, what in ((num_nan, "NaN"), (num_inf, "infinite")) if count)
    raise ValueError(
        f"{where}: {name} has {found} among {tensor.numel():,} numbers: the weights are damaged, or from a training run"
        " that diverged; use others"
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite: checks their sum, in one pass without a copy, then each if the sum overflows."""
    if tensor.itemsize == 1:  # torch cannot sum float8
        tensor = tensor.float()
    return math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(tensor.isfinite().all())
