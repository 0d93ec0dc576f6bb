"""Weights that are plain parameters while the model computes, in place of DTensors that train.

Optimizers, methods, checkpoints and exports see the masters, DTensors as FSDP2 makes them; a forward pass puts weights
of the compute type in their place, and the last backward of a step puts the masters back, with their gradients.

A model that one rank holds as a whole has no FSDP (`WholeWeights`). Beside FSDP2, which gives a group of parameters one
type, those that compute in fp32 in a model of any type are gathered once per step (model.kept_weights).
"""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from mini_trainer.distributed.devices import memory_kind
from mini_trainer.objectives.next_tokens import add_product


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
    """All weights of a model, held by one rank. A master that has the compute type already shares its memory with its
    weight, and its gradient. The others' weights are copies, made again by each `gather`; their gradients are added to
    the masters' as autograd makes them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, mesh: DeviceMesh, *, kept: Collection[nn.Parameter]):
        """`kept`: parameters that compute in their own type."""
        self.compute_dtype, self.mesh, self.kept = dtype, mesh, kept
        super().__init__(model, set(model.parameters()))
        shared = [(master, weight) for master, weight in self.pairs.values() if is_shared(master, weight)]
        self.shared = [(master, weight) for master, weight in shared if master.requires_grad]
        copied = [(master, weight) for master, weight in self.pairs.values() if not is_shared(master, weight)]
        self.sources = [master.detach().to_local() for master, _ in copied]
        self.copies = [weight.detach() for _, weight in copied]

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


def is_shared(master: nn.Parameter, weight: nn.Parameter) -> bool:
    """Whether both are the same memory."""
    return master.dtype == weight.dtype


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


# One rank's linear layers, whose gradients are added by the product that gives them.


def add_products(places: Iterable[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]) -> None:
    """Lets the linear layers add to the gradients of their masters. `places`: of `PlacedWeights`."""
    for module, name, master, weight in places:
        if type(module) is nn.Linear and name == "weight" and master.requires_grad:
            module.forward = functools.partial(multiply, module, functools.partial(add_to_gradient, master, weight))


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
