"""Weights of a model that one rank holds as a whole: cast to the compute type once per step, without FSDP's hooks.

The masters stay what FSDP would make of them, DTensors on a mesh of one rank, so that optimizers, methods, checkpoints
and exports see no difference. While the model computes, plain parameters of the compute type are in their place.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from mini_trainer.distributed.devices import memory_kind


class WholeWeights:
    """Puts weights of the compute type into the modules, and the masters back.

    A master that has the compute type already shares its memory with its weight, and its gradient. The others' weights
    are copies, made again by each `gather`; their gradients are added to the masters' as autograd makes them.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, mesh: DeviceMesh):
        """Replaces the parameters of `model`, which must all be plain, by masters on `mesh`."""
        self.places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []  # with master and weight
        pairs: dict[nn.Parameter, tuple[nn.Parameter, nn.Parameter]] = {}  # of the parameters that were there
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                if param not in pairs:
                    pairs[param] = self._split(param, compute_dtype, mesh)
                self.places.append((module, name, *pairs[param]))
        shared = [(master, weight) for master, weight in pairs.values() if is_shared(master, weight)]
        self.shared = [(master, weight) for master, weight in shared if master.requires_grad]
        copied = [(master, weight) for master, weight in pairs.values() if not is_shared(master, weight)]
        self.sources = [master.detach().to_local() for master, _ in copied]
        self.copies = [weight.detach() for _, weight in copied]
        self.is_gathered = False
        self.stays = False  # gathered, after the next backward
        self._place_masters()

    def _split(
        self, param: nn.Parameter, compute_dtype: torch.dtype, mesh: DeviceMesh
    ) -> tuple[nn.Parameter, nn.Parameter]:
        own = param.detach()
        master = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False), param.requires_grad)
        if own.is_floating_point() and own.dtype != compute_dtype:
            with memory_kind("gathered"):
                own = torch.empty_like(own, dtype=compute_dtype)
        weight = nn.Parameter(own, param.requires_grad)
        if weight.requires_grad and not is_shared(master, weight):
            weight.register_post_accumulate_grad_hook(lambda weight: add_gradient(master, weight))
        return master, weight

    @torch.no_grad()
    def gather(self) -> None:
        """Puts copies of the current masters into the modules as weights."""
        if self.is_gathered:
            return
        if self.copies:
            torch._foreach_copy_(self.copies, self.sources)
        for master, weight in self.shared:
            weight.grad = None if master.grad is None else master.grad.to_local()
        for module, name, _, weight in self.places:
            module._parameters[name] = weight
        self.is_gathered = True

    def free(self) -> None:
        """Puts the masters back, with the gradients so far."""
        if self.is_gathered:
            for master, weight in self.shared:
                master.grad = None if weight.grad is None else as_master(weight.grad, master)
                weight.grad = None
            self._place_masters()

    def _place_masters(self) -> None:
        for module, name, master, _ in self.places:
            module._parameters[name] = master
        self.is_gathered = False

    def end_backward(self) -> None:
        if not self.stays:
            self.free()

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
        Variable._execution_engine.queue_callback(self.end_backward)


def is_shared(master: nn.Parameter, weight: nn.Parameter) -> bool:
    """Whether both are the same memory."""
    return master.dtype == weight.dtype


@torch.no_grad()
def add_gradient(master: nn.Parameter, weight: nn.Parameter) -> None:
    """Adds the weight's gradient to its master's, in the master's type."""
    if master.grad is None:
        with memory_kind("gradients"):
            master.grad = as_master(weight.grad.to(master.dtype), master)
    else:
        rounds = master.dtype != torch.float32  # each gradient is rounded before it is added, as by FSDP
        master.grad.to_local().add_(weight.grad.to(master.dtype) if rounds else weight.grad)
    weight.grad = None


def as_master(tensor: Tensor, master: nn.Parameter) -> DTensor:
    return DTensor.from_local(tensor, master.device_mesh, master.placements, run_check=False)


def cast_inputs(blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Casts floating-point inputs of blocks to `dtype`, as FSDP does."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if type(value) in (tuple, list):
            return type(value)(map(cast, value))
        return {key: cast(each) for key, each in value.items()} if type(value) is dict else value

    for block in blocks:
        block.register_forward_pre_hook(lambda _, args, kwargs: (cast(args), cast(kwargs)), with_kwargs=True)
