"""Learning rates at the steps that matter, and clipping."""

import math

import pytest
import torch
from transformers import get_scheduler

from mini_trainer.model.optim.optimizers import build_optimizer, clip_gradients
from mini_trainer.model.optim.rates import learning_rate_at
from mini_trainer.options import OptimizationOptions


def rates(scheduler: str, num_steps: int = 10, **changes) -> list[float]:
    options = OptimizationOptions(lr_scheduler=scheduler, learning_rate=1.0, **changes)
    return [learning_rate_at(step, options, num_steps=num_steps) for step in range(num_steps)]


def test_constant_is_constant():
    assert rates("constant") == [1.0] * 10


@pytest.mark.parametrize("scheduler", ["constant_with_warmup", "linear", "cosine", "wsd"])
def test_warmup_rises_linearly_from_above_zero_to_the_peak(scheduler):
    assert rates(scheduler, num_warmup_steps=4, num_steps=100)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_share_of_the_run_warms_up_as_as_many_steps():
    assert rates("cosine", num_steps=30, num_warmup_steps=0.11) == rates("cosine", num_steps=30, num_warmup_steps=4)


def test_linear_falls_by_the_same_amount_and_its_last_step_still_trains():
    assert rates("linear") == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert rates("linear", min_lr_ratio=0.5)[-1] == pytest.approx(0.55)


def test_cosine_is_half_way_down_in_the_middle():
    assert rates("cosine")[5] == pytest.approx(0.5)
    assert rates("cosine", min_lr_ratio=0.2)[5] == pytest.approx(0.6)
    assert rates("cosine")[9] == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))


def test_wsd_is_stable_and_then_decays_over_the_last_steps():
    assert rates("wsd", num_decay_steps=4) == pytest.approx([1.0] * 7 + [0.75, 0.5, 0.25])
    assert rates("wsd", num_steps=20)[:19] == pytest.approx([1.0] * 19)  # 10 % of the run
    assert rates("wsd", num_steps=20)[19] == pytest.approx(0.5)


def test_wsd_decays_from_the_peak_where_warmup_and_decay_are_longer_than_the_run():
    found = rates("wsd", num_steps=7, num_warmup_steps=3, num_decay_steps=6)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("num_warmup_steps", [0, 5])
@pytest.mark.parametrize(
    ("scheduler", "changes", "arguments"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", dict(lr_shape=3.0), dict(num_cycles=3)),
        ("polynomial", dict(lr_shape=2.0), dict(power=2.0, lr_end=0.0)),
        ("polynomial", {}, dict(lr_end=0.0)),
        ("polynomial", dict(min_lr_ratio=0.25), dict(lr_end=0.25)),
        ("inverse_sqrt", {}, {}),
    ],
)
def test_after_warmup_shapes_are_those_of_transformers(scheduler, changes, arguments, num_warmup_steps):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    ends = {} if scheduler == "inverse_sqrt" else dict(num_training_steps=40)
    theirs = get_scheduler(
        scheduler, optimizer, num_warmup_steps=num_warmup_steps, scheduler_specific_kwargs=arguments, **ends
    )
    expected = []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    ours = rates(scheduler, num_steps=40, num_warmup_steps=num_warmup_steps, **changes)
    assert ours[num_warmup_steps:] == pytest.approx(expected[num_warmup_steps:])


def test_clipping_scales_only_what_is_too_long():
    gradients = [torch.full((4,), 3.0), torch.full((9,), 4.0 / 3)]
    norm = torch.cat(gradients).norm().item()
    for max_grad_norm in (None, norm + 1):
        clip_gradients(gradients, grad_norm=norm, max_grad_norm=max_grad_norm)
        assert torch.cat(gradients).norm().item() == pytest.approx(norm)
    clip_gradients(gradients, grad_norm=norm, max_grad_norm=0.5)
    assert torch.cat(gradients).norm().item() == pytest.approx(0.5)
    assert gradients[0][0].item() == pytest.approx(3.0 * 0.5 / norm)


def test_a_schedule_without_a_shape_of_its_own_is_not_taken_for_another():
    options = OptimizationOptions(learning_rate=1.0, lr_scheduler="sawtooth")
    with pytest.raises(KeyError, match="sawtooth"):
        learning_rate_at(5, options, num_steps=10)


def test_an_optimizer_without_a_rule_of_its_own_is_not_taken_for_another():
    with pytest.raises(KeyError, match="sgd"):
        build_optimizer(torch.nn.Module(), OptimizationOptions(learning_rate=1.0, optimizer="sgd"))
