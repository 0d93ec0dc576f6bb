"""Reduction of a step's results over ranks: one collective, one host sync."""

import functools
import math
import operator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mini_trainer.distributed.devices import peak_memory
from mini_trainer.objectives.objective import LossSums


@dataclass(frozen=True)
class StepSums:
    """A step's results over all ranks, after one all-gather."""

    loss_sum: float
    grad_norm: float
    peak_memory_bytes: float
    data_wait_seconds: float
    bad_micro_batches: list[tuple[int, int]]  # (k, rank) of each micro-batch whose loss is not finite
    flags: int  # distributed.ending.Flag, OR-ed over ranks
    reports: dict[str, np.ndarray]  # `LossSums.reports`, summed over micro-batches and ranks; fp64

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)


def reduce_step(
    sums: list[LossSums],
    gradients: list[Tensor],
    *,
    device: torch.device,
    num_shards: int,
    data_wait_seconds: float,
    flags: int = 0,
) -> StepSums:
    """Combines all ranks' `sums`, gradient norms, memory, waiting times and flags: one collective, one sync.

    `sums` are of the rank's micro-batches, as many on every rank. The first `num_shards` ranks hold the whole gradient;
    the others hold copies.
    """
    totals = {name: sum(each.reports[name].double() for each in sums) for name in sums[0].reports}
    squares = torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square()  # fp32 sums lose 1e-5 on CPU
    own = [
        squares.sum().to(device, non_blocking=True),  # on the CPU with --cpu-offload
        torch.full((), peak_memory(device), dtype=torch.float64, device=device),  # filled on the device: no sync
        torch.full((), data_wait_seconds, dtype=torch.float64, device=device),
        torch.full((), flags, dtype=torch.float64, device=device),
    ]
    losses = torch.stack([each.loss for each in sums])
    row = torch.cat([torch.stack(own), losses.double(), *(total.flatten() for total in totals.values())])
    rows = row.new_empty(dist.get_world_size(), len(row))
    dist.all_gather(list(rows.unbind()), row)
    rows = rows.cpu()
    sizes = [len(sums), *(total.numel() for total in totals.values())]
    losses_by_rank, *reports_by_rank = rows[:, len(own) :].split(sizes, dim=1)
    return StepSums(
        loss_sum=losses_by_rank.sum().item(),
        grad_norm=rows[:num_shards, 0].sum().sqrt().item(),
        peak_memory_bytes=rows[:, 1].max().item(),
        data_wait_seconds=rows[:, 2].max().item(),
        flags=functools.reduce(operator.or_, map(int, rows[:, 3].tolist())),
        reports={
            name: by_rank.sum(0).reshape(total.shape).numpy()
            for (name, total), by_rank in zip(totals.items(), reports_by_rank, strict=True)
        },
        bad_micro_batches=[(k, rank) for rank, k in (~losses_by_rank.isfinite()).nonzero().tolist()],
    )
