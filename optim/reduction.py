"""What the ranks know of a step only together: one collective, one host sync."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ranks.devices import peak_memory


@dataclass(frozen=True)
class StepSums:
    """What the ranks know only together, after one all-gather."""

    loss_sum: float
    grad_norm: float
    peak_memory_bytes: float
    data_wait_seconds: float
    bad_micro_batches: list[tuple[int, int]]  # (k, rank) whose loss is not finite
    flags: int  # of every rank, OR-ed: ranks.monitor.Flag
    reports: dict[str, np.ndarray]  # of the model, summed over micro-batches and ranks; fp64

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)


def reduce_step(
    losses: list[Tensor],
    gradients: list[Tensor],
    *,
    device: torch.device,
    num_shards: int,
    data_wait_seconds: float,
    flags: int = 0,
    reports: Sequence[dict[str, Tensor]] = ({},),
) -> StepSums:
    """The step's one collective and one host sync: each rank's losses, gradient norm, memory, wait, flags, reports.

    The first `num_shards` ranks hold the whole gradient; what others hold are copies. `reports`: of each micro-batch,
    by name, of the same shapes everywhere.
    """
    totals = {name: sum(report[name].double() for report in reports) for name in reports[0]}
    squares = torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square()  # fp32 sums lose 1e-5 on CPU
    own = [
        squares.sum().to(device, non_blocking=True),  # from the CPU with --cpu-offload
        torch.full((), peak_memory(device), dtype=torch.float64, device=device),  # filled on the device: no sync
        torch.full((), data_wait_seconds, dtype=torch.float64, device=device),
        torch.full((), flags, dtype=torch.float64, device=device),
    ]
    row = torch.cat(
        [torch.stack(own + [loss.double() for loss in losses]), *(total.flatten() for total in totals.values())]
    )
    rows = row.new_empty(dist.get_world_size(), len(row))
    dist.all_gather(list(rows.unbind()), row)
    rows = rows.cpu()
    sizes = [len(losses), *(total.numel() for total in totals.values())]
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
