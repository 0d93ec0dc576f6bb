"""Errors of our Triton kernels and liger-kernel's, in Triton's interpreter on the CPU, beside those of the eager code.

    OMP_NUM_THREADS=1 python benchmarks/kernel_errors.py > benchmarks/results/kernel_errors.txt

The kernels alone against fp64, optimizers with the same random bits; then, of models with all of them in place, the
loss and gradients of a packed row against those of the models' own code, in fp32: the interpreter multiplies the bits
of bf16 numbers as integers. Then compiles each of our kernels for GPUs, which needs none. Arguments: names of parts.
"""

import os
import sys

if sys.argv[1:] != ["--compile"]:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paths  # noqa: F401  (finds the tests' modules)
import torch
import triton
import triton.language as tl
from harness import describe_versions
from small_runs import full_gradients, make_micro_batch
from tiny_models import FAMILIES, build, check, save_model
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from mini_trainer.distributed.world import World, init_world
from mini_trainer.model.kernels import adamw, rotary
from mini_trainer.model.kernels.layers import find_fault
from mini_trainer.model.optim import compact_adamw

# Shapes whose blocks of 8-bit codes have 256, 64 and 32 numbers, and one without blocks; none fills a tile.
SHAPES = [(5, 512), (3, 7, 192), (7, 96), (1003,)]
NUM_STEPS = 5
# Errors as multiples of the eager ones, and the share of other codes. The interpreter truncates to bf16, GPUs round.
MOST = {"weights": 2.0, "rotations": 2.5, "codes": 1e-3}
CAPABILITIES = (80, 90)
# Queries, keys: heads and size that fill a power of two, and that do not.
HEADS = [(2, 5, 8, 4, 64), (1, 7, 3, 1, 24)]
LENGTHS = (13, 1, 22, 7)
MODELS = ("llama", "qwen2", "qwen3", "mistral_window", "gemma2_softcaps", "gemma3", "phi3", "olmo2", "granite_scaled",
          "mixtral", "gpt_oss_sinks")  # fmt: skip
MODES = ("none", "selective", "full")
MOST_OF_MODELS = 1e-5  # relative difference of a gradient
MAPS = tuple(table for is_signed in (True, False) for table in compact_adamw.load_map(is_signed, torch.device("cpu")))


class Drawn(compact_adamw.Rounding):
    """Gives the eager code the kernel's random bits."""

    def draw(self, weight: Tensor) -> Tensor:
        bits = torch.empty(weight.shape, dtype=torch.int32)
        seed, grid = self.generator.initial_seed(), (triton.cdiv(weight.numel(), adamw.TILE),)
        _write_bits[grid](bits, seed, self.number, weight.numel(), adamw.TILE // 256, 256)
        return bits


@triton.jit
def _write_bits(bits, seed, number, num_weights, NUM_BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    blocks = tl.program_id(0).to(tl.int64) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    at = blocks[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(bits + at, adamw.draw_bits(seed, number, blocks, NUM_BLOCKS, SIZE), mask=at < num_weights)


def make_state(weight: Tensor, *, is_8bit: bool) -> dict[str, Tensor]:
    optimizer = compact_adamw.CompactAdamW(
        [{"params": [weight], "weight_decay": 0.1}], lr=0, betas=(0.9, 0.95), eps=1e-8, is_8bit=is_8bit, seed=0
    )
    optimizer.init_state(weight)
    return optimizer.state[weight]


def copy_exactly(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The moments that a state stands for, in fp64."""
    if "exp_avg" in state:
        return {name: value.double() for name, value in state.items()}
    roots = compact_adamw.decode(state["exp_avg_root_codes"], state["exp_avg_root_scales"], is_signed=False).double()
    exp_avg = compact_adamw.decode(state["exp_avg_codes"], state["exp_avg_scales"], is_signed=True).double()
    return {"exp_avg": exp_avg, "exp_avg_sq": roots.square()}


def update_exactly(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict) -> Tensor:
    """The weights after AdamW's update in fp64, not rounded."""
    moments, (beta1, beta2), step = copy_exactly(state), group["betas"], group["step"] + 1
    exp_avg = beta1 * moments["exp_avg"] + (1 - beta1) * gradient.double()
    exp_avg_sq = beta2 * moments["exp_avg_sq"] + (1 - beta2) * gradient.double() ** 2
    update = exp_avg / (1 - beta1**step) / ((exp_avg_sq / (1 - beta2**step)).sqrt() + group["eps"])
    return weight.double() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update


def compare_updates(shape: tuple[int, ...], dtype: torch.dtype, *, is_8bit: bool) -> tuple[float, float, float]:
    """The largest errors of the kernel's and of the eager weights in some steps, and the share of other codes."""
    torch.manual_seed(0)
    ours, errors, others = torch.randn(shape).to(dtype), [], 0.0
    state = make_state(ours, is_8bit=is_8bit)
    for step in range(NUM_STEPS):
        gradient = (torch.randn(shape) * 10.0 ** torch.randint(-6, 2, shape)).to(dtype)
        group = dict(betas=(0.9, 0.95), step=step, lr=1e-2, weight_decay=0.1, eps=1e-8)
        exact = update_exactly(ours, gradient, state, group)
        eager, eager_state = ours.clone(), {name: value.clone() for name, value in state.items()}
        rounding = Drawn(torch.Generator().manual_seed(11 + step), number=3)
        compact_adamw.update_rows(eager, gradient.float(), eager_state, group, rounding)
        adamw.update_shard(ours, gradient, state, group, MAPS, rounding.generator.initial_seed(), rounding.number)
        if dtype == torch.bfloat16:
            exact = compact_adamw.round_to_bf16(exact.float(), rounding.draw(exact))
        errors.append([(each.double() - exact).abs().max().item() for each in (ours, eager)])
        codes = [name for name in state if name.endswith("codes")]
        others = max([others, *((state[name] != eager_state[name]).double().mean().item() for name in codes)])
    return *map(max, zip(*errors, strict=True)), others


def compare_optimizers(world: World) -> float:
    """The share of other codes after some steps of the optimizer, by the kernel and eagerly."""
    codes = []
    for is_usable in (True, False):
        compact_adamw.has_kernel = lambda weight, is_usable=is_usable: is_usable
        torch.manual_seed(0)
        weight = torch.nn.Parameter(DTensor.from_local(torch.randn(6, 512), world.mesh, [Shard(0)]))
        groups = [{"params": [weight], "weight_decay": 0.1}]
        optimizer = compact_adamw.CompactAdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, is_8bit=True, seed=0)
        for step in range(NUM_STEPS):
            weight.grad = DTensor.from_local(torch.randn(6, 512), world.mesh, [Shard(0)])
            optimizer.param_groups[0]["step"] = step
            optimizer.step()
        codes.append(optimizer.state[weight]["exp_avg_root_codes"].to_local())
    return (codes[0] != codes[1]).double().mean().item()


def compare_rotations(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[float, float]:
    """The largest errors of the kernel's and of the eager results, forward and backward."""
    torch.manual_seed(0)
    num_rows, num_tokens, num_queries, num_keys, size = shape
    pair = [torch.randn(num_rows, num_tokens, heads, size).to(dtype) for heads in (num_queries, num_keys)]
    slopes = [torch.randn_like(each).transpose(1, 2) for each in pair]
    cos, sin = torch.randn(2, num_rows, num_tokens, size).to(dtype)

    def run(rotate, dtype: torch.dtype) -> list[Tensor]:
        given = [each.to(dtype).transpose(1, 2).requires_grad_() for each in pair]
        turned = rotate(*given, cos.to(dtype), sin.to(dtype))
        return [*turned, *torch.autograd.grad(turned, given, [slope.to(dtype) for slope in slopes])]

    exact = run(apply_rotary_pos_emb, torch.float64)
    both = (run(rotary.Rotation.apply, dtype), run(apply_rotary_pos_emb, dtype))
    return tuple(max((a - b).abs().max().item() for a, b in zip(each, exact, strict=True)) for each in both)


def fill_gaps() -> None:
    """In the interpreter functions of CUDA's library are only declared and return None, and a kernel's float, when
    compiled an fp32 tensor, is Python's, which has no `to`."""
    import liger_kernel.ops  # noqa: F401  (imports all kernels)

    own = {"rsqrt": rsqrt, "tanh": tanh}
    for file, module in list(sys.modules.items()):
        for name in own.keys() & vars(module).keys() if file.startswith("liger_kernel.ops") else ():
            setattr(module, name, own[name])
    convert = interpreter._implicit_cvt

    def convert_argument(argument: object) -> object:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = convert_argument


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


def compare_model(name: str, mode: str, world: World) -> float:
    """The largest relative difference of a gradient, or of the loss; ValueError where a check at the start fails."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(FAMILIES[name], Path(folder))
        for which in ("eager", "fused"):
            model = build(path, world, kernels=which, activation_checkpointing=mode)
            check(model, world)
            if which == "fused" and (fault := find_fault(model.kernels, world.device, torch.float32)):
                raise ValueError(fault)
            loss = model(make_micro_batch(LENGTHS, seed=0)).loss
            loss.backward()
            found.append({"loss": loss.detach()} | full_gradients(model))
    expected, ours = found
    return max(((ours[key] - each).norm() / each.norm()).item() for key, each in expected.items())


def compile_kernel(kernel, capability: int, types: dict[str, str], constants: dict[str, object]) -> int:
    """Bytes of the machine code for GPUs of this capability. `types`: of arguments that are no fp32 numbers."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "fp32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])


def compile_update(dtype: str, capability: int, *, is_8bit: bool) -> int:
    names = adamw._update.arg_names
    types = dict.fromkeys(names[: names.index("num_weights")], "*fp32")
    types |= dict.fromkeys(("weight", "gradient"), dtype) | {"num_weights": "i64", "seed": "i32", "number": "i32"}
    types |= dict.fromkeys(("first", "second"), "*u8") if is_8bit else {}
    constants = dict(IS_CODED=is_8bit, ROUNDS=dtype == "*bf16", NUM_BLOCKS=adamw.TILE // 256, SIZE=256)
    return compile_kernel(adamw._update, capability, types, constants)


def compile_rotation(dtype: str, capability: int, *, is_backward: bool) -> int:
    names = rotary._rotate.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys(names[: names.index("num_tokens")], dtype)
    constants = dict(NUM_QUERIES=32, NUM_KEYS=8, HALF=64, QUERIES=32, KEYS=8, WIDTH=64, IS_BACKWARD=is_backward)
    return compile_kernel(rotary._rotate, capability, types, constants)


def print_sizes(name: str, sizes: Iterator[int]) -> None:
    print(name.ljust(40), *(f"{size:>9,}" for size in sizes))


def compile_all() -> None:
    for dtype in ("*fp32", "*bf16"):
        for flag in (True, False):
            name = f"AdamW, {dtype[1:]}, {8 if flag else 32}-bit moments"
            print_sizes(name, (compile_update(dtype, each, is_8bit=flag) for each in CAPABILITIES))
            name = f"rotary embeddings, {dtype[1:]}, {'backward' if flag else 'forward'}"
            print_sizes(name, (compile_rotation(dtype, each, is_backward=flag) for each in CAPABILITIES))


def list_cases() -> Iterator[tuple[tuple[int, ...], str, bool]]:
    for shape in SHAPES:
        for dtype in ("float32", "bfloat16"):
            for is_8bit in (True, False) if len(shape) > 1 else (False,):
                yield shape, dtype, is_8bit


def check_updates(world: World) -> bool:
    print(f"{'kernel':45}{'error':>10}{'eager':>10}{'other codes':>13}")
    is_right = True
    for shape, dtype, is_8bit in list_cases():
        ours, eager, others = compare_updates(shape, getattr(torch, dtype), is_8bit=is_8bit)
        is_right &= ours <= MOST["weights"] * eager and others < MOST["codes"]
        name = f"AdamW, {dtype}, {8 if is_8bit else 32}-bit moments {'x'.join(map(str, shape))}"
        print(f"{name:45}{ours:>10.1e}{eager:>10.1e}{others:>13.1e}", flush=True)
    others = compare_optimizers(world)
    print(f"{'CompactAdamW.step, 6x512':65}{others:>13.1e}")
    return is_right and others < MOST["codes"]


def check_rotations() -> bool:
    is_right = True
    for shape in HEADS:
        for dtype in ("float32", "bfloat16"):
            ours, eager = compare_rotations(shape, getattr(torch, dtype))
            is_right &= ours <= MOST["rotations"] * eager
            name = f"rotary embeddings, {dtype} {'x'.join(map(str, shape))}"
            print(f"{name:45}{ours:>10.1e}{eager:>10.1e}", flush=True)
    return is_right


def check_models(names: list[str], world: World) -> bool:
    fill_gaps()
    print(f"{'model':18} " + " ".join(f"{mode:>10}" for mode in MODES) + "   largest relative difference of a gradient")
    is_right = True
    for name in names:
        errors = [compare_model(name, mode, world) for mode in MODES]
        is_right &= all(error <= MOST_OF_MODELS for error in errors)
        print(f"{name:18} " + " ".join(f"{error:10.1e}" for error in errors), flush=True)
    return is_right


def main(asked: list[str]) -> None:
    if asked == ["--compile"]:
        compile_all()
        return
    print(describe_versions("torch", "transformers", "triton", "liger-kernel"))
    world, asked = init_world(), asked or ["updates", "rotations", *MODELS]
    is_right = "updates" not in asked or check_updates(world)
    is_right &= "rotations" not in asked or check_rotations()
    names = [name for name in asked if name in MODELS]
    is_right &= not names or check_models(names, world)
    print("bytes of machine code for GPUs of capability", *CAPABILITIES, flush=True)
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__, "--compile"], env=plain)
    sys.exit(0 if is_right and done.returncode == 0 else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
