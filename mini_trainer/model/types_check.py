"""Part of the start-up check: the types in which weights compute, and the experts that routers choose."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from mini_trainer.distributed.world import World
from mini_trainer.model.precision import choose_types
from mini_trainer.model.sharding import reshard
from mini_trainer.model.weights import unshard
from mini_trainer.objectives.families import text_tower
from mini_trainer.objectives.objective import PackedModel

FEW = 0.02  # share of tokens that another kernel's rounding may send to other experts, or one token


@dataclass
class Watched:
    """What a forward pass of a model was seen to do."""

    types: dict[str, torch.dtype] = field(default_factory=dict)  # of the weights in place
    routed: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = field(default_factory=list)
    # Routers, their arguments, and the experts (tokens, chosen) that they chose.


@contextmanager
def watched(packed_model: PackedModel) -> Iterator[Watched]:
    """Notes what forward passes of the blocks do inside this context."""
    model, seen = packed_model.model, Watched()
    names = {module: f"{name}." for name, module in model.named_modules()}
    blocks = text_tower.find_blocks(model)

    def note_types(block: nn.Module, args: Any) -> None:
        params = ((names[m] + key, p) for m in block.modules() for key, p in m.named_parameters(recurse=False))
        seen.types.update((name, p.dtype) for name, p in params if p.is_floating_point() and not isinstance(p, DTensor))

    def note_choice(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if (chosen := find_chosen(out)) is not None:
            seen.routed.append((module, args, kwargs, chosen))

    hooks = [block.register_forward_pre_hook(note_types) for block in blocks]
    inside = {module for block in blocks for module in block.modules() if module is not block}
    hooks += [module.register_forward_hook(note_choice, with_kwargs=True) for module in inside]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def find_chosen(out: Any) -> Tensor | None:
    """The experts (tokens, chosen) among what a router returns; None of other modules."""
    parts = [part for part in out if isinstance(part, Tensor)] if isinstance(out, tuple) else []
    found = [part for part in parts if part.dtype in (torch.int64, torch.int32) and part.ndim == 2]
    return found[0] if len(parts) > 1 and len(found) == 1 else None


def check_types(packed_model: PackedModel, seen: Watched, *, refused: str, world: World) -> None:
    """ValueError if weights compute in other types than transformers gives them, or routers choose otherwise than its
    own code with weights of its types, on the same inputs. All ranks call this."""
    compute_dtype = packed_model.compute_dtype
    for name, found in seen.types.items():
        expected = torch.float32 if name in packed_model.kept else compute_dtype
        if found != expected:
            raise ValueError(f"{refused}{name} computes in {found}, and in transformers' own model in {expected}")
    reshard(packed_model)
    names = {module: name for name, module in packed_model.model.named_modules()}
    num_tokens = sum(len(chosen) for *_, chosen in seen.routed)
    num_others = 0
    with packed_model.kernels.turned_off():
        for router, args, kwargs, chosen in seen.routed:
            own = {f"{names[router]}.{key}": param for key, param in router.named_parameters()}
            types = choose_types(packed_model.model, own, compute_dtype)
            params = {
                name.removeprefix(f"{names[router]}."): unshard(param, types[name], world=world)
                for name, param in own.items()
            }
            expected = find_chosen(functional_call(router, params, args, kwargs))
            num_others += int((chosen.sort(dim=1).values != expected.sort(dim=1).values).any(dim=1).sum())
    if num_others > max(1, FEW * num_tokens):
        raise ValueError(
            f"{refused}its routers send {num_others} of {num_tokens} tokens to other experts than transformers' own"
        )
