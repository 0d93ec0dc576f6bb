"""Layers that run once a sequence: packed rows give transformers' own losses and gradients, however computed."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch
from breadth import wide
from forked import ForkedJob
from hand_made import pack_samples
from in_process import train_forked, train_on
from processes import count_steps, flags
from small_runs import OPTIONS, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import HYBRIDS, VOCAB_SIZE, build, check, compile_by, save_model, save_tokenizer
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mini_trainer.model.blocks import find_mixers
from mini_trainer.model.by_sequence import list_with_kernels, use_kernels
from mini_trainer.model.flops import count_flops, count_state_products
from mini_trainer.objectives.families.text_tower import find_blocks

LENGTHS = (45, 1, 70, 7)
# Forward and backward of a token, by hand: 12 x heads x head size x state size x layers, the delta rule's 1.5 times.
STATE_PRODUCTS = {
    "gated delta net, experts": 18 * 4 * 8 * 8,
    "mamba 2, attention, experts": 12 * 4 * 16 * 8,
    "mamba 2 alone": 12 * 4 * 16 * 8 * 2,
    "short convolution": 0,
    "attention that chooses keys": 0,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tokenizer(save_model(config, root / str(i))) for i, (name, config) in enumerate(HYBRIDS.items())}


def make_sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(paths) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """By transformers alone, a sequence at a time: the summed loss and all gradients."""
    found = {}
    for name, path in paths.items():
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").train()
        total = 0.0
        for ids in make_sequences():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
            loss.backward()
            total += loss.item()
        found[name] = total, {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
    return found


@pytest.mark.parametrize("mode", ["none", "selective", wide("full"), wide("compiled")])
@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_losses_and_gradients_are_the_models_own(name, mode, paths, expected, world, monkeypatch):
    options = dict(activation_checkpointing=mode)
    if mode == "compiled":
        compile_by("eager", monkeypatch, dynamic=False)
        options = dict(compile=True, activation_checkpointing="none")
    model = build(paths[name], world, **options)
    samples = [(ids.numpy(), ids.numpy(), None) for ids in make_sequences()]
    loss = model(pack_samples(samples)).loss
    loss.backward()
    total, gradients = expected[name]
    assert loss.item() == pytest.approx(total, rel=1e-6)
    own = {key.removeprefix("model."): param.grad for key, param in model.named_parameters() if param.grad is not None}
    assert own.keys() == gradients.keys()
    for key, gradient in gradients.items():
        difference = (own[key].full_tensor() - gradient).norm()
        # Terms thousands of times as large cancel in a state's bias: its rounding differs from processor to processor.
        assert difference <= 1e-5 * gradient.norm() + 3e-7, key


@pytest.mark.parametrize("name", HYBRIDS)
def test_flops_of_mixers_are_counted(name, paths):
    """Against torch's counter, but for what states do: their kernels group tokens as they like."""
    model = AutoModelForCausalLM.from_pretrained(paths[name], experts_implementation="eager")
    num_tokens = 128
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(3, VOCAB_SIZE, (1, num_tokens)), use_cache=False)
    products = ("mm", "addmm", "convolution")
    counted = sum(n for kind, n in counter.get_flop_counts()["Global"].items() if kind.__name__ in products)
    flops = count_flops(model)
    mixers = [module for block in find_blocks(model) for mixer in find_mixers(block) for module in mixer.modules()]
    of_states = 12 * sum(map(count_state_products, mixers))
    assert (flops.per_token - of_states + flops.per_loss_token) * num_tokens / 3 == pytest.approx(counted, rel=1e-3)
    assert of_states == STATE_PRODUCTS[name]


def test_what_attends_is_counted_as_attention(paths, world):
    model = build(paths["mamba 2, attention, experts"], world)
    assert [len(find_mixers(block)) for block in find_blocks(model.model)] == [1, 0, 0]
    assert len(count_flops(model.model).windows) == 1
    alone = build(paths["mamba 2 alone"], world)
    assert count_flops(alone.model).attention_cost == 0


def convolve_with_borders(hidden_states, weight, bias=None, *, seq_idx=None, **_):
    """What causal_conv1d promises: a token convolves with those before it in its own sequence."""
    taps = weight.shape[-1]
    output = hidden_states * weight[:, -1:]
    for back in range(1, taps):
        shifted = torch.nn.functional.pad(hidden_states, (back, 0))[..., : hidden_states.shape[-1]]
        if seq_idx is not None:
            ids = torch.nn.functional.pad(seq_idx, (back, 0), value=-1)[:, : seq_idx.shape[1]]
            shifted = shifted * (ids == seq_idx)[:, None]
        output = output + shifted * weight[:, -1 - back, None]
    return output if bias is None else output + bias[:, None]


def convolve_across_borders(hidden_states, weight, bias=None, *, seq_idx=None, **_):
    return convolve_with_borders(hidden_states, weight, bias)


def fail_in_the_middle(hidden_states, weight, bias=None, *, seq_idx=None, **_):
    if seq_idx is not None:
        raise RuntimeError("seq_idx must be on the moon")
    return convolve_with_borders(hidden_states, weight, bias)


@pytest.mark.parametrize(
    ("convolve", "is_used"),
    [(convolve_with_borders, True), (convolve_across_borders, False), (fail_in_the_middle, False)],
)
def test_kernels_are_used_if_they_keep_to_the_borders(convolve, is_used, paths, expected, world, monkeypatch, caplog):
    """The kernel does not run here: in its place stands what it promises, or does not keep."""
    monkeypatch.setattr("transformers.models.lfm2.modeling_lfm2.causal_conv1d_fn", convolve)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "causal_conv1d" or None)
    name = "short convolution"
    model = build(paths[name], world)
    blocks = find_blocks(model.model)
    assert use_kernels(blocks, torch.device("cuda")) and len(list_with_kernels(blocks)) == 1
    check(model, world)
    assert len(list_with_kernels(blocks)) == int(is_used)
    assert ("per sequence" in caplog.text) != is_used
    loss = model(pack_samples([(ids.numpy(), ids.numpy(), None) for ids in make_sequences()])).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected[name][0], rel=1e-6)


def test_kernels_are_not_asked_for_what_is_not_there(paths, world, monkeypatch):
    installed = {"causal_conv1d"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    delta, conv = (build(paths[name], world) for name in ("gated delta net, experts", "short convolution"))
    assert not use_kernels(find_blocks(conv.model), torch.device("cpu"))
    assert not use_kernels(find_blocks(delta.model), torch.device("cuda"))  # its scan is flash-linear-attention's
    installed.add("fla")
    assert use_kernels(find_blocks(delta.model), torch.device("cuda"))
    (mixer,) = list_with_kernels(find_blocks(delta.model))
    assert mixer.forward.args[-1] == ("seq_idx", "cu_seq_lens_q")
    mamba = build(paths["mamba 2 alone"], world)
    assert not use_kernels(find_blocks(mamba.model), torch.device("cuda"))
    installed.add("mamba_ssm")
    assert use_kernels(find_blocks(mamba.model), torch.device("cuda"))
    assert len(list_with_kernels(find_blocks(mamba.model))) == 2


def make_run(path, tmp_path, **changes) -> dict:
    data = tmp_path / "data.arrow"
    if not data.exists():
        write_samples(data, make_samples(20, vocab_size=VOCAB_SIZE))
    return OPTIONS | dict(model_name_or_path=str(path), data_path=str(data), max_steps=4, adam_eps=1e-5) | changes


def check_close(one: Path, other: Path, *, first: int = 1) -> None:
    """One run's steps, from the `first` on that it has, are the other's."""
    for row, expected in zip(read_rows(one, first), read_rows(other)[first - 1 :], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.long
@pytest.mark.slow
def test_neither_ranks_nor_a_kill_change_a_run(paths, world, tmp_path):
    options = make_run(paths["short convolution"], tmp_path, max_steps=12)
    train_on(1, world, **options, output_dir=tmp_path / "on_1")
    killed = tmp_path / "killed_on_2"
    job = ForkedJob(2, ["train.py", *flags(**options, output_dir=killed)], killed)
    try:
        while count_steps(killed) < 3:
            assert job.process.poll() is None, job.log.read_text()
            time.sleep(0.01)
    finally:
        job.kill()
    assert count_steps(killed) < 12
    assert "resum" in train_forked(2, **options, output_dir=killed)
    check_close(killed, tmp_path / "on_1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        wide("gated delta net, experts", dict(lora=True)),
        wide("gated delta net, experts", dict(osft=True, osft_unfreeze_rank_ratio=0.5)),
        wide("gated delta net, experts", {}),
        wide("mamba 2, attention, experts", {}),
    ],
)
def test_runs_do_not_depend_on_ranks_and_resume_on_others(name, method, paths, world, tmp_path):
    options = make_run(paths[name], tmp_path, **method)
    if "osft" in method:
        options["osft_cache_dir"] = str(tmp_path / "osft")
    on_1, on_2 = tmp_path / "on_1", tmp_path / "on_2"
    train_on(1, world, **options, output_dir=on_1)
    train_on(2, world, **options, resume=str(on_1 / "checkpoints" / "step_1"), output_dir=on_2)
    check_close(on_2, on_1, first=2)
