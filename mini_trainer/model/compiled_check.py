"""The start-up check of compiled blocks: each gives the same results as uncompiled, forward and backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils._pytree import tree_leaves, tree_map_only

from mini_trainer.distributed.compilation import Compiled, count_graphs, describe_cache
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World
from mini_trainer.model.attention import find_features
from mini_trainer.model.check import draw_sequences, is_float8, token_errors
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.text_tower import find_blocks, text_config
from mini_trainer.objectives.objective import Objective, PackedModel

# Allowed relative differences: in fp32, in types in which fused kernels round less, and of products in fp8, to whose
# values, an eighth apart, both forms may round to either side.
EXACT, ROUNDED, EIGHT_BIT = 1e-3, 1e-1, 2.5e-1
SMALL = 1e-2  # gradients are compared with this share of their block's, if they are smaller: a key's bias has none


class Results(NamedTuple):
    """Results of one form of a block."""

    outputs: list[Tensor]
    gradients: list[Tensor]  # of the input, if it has one, and of the parameters that train


def check_compiled(
    packed_model: PackedModel,
    objective: Objective,
    *,
    world: World,
    progress: Callable[[str], None] = lambda where: None,
) -> None:
    """Compiles every block for training, and compares its outputs and gradients with those of its uncompiled code.

    ValueError naming the first block that differs or cannot be compiled, or if torch compiles no part of any. A block
    gets the uncompiled outputs of the one before it, for three short random sequences, and random gradients; none are
    accumulated. Models with dropout are compared in eval mode. `progress` is called for every block.
    """
    model = packed_model.model
    names = {module: name for name, module in model.named_modules()}
    blocks = find_blocks(model)
    has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in blocks.modules())
    packed_model.train(not (has_dropout or "dropout" in find_features(model, text_config(model.config))))
    check = BlockCheck(packed_model, progress)
    for block, compiled in zip(blocks, packed_model.compiled, strict=True):
        compiled.replacement = check.make_comparison(block, f"{names[block]} ({compiled.name})", compiled)
    sequences = draw_sequences(model, np.random.default_rng(0))
    micro_batch = objective.pack([objective.make_check_sample(ids) for ids in sequences])
    with torch.no_grad():
        packed_model.hidden_states(micro_batch.to(world.device))
    for compiled in packed_model.compiled:
        compiled.replacement = None
    reshard(packed_model)
    packed_model.train()
    if check.problems:
        raise ValueError(
            f"--compile: {check.problems[0]} ({len(check.problems)} of {len(blocks)} blocks): remove the option, or use"
            " another version of torch"
        )
    if count_graphs() == 0:
        reasons = torch._dynamo.utils.counters["graph_break"] or {"unknown": 1}
        raise ValueError(
            f"--compile has no effect: torch compiles no part of {names[blocks[0]]} ({packed_model.compiled[0].name}):"
            f" {next(iter(reasons)).splitlines()[0]}; remove the option"
        )
    log.info(f"compiled blocks agree with uncompiled ones; {describe_cache()}")


class BlockCheck:
    """Runs blocks in both forms; `problems` describes those that differ."""

    def __init__(self, packed_model: PackedModel, progress: Callable[[str], None]):
        self.problems: list[str] = []
        self.progress = progress
        self.is_exact = packed_model.compute_dtype == torch.float32
        # Whether the next block's input has a gradient. With adapters the first one's has none, which is another graph.
        self.has_gradient = packed_model.model.get_input_embeddings().weight.requires_grad

    def make_comparison(self, block: nn.Module, name: str, compiled: Compiled) -> Callable:
        """A forward method that compares both forms and returns the uncompiled one's outputs, without gradients.
        It is called inside the block, where FSDP has gathered its parameters."""

        def compare(*args: Any, **kwargs: Any) -> Any:
            self.progress(f"compiling {name}")
            params = [param for param in block.parameters() if param.requires_grad]
            expected, outputs = run_form(compiled.function, params, args, kwargs, has_gradient=self.has_gradient)
            try:
                found, _ = run_form(compiled.run, params, args, kwargs, has_gradient=self.has_gradient)
            except TorchDynamoException as error:
                self.problems.append(f"{name} cannot be compiled: {' '.join(str(error).split()[:40])}")
            else:
                # In bf16, rounding sends some tokens to other experts.
                moves_tokens = not self.is_exact and any(param.ndim == 3 for param in block.parameters())
                error, allowed = measure_error(found, expected, moves_tokens), self.find_allowed(block)
                if not error <= allowed:
                    self.problems.append(
                        f"{name} computes something else once compiled: outputs or gradients differ by {error:.1e}"
                        f" (allowed: {allowed:.0e})"
                    )
            self.has_gradient = self.has_gradient or bool(params)
            return outputs

        return compare

    def find_allowed(self, block: nn.Module) -> float:
        if any(is_float8(module) for module in block.modules()):
            return EIGHT_BIT
        return EXACT if self.is_exact else ROUNDED


@torch.enable_grad()
def run_form(
    function: Callable, params: list[Tensor], args: tuple, kwargs: dict[str, Any], *, has_gradient: bool
) -> tuple[Results, Any]:
    """Results of one form of a block, and its return value without gradients."""
    hidden = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_(has_gradient)
    args, kwargs = ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": hidden})
    returned = function(*args, **kwargs)
    outputs = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    trained = [output for output in outputs if output.requires_grad]
    random = torch.Generator(hidden.device).manual_seed(0)
    slopes = [torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=random) for t in trained]
    inputs = [tensor for tensor in (hidden, *params) if tensor.requires_grad]
    gradients = []
    if trained and inputs:
        gradients = torch.autograd.grad(trained, inputs, slopes, allow_unused=True, materialize_grads=True)
    return Results([t.detach() for t in outputs], list(gradients)), tree_map_only(Tensor, Tensor.detach, returned)


def measure_error(found: Results, expected: Results, uses_median: bool) -> float:
    """Largest relative difference of a token's outputs or of a gradient; of both the median if `uses_median`."""
    tokens = [
        token_errors(ours.flatten(0, -2), own.flatten(0, -2))
        for ours, own in zip(found.outputs, expected.outputs, strict=True)
    ]
    norms = [own.float().norm() for own in expected.gradients]
    least = SMALL * torch.stack(norms).norm() if norms else 0.0
    gradients = [
        (ours.float() - own.float()).norm() / norm.clamp_min(least)
        for ours, own, norm in zip(found.gradients, expected.gradients, norms, strict=True)
    ]
    errors = [torch.cat(tokens), *([torch.stack(gradients)] if gradients else [])]
    return max((each.median() if uses_median else each.max()).item() for each in errors)
