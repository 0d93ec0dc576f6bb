"""The layers in a model's transformer blocks, and passing blocks the micro-batch for their attention.

Some layers run once per sequence of a packed row (model/by_sequence.py): those with a recurrent state (Mamba, gated
delta nets, short convolutions), which would leak from one sequence into the next, and attention that no backend of
model/attention.py can replace.
"""

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass
class HeldRow:
    """The last micro-batch passed to a model or block; a simple object, which torch.compile can trace."""

    micro_batch: Any = None


def hand_micro_batch_on(base: nn.Module, blocks: nn.ModuleList, *, makes_masks: bool) -> list[HeldRow]:
    """Passes the micro-batch that the model is called with to each block; returns each block's holder of it.

    This also works if the model passes its blocks nothing (Mamba), or the blocks pass nothing to their children
    (StableLM). A block gets it from outside its forward, so that recomputation uses the same one. `makes_masks`: the
    model uses its own attention, with masks that it makes.
    """
    row = HeldRow()
    base.register_forward_pre_hook(functools.partial(hold_call, row, makes_masks), with_kwargs=True)
    held = []
    for block in blocks:
        inner = HeldRow()
        if drops_keywords(block):
            for child in block.children():
                if find_keywords(child) is not None:
                    child.forward = functools.partial(call_with_row, child.forward, inner)
        block.forward = functools.partial(hold_row, block.forward, inner, is_taken=takes(block, "micro_batch"))
        block.register_forward_pre_hook(functools.partial(give_row, row), with_kwargs=True)
        held.append(inner)
    return held


def hold_call(
    row: HeldRow, makes_masks: bool, base: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Pre-forward hook of a model: stores its micro-batch, and drops arguments that its forward does not accept. A
    model that makes masks gets a padding mask over the longest sequence, without padding: its mask (T, longest) then
    starts with that of a single sequence, for any positions in the row."""
    row.micro_batch = kwargs.get("micro_batch")
    if row.micro_batch is not None:
        if makes_masks:
            kwargs["attention_mask"] = kwargs["input_ids"].new_ones(1, row.micro_batch.row.max_seqlen)
        kwargs = {name: value for name, value in kwargs.items() if takes(base, name)}
    return args, kwargs


def give_row(row: HeldRow, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-forward hook of a block: adds the model's micro-batch, unless the model passed it."""
    return args, {"micro_batch": row.micro_batch} | kwargs


def hold_row(forward: Callable, row: HeldRow, *args: Any, is_taken: bool, **kwargs: Any) -> Any:
    row.micro_batch = kwargs.get("micro_batch") if is_taken else kwargs.pop("micro_batch", None)
    return forward(*args, **kwargs)


def call_with_row(forward: Callable, row: HeldRow, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, micro_batch=row.micro_batch, **kwargs)


def takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward accepts the keyword argument, by name or through **kwargs."""
    return name in read_signature(type(module).forward).parameters or find_keywords(module) is not None


def drops_keywords(module: nn.Module) -> bool:
    """Whether the module's forward has **kwargs that its code never reads."""
    name = find_keywords(module)
    return name is not None and all(
        name not in (instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
        for instruction in dis.get_instructions(inspect.unwrap(type(module).forward))
    )


def find_keywords(module: nn.Module) -> str | None:
    """Name of the forward's **kwargs parameter; None if it has none."""
    parameters = read_signature(type(module).forward).parameters.values()
    return next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), None)


@functools.cache
def read_signature(forward: Callable) -> inspect.Signature:
    """The function's signature; every forward pass asks for it again, and reading it costs more than a small layer."""
    return inspect.signature(forward)


def iterate_owners(name: str) -> Iterator[str]:
    """Names of the modules that contain the module or parameter `name`, outermost first, and itself: a, a.b, a.b.c."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts) + 1))


def find_linear_layers(model: PreTrainedModel, blocks: nn.ModuleList) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers inside the blocks, by name."""
    inside = {module for block in blocks for module in block.modules()}
    return {name: module for name, module in model.named_modules() if module in inside and is_linear(module)}


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies its inputs with a matrix and does no more, unlike some of nn.Linear's subclasses:
    routers that choose experts, products in groups."""
    if type(module) in (nn.Linear, Conv1D) or not isinstance(module, nn.Linear):
        return isinstance(module, (nn.Linear, Conv1D))
    params = {name: torch.empty(param.shape, device="meta") for name, param in module.named_parameters()}
    try:
        out = functional_call(module, params, torch.empty(2, module.in_features, device="meta"))
    except (RuntimeError, IndexError, ValueError):  # of inputs that it does not take
        return False
    return isinstance(out, torch.Tensor) and out.shape == (2, module.out_features)


# Parameters, buffers and modules that only layers with a recurrent state have; the last one is xLSTM's.
STATEFUL = frozenset({"A_log", "A", "dt_bias", "slope_rate", "igate_preact"})
STATELESS_KINDS = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp"})  # in config.layer_types


def find_mixers(block: nn.Module) -> list[nn.Module]:
    """A block's layers with a recurrent state, recognized by a convolution or by `STATEFUL` attributes."""

    def has_state(module: nn.Module) -> bool:
        return isinstance(module, nn.Conv1d) or any(hasattr(module, name) for name in STATEFUL)

    return [child for child in block.children() if any(map(has_state, child.modules()))]


def needs_own_attention(blocks: nn.ModuleList, config: PreTrainedConfig) -> bool:
    """Whether attention has a feature that no backend supports: a state (Zaya), or key selection (DeepSeek V3.2)."""
    kinds = getattr(config, "layer_types", None) or ()
    known = STATELESS_KINDS | ({"chunked_attention"} if getattr(config, "attention_chunk_size", None) else set())
    return any(
        any(hasattr(mixer, "num_key_value_groups") for mixer in mixers)
        or (not mixers and i < len(kinds) and kinds[i] not in known)
        for i, mixers in enumerate(map(find_mixers, blocks))
    )
