"""Activation checkpointing: the outputs that blocks keep for backward, and those that they recompute."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from mini_trainer.model import attention as packed_attention
from mini_trainer.model.method import Method
from mini_trainer.objectives.families.text_tower import find_blocks, text_config
from mini_trainer.objectives.objective import KernelSwitch, PackedModel

# Operations whose outputs --activation-checkpointing selective keeps. Not bmm, which computes eager attention's scores.
GROUPED_PRODUCTS = frozenset({"aten::_grouped_mm"})  # matrix products of all experts of a layer at once
MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm"}) | GROUPED_PRODUCTS
ATTENTION = frozenset({
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn", "flash_attn::_flash_attn_varlen_forward",
})  # fmt: skip


def choose_kept_operations(model: PreTrainedModel, method: Method, *, backend: str, compile: bool) -> frozenset[str]:
    """The operations whose outputs --activation-checkpointing selective keeps for backward."""
    if compile and backend in packed_attention.UNCOMPILED:
        raise ValueError(
            "--compile with --activation-checkpointing selective needs --attention flash_attn or varlen, not"
            f" {backend}: it cannot be compiled, and blocks with selective checkpointing are compiled only as a whole;"
            " use --activation-checkpointing none or full"
        )
    kept = method.keep_operations(MATRIX_PRODUCTS | ATTENTION)
    if "dropout" in packed_attention.find_features(model, text_config(model.config)):
        kept -= ATTENTION  # without recomputing it, later dropout would draw different random numbers
    if any(param.ndim == 2 and name.endswith("bias") for name, param in model.named_parameters()):
        kept -= GROUPED_PRODUCTS  # transformers adds the experts' biases in place, but kept outputs must not change
    return kept


is_inside_tiles = False  # of model.activation_memory: selective checkpointing keeps nothing there


@contextmanager
def inside_tiles() -> Iterator[None]:
    global is_inside_tiles
    outer, is_inside_tiles = is_inside_tiles, True
    try:
        yield
    finally:
        is_inside_tiles = outer


def apply_activation_checkpointing(blocks: nn.ModuleList, kept: frozenset[str] = frozenset()) -> None:
    """Keeps each block's input and the outputs of operations in `kept` for backward, and recomputes the rest.
    Wraps `forward`, not the module, so that parameters keep their names and FSDP's hooks stay outside."""

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operation.name() in kept and not is_inside_tiles
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, decide)} if kept else {}
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **contexts)


def apply_selective_checkpointing(
    model: PreTrainedModel, method: Method, kernels: KernelSwitch, *, backend: str, compile: bool
) -> None:
    """Keeps the outputs of costly operations; blocks that are made of `kernels` do so by model.kernels.remade."""
    blocks = find_blocks(model)
    apply_activation_checkpointing(blocks, choose_kept_operations(model, method, backend=backend, compile=compile))
    known = packed_attention.BACKENDS.get(backend)
    if kernels.num_modules and not compile and known is not None and not known.stores_scores:
        from mini_trainer.model.kernels.layers import is_covered
        from mini_trainer.model.kernels.remade import Remaking

        for block in blocks:
            block.forward = Remaking(block.forward, kernels, functools.partial(is_covered, block))


def set_activation_checkpointing(packed_model: PackedModel, method: Method, mode: str) -> None:
    """Changes the checkpointing mode of a built model, whose blocks must not be compiled."""
    model = packed_model.model
    blocks = find_blocks(model)
    for block in blocks:
        forward = getattr(block.forward, "recompute", block.forward)
        if isinstance(forward, functools.partial) and forward.func is checkpoint:
            (block.forward,) = forward.args
    match mode:
        case "none":
            pass
        case "selective":
            backend, kernels = packed_model.backend, packed_model.kernels
            apply_selective_checkpointing(model, method, kernels, backend=backend, compile=False)
        case "full":
            apply_activation_checkpointing(blocks)
        case _:
            raise ValueError(f"--activation-checkpointing {mode}: is not implemented")
