"""Weights that are plain parameters while the model computes, in place of DTensors that train.

Optimizers, methods, checkpoints and exports see the masters, DTensors as FSDP2 makes them; a forward pass puts weights
of the compute type in their place, and the last backward of a step puts the masters back, with their gradients.

A model that one rank holds as a whole has no FSDP (`WholeWeights`). Beside FSDP2, which gives a group of parameters one
type, those that compute in fp32 in a model of any type are gathered once per step (`KeptWeights`).
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from mini_trainer.distributed.devices import memory_kind
from mini_trainer.objectives.next_tokens import add_product

# torch 2.13's names, and those of torch 2.11, which 2.13 warns of.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PlacedWeights:
    """Puts weights into the modules of a model, and the masters back."""

    def __init__(self, model: nn.Module, params: Collection[nn.Parameter]):
        """Replaces these plain parameters of `model` by masters."""
        self.places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []  # with master and weight
        self.pairs: dict[nn.Parameter, tuple[nn.Parameter, nn.Parameter]] = {}  # of the parameters that were there
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                if param in params and param not in self.pairs:
                    self.pairs[param] = self._split(param)
                if param in self.pairs:
                    self.places.append((module, name, *self.pairs[param]))
        self.is_gathered = False
        self.stays = False  # gathered, after the next backward
        self._place_masters()

    def _split(self, param: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        """The master and the weight of a parameter."""
        raise NotImplementedError

    def _fill(self) -> None:
        """Gives the weights the masters' values."""
        raise NotImplementedError

    def _collect(self) -> None:
        """Gives the masters the weights' gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def gather(self) -> None:
        """Puts weights with the masters' present values into the modules."""
        if self.is_gathered:
            return
        self._fill()
        for module, name, _, weight in self.places:
            module._parameters[name] = weight
        self.is_gathered = True

    @torch.no_grad()
    def free(self) -> None:
        """Puts the masters back, with the gradients so far."""
        if self.is_gathered:
            self._collect()
            self._place_masters()

    def _place_masters(self) -> None:
        for module, name, master, _ in self.places:
            module._parameters[name] = master
        self.is_gathered = False

    def wrap(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """`compute` with the weights in place; the backward of its result, if there is one, puts the masters back."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.gather()
            result = compute(*args, **kwargs)
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._await_end)
            return result

        return run

    def _await_end(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: None if self.stays else self.free())


class WholeWeights(PlacedWeights):
    """All weights of a model, held by one rank.

    A master that has the compute type already shares its memory with its weight, and its gradient. The others' weights
    are copies, made again by each `gather`; their gradients are added to the masters' as autograd makes them.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype,
        mesh: DeviceMesh,
        *,
        kept: Collection[nn.Parameter],
        adds_products: bool = False,
    ):
        """`kept`: parameters that compute in their own type. `adds_products`: see `AddedProduct`."""
        self.compute_dtype, self.mesh, self.kept = compute_dtype, mesh, kept
        super().__init__(model, set(model.parameters()))
        shared = [(master, weight) for master, weight in self.pairs.values() if is_shared(master, weight)]
        self.shared = [(master, weight) for master, weight in shared if master.requires_grad]
        copied = [(master, weight) for master, weight in self.pairs.values() if not is_shared(master, weight)]
        self.sources = [master.detach().to_local() for master, _ in copied]
        self.copies = [weight.detach() for _, weight in copied]
        linear_layers = [module for module in model.modules() if type(module) is nn.Linear] if adds_products else []
        for module in linear_layers:
            master, weight = next((m, w) for owner, name, m, w in self.places if owner is module and name == "weight")
            if master.requires_grad:
                module.forward = functools.partial(multiply, module, functools.partial(add_to_gradient, master, weight))

    def _split(self, param: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        own = param.detach()
        master = nn.Parameter(DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False), param.requires_grad)
        if own.is_floating_point() and own.dtype != self.compute_dtype and param not in self.kept:
            with memory_kind("gathered"):
                own = torch.empty_like(own, dtype=self.compute_dtype)
        weight = nn.Parameter(own, param.requires_grad)
        if weight.requires_grad and not is_shared(master, weight):
            weight.register_post_accumulate_grad_hook(lambda weight: add_gradient(master, weight))
        return master, weight

    def _fill(self) -> None:
        if self.copies:
            torch._foreach_copy_(self.copies, self.sources)
        for master, weight in self.shared:
            weight.grad = None if master.grad is None else master.grad.to_local()

    def _collect(self) -> None:
        for master, weight in self.shared:
            master.grad = None if weight.grad is None else as_master(weight.grad, master)
            weight.grad = None


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

    def __init__(
        self,
        model: nn.Module,
        kept: Collection[nn.Parameter],
        mesh: DeviceMesh,
        *,
        device: torch.device,
    ):
        """`mesh`: its last dimension shards, an earlier one replicates. Masters are on `device`, also where FSDP2 holds
        others in CPU memory."""
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


def is_shared(master: nn.Parameter, weight: nn.Parameter) -> bool:
    """Whether both are the same memory."""
    return master.dtype == weight.dtype


def multiply(layer: nn.Linear, add: Callable[[Tensor, Tensor], None], x: Tensor) -> Tensor:  # (..., in) -> (..., out)
    if not torch.is_grad_enabled():
        return linear(x, layer.weight, layer.bias)
    return AddedProduct.apply(x, layer.weight, layer.bias, add)


class AddedProduct(torch.autograd.Function):
    """x W^T + b. The product that gives the gradient of W adds it to what earlier micro-batches gave, in the type of
    that: no gradient is rounded, written and read again before it is added."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, add: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.add = add
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        d_flat = d_out.reshape(-1, d_out.shape[-1])  # (T, out)
        ctx.add(d_flat.t(), x.reshape(-1, x.shape[-1]))
        return d_out @ weight if needs_x else None, None, d_flat.sum(0) if needs_bias else None, None


@torch.no_grad()
def add_to_gradient(master: nn.Parameter, weight: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to the gradient of a master, or of the weight that shares its memory, where it now is."""
    holder = weight if is_shared(master, weight) else master
    is_first = holder.grad is None
    if is_first:
        with memory_kind("gradients"):
            total = torch.empty_like(weight, dtype=master.dtype)
        holder.grad = total if holder is weight else as_master(total, master)
    total = holder.grad.to_local() if isinstance(holder.grad, DTensor) else holder.grad
    add_product(total, left, right, is_first=is_first)


@torch.no_grad()
def add_gradient(master: nn.Parameter, weight: nn.Parameter) -> None:
    """Adds the weight's gradient, if it has one, to its master's, in the master's type."""
    if weight.grad is None:  # autograd calls this also after an `AddedProduct`
        return
    if master.grad is None:
        with memory_kind("gradients"):
            master.grad = as_master(weight.grad.to(master.dtype), master)
    else:
        rounds = master.dtype != torch.float32  # each gradient is rounded before it is added, as by FSDP
        master.grad.to_local().add_(weight.grad.to(master.dtype) if rounds else weight.grad)
    weight.grad = None


def as_master(tensor: Tensor, master: nn.Parameter) -> DTensor:
    return DTensor.from_local(
        tensor, master.device_mesh, master.placements, run_check=False, shape=master.shape, stride=master.stride()
    )
