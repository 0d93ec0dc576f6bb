"""What the ranks know of a step only together: one collective, one host sync."""

import functools
import math
import operator
from dataclasses import dataclass

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
    source_loss_sums: list[float]  # of each data set, where there are several

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
    source_losses: Tensor | None = None,  # (sources,)
) -> StepSums:
    """The step's one collective and one host sync: each rank's losses, gradient norm, memory, wait and flags.

    The first `num_shards` ranks hold the whole gradient; what others hold are copies.
    """
    source_losses = losses[0].new_zeros(0) if source_losses is None else source_losses
    squares = torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square()  # fp32 sums lose 1e-5 on CPU
    own = [
        squares.sum().to(device, non_blocking=True),  # from the CPU with --cpu-offload
        torch.full((), peak_memory(device), dtype=torch.float64, device=device),  # filled on the device: no sync
        torch.full((), data_wait_seconds, dtype=torch.float64, device=device),
        torch.full((), flags, dtype=torch.float64, device=device),
    ]
    row = torch.cat([torch.stack(own + [loss.double() for loss in losses]), source_losses.double()])
    rows = row.new_empty(dist.get_world_size(), len(row))
    dist.all_gather(list(rows.unbind()), row)
    rows = rows.cpu()
    losses_by_rank, source_losses_by_rank = rows[:, len(own) :].split([len(losses), len(source_losses)], dim=1)
    return StepSums(
        loss_sum=losses_by_rank.sum().item(),
        grad_norm=rows[:num_shards, 0].sum().sqrt().item(),
        peak_memory_bytes=rows[:, 1].max().item(),
        data_wait_seconds=rows[:, 2].max().item(),
        flags=functools.reduce(operator.or_, map(int, rows[:, 3].tolist())),
        source_loss_sums=source_losses_by_rank.sum(0).tolist(),
        bad_micro_batches=[(k, rank) for rank, k in (~losses_by_rank.isfinite()).nonzero().tolist()],
    )
