"""--float8 with layers that round as torchao's do, on a CPU: the start-up check compares them in higher precision."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from gpu_cases import WIDER
from small_runs import make_micro_batch
from tiny_models import build, check, save_model
from torch import Tensor, nn

from mini_trainer.model import float8
from mini_trainer.model.check import in_high_precision
from mini_trainer.model.compiled_check import EIGHT_BIT, ROUNDED, BlockCheck
from mini_trainer.objectives.families.text_tower import find_blocks


class Rounded(torch.autograd.Function):
    """A tensor's rows in fp8, each with a scale of its own; gradients pass as they are."""

    @staticmethod
    def forward(_, tensor: Tensor) -> Tensor:
        scale = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
        return (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale

    @staticmethod
    def backward(_, grad: Tensor) -> Tensor:
        return grad


class Float8Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(Rounded.apply(input), Rounded.apply(self.weight), self.bias)


Float8Linear.__module__ = "torchao.float8.float8_linear"


@dataclass(frozen=True)
class Recipe:
    round_scales_to_power_of_2: bool = True  # as torchao's with a scale per row


@pytest.fixture
def rounding(monkeypatch):
    """torchao.float8, whose layers are those above."""

    def convert(blocks: nn.Module, *, module_filter_fn, config: Recipe) -> None:
        assert not config.round_scales_to_power_of_2
        for name, module in blocks.named_modules():
            if isinstance(module, nn.Linear) and module_filter_fn(module, name):
                module.__class__ = Float8Linear

    package = ModuleType("torchao.float8")
    package.Float8LinearConfig = SimpleNamespace(from_recipe_name=lambda name: Recipe())
    package.convert_to_float8_training = convert
    monkeypatch.setitem(sys.modules, "torchao.float8", package)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(float8, "is_able", lambda device: True)


def test_it_is_checked_without_fp8s_rounding_and_trains_with_it(rounding, world, tmp_path):
    path = save_model(WIDER, tmp_path / "model")
    model, plain = build(path, world, float8=True), build(path, world)
    check(model, world)
    micro_batch = make_micro_batch((13, 1, 22, 7), seed=0)
    losses = [each(micro_batch).loss.item() for each in (model, plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    with in_high_precision(model.model):
        assert model(micro_batch).loss.item() == losses[1]
    assert model(micro_batch).loss.item() == losses[0]


def test_compiled_blocks_may_round_to_a_neighbour(rounding, world, tmp_path):
    path = save_model(WIDER, tmp_path / "model")
    for is_float8, allowed in ((True, EIGHT_BIT), (False, ROUNDED)):
        model = build(path, world, dtype=torch.bfloat16, float8=is_float8)
        assert {BlockCheck(model, print).find_allowed(block) for block in find_blocks(model.model)} == {allowed}
