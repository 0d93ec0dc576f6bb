"""Fills a finished model unit by unit and shards it by FSDP2, and sets when gradients are reduced over ranks.

A model that one rank holds as a whole has no FSDP, and neither have weights of another type (model.whole_weights).
"""

from collections.abc import Collection, Container, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from mini_trainer.distributed.messages import show_progress
from mini_trainer.distributed.world import World, broadcast_from_rank0
from mini_trainer.model.method import Method
from mini_trainer.model.stored_tensors import reading_ahead
from mini_trainer.model.weights import Readers
from mini_trainer.model.whole_weights import PlacedWeights, WholeWeights, add_products
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options import ShardingOptions
from mini_trainer.options.doors import KEEPING, RESHARDING


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


READING = ("hidden_states", "look_ahead", "predict", "reference", "score")  # methods that read weights, beside forward
STATE = 4  # numbers for each weight that trains: itself, its gradient, two moments
ROOM = 0.85  # share of the memory that weights, gradients, moments and weights in the compute type may fill


def stays_whole(
    model: nn.Module,
    compute_dtype: torch.dtype,
    sharding: ShardingOptions,
    *,
    kept: Collection[str] = (),
    world_size: int,
    memory: int | None,
) -> bool:
    """Whether one rank has room for all weights in the compute type beside the masters, and so needs no FSDP.
    `kept`: names of parameters that compute in their own type. `memory`: bytes that the rank may use; None: enough."""
    if world_size > 1 or sharding.cpu_offload or sharding.micro_batch_grad_sync != "every":
        return False
    if "always" in (sharding.reshard_after_forward, sharding.reshard_after_backward):
        return False
    num_bytes = num_copied_bytes = 0
    for name, param in model.named_parameters():
        num_bytes += (STATE if param.requires_grad else 1) * param.nbytes
        if param.is_floating_point() and param.dtype != compute_dtype and name not in kept:
            num_copied_bytes += param.numel() * compute_dtype.itemsize
    return memory is None or num_copied_bytes == 0 or num_bytes + num_copied_bytes <= ROOM * memory


def list_resharding(sharding: ShardingOptions) -> dict[str, str]:
    """The options of resharding that are not, or no longer, auto."""
    values = {name: getattr(sharding, name) for name in ("reshard_after_forward", "reshard_after_backward")}
    return {name: value for name, value in values.items() if value != "auto"}


def choose_resharding(sharding: ShardingOptions, *, has_room: bool) -> dict[str, str]:
    """Values for those of the two options of resharding that are auto: never if all weights stay gathered.
    `has_room`: for them, as measured, or since a single rank keeps them (`stays_whole`)."""
    # Not kept, "auto" stays FSDP2's default, which frees all layers but the last.
    found = {
        "reshard_after_forward": "never" if has_room else "auto",
        "reshard_after_backward": "never" if has_room else "always",
    }
    return {name: value for name, value in found.items() if name not in list_resharding(sharding)}


def is_worth_measuring(unmeasured: dict[str, str], device: torch.device) -> bool:
    """Whether the room for gathered weights is measured, also with a fixed number of tokens: on GPUs, where it is not
    known without (`choose_resharding` without room)."""
    return device.type == "cuda" and "auto" in unmeasured.values()


def adds_products(packed_model: PackedModel, device: torch.device) -> bool:
    """Whether one rank's linear layers add to their gradients by the product that gives them, see `AddedProduct`. On
    CPUs gradients stay equal to FSDP2's to the bit; compiled blocks have a backward of their own."""
    return device.type == "cuda" and not packed_model.compiled


def apply_sharding(
    packed_model: PackedModel,
    blocks: nn.ModuleList,
    sharding: ShardingOptions,
    *,
    method: Method,
    readers: Readers,
    world: World,
) -> None:
    """Fills the meta model from rank 0's `readers` and shards it: each block, an untied embedding, and the rest.

    Units are processed one at a time, so that no rank ever holds more than one of them unsharded. Weights keep their
    dtypes on meta, compute is in the model's `compute_dtype` or for its `kept` parameters in their own, and gradients
    are reduced in fp32, then cast to the weights' dtype. A single rank has nothing to shard (`stays_whole`): the same
    numbers, with less work of the host.
    """
    packed_model.is_whole = is_whole = stays_whole(
        packed_model.model,
        packed_model.compute_dtype,
        sharding,
        kept=packed_model.kept,
        world_size=world.world_size,
        memory=world.memory,
    )
    reshard = RESHARDING[sharding.reshard_after_forward]
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if sharding.cpu_offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=packed_model.compute_dtype, reduce_dtype=torch.float32)
    root_policy = replace(policy, cast_forward_inputs=False)  # the sums of `look_ahead` stay in fp32
    names = {module: name for name, module in packed_model.model.named_modules()}
    own_type: set[nn.Parameter] = set()  # the kept parameters, once filled
    embedding, head = packed_model.model.get_input_embeddings(), packed_model.model.get_output_embeddings()
    is_tied = head is not None and embedding.weight is head.weight  # classifiers have no such head
    is_plain = type(embedding) is nn.Embedding  # fully_shard changes its class
    tied = packed_model.model.all_tied_weights_keys.keys()
    # Fill and shard unit by unit.
    units = (*blocks, *([] if is_tied else [embedding]), packed_model)
    with reading_ahead(readers, (names.get(module, "") for unit in units for module in unit.modules())):
        for unit in show_progress(units, "loading", unit="block"):
            for module in unit.modules():
                name = names.get(module, "")
                method.fill(module, name, readers, world=world)
                fill_module(module, name, readers, tied=tied, device=world.device)
            if unit is packed_model:
                packed_model.model.tie_weights()
            found = (packed_model.model.get_parameter(name) for name in packed_model.kept)
            own_type |= {param for param in found if not param.is_meta}
            if not is_whole:
                fully_shard(
                    unit,
                    mesh=world.mesh,
                    reshard_after_forward=reshard,
                    shard_placement_fn=partial(choose_dim, world.num_shards),
                    mp_policy=root_policy if unit is packed_model else policy,
                    offload_policy=offload,
                    ignored_params=own_type,
                )
    packed_model.frees_head = reshard is True
    assert not readers, f"the model has no place for {', '.join(readers)}"
    if is_whole:
        cast_inputs(blocks, packed_model.compute_dtype)
        weights = WholeWeights(packed_model, packed_model.compute_dtype, world.mesh, kept=own_type)
        if adds_products(packed_model, world.device):
            add_products(weights.places)
        place_weights(packed_model, weights)
        return
    # Configure gradient reduction and prefetching.
    for module in packed_model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed over ranks, not averaged: the loss is divided by the global number of tokens.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if (count := sharding.prefetch_blocks) > 1:  # FSDP2 prefetches one block by default
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(blocks[i + 1 : i + 1 + count]))
            block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, i - count) : i])))
    if is_plain and not is_tied:
        embedding.set_unshard_in_backward(False)  # its gradient needs the tokens' ids, not its weight
    for name in READING:
        register_fsdp_forward_method(packed_model, name)
    if own_type:
        from mini_trainer.model.kept_weights import KeptWeights

        place_weights(packed_model, KeptWeights(packed_model, own_type, world.mesh, device=world.device))


def place_weights(packed_model: PackedModel, weights: PlacedWeights) -> None:
    """Lets all that reads weights find them in place."""
    packed_model.placed_weights = weights
    for name in ("forward", *READING):
        setattr(packed_model, name, weights.wrap(getattr(packed_model, name)))


def reshard(packed_model: PackedModel) -> None:
    """Frees the parameters that forward passes without a backward leave gathered: the root's, or all."""
    if packed_model.placed_weights is not None:
        packed_model.placed_weights.free()
    for module in packed_model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def count_gathered_bytes(model: nn.Module, compute_dtype: torch.dtype, kept: Collection[str]) -> int:
    """Bytes of all weights gathered on one rank: in `compute_dtype`, except integers and those named in `kept`."""
    return sum(
        param.numel() * (compute_dtype if param.is_floating_point() and name not in kept else param.dtype).itemsize
        for name, param in model.named_parameters()
    )


def prepare_backward(packed_model: PackedModel, sharding: ShardingOptions, *, is_last: bool) -> None:
    """Sets how the next backward treats gradients and weights; `is_last`: it is the last of a step.

    It reduces gradients over ranks in every micro-batch, or the last one (--micro-batch-grad-sync). Over the replicas
    of hybrid sharding, gradients are reduced once per step in any case: until then they accumulate as shards, which
    takes no extra memory. It frees gathered weights in every micro-batch, or the last one (--reshard-after-backward):
    after a step all are freed, so that the optimizer finds the shards and the next forward pass gathers what it wrote.
    """
    if packed_model.placed_weights is not None:
        packed_model.placed_weights.stays = not is_last
    if packed_model.is_whole:
        return
    match sharding.micro_batch_grad_sync:
        case "last":
            packed_model.set_requires_gradient_sync(is_last)
        case "every":
            packed_model.set_requires_all_reduce(is_last)
        case when:
            raise ValueError(f"--micro-batch-grad-sync {when}: is not implemented")
    if KEEPING[sharding.reshard_after_backward]:
        packed_model.set_reshard_after_backward(is_last)


def choose_dim(num_shards: int, param: nn.Parameter) -> Shard | None:
    """Shards the experts of a layer, stored as (experts, rows, columns), by rows if there are too few of them."""
    by_rows = param.ndim == 3 and param.shape[0] % num_shards != 0 and param.shape[1] % num_shards == 0
    return Shard(1) if by_rows else None


def fill_module(module: nn.Module, name: str, readers: Readers, *, tied: Container[str], device: torch.device) -> None:
    """Fills `module`'s own meta parameters and buffers with rank 0's values, on `device`.
    Those named in `tied` are left to `tie_weights`."""
    tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    for key, meta in tensors.items():
        if not meta.is_meta or f"{name}.{key}" in tied:
            continue
        is_param = isinstance(meta, nn.Parameter)
        own = readers.pop(f"{name}.{key}")() if dist.get_rank() == 0 else None
        value = broadcast_from_rank0(own, meta.shape, dtype=meta.dtype, device=device)
        setattr(module, key, nn.Parameter(value, meta.requires_grad) if is_param else value)
