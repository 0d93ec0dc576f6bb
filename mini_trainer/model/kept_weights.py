"""Weights beside FSDP2's that compute in fp32 in a model of any type: gathered once per step."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mini_trainer.model.whole_weights import PlacedWeights, as_master

# torch 2.13's names, and those of torch 2.11, which 2.13 warns of.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Span:
    """Where a parameter is in the flat rows of `KeptWeights`, one row a shard."""

    start: int
    num_rows: int  # of the parameter, on each shard but the last ones
    row_size: int

    @property
    def stop(self) -> int:
        return self.start + self.num_rows * self.row_size


class KeptWeights(PlacedWeights):
    """Parameters beside FSDP2's that compute in their masters' own type: gathered once before the forward passes that
    follow a change of the masters, their gradients summed over ranks once per step, each by one collective."""

    def __init__(self, model: nn.Module, kept: Collection[nn.Parameter], mesh: DeviceMesh, *, device: torch.device):
        """`mesh`: the last dimension shards, earlier ones replicate. `device`: of masters, even if FSDP2 offloads."""
        self.mesh, self.device = mesh, device
        self.num_shards, self.shard = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        self.spans: dict[nn.Parameter, Span] = {}  # by weight
        self.width = 0  # numbers of a flat row; behind each parameter's stands whether it has a gradient
        super().__init__(model, kept)

    def _split(self, param: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        own, placements = param.detach(), [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        chunks = own.chunk(self.num_shards)
        local = (chunks[self.shard] if self.shard < len(chunks) else own[:0]).clone()
        sharded = DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=own.shape, stride=own.stride()
        )
        weight = nn.Parameter(own, param.requires_grad)
        num_rows = -(-len(own) // self.num_shards)
        self.spans[weight] = span = Span(self.width, num_rows, own[:1].numel())
        self.width = span.stop + 1
        return nn.Parameter(sharded, param.requires_grad), weight

    def _fill(self) -> None:
        mine = torch.zeros(self.width, device=self.device)
        for master, weight in self.pairs.values():
            local = master.detach().to_local().flatten()
            mine[self.spans[weight].start :][: len(local)].copy_(local)
        rows = mine.new_empty(self.num_shards, self.width)
        all_gather(rows.view(-1), mine, group=self.mesh.get_group(self.mesh.ndim - 1))
        for _, weight in self.pairs.values():
            span = self.spans[weight]
            weight.detach().copy_(rows[:, span.start : span.stop].flatten()[: weight.numel()].view_as(weight))

    def _collect(self) -> None:
        trained = [(master, weight) for master, weight in self.pairs.values() if weight.requires_grad]
        has_gradient = [weight.grad is not None for _, weight in trained]
        if not any(has_gradient):
            return
        rows = torch.zeros(self.num_shards, self.width, device=self.device)
        for _, weight in trained:
            if weight.grad is not None:
                span = self.spans[weight]
                padded = weight.grad.new_zeros(self.num_shards * span.num_rows * span.row_size)
                padded[: weight.numel()] = weight.grad.flatten()
                rows[:, span.start : span.stop] = padded.view(self.num_shards, -1)
                rows[:, span.stop] = 1
                weight.grad = None
        mine = rows.new_empty(self.width)
        reduce_scatter(mine, rows.view(-1), group=self.mesh.get_group(self.mesh.ndim - 1))
        if self.mesh.ndim > 1:
            dist.all_reduce(mine, group=self.mesh.get_group(0))
        if not isinstance(mine, FakeTensor):  # a plan's has no values; else one sync
            has_gradient = (mine[[self.spans[weight].stop for _, weight in trained]] > 0).tolist()  # on any rank
        for (master, weight), has in zip(trained, has_gradient, strict=True):
            span, local = self.spans[weight], master.detach().to_local()
            if has:
                own = mine[span.start :][: local.numel()].view_as(local).to(master.dtype)
                master.grad = as_master(own, master)
