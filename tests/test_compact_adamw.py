"""8-bit moments and bf16 weights: as AdamW trains within what they promise, less memory, exact to resume."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from breadth import wide
from in_process import train_here, train_on
from safetensors.torch import load_file
from small_runs import OPTIONS, read_rows
from tiny_models import FAMILIES, build, save_model
from torch.distributed.tensor import DTensor, Replicate, Shard

from mini_trainer.model.optim import compact_adamw
from mini_trainer.model.optim.compact_adamw import (
    CompactAdamW,
    Rounding,
    decode,
    encode,
    make_generator,
    round_to_bf16,
    update_rows,
)
from mini_trainer.model.optim.optimizers import build_optimizer, open_optimizer, set_step
from mini_trainer.options import OptimizationOptions

MODEL = "llama_tied_bias"
ADAMW = dict(learning_rate=1e-2, weight_decay=0.1)


def train_matrix(
    world, *, optimizer: str, dtype: torch.dtype, num_steps: int, width: int = 512
) -> tuple[DTensor, torch.optim.Optimizer]:
    """A (64, width) matrix, and a vector, that learn to map random vectors to others."""
    torch.manual_seed(0)
    module = torch.nn.Linear(width, 64).to(dtype)
    for name, param in list(module.named_parameters()):
        shard = DTensor.from_local(param.detach(), world.mesh, [Shard(0)])
        module.register_parameter(name, torch.nn.Parameter(shard))
    built = build_optimizer(module, OptimizationOptions(optimizer=optimizer, **ADAMW))
    inputs, targets = torch.randn(32, width), torch.randn(32, 64)
    for step in range(num_steps):
        weight, bias = module.weight.to_local().float(), module.bias.to_local().float()
        error = inputs @ weight.detach().T + bias.detach() - targets  # (32, 64)
        gradients = {module.weight: error.T @ inputs / 32, module.bias: error.mean(0)}
        for param, gradient in gradients.items():
            param.grad = DTensor.from_local(gradient.to(dtype), world.mesh, [Shard(0)])
        set_step(built, step=step, learning_rate=ADAMW["learning_rate"] / (step + 1))
        built.step()
    return module.weight, built


def test_without_8_bits_and_rounding_it_is_torchs_adamw(world, monkeypatch):
    expected, _ = train_matrix(world, optimizer="adamw", dtype=torch.float32, num_steps=20)
    monkeypatch.setattr(CompactAdamW, "choose_block_size", lambda self, param: None)
    weight, _ = train_matrix(world, optimizer="adamw8bit", dtype=torch.float32, num_steps=20)
    torch.testing.assert_close(weight.to_local(), expected.to_local(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw8bit", "float32"), ("adamw", "bfloat16")])
def test_twenty_steps_end_near_those_of_adamw(optimizer, dtype, world):
    expected, _ = train_matrix(world, optimizer="adamw", dtype=torch.float32, num_steps=20)
    start, _ = train_matrix(world, optimizer="adamw", dtype=torch.float32, num_steps=0)
    weight, _ = train_matrix(world, optimizer=optimizer, dtype=getattr(torch, dtype), num_steps=20)
    moved = (expected - start).to_local().norm()
    assert (weight.float() - expected).to_local().norm() < 0.05 * moved


@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw8bit", "float32"), ("adamw8bit", "bfloat16")])
def test_a_large_shard_is_updated_some_rows_at_a_time_to_the_same_bits(optimizer, dtype, world, monkeypatch):
    expected, _ = train_matrix(world, optimizer=optimizer, dtype=getattr(torch, dtype), num_steps=3)
    sizes = []
    monkeypatch.setattr(compact_adamw, "MAX_NUMEL", 7 * 512)  # of 64 rows, the last of which are fewer
    monkeypatch.setattr(compact_adamw, "update_rows", lambda *args: sizes.append(len(args[0])) or update_rows(*args))
    weight, _ = train_matrix(world, optimizer=optimizer, dtype=getattr(torch, dtype), num_steps=3)
    assert torch.equal(weight.to_local(), expected.to_local())
    assert sizes == 3 * [*9 * [7], 1, 64]  # the vector's numbers are few


def count_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize(("width", "share"), [(512, 1 / 4), (96, (1 + 4 / 32) / 4), (24, 1)])  # blocks of 256, 32, none
def test_moments_take_a_quarter_of_the_memory_as_planned(width, share, world):
    (_, adamw), (_, adamw8bit) = (
        train_matrix(world, optimizer=optimizer, dtype=torch.float32, num_steps=1, width=width)
        for optimizer in ("adamw", "adamw8bit")
    )
    assert count_bytes(adamw8bit) == pytest.approx(count_bytes(adamw) * share, rel=0.03)
    plan = open_optimizer(OptimizationOptions(optimizer="adamw8bit"))
    planned = sum(plan.count_bytes(param, is_matrix=False) for param in adamw8bit.state)
    assert count_bytes(adamw8bit) == planned


def test_bf16_weights_take_half_the_memory(world, tmp_path):
    path = save_model(FAMILIES["gpt2"], tmp_path)
    models = {dtype: build(path, world, weights_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    num_bytes = {dtype: sum(param.nbytes for param in model.parameters()) for dtype, model in models.items()}
    assert num_bytes[torch.bfloat16] == num_bytes[torch.float32] / 2


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_keep_seven_decades_of_a_block_and_never_turn_a_second_moment_to_zero(is_signed):
    torch.manual_seed(0)
    value = torch.tensor([1e-3, 1.0, 50.0, 0.0])[:, None] * torch.logspace(-9, 0, 256)
    if is_signed:
        value *= torch.randn_like(value).sign()
    codes, scales = torch.empty(4, 256, dtype=torch.uint8), torch.empty(4, 1)
    encode(value, codes, scales, is_signed=is_signed)
    decoded = decode(codes, scales, is_signed=is_signed)
    share = (value / scales)[:3].abs()
    error = ((decoded - value) / value)[:3].abs()
    assert error[share > 0.1].max() < (0.072 if is_signed else 0.036)  # half of 0.9 / 64 or 0.9 / 128, at 0.1
    assert error[share > 1e-3].max() < (0.29 if is_signed else 0.15)  # two decades below, four times as wide
    assert torch.equal(decoded[:3].sign()[share > 1e-6], value[:3].sign()[share > 1e-6])
    assert torch.equal(decoded[3], value[3])
    if not is_signed:
        assert torch.equal(decoded > 0, value > 0)


def test_rounding_is_unbiased_and_leaves_what_bf16_can_hold(world):
    rounding = Rounding(torch.Generator().manual_seed(0))
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(round_to_bf16(exact.clone(), rounding.draw(exact)), exact)
    value = torch.randn(50, dtype=torch.float32)
    repeated = value.repeat(20_000, 1)
    rounded = round_to_bf16(repeated.clone(), rounding.draw(repeated))
    assert torch.equal(rounded.bfloat16().float(), rounded)
    step = value.abs() * 2**-7  # at least the distance of two neighbours
    assert ((rounded - value).abs() <= step).all()
    assert ((rounded.double().mean(0) - value).abs() < 5 * 0.5 * step / 20_000**0.5).all()  # 5 standard errors


def test_updates_below_bf16s_resolution_are_not_lost(world):
    """Steps of 1e-4 from 1, where bf16's neighbours are 2^-8 below: rounded to nearest, none would ever move."""
    param = torch.nn.Parameter(DTensor.from_local(torch.ones(4000, dtype=torch.bfloat16), world.mesh, [Shard(0)]))
    optimizer = build_optimizer(torch.nn.ParameterList([param]), OptimizationOptions(weight_decay=0.0), seed=3)
    for step in range(10):
        param.grad = torch.ones_like(param)
        set_step(optimizer, step=step, learning_rate=1e-4)
        optimizer.step()
    assert torch.ones(1).bfloat16() - 1e-4 == 1
    moved = 1 - param.to_local().double().mean().item()
    assert moved == pytest.approx(10 * 1e-4, rel=0.15)  # a standard error of 3 %


def test_random_numbers_differ_by_seed_step_and_shard_and_are_alike_on_replicas():
    def draw(seed: int, step: int, *, replica: int, shard: int) -> tuple[float, ...]:
        mesh = SimpleNamespace(get_local_rank=(replica, shard).__getitem__)
        param = SimpleNamespace(placements=(Replicate(), Shard(0)), device_mesh=mesh, device="cpu")
        return tuple(torch.rand(3, generator=make_generator(seed, step, param)).tolist())

    settings = [(seed, step, shard) for seed in (1, 2) for step in (0, 1) for shard in (0, 1)]
    draws = [draw(seed, step, replica=0, shard=shard) for seed, step, shard in settings]
    assert len({*draws}) == len(settings)
    assert draws == [draw(seed, step, replica=1, shard=shard) for seed, step, shard in settings]


CHANGES = {
    "8-bit": dict(optimizer="adamw8bit"),
    "bf16": dict(master_weights="bfloat16"),
    "both": dict(optimizer="adamw8bit", master_weights="bfloat16"),
}


def train(world, inputs: dict, output_dir: Path, **changes) -> Path:
    train_here(world, **(inputs | OPTIONS | dict(output_dir=str(output_dir), save_final_checkpoint=True) | changes))
    return output_dir


@pytest.mark.parametrize("case", [case if case == "both" else wide(case) for case in CHANGES])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(case, inputs, world, tmp_path):
    whole = train(world, inputs, tmp_path / "whole", max_steps=4, **CHANGES[case])
    for max_steps in (2, 4):
        parts = train(world, inputs, tmp_path / "parts", max_steps=max_steps, **CHANGES[case])
    assert read_rows(whole) == read_rows(parts)
    tensors = [load_file(path / "checkpoints" / "step_4" / "rank_00000.safetensors") for path in (whole, parts)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    dtypes = {value.dtype for value in tensors[0].values()}
    assert (torch.uint8 in dtypes) == ("optimizer" in CHANGES[case])
    assert (torch.bfloat16 in dtypes) == ("master_weights" in CHANGES[case])


def test_a_checkpoint_of_another_optimizer_or_other_weights_is_refused(inputs, world, tmp_path):
    output_dir = train(world, inputs, tmp_path / "run", max_steps=1)
    with pytest.raises(ValueError, match=r"step_1 .*optimizer \(adamw .*adamw8bit\)"):
        train(world, inputs, output_dir, max_steps=2, optimizer="adamw8bit")
    with pytest.raises(ValueError, match=r"step_1: .*--optimizer: .* exp_avg, exp_avg_sq, step"):
        train(world, inputs, output_dir, max_steps=2, optimizer="adamw8bit", allow_changed_options=True)
    with pytest.raises(ValueError, match="'dtype': 'BF16'"):
        train(world, inputs, output_dir, max_steps=2, master_weights="bfloat16", allow_changed_options=True)


@pytest.mark.long
@pytest.mark.slow
def test_8_bit_moments_move_between_numbers_of_ranks_and_bf16_weights_resume_on_two(inputs, world, tmp_path):
    whole = train(world, inputs, tmp_path / "whole", max_steps=4, optimizer="adamw8bit")
    parts = train(world, inputs, tmp_path / "parts", max_steps=2, optimizer="adamw8bit")
    train_on(2, world, **(inputs | OPTIONS | dict(output_dir=parts, max_steps=4, optimizer="adamw8bit")))
    for row, other in zip(read_rows(whole), read_rows(parts), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-4)  # where rounding moves a code to the next one
    for name, changes in (("whole16", {}), ("parts16", dict(resume=tmp_path / "whole16" / "checkpoints" / "step_1"))):
        changes |= dict(output_dir=tmp_path / name, max_steps=3, **CHANGES["both"])
        train_on(2, world, **(inputs | OPTIONS | changes))
    for rank in range(2):
        file = Path("checkpoints", "step_3", f"rank_{rank:05}.safetensors")
        whole, parts = (load_file(tmp_path / name / file) for name in ("whole16", "parts16"))
        assert whole.keys() == parts.keys() and all(torch.equal(value, parts[key]) for key, value in whole.items())
