"""The memory of a training step, computed without using it: runs the run's own code on tensors with shapes but no
content.

Not looked up in a table of models: torch's FakeTensorMode runs the whole model's forward, backward and update as rank 0
of as many ranks as wanted (torch's fake process group), and `MemoryCounter` adds up what is allocated.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from mini_trainer.distributed.devices import DTYPES, OFFLOADED, memory_kind
from mini_trainer.distributed.world import World, make_mesh, make_row_group
from mini_trainer.model.activation_memory import apply_tiling
from mini_trainer.model.build import check_divisible, make_meta_model
from mini_trainer.model.flops import FlopCount, count_flops
from mini_trainer.model.method import MetaModel, Method
from mini_trainer.model.optim.averages import make_average
from mini_trainer.model.optim.compact_adamw import load_map
from mini_trainer.model.optim.optimizers import build_optimizer, count_state_bytes, open_optimizer
from mini_trainer.model.precision import set_types
from mini_trainer.model.sharding import apply_sharding, prepare_backward
from mini_trainer.objectives.objective import Objective, PackedModel
from mini_trainer.options import ComputeOptions
from mini_trainer.options.doors import KEEPING
from mini_trainer.run.auto_settings import MemoryCounter
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.step import StepOptions, TrainState, run_backward, update_weights

MOST_ELEMENTS = 2**26  # of a tensor whose values are kept


class KnownValues(TorchDispatchMode):
    """While entered inside `fake`, tensors made from real ones keep their values, and so do results computed from these
    alone. This simulates vision towers that cut their rows by tensor values: image sizes, places of padding."""

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self.fake = fake
        self.values = WeakTensorKeyDictionary()  # simulated tensor -> real one

    def simulate(self, tensor: Tensor) -> Tensor:
        """A simulated tensor in the place of a real one, with its values."""
        with _disable_current_modes():
            simulated = self.fake.from_tensor(tensor)
            self.values[simulated] = tensor.clone()  # as long as `tensor` itself lives, `fake` keeps what it made of it
        return simulated

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(function, OpOverload) or torch.Tag.nondeterministic_seeded in function.tags:
            return function(*args, **kwargs)
        given = list_tensors((*args, *kwargs.values()))
        is_real = [not (isinstance(tensor, FakeTensor) or tensor.is_meta) for tensor in given]
        is_known = all(real or tensor in self.values for real, tensor in zip(is_real, given, strict=True))
        try:
            result = function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if is_known:
                return tree_map_only(Tensor, self.simulate, self.compute(function, args, kwargs))
            if function._schema.name not in ("aten::index", "aten::index_put"):
                raise
            return function(args[0], self.number_masked(args[1]), *args[2:], **kwargs)
        made = list_tensors((result,))
        if is_known and made and all(is_kept(tensor, is_new=not given) for tensor in made):
            self.values.update(zip(made, list_tensors((self.compute(function, args, kwargs),)), strict=True))
        elif function._schema.is_mutable:
            for tensor in made:
                self.values.pop(tensor, None)
        return result

    def compute(self, function: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The operation on the real tensors."""
        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, lambda tensor: self.values.get(tensor, tensor), (args, kwargs))
            return function(*args, **kwargs)

    def number_masked(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Indices with the places that a known mask chooses in the mask's place."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool and index in self.values:
                with _disable_current_modes():
                    places = self.values[index].nonzero(as_tuple=True)
                found += map(self.simulate, places)
            else:
                found.append(index)
        return found


def list_tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among an operation's arguments or results, which may hold lists of them."""
    return [value for value in tree_iter(values) if isinstance(value, Tensor)]


def is_kept(tensor: Tensor, *, is_new: bool) -> bool:
    """Whether the operation's values are computed: tensors made from nothing may be meant to hold a model's numbers."""
    return tensor.numel() <= MOST_ELEMENTS and not (is_new and tensor.is_floating_point())


SHARDED = ("weights", "frozen", "gradients", "optimizer")  # kinds of memory that --cpu-offload moves to the CPU
# Where FSDP's code is entered from the model's and autograd's: memory allocated there is for its collectives.
FSDP_HOOKS = {
    FSDPState: ("_pre_forward", "_post_forward", "_pre_backward", "_root_post_backward_final_callback"),
    FSDPParamGroup: ("post_backward",),
}


@dataclass(frozen=True)
class StepMemory:
    """Bytes on rank 0, which has the largest shards, at a step's peak."""

    peak: Counter[str]  # by kind: weights, frozen, gradients, optimizer, gathered, activations, loss
    offloaded: int  # in CPU memory, in addition
    per_token: float  # by how much each extra token raises the peak

    @property
    def total(self) -> int:
        return self.peak.total()


@dataclass(frozen=True)
class Ranks:
    """The ranks that are simulated."""

    world_size: int
    num_shards: int  # ranks that hold one copy of the model
    num_sharing: int | None = None  # ranks that share a packed row; None: each has rows of its own
    offloads: bool = False  # whether sharded tensors are elsewhere, and not counted
    memory: int | None = None  # bytes that a rank may use, if that affects how weights are held

    @property
    def num_rows(self) -> int:
        """Rows that are packed at once."""
        return self.world_size // (self.num_sharing or 1)


@dataclass(frozen=True)
class Load:
    """A micro-batch to simulate."""

    num_tokens: int  # of the row, of all ranks that share it
    num_trained: int
    longest: int  # tokens of its longest sequence
    accumulates: bool  # the step has several micro-batches, so that gradients are there during the forward pass


@dataclass(frozen=True)
class PlannedModel:
    """A model without memory, with its method's layers, and the facts that follow from its shape."""

    meta: MetaModel
    method: Method
    objective: Objective
    num_params: int  # without what the method's layers add
    num_trainable: int
    state_bytes: int  # of a checkpoint: the parameters and buffers that it holds, and two moments of the trained ones
    flops: FlopCount
    update_flops: int  # of an optimizer step, on all ranks together


def lay_out_model(options: StepOptions, inputs: RunInputs, compute: ComputeOptions, method: Method) -> PlannedModel:
    """The model on the meta device, as a run on a CPU would lay it out. ValueError for models that cannot be trained.
    `compute` without --compile and --float8, which need the device itself. `method`: a new one,
    whose layers the model gets.
    """
    meta = make_meta_model(inputs.source, compute, family=inputs.family, method=method, device=torch.device("cpu"))
    model = meta.model
    if options.sharding.context_parallel is not None:
        check_divisible(meta, options.sharding.context_parallel)
    num_params = sum(param.numel() for param in model.parameters())
    set_types(model, DTYPES[options.optimization.master_weights])
    method.choose_layers(meta)
    method.lay_out(meta)
    apply_tiling(meta)
    params = list(model.parameters())
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    trained = [param for _, param in named]
    saved = model.state_dict().keys()
    buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
    in_checkpoints = (*params, *buffers) if method.saves_frozen else trained
    return PlannedModel(
        meta,
        method,
        inputs.objective,
        num_params=num_params,
        num_trainable=sum(param.numel() for param in trained),
        state_bytes=sum(tensor.numel() * tensor.itemsize for tensor in in_checkpoints)
        + count_state_bytes(named, model, options.optimization)
        + (4 * sum(param.numel() for param in trained) if options.optimization.weight_average != "none" else 0),
        flops=count_flops(model),
        update_flops=open_optimizer(options.optimization).count_flops(model),
    )


def simulate_step(options: StepOptions, planned: PlannedModel, load: Load, ranks: Ranks) -> StepMemory:
    """The memory of a step whose largest micro-batch is `load`. Uses `planned` up.
    RuntimeError where an operation of the model cannot be simulated."""
    meta, sharding = planned.meta, options.sharding
    packed_model = PackedModel(
        meta.model, planned.objective, backend=meta.backend, compute_dtype=meta.compute_dtype, kept=meta.list_kept()
    )
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        fake_world(ranks) as world,
        quiet_simulation(),
        fsdp_of_rank0(),
        fake,
        AnyTypeOfExperts(),
        MemoryCounter() as counter,
        KnownValues(fake) as known,
    ):
        # The sharded model, and an update, which makes the optimizer's state.
        give_memory(packed_model, planned.method, world)
        apply_sharding(
            packed_model,
            meta.blocks,
            replace(sharding, cpu_offload=False),
            method=planned.method,
            readers={},
            world=world,
        )
        tensors = [*packed_model.train().parameters(), *packed_model.buffers()]
        params = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in tensors:
            counter.count(tensor, "weights" if tensor.requires_grad else "frozen")
        optimizer = build_optimizer(packed_model, options.optimization)
        average = make_average(packed_model, options.optimization, end=0)
        state = TrainState(packed_model, planned.method, optimizer, world, average=average)
        make_gradients(params, counter)
        counter.reset_peak()
        planned.method.constrain_gradients()
        update_weights(state, step=0, lr=0.0, num_samples=1)
        peaks = [counter.peak]

        # Forward and backward of half and of all tokens. Where whole gradients or weights stay until the last
        # micro-batch, a first one has to make them.
        keeps = sharding.micro_batch_grad_sync == "last" or KEEPING[sharding.reshard_after_backward]
        waits = load.accumulates and keeps
        passes = [(load.num_tokens // 2, not waits), (load.num_tokens, not waits)]
        passes = [passes[0], *passes, (load.num_tokens, True)] if waits else passes
        if load.accumulates and sharding.micro_batch_grad_sync == "every":
            make_gradients(params, counter)
        for size, is_last in passes:
            if not load.accumulates:
                optimizer.zero_grad()
            counter.reset_peak()
            prepare_backward(packed_model, sharding, is_last=is_last)
            num_trained = size * load.num_trained // load.num_tokens
            with _disable_current_modes():  # where a row is cut depends on its content
                micro_batch = planned.objective.make_probe(
                    size, num_trained, longest=load.longest, row_group=world.row_group
                )
            simulated = micro_batch.map(lambda tensor: counter.count(known.simulate(tensor)))
            run_backward(packed_model, simulated, planned.objective.weigh(num_trained, size, ()))
            for param in params:
                if param.grad is not None:
                    counter.count(param.grad, "gradients")
            peaks.append(counter.peak)
    elsewhere = (OFFLOADED, *(SHARDED if ranks.offloads else ()))
    peaks = [Counter({kind: size for kind, size in peak.items() if kind not in elsewhere}) for peak in peaks]
    return StepMemory(
        peak=max(peaks, key=Counter.total),
        offloaded=counter.most_offloaded,
        per_token=(peaks[2 + waits].total() - peaks[1 + waits].total()) / (load.num_tokens - load.num_tokens // 2),
    )


def make_gradients(params: list[nn.Parameter], counter: MemoryCounter) -> None:
    for param in params:
        param.grad = torch.zeros_like(param)
        counter.count(param.grad, "gradients")


@contextmanager
def fake_world(ranks: Ranks) -> Iterator[World]:
    """Rank 0 of ranks that do not exist; there must be no other process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks.world_size)
    try:
        mesh = make_mesh("cpu", ranks.world_size, ranks.num_shards)
        row_group = make_row_group(0, ranks.world_size, ranks.num_sharing)
        yield World(0, ranks.world_size, torch.device("cpu"), mesh, row_group, memory=ranks.memory)
    finally:
        dist.destroy_process_group()


@contextmanager
def fsdp_of_rank0() -> Iterator[None]:
    """Counts what FSDP's hooks allocate as gathered, and lets FSDP cut only rank 0's shard from a weight: those of all
    of 1,024 simulated ranks take tenths of a second. AttributeError where torch calls them by other names."""

    def count_as_gathered(hook: Callable) -> Callable:
        @functools.wraps(hook)
        def run_hook(*args: Any, **kwargs: Any) -> Any:
            with memory_kind("gathered"):
                return hook(*args, **kwargs)

        return run_hook

    hooks = [(owner, name, getattr(owner, name)) for owner, names in FSDP_HOOKS.items() for name in names]
    chunk, _fsdp_param._chunk_with_empty = _fsdp_param._chunk_with_empty, cut_first
    for owner, name, hook in hooks:
        setattr(owner, name, count_as_gathered(hook))
    try:
        yield
    finally:
        for owner, name, hook in hooks:
            setattr(owner, name, hook)
        _fsdp_param._chunk_with_empty = chunk


def cut_first(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Rank 0's chunk, in place of a list of all ranks'."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


class AnyTypeOfExperts(TorchDispatchMode):
    """Grouped products in other types than bf16, which torch computes on a CPU but does not simulate."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return function(*args, **(kwargs or {}))
        dtype = args[0].dtype
        in_bf16 = functools.partial(tree_map_only, torch.Tensor, lambda t: t.bfloat16() if t.dtype == dtype else t)
        return function(*in_bf16(args), **in_bf16(kwargs or {})).to(dtype)


@contextmanager
def quiet_simulation() -> Iterator[None]:
    """Silences torch's own report of an operation that cannot be simulated: the exception has it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        load_map.cache_clear()  # its tensors are simulated ones now


def give_memory(packed_model: PackedModel, method: Method, world: World) -> None:
    """Replaces tensors on the meta device by ones on the (simulated) device."""
    for module in packed_model.modules():
        for name, param in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(param, device=world.device), param.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=world.device))
        method.give_memory(module, world=world)
    packed_model.model.tie_weights()
