"""Learning rates at the steps that matter, and clipping; weight decay and rates by parameter."""

import copy
import math
import re

import pytest
import torch
import torch.distributed as dist
from in_process import train_here
from small_runs import OPTIONS, load_checkpoint, make_inputs
from tiny_classifiers import CLASSIFIERS
from tiny_models import FAMILIES, HYBRIDS, SHAPE, build, save_model
from tiny_vision import VISION_MODELS
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    CohereConfig,
    Ernie4_5_MoeConfig,
    FalconMambaConfig,
    OPTConfig,
    Trainer,
    get_scheduler,
)

from mini_trainer.model.optim import optimizers
from mini_trainer.model.optim.optimizers import (
    build_optimizer,
    clip_gradients,
    find_decayed,
    learning_rate_at,
    reduce_step,
    set_step,
)
from mini_trainer.objectives.objective import LossSums
from mini_trainer.options import OptimizationOptions, parse_rate


def rates(scheduler: str, num_steps: int = 10, **changes) -> list[float]:
    options = OptimizationOptions(lr_scheduler=scheduler, learning_rate=1.0, **changes)
    return [learning_rate_at(step, options, num_steps=num_steps) for step in range(num_steps)]


@pytest.mark.parametrize("scheduler", ["constant_with_warmup", "linear", "cosine", "wsd"])
def test_warmup_rises_linearly_from_above_zero_to_the_peak(scheduler):
    assert rates(scheduler, num_warmup_steps=4, num_steps=100)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_share_of_the_run_warms_up_as_as_many_steps():
    assert rates("cosine", num_steps=30, num_warmup_steps=0.11) == rates("cosine", num_steps=30, num_warmup_steps=4)


@pytest.mark.parametrize(
    ("scheduler", "changes", "first", "expected"),  # from the step `first` on
    [
        ("constant", {}, 0, [1.0] * 10),
        ("linear", {}, 0, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),  # the last step still trains
        ("linear", dict(min_lr_ratio=0.5), 9, [0.55]),
        ("cosine", {}, 5, [0.5, *(0.5 * (1 + math.cos(i / 10 * math.pi)) for i in range(6, 10))]),
        ("cosine", dict(min_lr_ratio=0.2), 5, [0.6, *(0.6 + 0.4 * math.cos(i / 10 * math.pi) for i in range(6, 10))]),
        ("wsd", dict(lr_shape=4), 0, [1.0] * 7 + [0.75, 0.5, 0.25]),
        ("wsd", dict(num_steps=20), 0, [1.0] * 19 + [0.5]),  # over 10 % of the run
        # From the peak, where warmup and decay are longer than the run.
        ("wsd", dict(num_steps=7, num_warmup_steps=3, lr_shape=6), 0, [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]),
    ],
)
def test_rates_are_those_of_the_definitions(scheduler, changes, first, expected):
    assert rates(scheduler, **changes)[first:] == pytest.approx(expected)


@pytest.mark.parametrize("num_warmup_steps", [0, 5])
@pytest.mark.parametrize(
    ("scheduler", "changes", "arguments"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", dict(lr_shape=3.0), dict(num_cycles=3)),
        ("cosine_with_restarts", {}, {}),
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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_combines_what_the_ranks_say(bad, monkeypatch):
    """Two replicas have the same gradient, which counts once, in fp64. Both are asked to stop, and a loss of
    each is not finite. The other one has twice the memory and waits twice as long."""
    other = torch.ones(6, dtype=torch.float64)
    other[1:3] = 2
    monkeypatch.setattr(optimizers, "peak_memory", lambda device: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", lambda rows, row: (rows[0].copy_(row), rows[1].copy_(row * other)))
    sums = [LossSums(torch.tensor(loss)) for loss in (1.0, bad)]
    gradient, device = torch.full((3_000_017,), 0.1), torch.device("cpu")
    found = reduce_step(sums, [gradient], device=device, num_shards=1, data_wait_seconds=0.5, flags=2)
    assert found.grad_norm == pytest.approx(gradient[0].item() * math.sqrt(len(gradient)), rel=1e-9)
    assert (found.peak_memory_bytes, found.data_wait_seconds) == (6, 1.0)
    assert (found.flags, sorted(found.bad_micro_batches), found.finite) == (2, [(1, 0), (1, 1)], False)


def test_a_schedule_or_an_optimizer_without_a_rule_of_its_own_is_not_taken_for_another():
    options = OptimizationOptions(learning_rate=1.0, lr_scheduler="sawtooth", optimizer="sgd")
    with pytest.raises(KeyError, match="sawtooth"):
        learning_rate_at(5, options, num_steps=10)
    with pytest.raises(KeyError, match="sgd"):
        build_optimizer(torch.nn.Module(), options)


OTHERS = {
    "norms with heads": CohereConfig(**SHAPE, use_qk_norm=True),
    "correction biases": Ernie4_5_MoeConfig(
        **SHAPE, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0
    ),
    "decay rates with states": FalconMambaConfig(vocab_size=288, hidden_size=32, num_hidden_layers=2, state_size=4),
    "a last norm that is made first": OPTConfig(
        vocab_size=288, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=16
    ),
}
DECODERS = FAMILIES | HYBRIDS | OTHERS
NAMES = [*DECODERS, *(f"classifier {name}" for name in CLASSIFIERS), *(f"images, {name}" for name in VISION_MODELS)]

# Vectors that transformers decays, since no rule of its by name knows them, and Mamba's A_log, a matrix in some models.
BY_TRANSFORMERS = re.compile(
    r"(\.(sinks|A_log|D|class_embedding|image_newline|lambda_[12])|(norm_f|norm[12]|ln_q|ln_pre)\.weight)$"
)


def make_model(name: str) -> torch.nn.Module:
    """A model of the kind, without memory."""
    with torch.device("meta"):
        if name in DECODERS:
            return AutoModelForCausalLM.from_config(copy.deepcopy(DECODERS[name]))
        if name.startswith("images, "):
            kind = VISION_MODELS[name.removeprefix("images, ")]
            ids = {key: 5 for key, value in kind.config.items()
                   if isinstance(value, str) and key.endswith(("_token_id", "_token_index"))}  # fmt: skip
            config = AutoConfig.for_model(kind.model_type, **copy.deepcopy(kind.config) | ids)
            return AutoModelForImageTextToText.from_config(config)
        return AutoModelForSequenceClassification.from_config(CLASSIFIERS[name.removeprefix("classifier ")])


@pytest.mark.parametrize("name", NAMES)
def test_what_decays_is_what_transformers_decays(name):
    model = make_model(name)
    ours, theirs = find_decayed(model), set(Trainer.get_decay_parameter_names(None, model))
    params = dict(model.named_parameters())
    assert {key for key in params.keys() & theirs - ours if not BY_TRANSFORMERS.search(key)} == set()
    assert ours & params.keys() <= theirs and not any(key.endswith("A_log") for key in ours)
    assert all(params[key].ndim == 1 or key.endswith("A_log") for key in params.keys() & theirs - ours)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_step_without_gradients_shrinks_what_decays_by_the_rate_times_the_decay(optimizer, world, tmp_path):
    """gpt-oss's experts have biases of two dimensions; patterns say otherwise for some, the first that fits."""
    model = build(save_model(FAMILIES["gpt_oss_sinks"], tmp_path / "model"), world)
    options = OptimizationOptions(
        optimizer=optimizer, learning_rate=0.1, weight_decay=0.5,
        learning_rate_for=("lm_head*=0.2:0.25", "*.embed_tokens.*=:0", "*layernorm*=:1", "*.q_proj.*=0.3", "*norm*=:0"),
    )  # fmt: skip
    optimizer = build_optimizer(model, options)
    before = {name: param.full_tensor().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    set_step(optimizer, step=0, learning_rate=0.1)
    optimizer.step()
    for name, param in model.named_parameters():
        kind = next((kind for kind in ("lm_head", "embed_tokens", "layernorm", "q_proj.weight") if kind in name), None)
        is_whole = name.endswith(("bias", "sinks", "norm.weight")) and kind is None
        shrunk = {"lm_head": 0.2 * 0.25, "embed_tokens": 0, "layernorm": 0.1, "q_proj.weight": 0.3 * 0.5}
        expected = before[name] * (1 - shrunk.get(kind, 0 if is_whole else 0.1 * 0.5))
        torch.testing.assert_close(param.full_tensor(), expected, rtol=1e-6, atol=1e-7, msg=name)


def test_rates_and_decays_of_patterns_are_read_as_written():
    assert parse_rate("lm_head*=1e-6") == ("lm_head*", 1e-6, None)
    assert parse_rate("*.a=b=:0") == ("*.a=b", None, 0.0)
    assert parse_rate("x=0:0.5") == ("x", 0.0, 0.5)
    for text in ("x", "=1", "x=", "x=:", "x=1:", "x=-1", "x=1:-1", "x=1:nan", "x=inf", "x=1:2:3", "x=a"):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}: "):
            parse_rate(text)


def test_a_checkpoint_of_another_grouping_resumes_with_the_rule_of_now(world, tmp_path):
    """An older version decayed the biases of gpt-oss's experts: the third step is AdamW's from their moments."""
    inputs = make_inputs(tmp_path, "gpt_oss_sinks")
    run = inputs | OPTIONS | dict(output_dir=str(tmp_path / "run"), save_final_checkpoint=True)
    train_here(world, **run, max_steps=2, learning_rate_for=["*_proj_bias=:0.5"])
    train_here(world, **run, max_steps=3, allow_changed_options=True)
    before, after = (load_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{step}") for step in (2, 3))
    biases = [name for name in after if name.startswith("model/") and name.endswith("_proj_bias")]
    matrices = [name for name in after if name.startswith("model/") and "q_proj.weight" in name]
    assert len(biases) == 4 and len(matrices) == 2
    for decay, names in ((0.0, biases), (OPTIONS["weight_decay"], matrices)):
        for name in names:
            key = name.removeprefix("model/")
            mean, square = (after[f"optimizer/{kind}/{key}"] for kind in ("exp_avg", "exp_avg_sq"))
            step = mean / (1 - 0.9**3) / ((square / (1 - 0.95**3)).sqrt() + 1e-8)
            expected = before[name] * (1 - OPTIONS["learning_rate"] * decay) - OPTIONS["learning_rate"] * step
            torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7, msg=name)
