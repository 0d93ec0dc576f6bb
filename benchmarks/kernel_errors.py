"""Errors of our Triton kernels, in Triton's interpreter on the CPU, and of the eager code, both against fp64.

    OMP_NUM_THREADS=1 python benchmarks/kernel_errors.py > benchmarks/results/kernel_errors.txt

Both round with the same random bits. Then compiles each kernel for GPUs, which needs none: the last two columns.
"""

import os
import sys

if sys.argv[1:] != ["--compile"]:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

import subprocess
from collections.abc import Iterator

import paths  # noqa: F401  (finds the tests' modules)
import torch
import triton
import triton.language as tl
from harness import describe_versions
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mini_trainer.distributed.world import World, init_world
from mini_trainer.model import kernels
from mini_trainer.model.kernels import adamw
from mini_trainer.model.optim import compact_adamw

# Shapes whose blocks of 8-bit codes have 256, 64 and 32 numbers, and one without blocks; none fills a tile.
SHAPES = [(5, 512), (3, 7, 192), (7, 96), (1003,)]
NUM_STEPS = 5
MOST = {"weights": 2.0, "codes": 1e-3}  # the kernel's error, as a multiple of the eager one; other codes
CAPABILITIES = (80, 90)
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
        kernels.are_usable = lambda device, is_usable=is_usable: is_usable
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


def compile_update(dtype: str, size: int, capability: int, *, is_8bit: bool) -> int:
    """Bytes of the machine code for GPUs of this capability."""
    kernel = adamw._update
    stored, moments = {"bfloat16": "*bf16", "float32": "*fp32"}[dtype], "*u8" if is_8bit else "*fp32"
    pointers = {"weight": stored, "gradient": stored, "first": moments, "second": moments}
    numbers = {"num_weights": "i64", "seed": "i32", "number": "i32"}
    constants = dict(IS_CODED=is_8bit, ROUNDS=dtype == "bfloat16", NUM_BLOCKS=adamw.TILE // size, SIZE=size)
    signature = {}
    for name in kernel.arg_names:
        is_pointer = kernel.arg_names.index(name) < kernel.arg_names.index("num_weights")
        default = "constexpr" if name in constants else "*fp32" if is_pointer else "fp32"
        signature[name] = (pointers | numbers).get(name, default)
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    return len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])


def list_cases() -> Iterator[tuple[tuple[int, ...], str, bool]]:
    for shape in SHAPES:
        for dtype in ("float32", "bfloat16"):
            for is_8bit in (True, False) if len(shape) > 1 else (False,):
                yield shape, dtype, is_8bit


def main() -> None:
    if sys.argv[1:] == ["--compile"]:
        for dtype in ("float32", "bfloat16"):
            for is_8bit in (True, False):
                sizes = [compile_update(dtype, 256, each, is_8bit=is_8bit) for each in CAPABILITIES]
                print(f"AdamW, {dtype}, {8 if is_8bit else 32}-bit moments".ljust(40), *(f"{n:>9,}" for n in sizes))
        return
    print(describe_versions("torch", "triton"))
    print(f"{'kernel':45}{'error':>10}{'eager':>10}{'other codes':>13}")
    is_right = True
    for shape, dtype, is_8bit in list_cases():
        ours, eager, others = compare_updates(shape, getattr(torch, dtype), is_8bit=is_8bit)
        is_right &= ours <= MOST["weights"] * eager and others < MOST["codes"]
        name = f"AdamW, {dtype}, {8 if is_8bit else 32}-bit moments {'x'.join(map(str, shape))}"
        print(f"{name:45}{ours:>10.1e}{eager:>10.1e}{others:>13.1e}", flush=True)
    others = compare_optimizers(init_world())
    is_right &= others < MOST["codes"]
    print(f"{'CompactAdamW.step, 6x512':65}{others:>13.1e}")
    print("bytes of machine code for GPUs of capability", *CAPABILITIES, flush=True)
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__, "--compile"], env=plain)
    sys.exit(0 if is_right and done.returncode == 0 else 1)


if __name__ == "__main__":
    main()
