"""The memory of a training step, without the memory: the run's own code on tensors that have shapes and no content.

Not looked up in a table of models: torch's FakeTensorMode runs the whole model's forward, backward and update as rank 0
of as many ranks as wanted (torch's fake process group), and `MemoryCounter` adds up what is allocated.
"""

import functools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel

from lifecycle.start import make_osft_settings
from lifecycle.training_log import FlopCount, count_flops
from model.build import PackedCausalLM, apply_fsdp, set_gradient_sync, shape_model
from optim.compact_adamw import load_map
from optim.optimizers import build_optimizer, moment_bytes
from options import TrainOptions
from osft import (
    OSFTLinear,
    OSFTSettings,
    count_kept,
    find_osft_layers,
    find_targets,
    oriented_shape,
    project_gradients,
    project_updates,
    replace_layers,
)
from plan.auto_settings import make_micro_batch
from ranks.memory import MemoryCounter
from ranks.world import World, make_mesh

SHARDED = ("weights", "frozen", "gradients", "optimizer")  # kinds of memory that --cpu-offload takes elsewhere
UNKNOWN_ENERGY_RATIO = 0.5  # unfreeze rank ratio to plan with where --osft-keep-energy will decide


@dataclass(frozen=True)
class StepMemory:
    """Bytes on rank 0, which has the largest shards, when a step needs most."""

    peak: Counter[str]  # by kind: weights, frozen, gradients, optimizer, gathered, activations, loss
    num_tokens: int  # of the micro-batch
    per_token: float  # by how much a token more raises the peak

    @property
    def total(self) -> int:
        return self.peak.total()

    def at(self, num_tokens: int) -> float:
        """The peak with another number of tokens."""
        return self.total + self.per_token * (num_tokens - self.num_tokens)


@contextmanager
def fake_world(world_size: int, num_shards: int) -> Iterator[World]:
    """Rank 0 of `world_size` ranks that are not there; no other process group may exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield World(0, world_size, torch.device("cpu"), make_mesh("cpu", world_size, num_shards), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class ShapedModel:
    """A model without memory, and what is known of it from its shape."""

    model: PreTrainedModel
    blocks: nn.ModuleList
    backend: str
    compute_dtype: torch.dtype
    num_params: int  # of OSFT the weights that it stands for
    num_trainable: int
    state_bytes: int  # of a checkpoint: all of that, and two moments of what trains
    flops: FlopCount


def shape_run_model(
    options: TrainOptions, config: PreTrainedConfig, *, compute_dtype: torch.dtype, attention: str
) -> ShapedModel:
    """The model on the meta device, as a run on a CPU would shape it. ValueError for what cannot be trained.

    Without --compile, --float8 and --use-liger-kernels, which need the device itself.
    """
    model, blocks, backend = shape_model(
        config,
        trust_remote_code=options.model.trust_remote_code,
        device=torch.device("cpu"),
        compute_dtype=compute_dtype,
        attention=attention,
        activation_checkpointing=options.compute.activation_checkpointing,
        compile=False,
        use_liger_kernels=False,
        has_osft=options.osft.osft,
    )
    num_params = sum(param.numel() for param in model.parameters())
    if (osft := make_osft_settings(options)) is not None:
        shape_osft(model, blocks, osft, compute_dtype=compute_dtype)
    else:
        for param in model.parameters():
            param.data = param.data.to(getattr(torch, options.optimization.master_weights))
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    U_high_numel = sum(layer.num_rows * layer.num_kept for layer in find_osft_layers(model) if layer.projects)
    return ShapedModel(
        model,
        blocks,
        backend,
        compute_dtype,
        num_params=num_params,
        num_trainable=sum(param.numel() for param in trained),
        state_bytes=sum(param.numel() * param.itemsize for param in params)
        + sum(moment_bytes(param, options.optimization.optimizer) for param in trained)
        + 4 * U_high_numel,
        flops=count_flops(model, config),
    )


def simulate_step(
    options: TrainOptions,
    shaped: ShapedModel,
    *,
    world_size: int,
    num_shards: int,
    num_tokens: int,
    num_trained: int,
    longest: int,
    accumulates: bool,
    offloads: bool = False,
) -> StepMemory:
    """A micro-batch of `num_tokens`, `num_trained` of them trained, in sequences of up to `longest` tokens.

    `accumulates`: whether the step has more than one micro-batch, so that gradients are there during the forward pass.
    `offloads`: whether what is sharded lies elsewhere, and is not counted. Uses `shaped` up. RuntimeError where an
    operation of the model cannot be simulated.
    """
    packed_model = PackedCausalLM(shaped.model, backend=shaped.backend, compute_dtype=shaped.compute_dtype)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        fake_world(world_size, num_shards) as world,
        quiet_simulation(),
        fake,
        AnyTypeOfExperts(),
        MemoryCounter() as counter,
    ):
        give_memory(packed_model, world)
        apply_fsdp(
            packed_model,
            shaped.blocks,
            weights={},
            weights_dtype=getattr(torch, options.optimization.master_weights),
            subspaces={},
            world=world,
            reshard_after_forward=options.sharding.reshard_after_forward,
            prefetch_blocks=options.sharding.prefetch_blocks,
            cpu_offload=False,
        )
        tensors = [*packed_model.train().parameters(), *packed_model.buffers()]
        params = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in tensors:
            counter.count(tensor, "weights" if tensor.requires_grad else "frozen")
        for param in params:
            param.grad = torch.zeros_like(param)
            counter.count(param.grad, "gradients")
        optimizer = build_optimizer(
            packed_model,
            optimizer=options.optimization.optimizer,
            learning_rate=0.0,
            weight_decay=0.0,
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        osft_layers = find_osft_layers(packed_model)
        counter.reset_peak()
        project_gradients(osft_layers)
        optimizer.step()
        project_updates(osft_layers)
        peaks = [counter.peak]
        # Where gradients stay whole until the last micro-batch, a first one has to make them.
        waits = accumulates and options.sharding.micro_batch_grad_sync == "last"
        passes = [(num_tokens // 2, not waits), (num_tokens, not waits)]
        passes = [passes[0], *passes, (num_tokens, True)] if waits else passes
        if waits:
            optimizer.zero_grad()
        for size, is_last in passes:
            if not accumulates:
                optimizer.zero_grad()
            counter.reset_peak()
            set_gradient_sync(packed_model, options.sharding.micro_batch_grad_sync, is_last=is_last)
            micro_batch = make_micro_batch(size, size * num_trained // num_tokens, longest=longest)
            (packed_model(micro_batch._map_tensors(fake.from_tensor)) / 1.0).backward()
            for param in params:
                if param.grad is not None:
                    counter.count(param.grad, "gradients")
            peaks.append(counter.peak)
    if offloads:
        peaks = [Counter({kind: size for kind, size in peak.items() if kind not in SHARDED}) for peak in peaks]
    return StepMemory(
        peak=max(peaks, key=Counter.total),
        num_tokens=num_tokens,
        per_token=(peaks[2 + waits].total() - peaks[1 + waits].total()) / (num_tokens - num_tokens // 2),
    )


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
    """Without torch's own report of an operation that cannot be simulated: the exception says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        load_map.cache_clear()  # its tensors are simulated ones now


def shape_osft(model: nn.Module, blocks: nn.ModuleList, osft: OSFTSettings, *, compute_dtype: torch.dtype) -> None:
    """OSFT's layers by their shapes alone; where the data decide how much each keeps, all keep the mean."""
    targets = find_targets(model, blocks, osft.target_patterns)
    ratio = UNKNOWN_ENERGY_RATIO if osft.unfreeze_rank_ratio is None else osft.unfreeze_rank_ratio
    num_kept = {name: count_kept(oriented_shape(layer, osft.basis)[1], ratio) for name, layer in targets.items()}
    replace_layers(model, targets, num_kept, osft, compute_dtype=compute_dtype)


def give_memory(packed_model: PackedCausalLM, world: World) -> None:
    """Puts tensors on the (simulated) device in the place of those on the meta device."""
    for module in packed_model.modules():
        for name, param in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(param, device=world.device), param.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=world.device))
        if isinstance(module, OSFTLinear) and module.projects:
            rows, num_kept = -(-module.num_rows // world.num_shards), module.num_kept
            module.U_high = DTensor.from_local(
                torch.empty(rows, num_kept), world.shard_mesh, [Shard(0)], run_check=False,
                shape=(module.num_rows, num_kept), stride=(num_kept, 1),
            )  # fmt: skip
    packed_model.model.tie_weights()
