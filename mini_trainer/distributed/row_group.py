"""Context parallelism (--context-parallel): N consecutive ranks share each packed row, in equal parts of its tokens."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


@dataclass(frozen=True)
class RowGroup:
    """The ranks that share a row with this one."""

    group: dist.ProcessGroup
    rank: int  # this rank's index in the group, and its part of each row
    size: int  # N

    def swap(self, tensor: Tensor, *, split_dim: int, join_dim: int) -> Tensor:
        """All-to-all: sends the i-th of N parts along `split_dim` to rank i; joins the received ones along `join_dim`.

        Differentiable. All ranks of the group call this with tensors of the same shape.
        """
        parts = torch.stack(tensor.chunk(self.size, split_dim))  # (N, ...)
        received = all_to_all_single_autograd(parts, None, None, self.group)
        return torch.cat(received.unbind(), join_dim)

    def gather(self, part: Tensor, *, dim: int) -> Tensor:
        """All-gather: the parts of all ranks, concatenated along `dim`. Not differentiable."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)


@dataclass(frozen=True)
class RowPlace:
    """This rank among all, with the same attributes as `World`; the defaults describe a single process."""

    rank: int = 0
    world_size: int = 1
    row_group: RowGroup | None = None


def count_sharing(row_group: RowGroup | None) -> int:
    """Number of ranks that share a row; 1 without a group."""
    return 1 if row_group is None else row_group.size


def sum_parts(tensor: Tensor, row_group: RowGroup | None) -> Tensor:
    """Sum of `tensor` over the ranks that share a row. Not differentiable."""
    if row_group is None:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total, group=row_group.group)
    return total


def check_sharing(world_size: int, num_sharing: int | None) -> None:
    """ValueError if the ranks cannot be divided into groups of `num_sharing`; None: no sharing."""
    if num_sharing is not None and world_size % num_sharing != 0:
        raise ValueError(
            f"--context-parallel {num_sharing}: cannot divide {world_size} rank{'' if world_size == 1 else 's'} into"
            f" groups of {num_sharing}: give a number that divides the number of ranks, or change the number of ranks"
        )


def make_row_group(
    rank: int, world_size: int, num_sharing: int | None, timeout: datetime.timedelta | None = None
) -> RowGroup | None:
    """This rank's group; None without sharing. All ranks call this."""
    check_sharing(world_size, num_sharing)
    if num_sharing is None:
        return None
    group = make_own_group(torch.arange(world_size).view(-1, num_sharing).tolist(), timeout)
    return RowGroup(group, rank % num_sharing, num_sharing)


def make_own_group(groups: Sequence[Sequence[int]], timeout: datetime.timedelta | None = None) -> dist.ProcessGroup:
    """Makes the group among `groups`, a partition of all ranks, that this rank belongs to. All ranks call this.

    dist.new_subgroups_by_enumeration would let every rank wait for all at every group: groups x ranks requests.
    """
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    return dist.new_group(own, timeout=timeout, use_local_synchronization=True)
