"""Fused kernels in a model's modules: where they are put, that they train as its own code does, and who decides."""

import json
import logging

import pytest
import torch
from breadth import long
from in_process import train_here
from kernels_standin import PARTS, Kernels
from recorded import RELEASES
from small_runs import OPTIONS, full_gradients, make_inputs, make_micro_batch, read_rows
from tiny_models import FAMILIES, build, check, save_model
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from mini_trainer.model.kernels.layers import find_fault, find_kind, fuse_mlp, fuse_sums_of, is_rotation
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.run.start import choose_method

LENGTHS = (13, 1, 22, 7)
# Parts of each family; the others keep its own code.
PARTS_OF = {
    "llama": PARTS,
    "qwen3": PARTS,
    "gemma3": PARTS,
    "olmo2": ("norm", "gated", "rotary"),
    "granite_scaled": ("norm", "gated", "rotary"),
    "mixtral": ("norm", "sum", "rotary"),
    "gpt_oss_sinks": ("norm", "sum"),
    "cohere_scaled": ("gated",),
    "phi_head_bias": ("rotary",),
}


@pytest.fixture
def install(monkeypatch):
    def install(*args: str, **kwargs: str) -> Kernels:
        kernels = Kernels(*args, **kwargs)
        kernels.install(monkeypatch)
        return kernels

    return install


def run_backward(model) -> dict[str, Tensor]:
    loss = model(make_micro_batch(LENGTHS, seed=0)).loss
    loss.backward()
    return {"loss": loss.detach()} | full_gradients(model)


@pytest.mark.parametrize("mode", ["full", long("selective"), long("none")])
@pytest.mark.parametrize("family", PARTS_OF)
def test_a_familys_kernels_are_in_place_and_give_its_gradients(family, mode, world, tmp_path, install):
    path = save_model(FAMILIES[family], tmp_path)
    plain = run_backward(build(path, world))
    kernels = install()
    model = build(path, world, kernels="fused", activation_checkpointing=mode)
    check(model, world)
    for is_on in (True, False):
        kernels.num_calls, model.kernels.is_on = dict.fromkeys(PARTS, 0), is_on
        ours = run_backward(model)
        model.zero_grad()
        assert [part for part in PARTS if kernels.num_calls[part]] == [*(PARTS_OF[family] if is_on else ())]
        for name, expected in plain.items():
            assert (ours[name] - expected).norm() <= 1e-5 * expected.norm(), (is_on, name)


@pytest.mark.parametrize(
    ("family", "options", "is_covered"),
    [
        ("llama", {}, True),
        ("gemma3", dict(reshard_after_forward="always"), True),  # weights are freed before backward
        ("qwen3", dict(lora=True, lora_rank=4), True),
        ("llama", dict(lora=True, lora_rank=4, lora_dropout=0.1), False),
        ("llama", dict(attention="eager"), False),
        ("mixtral", {}, False),
    ],
)
def test_selective_checkpointing_runs_more_than_norms_and_gates_again(
    family, options, is_covered, world, tmp_path, install
):
    path, kernels, gradients = save_model(FAMILIES[family], tmp_path), install(), []
    given = group_options(TrainOptions, model_name_or_path=str(path), data_path="", output_dir="", **options)
    for mode in ("none", "selective"):
        own = dict(attention=given.compute.attention, reshard_after_forward=given.sharding.reshard_after_forward)
        method = choose_method(given)
        model = build(path, world, kernels="fused", activation_checkpointing=mode, method=method, **own)
        torch.manual_seed(0)  # dropout
        loss = model(make_micro_batch(LENGTHS, seed=0)).loss
        kernels.num_calls = dict.fromkeys(PARTS, 0)
        loss.backward()
        gradients.append(full_gradients(model))
    layers = len(model.model.model.layers)
    has_norms_before = hasattr(model.model.model.layers[0].self_attn, "q_norm")
    assert kernels.num_calls["sum"] == (0 if is_covered else layers)
    assert kernels.num_calls["rotary"] == (0 if is_covered and not has_norms_before else layers)
    assert kernels.num_calls["gated"] == (layers if "gated" in PARTS_OF[family] else 0)
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


@pytest.mark.parametrize("family", PARTS_OF)
def test_a_kernel_has_no_trial(family, world, tmp_path, install):
    kernels = install()
    model = build(save_model(FAMILIES[family], tmp_path), world, kernels="fused")
    assert find_fault(model.kernels, world.device, torch.float32) is None
    assert {*PARTS_OF[family]} <= {part for part in PARTS if kernels.num_calls[part]}


@pytest.mark.parametrize("release", RELEASES["liger-kernel"])
def test_every_release_takes_what_it_is_given(release, world, tmp_path, install):
    kernels = install(release)
    for family in ("llama", "gemma3"):
        run_backward(build(save_model(FAMILIES[family], tmp_path / family), world, kernels="fused"))
    assert all(kernels.num_calls.values())


@pytest.mark.parametrize("options", [{}, long(dict(tiled_mlp=True)), long(dict(lora=True, lora_rank=4))])
@pytest.mark.parametrize("faulty", [None, *PARTS, "gradient"])
def test_a_run_whose_kernels_are_faulty_goes_on_without_them(faulty, options, world, tmp_path, install, caplog):
    run = OPTIONS | make_inputs(tmp_path, "llama") | options | dict(max_steps=2, checkpoint_every_steps=None)
    rows = []
    for kernels in ("eager", "fused"):
        if kernels == "fused":
            stand_ins = install(faulty=faulty)
        train_here(world, **run, output_dir=str(tmp_path / kernels), kernels=kernels)
        rows.append([(row["loss"], row["grad_norm"]) for row in read_rows(tmp_path / kernels)])
    warned = any("without fused kernels" in each.message for each in caplog.records if each.levelno == logging.WARNING)
    settled = json.loads((tmp_path / "fused" / "training_params.json").read_text())["options"]["kernels"]
    assert warned == (faulty is not None) and settled == ("eager" if warned else "fused")
    assert any(stand_ins.num_calls.values())
    if warned:
        assert rows[1] == rows[0]
    assert rows[1] == [pytest.approx(row, rel=1e-5) for row in rows[0]]


def test_auto_measures_both_and_a_resume_keeps_its_choice(world, tmp_path, install, caplog):
    install()
    run = OPTIONS | make_inputs(tmp_path, "llama") | dict(checkpoint_every_steps=1, output_dir=str(tmp_path / "run"))
    caplog.set_level("INFO", logger="mini_trainer")
    chosen = []
    for max_steps in (1, 2):
        train_here(world, **run, kernels="auto", max_steps=max_steps)
        chosen.append(json.loads((tmp_path / "run" / "training_params.json").read_text())["auto_settings"])
    assert chosen[0] == chosen[1] and chosen[0]["kernels"] in ("fused", "eager") and chosen[0]["has_kernels"]
    assert [probe["kernels"] for probe in chosen[0]["probes"]["kernels"]] == ["fused", "eager"]
    assert "again" not in caplog.text


def test_a_resume_that_cannot_have_its_kernels_chooses_again_and_says_so(world, tmp_path, install, caplog, monkeypatch):
    run = OPTIONS | make_inputs(tmp_path, "llama") | dict(checkpoint_every_steps=1, output_dir=str(tmp_path / "run"))
    run |= dict(kernels="auto", activation_checkpointing="auto")
    caplog.set_level("INFO", logger="mini_trainer")
    with monkeypatch.context() as context:
        Kernels().install(context)
        train_here(world, **run, max_steps=1)
    train_here(world, **run, max_steps=2)
    assert "kernels: eager, since the device is cpu" in caplog.text
    assert "auto: chosen again, since these changed: options, whether there are fused kernels" in caplog.text


def test_a_cpu_has_no_kernels(world, tmp_path):
    run = OPTIONS | make_inputs(tmp_path, "llama") | dict(max_steps=1, output_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"--kernels fused .*CUDA.*the device is cpu"):
        train_here(world, **run, kernels="fused")


def test_a_model_without_a_module_for_them_is_refused_only_if_they_are_asked_for(world, tmp_path, install):
    install()
    path = save_model(FAMILIES["gpt2"], tmp_path)
    with pytest.raises(ValueError, match=r"--kernels fused: .*'gpt2'"):
        build(path, world, kernels="fused")
    assert not build(path, world, kernels="auto").kernels.num_modules


class Doubled(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class Gated(LlamaRMSNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * gate


def test_what_computes_something_else_gets_no_kernel():
    assert find_kind(LlamaRMSNorm(8, eps=1e-6), 1e-6) == (1e-6, 0.0, "llama")
    assert [find_kind(each(8), 1e-6) for each in (Doubled, Gated)] == [None, None]
    mlp = nn.Module()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn = *(nn.Linear(8, 8) for _ in range(3)), nn.ReLU()
    assert fuse_mlp(mlp) is None
    assert not is_rotation(lambda q, k, cos, sin: (q * cos[:, None], k * sin[:, None]))


def test_a_block_is_rewritten_only_where_the_sum_goes_into_a_norm():
    forward = LlamaDecoderLayer.forward
    _, norms = fuse_sums_of(getattr(forward, "__wrapped__", forward))
    assert norms == ("post_attention_layernorm",)

    def scaled(self, hidden, residual):
        hidden = residual + 2 * hidden
        residual = hidden
        hidden = self.norm(hidden)
        return hidden + residual

    assert fuse_sums_of(scaled) == (None, ())
