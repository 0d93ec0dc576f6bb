"""Fused kernels in the modules of a model: RMS norms, gated MLPs, rotary embeddings, and sums before a norm.

A module gets one if its own code computes what the kernel does, which is tried out on random numbers; there is no list
of model types. Names, parameters and checkpoints stay as they are, and each module has a switch. Norms, MLPs and sums
are liger-kernel's functions, called directly.
"""

import ast
import copy
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.functional import gelu, silu

from mini_trainer.model.kernels.remade import is_noted, note
from mini_trainer.objectives.objective import KernelSwitch

ROTATE = "apply_rotary_pos_emb"  # transformers' name for it, in each of its files
TOKENS = 5  # of a trial
MOST = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # relative error


class Trial(NamedTuple):
    """A kernel and plain code for the same, both called with `kind` and tensors of these shapes."""

    kernel: Callable[..., Tensor | tuple[Tensor, ...]]
    plain: Callable[..., Tensor | tuple[Tensor, ...]]
    kind: Any
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class Fused:
    """A module's forward method in two forms: its own, and by fused kernels."""

    own: Callable
    fused: Callable
    add: Callable | None = None  # of a norm: (residual, hidden) -> (norm of the sum, the sum)
    trials: tuple[Trial, ...] = ()
    switch: KernelSwitch = field(default_factory=KernelSwitch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.fused if self.switch.is_on else self.own)(*args, **kwargs)


def apply_kernels(model: nn.Module, blocks: nn.ModuleList) -> KernelSwitch:
    """Gives each module the kernels for what it computes; later changes to `forward` go around them."""
    switch = KernelSwitch()
    for module in [*model.modules(), *blocks]:  # blocks once more, after their norms
        fused = fuse_norm(module) or fuse_mlp(module) or fuse_rotation(module) or fuse_sums(module)
        if fused is not None and not isinstance(module.forward, Fused):
            module.forward, fused.switch = fused, switch
            switch.num_modules += 1
            switch.trials |= {*fused.trials}
    return switch


def is_covered(block: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a block keeps for backward only inputs of products, of attention and of kernels that compute in `dtype`.
    Layers that keep more, such as experts, or adapters with dropout, have modules of other kinds."""

    def is_known(module: nn.Module) -> bool:
        params = [param for param in module._parameters.values() if param is not None]
        if isinstance(module.forward, Fused):
            return all(param.dtype == dtype for param in params)
        return type(module) is nn.Linear or not (params or (isinstance(module, nn.Dropout) and module.p))

    modules = list(block.modules())
    has_gated = any(isinstance(module.forward, Fused) and hasattr(module, GATED[0]) for module in modules)
    return has_gated and all(map(is_known, modules))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu")


def try_out(function: Callable, *given: Any) -> Any:
    """What a function of a model makes of random numbers; None if it needs more, or something else, than these."""
    try:
        with torch.no_grad():
            return function(*given)
    except Exception:  # of a model's code, which may be anything
        return None


def takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


# Norms. A kind of norm: (epsilon, what is added to the weight, liger-kernel's name for when it rounds).

Kind = tuple[float, float, str]


def fuse_norm(module: nn.Module) -> Fused | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if [*module._parameters] != ["weight"] or module._modules or weight.ndim != 1 or not isinstance(epsilon, float):
        return None
    if not takes_one(module) or (kind := find_kind(module, epsilon)) is None:
        return None
    given, weight, rows = (module, module.forward, kind), weight.shape, (TOKENS, len(weight))
    trials = (
        Trial(normalize, normalize_plainly, kind, (weight, rows)),
        Trial(add_and_normalize, add_and_normalize_plainly, kind, (weight, rows, rows)),
    )
    return Fused(
        module.forward, functools.partial(run_norm, *given), functools.partial(run_norm_of_sum, *given), trials
    )


def run_norm(module: nn.Module, own: Callable, kind: Kind, x: Tensor) -> Tensor:
    if x.dtype != module.weight.dtype:  # a weight kept in fp32: its product has another type
        return own(x)
    return normalize(kind, module.weight, x)


def run_norm_of_sum(
    module: nn.Module, own: Callable, kind: Kind, residual: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    if not residual.dtype == hidden.dtype == module.weight.dtype:
        return own(total := residual + hidden), total
    return add_and_normalize(kind, module.weight, residual, hidden)


def find_kind(module: nn.Module, epsilon: float) -> Kind | None:
    """The kind of a norm's code, by its result in bf16, which shows when it rounds."""
    tried, x, weight = copy.copy(module), draw(5, 64).bfloat16(), draw(64).bfloat16()
    tried._parameters = {"weight": nn.Parameter(weight)}
    result = try_out(tried.forward, x)
    if not isinstance(result, Tensor) or result.dtype != x.dtype:
        return None
    kinds = itertools.product((epsilon,), (0.0, 1.0), ("llama", "gemma"))
    return next((kind for kind in kinds if torch.equal(result, normalize_plainly(kind, weight, x))), None)


def normalize_plainly(kind: Kind, weight: Tensor, x: Tensor) -> Tensor:
    epsilon, offset, casting = kind
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    if casting == "llama":
        return (offset + weight) * scaled.to(x.dtype)
    return (scaled * (offset + weight.float())).to(x.dtype)  # rounded last


def normalize(kind: Kind, weight: Tensor, x: Tensor) -> Tensor:
    if isinstance(x, FakeTensor):
        result = Simulated.apply("norm", x, weight)
    else:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        result = LigerRMSNormFunction.apply(x, weight, *kind, False)  # not in place: others may have the gradient, too
    return note(result, normalize, kind, weight, x)


def add_and_normalize_plainly(kind: Kind, weight: Tensor, residual: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return normalize_plainly(kind, weight, residual + hidden), residual + hidden


def add_and_normalize(kind: Kind, weight: Tensor, residual: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(hidden, FakeTensor):
        result, total = Simulated.apply("sum", hidden, residual, weight)
    else:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        result, total = LigerFusedAddRMSNormFunction.apply(hidden, residual, weight, *kind, False)
    return note(result, normalize, kind, weight, total), total


# Gated MLPs.

GATED = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS = {"silu": silu, "gelu": functools.partial(gelu, approximate="tanh")}


def fuse_mlp(module: nn.Module) -> Fused | None:
    """down(activation(gate(x)) up(x))."""
    if any(type(getattr(module, name, None)) is not nn.Linear for name in GATED) or not takes_one(module):
        return None
    tried, x, layers = copy.copy(module), draw(5, 8), {name: nn.Linear(8, 8, bias=False) for name in GATED}
    for i, layer in enumerate(layers.values()):
        layer.weight = nn.Parameter(draw(8, 8).roll(i, 0))
    tried._modules = module._modules | layers
    result, (gate, up, down) = try_out(tried.forward, x), (layer.weight for layer in layers.values())
    for name in ACTIVATIONS:
        expected = multiply_plainly(name, x @ gate.t(), x @ up.t()) @ down.t()
        if isinstance(result, Tensor) and torch.allclose(result, expected, rtol=1e-5, atol=1e-5):
            rows = (TOKENS, module.gate_proj.out_features)
            trials = (Trial(multiply_gated, multiply_plainly, name, (rows, rows)),)
            return Fused(module.forward, functools.partial(run_mlp, module, name), trials=trials)
    return None


def run_mlp(module: nn.Module, activation: str, x: Tensor) -> Tensor:
    return module.down_proj(multiply_gated(activation, module.gate_proj(x), module.up_proj(x)))


def multiply_plainly(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    return ACTIVATIONS[activation](gate) * up


def multiply_gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if isinstance(gate, FakeTensor):
        result = Simulated.apply("gated", gate, up)
    elif activation == "silu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        result = LigerSiLUMulFunction.apply(gate, up)
    else:
        from liger_kernel.ops.geglu import LigerGELUMulFunction

        result = LigerGELUMulFunction.apply(gate, up)
    return note(result, multiply_gated, activation, gate, up)


# Rotary embeddings.


def fuse_rotation(module: nn.Module) -> Fused | None:
    forward = getattr(module.forward, "__func__", None)  # of the class
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    if ROTATE not in forward.__code__.co_names or not is_rotation(own := forward.__globals__.get(ROTATE)):
        return None
    rebuilt, trials = rebuild(forward, forward.__code__, {ROTATE: functools.partial(rotate, own)}), ()
    if isinstance(size := getattr(module, "head_dim", None), int):
        trials = (Trial(turn_by_kernel, turn, own, ((1, 4, TOKENS, size), (1, 2, TOKENS, size))),)
    return Fused(module.forward, MethodType(rebuilt, module), trials=trials)


def turn(rotate: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    angles = query.detach()[0, :1]  # (1, T, D)
    return rotate(query, key, angles.cos(), angles.sin())


def turn_by_kernel(own: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return turn(functools.partial(rotate, own), query, key)


def rebuild(function: FunctionType, code: Any, names: dict[str, Any]) -> FunctionType:
    """The function with other code, or with other things behind some global names."""
    rebuilt = FunctionType(code, function.__globals__ | names, function.__name__, function.__defaults__)
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return rebuilt


@functools.cache
def is_rotation(function: Any) -> bool:
    """Whether it computes x cos + rotate_half(x) sin, for any cosines and sines."""
    pair, (cos, sin) = (draw(1, 3, 5, 8), draw(1, 2, 5, 8)), draw(2, 1, 5, 8)
    halves = [torch.cat([-x[..., 4:], x[..., :4]], -1) for x in pair]
    expected = [x * cos[:, None] + half * sin[:, None] for x, half in zip(pair, halves, strict=True)]
    result = try_out(function, *pair, cos, sin)
    if not isinstance(result, tuple) or [getattr(each, "shape", None) for each in result] != [x.shape for x in pair]:
        return False
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(result, expected, strict=True))


def rotate(
    own: Callable, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    is_usual = query.ndim == 4 and cos.ndim == 3 and cos.shape == sin.shape and cos.shape[1:] == query.shape[2:]
    if args or kwargs or not is_usual or len(cos) not in (1, len(query)):  # a part of each head, or another layout
        return own(query, key, cos, sin, *args, **kwargs)
    if isinstance(query, FakeTensor):
        result = Simulated.apply("rotation", query, key, cos, sin)
    else:
        from mini_trainer.model.kernels.rotary import Rotation

        result = Rotation.apply(query, key, cos, sin)
    # Only after norms of queries and keys, whose inputs are kept: else these are as large as what is made of them.
    return note(result, rotate, own, query, key, cos, sin) if is_noted(query) else result


# Sums before a norm.

CALL = "__add_and_normalize"  # in the rebuilt method
CHECKPOINTING = "forward_with_checkpointing"  # transformers' own wrapper of a block's method, which is never turned on


def fuse_sums(block: nn.Module) -> Fused | None:
    forward = getattr(block.forward, "__func__", None)
    while getattr(forward, "__code__", None) is not None and forward.__code__.co_name == CHECKPOINTING:
        forward = forward.__wrapped__
    fused, norms = fuse_sums_of(forward) if isinstance(forward, FunctionType) else (None, ())
    if fused is None or not any(getattr(getattr(block, norm).forward, "add", None) for norm in norms):
        return None
    return Fused(block.forward, MethodType(fused, block))


@functools.cache
def fuse_sums_of(forward: FunctionType) -> tuple[FunctionType | None, tuple[str, ...]]:
    """A forward method in which each

        hidden = residual + hidden; residual = hidden; hidden = self.norm(hidden)

    is one call, and the names of these norms; None if there is none, or if the method is not plain.
    """
    if hasattr(forward, "__wrapped__") or forward.__closure__:
        return None, ()
    try:
        lines, first = inspect.getsourcelines(forward)
        (method,) = (tree := ast.parse(textwrap.dedent("".join(lines)))).body
    except (OSError, SyntaxError):
        return None, ()
    method.decorator_list, method.returns = [], None
    for argument in [node for node in ast.walk(method.args) if isinstance(node, ast.arg)]:
        argument.annotation = None
    body, norms = [], []
    for statement in method.body:
        body.append(statement)
        if (match := match_sum(body[-3:])) is not None:
            body[-3:] = [ast.copy_location(ast.parse(match[0]).body[0], statement)]
            norms.append(match[1])
    if not norms:
        return None, ()
    method.body = body
    ast.increment_lineno(ast.fix_missing_locations(tree), first - 1)
    module_code = compile(tree, forward.__code__.co_filename, "exec")
    (code,) = (each for each in module_code.co_consts if inspect.iscode(each))
    return rebuild(forward, code, {CALL: call_norm}), tuple(norms)


def match_sum(statements: list[ast.stmt]) -> tuple[str, str] | None:
    """The one call in place of these three statements, and the norm's name; None if they are others."""
    words = [ast.unparse(each) for each in statements]
    names = [word.partition(" = ")[0] for word in words]
    if len(words) != 3 or names[0] != names[2] or not all(map(str.isidentifier, names)):
        return None
    hidden, residual, _ = names
    norm = words[2].removeprefix(f"{hidden} = self.").removesuffix(f"({hidden})")
    sums = (f"{hidden} = {residual} + {hidden}", f"{hidden} = {hidden} + {residual}")
    rest = [f"{residual} = {hidden}", f"{hidden} = self.{norm}({hidden})"]
    if words[0] not in sums or words[1:] != rest or not norm.isidentifier():
        return None
    return f"{hidden}, {residual} = {CALL}(self.{norm}, {residual}, {hidden})", norm


def call_norm(norm: nn.Module, residual: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the sum, and the sum; by the norm itself if something is around its kernel."""
    fused = norm.forward
    if isinstance(fused, Fused) and fused.add is not None and fused.switch.is_on and not norm._forward_hooks:
        return fused.add(residual, hidden)
    total = residual + hidden
    return norm(total), total


class Simulated(torch.autograd.Function):
    """In a plan, where no kernel runs: allocates what a kernel returns and keeps."""

    @staticmethod
    def forward(ctx: Any, kernel: str, *inputs: Tensor) -> Any:
        ctx.kernel, (first, second, *others) = kernel, inputs
        scales = first.new_empty(first.shape[:-1], dtype=torch.float32)  # of a norm's rows
        outputs, kept = (torch.empty_like(first),), inputs
        match kernel:
            case "norm":
                kept = (first, second, scales)
            case "sum":
                outputs = (*outputs, torch.empty_like(first))
                kept = (outputs[1], *others, scales)
            case "rotation":
                outputs, kept = (*outputs, torch.empty_like(second)), others
        ctx.save_for_backward(*kept)
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        match ctx.kernel:
            case "norm":
                return None, torch.empty_like(gradients[0]), torch.empty_like(kept[1])
            case "sum":
                return None, *[torch.empty_like(gradients[0])] * 2, torch.empty_like(kept[1])
            case "gated":  # in place of what was kept
                return None, *kept
        return None, *map(torch.empty_like, gradients), None, None


def find_fault(kernels: KernelSwitch, device: torch.device, dtype: torch.dtype) -> str | None:
    """What the first kernel of a model does wrong on random numbers; None if none does."""
    for trial in kernels.trials:
        try:
            error = compare(trial, device, dtype)
        except Exception as failure:  # of the compiler, the driver or the kernel
            return f"{trial.kernel.__name__}: {type(failure).__name__}: {failure}"
        if not error <= MOST[dtype]:
            return f"{trial.kernel.__name__}: a result or a gradient differs by {error:.2g} of its size"
    return None


def compare(trial: Trial, device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative error of the kernel's results and gradients."""
    drawn = [draw(len(trial.shapes), *shape)[i].to(device, dtype) for i, shape in enumerate(trial.shapes)]
    both = []
    for compute in (trial.kernel, trial.plain):
        given = [each.clone().requires_grad_() for each in drawn]  # kernels may write into what they keep
        results = compute(trial.kind, *given)
        results = (results,) if isinstance(results, Tensor) else results
        slopes = [each.detach().cos() for each in results]
        both.append([*results, *torch.autograd.grad(results, given, slopes)])
    return max(((a - b).float().norm() / b.float().norm()).item() for a, b in zip(*both, strict=True))
