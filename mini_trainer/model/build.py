"""Builds a sharded, trainable model from a model directory: on the meta device, then `apply_*` in a fixed order."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from mini_trainer.data.stores.model_files import naming_config
from mini_trainer.distributed.devices import DTYPES
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model import attention
from mini_trainer.model.activation_checkpointing import apply_activation_checkpointing, apply_selective_checkpointing
from mini_trainer.model.blocks import find_mixers, hand_micro_batch_on, needs_own_attention
from mini_trainer.model.config import ModelSource
from mini_trainer.model.method import MetaModel, Method
from mini_trainer.model.precision import find_kept, set_types
from mini_trainer.model.sharding import apply_sharding
from mini_trainer.model.weights import Readers, read_weights
from mini_trainer.objectives.families.family import Family, find_pad_position
from mini_trainer.objectives.families.text_tower import find_blocks, find_decoder, set_attention, text_config
from mini_trainer.objectives.objective import KernelSwitch, Objective, PackedModel
from mini_trainer.options import ComputeOptions, ShardingOptions
from mini_trainer.options.doors import Doors

if TYPE_CHECKING:
    from mini_trainer.distributed.compilation import Compiled

# Model types whose own attention code needs a padded batch, and the functions that make one.
PADDED = Doors({"deberta-v2": "mini_trainer.model.attention_kernels:pad_attention"})


def build_model(
    source: ModelSource,
    compute: ComputeOptions,
    sharding: ShardingOptions,
    *,
    objective: Objective,
    method: Method,
    weights_dtype: torch.dtype = torch.float32,
    world: World,
    progress: Callable[[str], None] = lambda where: None,
) -> PackedModel:
    """Builds the model, sharded over `world.mesh`, in train mode, with the layers that `method` adds. Only rank 0 reads
    the weights, block by block, and broadcasts them. `weights_dtype` is the master weights' dtype. `progress` is called
    during a long start."""
    meta = make_meta_model(source, compute, family=objective.family, method=method, device=world.device)
    if world.row_group is not None:
        check_divisible(meta, world.row_group.size)
    set_types(meta.model, weights_dtype)
    if meta.left_out.parts:
        log.info(meta.left_out.describe(num_bytes=weights_dtype.itemsize))
    method.choose_layers(meta)
    readers: Readers = {}  # stays empty on the other ranks
    call_on_rank0(world, lambda: readers.update(read_weights(source, objective.family)))
    method.prepare(meta, readers, world=world, progress=progress)
    if meta.tiled:
        from mini_trainer.model.activation_memory import apply_tiling

        apply_tiling(meta)
    is_fused = compute.compile
    if world.device.type == "cuda":
        from mini_trainer.model.kernels import are_usable

        is_fused = is_fused or are_usable(world.device)
    packed_model = PackedModel(
        meta.model,
        objective,
        backend=meta.backend,
        compute_dtype=meta.compute_dtype,
        kept=meta.list_kept(),
        is_fused=is_fused,
    )
    packed_model.compiled, packed_model.kernels = meta.compiled, meta.kernels
    apply_sharding(packed_model, meta.blocks, sharding, method=method, readers=readers, world=world)
    return packed_model.train()


def make_meta_model(
    source: ModelSource, compute: ComputeOptions, *, family: Family, method: Method, device: torch.device
) -> MetaModel:
    """Builds the model on the meta device, with all changes to its code; `device` is where it will compute."""
    compute_dtype, mode = choose_compute_dtype(compute, device), compute.activation_checkpointing
    with torch.device("meta"), naming_config(source.directory):
        model = family.make_model(source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code)
    model.to("meta")  # for parameters created in a way that ignores the default device (DiffLlama)
    left_out = family.leave_out(model)
    if source.new_tokens and not model.get_input_embeddings().weight.requires_grad:
        raise ValueError(
            f"--freeze language: the data has {len(source.new_tokens)} tokens that the model does not have, whose"
            " embeddings would stay as they begin: remove the option, or tokenize the data without adding tokens"
        )
    backend = apply_attention(model, compute.attention, device=device, dtype=compute_dtype)
    blocks = find_blocks(model)
    switch = KernelSwitch()
    if compute.kernels in ("auto", "fused"):
        from mini_trainer.model.kernels.layers import apply_kernels

        switch = apply_kernels(model, blocks)
        if not switch.num_modules and compute.kernels == "fused":
            raise ValueError(
                f"--kernels fused: no module of model type {model.config.model_type!r} computes what one of the kernels"
                " does: remove the option"
            )
    held = hand_micro_batch_on(find_decoder(model), blocks, makes_masks=backend == attention.OWN)
    if backend == attention.OWN or any(map(find_mixers, blocks)):
        from mini_trainer.model.by_sequence import split_layers, use_kernels

        split_layers(blocks, held, has_own_attention=backend == attention.OWN)
        if backend != attention.OWN:
            use_kernels(blocks, device)
    if compute.float8:
        from mini_trainer.model.float8 import apply_float8

        apply_float8(blocks, device)
    tiled = ()
    if compute.tiled_mlp:
        from mini_trainer.model.activation_memory import find_tiled

        tiled = find_tiled(model, blocks)
    if mode == "selective":
        # Before compiling, which hides operations.
        apply_selective_checkpointing(model, method, switch, backend=backend, compile=compute.compile)
    compiled = apply_compile(blocks) if compute.compile else ()
    if mode == "full":
        apply_activation_checkpointing(blocks)
    if compute.offload_activations:
        from mini_trainer.model.activation_memory import apply_offloading

        apply_offloading(blocks, device)
    return MetaModel(
        model,
        blocks,
        backend,
        compute_dtype,
        source,
        family,
        left_out=left_out,
        kept=find_kept(model, compute_dtype),
        tiled=tiled,
        kernels=switch,
        compiled=compiled,
    )


def check_divisible(meta: MetaModel, num_sharing: int) -> None:
    """ValueError for a model whose packed rows cannot be split over ranks (--context-parallel)."""
    reason = None
    if any(map(find_mixers, meta.blocks)):
        reason = "layers with a recurrent state, which would have to pass from rank to rank"
    elif meta.backend not in attention.BACKENDS:
        reason = "its own attention code, which needs whole sequences"
    elif find_pad_position(meta.model) is not None:
        reason = "positions that are counted over whole sequences"
    if reason is not None:
        raise ValueError(
            f"--context-parallel {num_sharing}: model type {meta.model.config.model_type!r} has {reason}; remove the"
            " option"
        )


def choose_compute_dtype(compute: ComputeOptions, device: torch.device) -> torch.dtype:
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return DTYPES[auto if compute.compute_dtype == "auto" else compute.compute_dtype]


def apply_attention(model: PreTrainedModel, requested: str, *, device: torch.device, dtype: torch.dtype) -> str:
    """Routes the model's attention to a backend of model.attention; returns its name."""
    config = text_config(model.config)
    missing = [] if getattr(config, "hidden_size", None) else ["hidden_size"]
    if not missing and not attention.list_heads(config) and not any(map(find_mixers, find_blocks(model))):
        missing = ["num_attention_heads"]
    if missing:
        raise ValueError(
            f"model type {model.config.model_type!r} has no {' and no '.join(missing)} in its config: it is not a known"
            " stack of blocks with attention or a recurrent state, and packed samples could not be kept apart"
        )
    if model.config.model_type in PADDED:
        PADDED[model.config.model_type](model)
        if requested != "auto":
            raise ValueError(
                f"--attention {requested}: model type {model.config.model_type!r} computes attention in its own code,"
                " which cannot be replaced: remove the option"
            )
        return "padded"
    if needs_own_attention(find_blocks(model), config):
        return keep_own_attention(model, requested)
    attention.mark_chunked(model, config)
    backend = attention.choose_backend(requested, model=model, config=config, device=device, dtype=dtype)
    attention.register_backend(backend)
    if device.type == "cuda":
        from mini_trainer.model.attention_kernels import activate_kernels

        activate_kernels(backend)
    set_attention(model, attention.registered_name(backend))
    is_replaced = find_decoder(model).config._attn_implementation == attention.registered_name(backend)
    return backend if is_replaced else keep_own_attention(model, requested)


def keep_own_attention(model: PreTrainedModel, requested: str) -> str:
    """Keeps the model's own attention, which then runs one sequence at a time."""
    if requested != "auto":
        raise ValueError(
            f"--attention {requested}: model type {model.config.model_type!r} has its own attention code, which runs"
            " one sequence at a time and cannot be replaced: use --attention auto"
        )
    set_attention(model, "eager")
    return attention.OWN


def apply_compile(
    blocks: nn.ModuleList, *, backend: str | Callable = "inductor", dynamic: bool = True
) -> "tuple[Compiled, ...]":
    """Compiles each block separately, for any number of tokens and sequences; the options are torch.compile's. All
    blocks of a kind share one compiled graph, and no micro-batch triggers recompilation, since none has a dimension or
    a longest sequence of 1 (see `Objective.pack`), which torch.compile would specialize on."""
    from mini_trainer.distributed.compilation import Compiled

    # Inside selective checkpointing torch compiles nothing that stores something, and blocks store their micro-batch.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for block in blocks:
        block.forward = Compiled(
            block.forward,
            type(block).__name__,
            mode=functools.partial(getattr, block, "training"),
            backend=backend,
            dynamic=dynamic,
        )
    return tuple(block.forward for block in blocks)
