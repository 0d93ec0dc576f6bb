"""Weights that hold NaN or infinity are refused by name: nothing that is computed from them would mean anything."""

import math

import torch
from torch import Tensor


def check_finite(tensor: Tensor, name: str, *, where: object) -> Tensor:
    """`tensor`; ValueError naming it and `where` it is from if not all of its numbers are finite."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or is_finite(tensor):
        return tensor
    numbers = tensor.float()
    num_nan, num_inf = int(numbers.isnan().sum()), int(numbers.isinf().sum())
    found = " and ".join(f"{count:,} {what}" for count, what in ((num_nan, "NaN"), (num_inf, "infinite")) if count)
    raise ValueError(
        f"{where}: {name} holds {found} of {tensor.numel():,} numbers: the weights are damaged, or come from a training"
        " that diverged; give others"
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite: by their sum, one pass without a copy, unless that overflows."""
    if tensor.itemsize == 1:  # torch sums no float8
        tensor = tensor.float()
    return math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(tensor.isfinite().all())
