"""MLPs, experts and norms, a tile of the row at a time: what they hold between their first and last operation is the
most that a long row needs.

Each tile is a checkpoint of torch's: it keeps its part of the input and is computed again in backward. Routers are
outside of the tiles, so that what is known of them is the same.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from model.method import MetaModel

MOST_TILES = 16  # of a row: each tile's part of a weight's gradient is rounded to the type that is computed in
LEAST_TOKENS = 1024  # of a tile: a GPU is busy with the product of this many rows
LINEAR = (nn.Linear, Conv1D)


def find_tiled(model: PreTrainedModel, blocks: nn.ModuleList) -> tuple[str, ...]:
    """Names of the modules in the blocks that take each token by itself. ValueError if no MLP is among them.

    To be called before a method puts its layers in, which may hide what a module is.
    """
    modules = [module for block in blocks for module in list_tiled(block)]
    if all(map(is_norm, modules)):
        raise ValueError(
            f"--tiled-mlp: model type {model.config.model_type!r} has no module for its MLPs that takes hidden states"
            " alone, and nothing else can be cut into tiles: leave it out"
        )
    names = {module: name for name, module in model.named_modules()}
    return tuple(names[module] for module in modules)


def list_tiled(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost ones inside of `module`."""
    for child in module.children():
        if is_mlp(child) or holds_experts(child) or is_norm(child):
            yield child
        else:
            yield from list_tiled(child)


def is_mlp(module: nn.Module) -> bool:
    """Whether the module takes hidden states alone, and all its parameters are those of linear layers."""
    parts = list(module.modules())
    linear = [part for part in parts if isinstance(part, LINEAR)]
    num_held = sum(len(list(layer.parameters())) for layer in linear)
    has_choice = any(isinstance(part, nn.ModuleList) for part in parts)  # experts, one by one, beside their router
    is_whole = num_held == len(list(module.parameters())) and not has_choice
    return count_inputs(module) == 1 and len(linear) > 1 and is_whole


def holds_experts(module: nn.Module) -> bool:
    """Whether the module takes hidden states, each token's experts and their weights, and holds the experts as one."""
    return count_inputs(module) == 3 and any(param.ndim == 3 for param in module.parameters(recurse=False))


def is_norm(module: nn.Module) -> bool:
    """Whether the module takes hidden states alone, and has one number for each of their columns, if any."""
    is_named = "norm" in type(module).__name__.lower()
    return is_named and count_inputs(module) == 1 and all(param.ndim == 1 for param in module.parameters())


def count_inputs(module: nn.Module) -> int | None:
    """The parameters of the module's forward; None if it takes any number of them."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    has_any = any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters)
    return None if has_any else len(parameters)


def apply_tiling(meta: MetaModel) -> None:
    """Makes modules, with the layers that a method has put into or around them, take a tile at a time."""
    for name in meta.tiled:
        module = meta.model.get_submodule(name)
        module.forward = functools.partial(run_in_tiles, module.forward)


def run_in_tiles(forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:  # each (1, T, ...) or (T, ...)
    shape = inputs[0].shape
    dim = next((i for i, size in enumerate(shape[:-1]) if size > 1), 0)
    size = max(LEAST_TOKENS, -(-shape[dim] // MOST_TILES))
    if shape[dim] <= size:
        return forward(*inputs)
    tiles = zip(*(tensor.split(size, dim) for tensor in inputs), strict=True)
    with inside_tiles():
        return torch.cat([checkpoint(forward, *tile, use_reentrant=False) for tile in tiles], dim)


is_inside_tiles = False  # where nothing is kept for backward, unlike in the rest of a block


@contextmanager
def inside_tiles() -> Iterator[None]:
    global is_inside_tiles
    outer, is_inside_tiles = is_inside_tiles, True
    try:
        yield
    finally:
        is_inside_tiles = outer
