"""What runs on a GPU is what the CPU computes, to the rounding of bfloat16: `pytest -m gpu`, by benchmarks/gpu.py.

With GPU_TESTS_ON_CPU set they run where there is no GPU, too, in bfloat16 on the CPU, all but what needs CUDA.
"""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_cases import DECIDING, make_inputs
from gpu_settings import read_expected
from in_process import train_forked, train_here
from small_runs import make_micro_batch, read_rows
from torch import Tensor

from mini_trainer.distributed.world import World
from mini_trainer.model import activation_memory
from mini_trainer.model.attention import BACKENDS, Rule, find_obstacle
from mini_trainer.model.attention_kernels import activate_kernels
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.options.doors import ATTENTION

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU and "GPU_TESTS_ON_CPU" not in os.environ, reason="needs a CUDA device"),
]

SEQUENCES = (17, 64, 1, 129, 5)
HALF_BIT = 2**-9  # of bfloat16
EXPECTED = read_expected()["losses"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_heads", "num_key_value_heads", "head_size", "window", "extras"),
    [
        (4, 4, 64, None, {}),
        (8, 2, 64, None, {}),
        (8, 2, 128, 16, {}),
        (6, 1, 64, 2, {}),
        (4, 2, 64, None, dict(is_two_sided=True)),
        (4, 2, 64, 16, dict(softcap=2.0)),
    ],
    ids=["as many heads", "grouped heads", "window", "window of two", "two-sided", "softcap"],
)
def test_every_backend_is_attention_to_the_rounding_of_bf16(
    backend, num_heads, num_key_value_heads, head_size, window, extras, world
):
    """Output and gradients, against eager attention in float64; no backend is much further off than eager in bf16."""
    config = SimpleNamespace(head_dim=head_size, num_attention_heads=num_heads)
    needed = extras.keys() - {"is_two_sided"}
    obstacle = find_obstacle(backend, needed, config=config, device=world.device, dtype=torch.bfloat16)
    if obstacle is not None:
        pytest.skip(obstacle)
    activate_kernels(backend)
    torch.manual_seed(0)
    micro_batch = make_micro_batch(SEQUENCES, seed=0)
    inputs = [
        torch.randn(1, heads, sum(SEQUENCES), head_size).bfloat16()
        for heads in (num_heads, num_key_value_heads, num_key_value_heads)
    ]
    arguments = dict(scaling=head_size**-0.5, window=window, **extras)
    expected = attend_both_ways("eager", [each.double() for each in inputs], micro_batch, arguments)
    on_device = [each.to(world.device) for each in inputs], micro_batch.to(world.device), arguments
    both = (attend_both_ways(name, *on_device) for name in (backend, "eager"))
    errors, eager = ([measure_error(*pair) for pair in zip(those, expected, strict=True)] for those in both)
    for what, error, own in zip(("output", "query", "key", "value"), errors, eager, strict=True):
        assert error <= 2 * own + HALF_BIT <= 0.05, f"{what}: {error:.1e}, and of eager {own:.1e}"


def measure_error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.cpu().double() - exact).norm() / exact.norm()).item()


def attend_both_ways(backend: str, inputs: list[Tensor], micro_batch: MicroBatch, arguments: dict) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    tensors = [each.detach().requires_grad_() for each in inputs]
    output = ATTENTION[backend](*tensors, micro_batch.row, Rule(**arguments))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), tensors)]


# What a run on the GPU is given: the name of options in DECIDING, and options that must not change the numbers. Those
# that compile take longest, and come last.
CASES = {
    **{f"attention {name}": ("full", dict(attention=name)) for name in BACKENDS},
    "selective": ("full", dict(activation_checkpointing="selective")),
    "liger": ("full", dict(kernels="fused")),
    "float8": ("full", dict(float8=True)),
    "offloaded": ("full", dict(cpu_offload=True)),
    "tiled": ("full", dict(tiled_mlp=True)),
    "tiled, inputs offloaded": (
        "full",
        dict(tiled_mlp=True, offload_activations=True, activation_checkpointing="full"),
    ),
    "8-bit moments": ("8-bit moments", {}),
    "8-bit moments, bf16 weights": ("8-bit moments, bf16 weights", {}),
    "lora": ("lora", {}),
    "nf4": ("nf4", {}),
    "osft": ("osft", {}),
    "compiled": ("full", dict(compile=True)),
    "compiled, selective": ("full", dict(compile=True, activation_checkpointing="selective")),
    "float8, compiled": ("full", dict(float8=True, compile=True)),
    "lora, compiled": ("lora", dict(compile=True)),
    "osft, compiled": ("osft", dict(compile=True)),
}
PACKAGES = {"attention flash_attn": "flash_attn", "attention varlen_fa3": "flash_attn_interface",
            "liger": "liger_kernel", "float8": "torchao", "nf4": "bitsandbytes", "lora": "peft"}  # fmt: skip
ONLY_ON_CUDA = ("attention flash_attn", "attention varlen", "attention varlen_fa3", "liger", "float8", "compiled",
                "inputs offloaded")  # fmt: skip
TILE = 8  # tokens, so that rows of 64 have several


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, object]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("case", CASES)
def test_it_trains_to_the_cpus_losses_within_bf16(case, inputs, world: World, tmp_path: Path, monkeypatch):
    missing = [package for name, package in PACKAGES.items()
               if name in case and importlib.util.find_spec(package) is None]  # fmt: skip
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if not HAS_GPU and any(name in case for name in ONLY_ON_CUDA):
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(activation_memory, "LEAST_TOKENS", TILE)
    deciding, changes = CASES[case]
    options = inputs | DECIDING[deciding] | changes
    options |= dict(compute_dtype="bfloat16", output_dir=str(tmp_path / "run"))
    if "osft" in deciding:
        options |= dict(osft_cache_dir=str(tmp_path / "osft"), save_final_checkpoint=True)  # which measures the leak
    train_here(world, **options)
    rows = read_rows(tmp_path / "run")
    check_losses(rows, EXPECTED[deciding], within=0.1 if "float8" in case or "bf16 weights" in case else 0.03)
    if "osft" in case:
        assert rows[-1]["osft_leak"] < 1e-5


def check_losses(rows: list[dict], expected: list[dict], *, within: float) -> None:
    for row, reference in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=within), row["step"]
    assert rows[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=2 * within)
    assert expected[-1]["loss"] < 0.95 * expected[0]["loss"], "nothing was learned"


@pytest.mark.parametrize("attention", BACKENDS)
def test_two_that_share_rows_train_to_the_cpus_losses_within_bf16(attention, inputs, tmp_path: Path):
    if HAS_GPU and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    package = PACKAGES.get(f"attention {attention}", "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if not HAS_GPU and f"attention {attention}" in ONLY_ON_CUDA:
        pytest.skip("needs a CUDA device")
    output_dir = tmp_path / "run"
    shared = dict(context_parallel=2, max_tokens_per_gpu=32, attention=attention, compute_dtype="bfloat16")
    train_forked(2, **inputs | shared | dict(output_dir=output_dir))
    check_losses(read_rows(output_dir), EXPECTED["full"], within=0.03)
