"""Layers with a state, once a sequence: packed rows give transformers' own losses and gradients, however computed."""

import pytest
import torch
from in_process import train_on
from small_runs import OPTIONS, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE, build, compile_by, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, Lfm2Config, Mamba2Config, NemotronHConfig, Qwen3NextConfig

from model.blocks import find_blocks
from model.flops import count_flops
from model.mixers import find_mixers
from objectives.micro_batch import pack_samples

SHAPE = dict(vocab_size=VOCAB_SIZE, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
MODELS = {
    "gated delta net, experts": Qwen3NextConfig(
        **SHAPE, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], head_dim=8,
        intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "mamba 2, attention, experts": NemotronHConfig(
        **SHAPE, layers_block_type=["mamba", "attention", "mlp"], head_dim=8, intermediate_size=48, mamba_num_heads=4,
        mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=16, expand=2,
    ),
    "mamba 2 alone": Mamba2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2,
        chunk_size=16, expand=2,
    ),
    "short convolution": Lfm2Config(
        **SHAPE, num_hidden_layers=2, layer_types=["conv", "full_attention"], intermediate_size=48,
        block_auto_adjust_ff_dim=False,
    ),
}  # fmt: skip
LENGTHS = (45, 1, 70, 7)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tokenizer(save_model(config, root / str(i))) for i, (name, config) in enumerate(MODELS.items())}


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


@pytest.mark.parametrize("mode", ["none", "selective", "full", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_losses_and_gradients_are_the_models_own(name, mode, paths, expected, world, monkeypatch):
    options = dict(activation_checkpointing=mode)
    if mode == "compiled":
        compile_by("eager", monkeypatch)
        options = dict(compile=True, activation_checkpointing="none")
    model = build(paths[name], world, **options)
    samples = [(ids.numpy(), ids.numpy(), None) for ids in make_sequences()]
    loss = model(pack_samples(samples))
    loss.backward()
    total, gradients = expected[name]
    assert loss.item() == pytest.approx(total, rel=1e-6)
    own = {
        key.removeprefix(
            "model.",
        ): param.grad
        for key, param in model.named_parameters()
        if param.grad is not None
    }
    assert own.keys() == gradients.keys()
    for key, gradient in gradients.items():
        difference = (own[key].full_tensor() - gradient).norm()
        assert difference <= 1e-5 * gradient.norm() + 1e-7, key


def test_what_attends_is_counted_as_attention(paths, world):
    model = build(paths["mamba 2, attention, experts"], world)
    assert [len(find_mixers(block)) for block in find_blocks(model.model)] == [1, 0, 0]
    assert len(count_flops(model.model, model.model.config).windows) == 1
    alone = build(paths["mamba 2 alone"], world)
    assert count_flops(alone.model, alone.model.config).attention_cost == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", [{}, dict(lora=True), dict(osft=True, osft_unfreeze_rank_ratio=0.5)])
def test_runs_do_not_depend_on_ranks(method, paths, world, tmp_path):
    data = str(write_samples(tmp_path / "data.arrow", make_samples(20, vocab_size=VOCAB_SIZE)))
    path = str(paths["gated delta net, experts"])
    options = OPTIONS | dict(model_name_or_path=path, data_path=data, max_steps=4, adam_eps=1e-5) | method
    if "osft" in method:
        options["osft_cache_dir"] = str(tmp_path / "osft")
    for num_ranks in (1, 2):
        train_on(num_ranks, world, **options, output_dir=tmp_path / f"on_{num_ranks}")
    for row, other in zip(read_rows(tmp_path / "on_1"), read_rows(tmp_path / "on_2"), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
