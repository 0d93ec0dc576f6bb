"""Tiles over the row and offloaded activations: less memory, and the same losses and gradients."""

import pytest
import torch
from breadth import wide
from small_runs import full_gradients, make_micro_batch
from tiny_models import FAMILIES, HYBRIDS, SHAPE, build, make_osft, save_model
from torch import Tensor
from transformers import LlamaConfig, OPTConfig

from mini_trainer.model import activation_memory
from mini_trainer.model.activation_memory import apply_offloading
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.objectives.families.text_tower import find_blocks
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options import LoRAOptions
from mini_trainer.run.auto_settings import MemoryCounter

LENGTHS, LEAST_TOKENS = (13, 1, 40, 27), 8  # borders inside of tiles; the last tile is smaller
MODES = ("none", "selective", "full")
CASES = FAMILIES | HYBRIDS
UNTILED = ("mamba 2 alone",)  # which has no MLPs
ALWAYS = ("llama", "gpt2", "gpt_oss_sinks")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(activation_memory, "LEAST_TOKENS", LEAST_TOKENS)


def run_backward(model: PackedModel) -> dict[str, Tensor]:
    """The loss, the gradients, and what a router reports, of a row of several samples."""
    torch.manual_seed(0)  # dropout
    sums = model(make_micro_batch(LENGTHS, seed=0))
    sums.total.backward()
    return {"loss": sums.loss.detach()} | full_gradients(model) | {**sums.reports}


def check_same(results: dict[str, Tensor], expected: dict[str, Tensor], *, within: float = 1e-6) -> None:
    assert results.keys() == expected.keys() and len(expected) > 2
    for name, value in expected.items():
        assert (results[name] - value).norm() <= within * value.norm(), name


@pytest.mark.parametrize("case", [case if case in ALWAYS else wide(case) for case in CASES if case not in UNTILED])
def test_the_same_gradients_whatever_blocks_keep(case, world, tmp_path):
    path = save_model(CASES[case], tmp_path / "model")
    plain = run_backward(build(path, world))
    for mode in MODES:
        tiled = run_backward(build(path, world, activation_checkpointing=mode, tiled_mlp=True))
        check_same(tiled, plain, within=2e-6 if case in FAMILIES else 1e-5)  # states add up what differs
    offloaded = dict(activation_checkpointing="full", offload_activations=True)
    check_same(run_backward(build(path, world, **offloaded)), plain, within=0.0)
    check_same(run_backward(build(path, world, **offloaded, tiled_mlp=True)), tiled, within=0.0)


def make_lora(**options: object) -> LoRA:
    return LoRA(LoRAOptions(lora=True, lora_rank=4, **options), seed=0)


@pytest.mark.parametrize("kind", ["lora", "dora", "osft"])
def test_the_same_gradients_of_layers_that_a_method_puts_in(kind, world, tmp_path):
    path = save_model(FAMILIES["llama" if kind == "dora" else "mixtral"], tmp_path / "model")
    results = []
    for options in ({}, dict(tiled_mlp=True, activation_checkpointing="full", offload_activations=True)):
        methods = dict(lora=make_lora(), dora=make_lora(lora_use_dora=True))
        method = make_osft(tmp_path, osft_unfreeze_rank_ratio=0.5) if kind == "osft" else methods[kind]
        model = build(path, world, method=method, **options)
        for name, param in model.named_parameters():  # adapters that have learned nothing give A no gradient
            if "lora_B" in name:
                torch.manual_seed(len(name))
                torch.nn.init.normal_(param.to_local(), std=0.1)
        results.append(run_backward(model))
    assert any("experts" in name for name in results[0]) == (kind == "lora")
    check_same(results[1], results[0], within=2e-6)


def test_tiles_change_nothing_of_what_is_known_of_experts(world, tmp_path, monkeypatch):
    path = save_model(FAMILIES["mixtral"], tmp_path / "model")
    monkeypatch.setattr("mini_trainer.objectives.families.text.find_router_loss", lambda model, asked: 0.1)
    plain, tiled = (run_backward(build(path, world, tiled_mlp=is_tiled)) for is_tiled in (False, True))
    assert torch.equal(tiled["expert_loads"], plain["expert_loads"]) and plain["router_loss"] > 0
    check_same(tiled, plain)


def test_dropout_in_a_tile_is_drawn_once(world, tmp_path):
    """Else the gradient would not be that of the loss: here, of a move of adapters that have learned nothing."""
    method = make_lora(lora_dropout=0.3, lora_target_modules=("up_proj",))
    path = save_model(LlamaConfig(**SHAPE), tmp_path / "model")
    model = build(path, world, method=method, tiled_mlp=True, activation_checkpointing="full")
    name, param = next((n, p) for n, p in model.named_parameters() if "up_proj.lora_B" in n)
    gradient = run_backward(model)[name].clone()
    torch.manual_seed(1)
    direction, losses = torch.randn(param.shape), []
    for sign in (1, -1):
        with torch.no_grad():
            param.to_local().copy_(sign * 3e-3 * direction)
        losses.append(run_backward(model)["loss"])
    slope = (losses[0] - losses[1]) / 6e-3
    assert slope == pytest.approx(float((gradient * direction).sum()), rel=0.02)


def test_in_bf16_tiles_round_hardly_more(world, tmp_path):
    """A weight's gradient is the sum of its tiles', each rounded once."""
    path = save_model(FAMILIES["llama"], tmp_path / "model")
    exact, plain, tiled = (
        run_backward(build(path, world, dtype=dtype, tiled_mlp=is_tiled))
        for dtype, is_tiled in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    )
    errors = [
        torch.stack([(result[name] - value).norm() / value.norm() for name, value in exact.items()]).mean()
        for result in (plain, tiled)
    ]
    assert errors[1] <= 1.2 * errors[0], errors


def measure_peak(path, world, **options: object) -> tuple[int, int, int]:
    """Bytes that one forward and backward of a long row adds, at most; what is left after forward, here and moved."""
    model = build(path, world, activation_checkpointing="full", **options)
    with MemoryCounter() as counter:
        loss_sum = model(CausalLM().make_probe(512, 8, longest=64)).loss
        kept = counter.num_live, counter.most_offloaded
        loss_sum.backward()
    return counter.num_peak, *kept


def test_a_long_row_needs_less(world, tmp_path):
    num_blocks, num_tokens, width = 4, 512, 32
    config = LlamaConfig(**SHAPE | dict(intermediate_size=256, num_hidden_layers=num_blocks))
    path = save_model(config, tmp_path / "model")
    plain, tiled, offloaded = (
        measure_peak(path, world, **options) for options in ({}, dict(tiled_mlp=True), dict(offload_activations=True))
    )
    inputs = num_blocks * num_tokens * width * 4
    assert tiled[0] < 0.6 * plain[0]
    assert offloaded[2] == inputs and plain[2] == tiled[2] == 0
    assert offloaded[1] == plain[1] - inputs + inputs // num_blocks  # the last one is still under way


def test_what_is_not_used_leaves_nothing_in_memory(world, tmp_path):
    """A loss without a backward, and a row whose blocks are frozen, which ask for nothing."""
    model = build(save_model(FAMILIES["llama"], tmp_path / "model"), world, activation_checkpointing="full")
    apply_offloading(find_blocks(model.model), world.device)
    with MemoryCounter() as counter:
        for _ in range(2):
            loss_sum = model(make_micro_batch(LENGTHS, seed=0)).loss
            assert counter.live["offloaded"] == 2 * sum(LENGTHS) * 32 * 4
            del loss_sum
        loss_sum = model(make_micro_batch(LENGTHS, seed=0)).loss
        loss_sum.backward()
        del loss_sum
    assert counter.live["offloaded"] == 0


def test_what_cannot_be_is_refused(world, tmp_path):
    opt = OPTConfig(
        vocab_size=288, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    )
    for config in (opt, HYBRIDS["mamba 2 alone"]):
        path = save_model(config, tmp_path / config.model_type)
        with pytest.raises(ValueError, match=f"--tiled-mlp: .*'{config.model_type}' "):
            build(path, world, tiled_mlp=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_inputs_wait_in_cpu_memory_and_come_back_as_they_were(world, tmp_path, monkeypatch):
    num_blocks, num_tokens, width = 8, 32768, 256
    monkeypatch.setattr(activation_memory, "LEAST_TOKENS", 1024)
    shape = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=num_blocks)
    path = save_model(LlamaConfig(**SHAPE | shape), tmp_path / "model")
    micro_batch = CausalLM().make_probe(num_tokens, num_tokens, longest=256).to(world.device)
    peaks, results = {}, {}
    for name, options in dict(plain={}, tiled=dict(tiled_mlp=True), offloaded=dict(offload_activations=True)).items():
        model = build(path, world, dtype=torch.bfloat16, activation_checkpointing="full", **options)
        for _ in range(2):  # the second time memory is there, which what comes too early would find in use
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss_sum = model(micro_batch).loss
            kept = torch.cuda.memory_allocated() - before
            loss_sum.backward()
            torch.cuda.synchronize()
        peaks[name] = kept, torch.cuda.max_memory_allocated() - before
        gradients = {key: param.grad.full_tensor() for key, param in model.named_parameters()}
        results[name] = {"loss": loss_sum.detach()} | gradients
        del model, gradients, loss_sum
    check_same(results["offloaded"], results["plain"], within=0.0)
    check_same(results["tiled"], results["plain"], within=0.02)
    inputs = num_blocks * num_tokens * width * 2
    assert peaks["offloaded"][0] <= peaks["plain"][0] - 0.7 * inputs
    assert peaks["tiled"][1] < 0.8 * peaks["plain"][1]
