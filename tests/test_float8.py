"""--float8 with torchao's own layers, emulated on a CPU: the start-up check compares them in higher precision."""

import pytest
import torch
from gpu_cases import WIDER
from heavy import need
from small_runs import make_micro_batch
from tiny_models import build, check, save_model

from model import float8
from model.compiled_check import EIGHT_BIT, BlockCheck, check_compiled
from objectives.next_tokens import CausalLM
from pretrained.parts import find_blocks

torchao = need("torchao.float8")


@pytest.fixture
def emulated(monkeypatch):
    """Layers in fp8 on a CPU."""
    recipe = torchao.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    config = type(recipe)(**vars(recipe) | dict(emulate=True))
    monkeypatch.setattr(torchao.Float8LinearConfig, "from_recipe_name", lambda name: config)
    monkeypatch.setattr(float8, "is_able", lambda device: True)


def test_it_is_checked_without_fp8s_rounding_and_trains_with_it(emulated, world, tmp_path):
    path = save_model(WIDER, tmp_path / "model")
    model = build(path, world, float8=True)
    check(model, world)
    micro_batch, plain = make_micro_batch((13, 1, 22, 7), seed=0), build(path, world)
    losses = [each(micro_batch).item() for each in (model, plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    with float8.in_high_precision(model.model):
        assert model(micro_batch).item() == losses[1]
    assert model(micro_batch).item() == losses[0]


@pytest.mark.long
def test_compiled_blocks_may_round_to_a_neighbour(emulated, world, tmp_path):
    model = build(save_model(WIDER, tmp_path / "model"), world, dtype=torch.bfloat16, float8=True, compile=True)
    assert {BlockCheck(model, print).find_allowed(block) for block in find_blocks(model.model)} == {EIGHT_BIT}
    check_compiled(model, CausalLM(), world=world)
