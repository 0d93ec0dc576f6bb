"""Liger kernels: what is replaced, that the start compares it with transformers' own code, and that it trains alike."""

import pytest
import torch
from in_process import train_here
from liger_standin import FAULTS, TABLE, LigerKernel
from recorded import RELEASES, find_signature, list_names
from small_runs import OPTIONS, full_gradients, make_inputs, make_micro_batch, read_rows
from tiny_models import FAMILIES, build, check, save_model
from transformers import AutoModelForCausalLM

from mini_trainer.model.faster_layers import apply_liger_kernels

LENGTHS = (13, 1, 22, 7)
NEWEST = RELEASES["liger-kernel"][-1]
MULTIMODAL = ("internvl", "smolvlm")  # refused by name


@pytest.fixture
def install(monkeypatch):
    def install(release: str = NEWEST, faulty: str | None = None) -> LigerKernel:
        kernel = LigerKernel(release, faulty)
        kernel.install(monkeypatch)
        monkeypatch.setattr("mini_trainer.model.faster_layers.check_device", lambda device: None)
        return kernel

    return install


def run_backward(model) -> dict[str, torch.Tensor]:
    loss = model(make_micro_batch(LENGTHS, seed=0)).loss
    loss.backward()
    return {"loss": loss.detach()} | full_gradients(model)


@pytest.mark.parametrize(
    ("family", "release"), [*(("llama", release) for release in RELEASES["liger-kernel"]), ("qwen3", NEWEST)]
)
def test_the_kernels_are_in_place_and_give_the_same_gradients(family, release, world, tmp_path, install):
    path = save_model(FAMILIES[family], tmp_path)
    plain = run_backward(build(path, world))
    kernel = install(release)
    for mode in ("none", "selective", "full") if release == NEWEST else ("none",):
        model = build(path, world, use_liger_kernels=True, activation_checkpointing=mode)
        check(model, world)
        kernel.num_calls = dict.fromkeys(FAULTS, 0)
        ours = run_backward(model)
        assert all(kernel.num_calls[part] > 0 for part in FAULTS if (part, mode) != ("rotary", "selective"))
        for name, expected in plain.items():
            assert (ours[name] - expected).norm() <= 1e-5 * expected.norm(), (mode, name)


@pytest.mark.parametrize("options", [{}, dict(tiled_mlp=True)])
@pytest.mark.parametrize("faulty", FAULTS)
def test_a_kernel_that_computes_something_else_is_found(faulty, options, world, tmp_path, install):
    install(faulty=faulty)
    model = build(save_model(FAMILIES["llama"], tmp_path), world, use_liger_kernels=True, **options)
    with pytest.raises(ValueError, match="hidden states differ"):
        check(model, world)


def test_a_teacher_leaves_the_models_rotary_embeddings_alone(world, tmp_path, install):
    """It is built after the model, which keeps outputs that liger-kernel's would rotate in place."""
    inputs = make_inputs(tmp_path, "llama")
    options = OPTIONS | inputs | dict(max_steps=2, checkpoint_every_steps=None, activation_checkpointing="selective")
    options |= dict(teacher_model=inputs["model_name_or_path"], teacher_weight=0.5)
    kernel, rows = install(), []
    for use_liger in (False, True):
        output_dir = tmp_path / f"run_{use_liger}"
        train_here(world, **options, output_dir=str(output_dir), use_liger_kernels=use_liger)
        rows.append([pytest.approx((row["loss"], row["grad_norm"]), rel=1e-5) for row in read_rows(output_dir)])
    assert rows[0] == [pair.expected for pair in rows[1]]
    assert kernel.num_calls["norm"] > 0 == kernel.num_calls["rotary"]


@pytest.mark.parametrize("release", RELEASES["liger-kernel"])
def test_every_text_familys_rotary_embeddings_can_be_left_out(release):
    """The package ignores `rope` silently where a family's function does not take it."""
    names = list_names("liger-kernel", release, beginning=TABLE)
    assert len(names) > 40
    for name in names:
        parameters = find_signature("liger-kernel", name, release).parameters
        assert "rope" in parameters or "rms_norm" not in parameters or any(part in name for part in MULTIMODAL), name


def test_what_no_kernel_computes_is_refused(install):
    install()
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(FAMILIES[name]) for name in ("llama_tied_bias", "gpt2")]
    for model, words in zip(models, ("mlp_bias", "'gpt2'"), strict=True):
        with pytest.raises(ValueError, match=words):
            apply_liger_kernels(model, torch.device("cuda"), keeps_products=False)
