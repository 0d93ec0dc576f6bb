"""The start-up check refuses a model whose packed sequences see each other, or whose loss here differs from its own.

L tokens of one sequence, T of a packed row, H hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AttentionInterface, PreTrainedModel

from mini_trainer.distributed.devices import run_eagerly
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, sum_parts
from mini_trainer.model.attention import OWN
from mini_trainer.model.blocks import find_mixers
from mini_trainer.model.precision import choose_types
from mini_trainer.model.sharding import reshard
from mini_trainer.model.weights import unshard
from mini_trainer.objectives.families import text_tower
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.objective import Objective, PackedModel

FEW = 0.02  # share of tokens that another kernel's rounding may send to other experts, or one token


def check_model(packed_model: PackedModel, objective: Objective, *, world: World) -> None:
    """Refuses a model whose packed sequences see each other or whose loss here differs from the model's own. Layers
    with a recurrent state whose kernels take a row's sequence borders are checked in train and in eval mode, in which
    transformers calls different kernels. If they leak across borders, these layers run once per sequence instead."""
    blocks = text_tower.find_blocks(packed_model.model)
    if any(map(find_mixers, blocks)):
        from mini_trainer.model.by_sequence import list_with_kernels, use_loop

        if mixers := list_with_kernels(blocks):
            try:
                check_packing(packed_model, objective, world=world, training=mixers)
                check_packing(packed_model, objective, world=world)
                return
            except ValueError as error:
                use_loop(blocks)
                log.warning(f"layers with a recurrent state run once per sequence, since with their kernels: {error}")
    check_packing(packed_model, objective, world=world)


@torch.no_grad()
@run_eagerly()  # in eval mode and without gradients the blocks would be compiled once more
def check_packing(
    packed_model: PackedModel, objective: Objective, *, world: World, training: Sequence[nn.Module] = ()
) -> None:
    """Compares, on three short random sequences: each one's hidden states before and after the others change; packed
    hidden states and loss with the model's own forward pass over one sequence at a time; and the sliding windows that
    reach the attention backend with those that the config declares. Layers in fp8 are compared with the model's own
    forward pass in higher precision.

    The modules in `training` are in train mode, all others in eval mode.
    """
    model = packed_model.model
    # Different kernels round differently. In bf16 this accumulates over layers (4 % was seen after 80) and routes some
    # tokens to other experts, so the median token decides there: wrong attention or positions move nearly all tokens.
    exact = packed_model.compute_dtype == torch.float32
    tolerance, rounding, loss_tolerance = (1e-4, 1e-4, 1e-5) if exact else (3e-2, 1e-1, 3e-2)
    random = np.random.default_rng(0)
    sequences, others = draw_sequences(model, random), draw_sequences(model, random)
    backend = text_tower.find_decoder(model).config._attn_implementation
    refused = f"model type {model.config.model_type!r} cannot be trained here: "
    packed_model.eval()
    for module in training:
        module.train()

    def pack(token_ids: list[np.ndarray]) -> MicroBatch:
        samples = [objective.make_check_sample(ids) for ids in token_ids]
        return objective.pack(samples, row_group=world.row_group).to(world.device)

    # No sequence changes when the others do.
    try:
        packed = pack(sequences)
        with watched(packed_model) as seen:
            hidden = split_rows(packed_model.hidden_states(packed), packed)[: len(sequences)]
    except Exception as error:  # models may raise anything when they make masks and positions
        words = str(error) or type(error).__name__
        raise ValueError(f"{refused}its forward pass fails on a packed row: {words}") from error
    check_types(packed_model, seen, refused=refused, world=world)
    for i in range(len(sequences)):
        changed = [s if j == i else other for j, (s, other) in enumerate(zip(sequences, others, strict=True))]
        others_changed = pack(changed)
        moved = split_rows(packed_model.hidden_states(others_changed), others_changed)[i]
        leak = token_errors(moved, hidden[i]).max().item()
        if not leak <= tolerance:
            raise ValueError(
                f"{refused}packed sequences see each other; changing the others in a row changed one by {leak:.1e}"
                f" (allowed: {tolerance:.0e})"
            )
    # The windows that the config declares reach the backend.
    if packed_model.backend != OWN:  # the model's own attention applies its own windows
        check_windows(packed_model, pack(sequences))

    # Hidden states and loss are the model's own.
    with in_high_precision(model) as changes:
        if changes:
            hidden = split_rows(packed_model.hidden_states(packed), packed)[: len(sequences)]
        loss = sum_parts(packed_model(pack(sequences)).total, world.row_group).item()
        if packed_model.backend != OWN:
            text_tower.set_attention(model, "eager")
        own_loss, errors = 0.0, []
        for sequence, packed_hidden in zip(sequences, hidden, strict=True):
            own_hidden, own_sum = packed_model.reference(pack([sequence]))
            errors.append(token_errors(packed_hidden, own_hidden[0]))
            own_loss += own_sum.item()
        if packed_model.backend != OWN:
            text_tower.set_attention(model, backend)
    error = (torch.cat(errors).max() if exact else torch.cat(errors).median()).item()
    if not error <= rounding:
        raise ValueError(
            f"{refused}packed hidden states differ from the model's own forward pass by {error:.1e}"
            f" (allowed: {rounding:.0e})"
        )
    if not abs(loss - own_loss) <= loss_tolerance * abs(own_loss):
        raise ValueError(
            f"{refused}its hidden states are right, but the loss over {len(sequences)} sequences is {loss:.6f} here and"
            f" {own_loss:.6f} from its own logits. Either its head (or auxiliary loss) does something unknown here, or"
            f" Loss.sum_own of the objective {objective.name} is not the same loss as Loss.sum"
        )
    reshard(packed_model)
    packed_model.train()


def draw_sequences(model: PreTrainedModel, random: np.random.Generator) -> list[np.ndarray]:
    """Draws three short sequences of random text tokens (no image placeholders)."""
    ids = np.arange(text_tower.count_logits(model.config))
    texts = np.setdiff1d(ids, list(text_tower.find_placeholders(model.config)))
    return [texts[random.integers(0, len(texts), length)] for length in (11, 16, 9)]


def split_rows(hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
    """Splits a packed row's hidden states (1, T, H) by sequence."""
    return hidden[0].float().split(micro_batch.row.seq_lengths)


def token_errors(value: Tensor, expected: Tensor) -> Tensor:  # (L,)
    """Relative distance of each token's hidden state (L, H) from the expected one; 0 if both are zero."""
    tiny = torch.finfo(torch.float32).tiny  # a padding token's state may be exactly zero
    return (value.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp_min(tiny)


def check_windows(packed_model: PackedModel, micro_batch: MicroBatch) -> None:
    """Refuses a model whose config declares sliding windows that its layers do not pass to the attention backend."""
    model, config = packed_model.model, text_tower.text_config(packed_model.model.config)
    backend = text_tower.find_decoder(model).config._attn_implementation
    if backend not in AttentionInterface():  # the model's own code, which gets no windows
        return
    attend, windows = AttentionInterface()[backend], []

    def record_window(*args, sliding_window: int | None = None, **kwargs):
        windows.append(sliding_window)
        return attend(*args, sliding_window=sliding_window, **kwargs)

    AttentionInterface.register("packed_recording", record_window)
    text_tower.set_attention(model, "packed_recording")
    packed_model.hidden_states(micro_batch)
    text_tower.set_attention(model, backend)
    if 0 in windows:
        raise ValueError(
            f"model type {model.config.model_type!r} cannot be trained here: its layers have a sliding window of 0"
            " tokens, none at all: set sliding_window in config.json to null for attention to all tokens"
        )
    num_seen = sum(window is not None for window in windows)
    if getattr(config, "layer_types", None) is not None:
        num_declared = config.layer_types.count("sliding_attention")
    else:
        num_declared = len(windows) if getattr(config, "sliding_window", None) else 0
    if num_declared != num_seen:
        raise ValueError(
            f"model type {model.config.model_type!r} cannot be trained here: its config declares {num_declared} layers"
            f" with a sliding window, but {num_seen} use one"
        )


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


def is_float8(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torchao.float8.")


@contextmanager
def in_high_precision(model: nn.Module) -> Iterator[bool]:
    """Layers in fp8 compute in their inputs' type. Yields whether there are any.
    Over many layers fp8 turns the last bit's differences of two attention kernels into 20 % of a hidden state."""
    layers = [module for module in model.modules() if is_float8(module)]
    for layer in layers:
        layer.forward = nn.Linear.forward.__get__(layer)
    try:
        yield bool(layers)
    finally:
        for layer in layers:
            del layer.forward
