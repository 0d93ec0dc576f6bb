"""Where a model's transformer blocks are, and that their attention is told what is packed."""

import dis
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from objectives.text_tower import find_decoder, text_config


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer blocks: the module list as long as the model is deep.

    Where the config does not say how deep it is (several layers a block, several stacks, those of a decoder): the
    longest list that is in no other one, and all that hold modules of the same class.
    """
    decoder, num_blocks = find_decoder(model), getattr(text_config(model.config), "num_hidden_layers", None)
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks:
            return module
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    inner = {inside for outer in lists for block in outer for inside in block.modules()}
    lists = [blocks for blocks in lists if blocks not in inner]
    if not lists:
        raise ValueError(f"model type {model.config.model_type!r}: no list of blocks found to shard")
    kind = type(max(lists, key=len)[0])
    return nn.ModuleList(block for blocks in lists if type(blocks[0]) is kind for block in blocks)


@dataclass
class HeldRow:
    """The micro-batch that a block was given last; plain, since torch.compile follows what is done with it."""

    micro_batch: Any = None


def hand_micro_batch_on(blocks: nn.ModuleList) -> None:
    """In blocks that take keyword arguments and never use them (StableLM), gives the micro-batch to those inside.

    A block is given it again where it is recomputed, so that it is always that of the block's own call.
    """
    for block in blocks:
        if not drops_keywords(block):
            continue
        row = HeldRow()
        for child in block.children():
            if find_keywords(child) is not None:
                child.forward = functools.partial(call_with_row, child.forward, row)
        block.forward = functools.partial(hold_row, block.forward, row)


def hold_row(forward: Callable, row: HeldRow, *args: Any, **kwargs: Any) -> Any:
    row.micro_batch = kwargs.get("micro_batch")
    return forward(*args, **kwargs)


def call_with_row(forward: Callable, row: HeldRow, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, micro_batch=row.micro_batch, **kwargs)


def drops_keywords(module: nn.Module) -> bool:
    """Whether the module's forward takes any keyword arguments, and its code never reads them."""
    name = find_keywords(module)
    return name is not None and all(
        name not in (instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
        for instruction in dis.get_instructions(inspect.unwrap(type(module).forward))
    )


def find_keywords(module: nn.Module) -> str | None:
    """How the module's forward calls its other keyword arguments (kwargs); None if it takes none."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), None)


def find_linear_layers(model: PreTrainedModel, blocks: nn.ModuleList) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers inside the blocks, by name."""
    inside = {module for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if module in inside and isinstance(module, (nn.Linear, Conv1D))
    }
