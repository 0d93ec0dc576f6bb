"""Muon equals torch's for every matrix, in fused weights and sharded ones too; learning rates of parts of a model."""

import inspect
from pathlib import Path

import pytest
import torch
from breadth import long, wide
from in_process import train_here, train_on
from safetensors.torch import load_file
from small_runs import OPTIONS, make_inputs, read_rows
from torch.distributed.tensor import DTensor, Shard
from torch.optim import _muon
from transformers import AutoConfig, AutoModelForCausalLM

from mini_trainer.model.optim import muon
from mini_trainer.model.optim.muon import Layout, Muon, Unit, find_matrices, share_out
from mini_trainer.model.optim.optimizers import choose_rates, set_step
from mini_trainer.options import OptimizationOptions

MUON = dict(optimizer="muon", learning_rate=2e-3, weight_decay=0.1)
ADAMW = dict(lr=0.0, betas=(0.9, 0.95), eps=1e-8)
TINY = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, pad_token_id=None, bos_token_id=None, eos_token_id=None)  # fmt: skip
OWN = {
    "deepseek_v3": dict(q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
                        num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                        first_k_dense_replace=1, n_group=2, topk_group=1, head_dim=4),
    "gpt2": dict(n_embd=32, n_inner=48, n_layer=2, n_head=4),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
    "mixtral": dict(num_local_experts=4),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "phi": dict(num_key_value_heads=4),
    "qwen2_moe": dict(num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}  # fmt: skip
# In weights that hold several matrices: which of them can be doubled, and which other one halved, without a change.
PARTNERS = {"qkv_proj": (0, 1), "c_attn": (0, 1), "query_key_value": (0, 1)}
# The last of them can be doubled if this weight is halved.
FOLLOWED_BY = {"gate_up_proj": "down_proj", "kv_b_proj": "o_proj"}


def make_model(model_type: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **TINY | OWN.get(model_type, {}))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def step_both(world, *, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights after five steps of ours and of torch's Muon with the same gradients; ours has the last two in one."""
    torch.manual_seed(0)
    theirs = [torch.nn.Parameter(torch.randn(shape) / 8) for shape in ((24, 24), (40, 16), (16, 56), (48, 24), (8, 24))]

    def gather(tensors: list[torch.Tensor]) -> list[DTensor]:
        plain = [*(tensor.detach().clone() for tensor in tensors[:3]), torch.cat([tensors[3], tensors[4]]).detach()]
        return [DTensor.from_local(tensor, world.mesh, [Shard(0)]) for tensor in plain]

    ours = list(map(torch.nn.Parameter, gather(theirs)))
    groups = [{"params": ours, "weight_decay": 0.1, "rate": 1.0}]
    layouts = dict.fromkeys(ours[:3], Layout()) | {ours[3]: Layout((48, 8))}
    muon = Muon(groups, layouts, **ADAMW, compute_dtype=dtype)
    reference = torch.optim.Muon(theirs, lr=0.0, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        for other in theirs:
            other.grad = torch.randn_like(other)
        for own, gradient in zip(ours, gather([other.grad for other in theirs]), strict=True):
            own.grad = gradient
        reference.param_groups[0]["lr"] = 0.02 / (step + 1)
        set_step(muon, step=step, learning_rate=0.02 / (step + 1))
        reference.step(), muon.step()
    return [(own.to_local(), other.to_local()) for own, other in zip(ours, gather(theirs), strict=True)]


def test_it_is_torchs_to_the_bit_in_bf16(world):
    for own, other in step_both(world, dtype=torch.bfloat16)[:3]:  # fused ones are scaled in bf16
        assert torch.equal(own, other)


def test_it_is_torchs_in_fp32_without_the_cast(world, monkeypatch):
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert source.count("grad.bfloat16()") == 1
    names = dict(vars(_muon))
    exec(source.replace("grad.bfloat16()", "grad.clone()"), names)
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", names["_zeropower_via_newtonschulz"])
    for own, other in step_both(world, dtype=torch.float32):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


def test_a_missing_gradient_is_one_of_zeros(world):
    start, gradient = torch.randn(24, 16), torch.randn(24, 16)
    ends = []
    for missing in (None, torch.zeros_like(start)):
        param = torch.nn.Parameter(DTensor.from_local(start.clone(), world.mesh, [Shard(0)]))
        muon = Muon([{"params": [param], "weight_decay": 0.5, "rate": 2.0}], {param: Layout()}, **ADAMW)
        for step, given in enumerate((missing, gradient, missing)):
            param.grad = None if given is None else DTensor.from_local(given, world.mesh, [Shard(0)])
            set_step(muon, step=step, learning_rate=0.05)
            muon.step()
            if step == 0:
                torch.testing.assert_close(param.to_local(), start * 0.95)  # it only decays
        ends.append(param.to_local())
    assert torch.equal(*ends)


@pytest.mark.parametrize("model_type", sorted(muon.FAMILIES))
def test_every_matrix_of_a_family_is_found_and_fused_ones_are_cut_as_the_model_cuts_them(model_type):
    """A query's matrix can be doubled if the key's is halved, and an up projection's if the down projection's is."""
    model = make_model(model_type)
    layouts, ids = find_matrices(model), torch.arange(12)[None]
    params = dict(model.named_parameters())
    assert {name for name, param in params.items() if param.ndim >= 2} - layouts.keys() <= {
        name for name in params if name.endswith("bias") or name.split(".")[-2] in muon.OTHERS}  # fmt: skip
    with torch.no_grad():
        for name, param in params.items():
            if name.endswith("bias") and model_type in ("gpt2", "gpt_neox"):
                param.zero_()
        expected = model(ids).logits
        for name, layout in layouts.items():
            kind = name.removesuffix(".weight").split(".")[-1]
            if not layout.sizes:
                assert kind not in PARTNERS | FOLLOWED_BY
                continue
            before = params[name].clone()
            parts = [part.clone() for part in layout.cut(before)]
            assert torch.equal(layout.join(parts), before)
            if kind in PARTNERS:
                first, second = PARTNERS[kind]
                parts[first] *= 2
                parts[second] /= 2
                params[name].copy_(layout.join(parts))
                assert torch.equal(model(ids).logits, expected), name
                parts[first] *= 2  # alone it does change something
                params[name].copy_(layout.join(parts))
                assert not torch.equal(model(ids).logits, expected), name
            elif kind in FOLLOWED_BY and model_type != "gpt_oss":
                down = params[name.replace(kind, FOLLOWED_BY[kind])]
                parts[1] *= 2
                params[name].copy_(layout.join(parts))
                assert not torch.equal(model(ids).logits, expected), name
                down /= 2
                assert torch.equal(model(ids).logits, expected), name
                down *= 2
            params[name].copy_(before)


def test_gpt_oss_experts_are_cut_by_columns_in_turn():
    model = make_model("gpt_oss")
    layouts, params = find_matrices(model), dict(model.named_parameters())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    gate, up = layouts[name].cut(params[name])
    assert torch.equal(gate, params[name][..., ::2].mT)  # as GptOssExperts takes them
    assert torch.equal(up, params[name][..., 1::2].mT)


def test_what_is_not_known_is_refused_by_name():
    model = make_model("llama")
    model.model.layers[1].mlp.adapter = torch.nn.Linear(32, 32)
    with pytest.raises(ValueError, match=r"--optimizer muon: .*layers\.1\.mlp\.adapter\.weight "):
        find_matrices(model)
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=64)
    with pytest.raises(ValueError, match=r"--optimizer muon: .*'bloom' .*cohere, "):
        find_matrices(AutoModelForCausalLM.from_config(config))


def test_work_is_shared_out_evenly_and_each_unit_once():
    torch.manual_seed(0)
    shapes = [torch.Size((int(a), int(b))) for a, b in torch.randint(16, 512, (101, 2))]
    units = [Unit(object(), Layout(), [shape]) for shape in shapes]
    rounds = share_out(units, 4)
    assert sorted(map(id, units)) == sorted(id(unit) for units_of in rounds for unit in units_of if unit is not None)
    work = [sum(units_of[i].count_flops() for units_of in rounds if units_of[i] is not None) for i in range(4)]
    assert max(work) < 1.05 * min(work)


CASES = {"llama": "llama_tied_bias", "fused": "phi3", "experts by rows": "mixtral"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, dict[str, str]]:
    return {case: make_inputs(tmp_path_factory.mktemp("inputs"), family) for case, family in CASES.items()}


def train(num_ranks: int, world, inputs: dict[str, str], output_dir: Path, **changes) -> dict[str, torch.Tensor]:
    options = inputs | OPTIONS | MUON | dict(max_steps=4, output_dir=output_dir, save_final_checkpoint=True)
    train_on(num_ranks, world, **options | changes)
    return load_file(output_dir / "hf_format" / "latest" / "model.safetensors")


REPLICAS = dict(sharding="hybrid", shard_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_ranks", "changes"),  # fused ones among plain ones
    [wide("llama", 2, {}), wide("llama", 3, {}), ("fused", 3, {}), long("experts by rows", 3, {}),
     long("llama", 4, REPLICAS)],
)  # fmt: skip
def test_weights_do_not_depend_on_ranks_and_replicas(case, num_ranks, changes, inputs, world, tmp_path):
    """Three ranks: rows that they do not divide, and experts of which some or all hold a part."""
    expected = train(1, world, inputs[case], tmp_path / "1")
    for name, tensor in train(num_ranks, world, inputs[case], tmp_path / "other", **changes).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_a_resumed_run_is_the_same_to_the_bit(inputs, world, tmp_path):
    whole = train(1, world, inputs["llama"], tmp_path / "whole")
    train(1, world, inputs["llama"], tmp_path / "parts", max_steps=2)
    options = inputs["llama"] | OPTIONS | MUON | dict(max_steps=4, save_final_checkpoint=True)
    train_here(world, **options, output_dir=str(tmp_path / "parts"))
    assert read_rows(tmp_path / "parts") == read_rows(tmp_path / "whole")
    exports = sorted((tmp_path / "parts" / "hf_format").glob("samples_*"), key=lambda path: path.stat().st_mtime)
    parts = load_file(exports[-1] / "model.safetensors")
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_rates_by_pattern():
    model = make_model("llama")
    options = OptimizationOptions(
        learning_rate=1e-3, optimizer="muon",
        learning_rate_for=("lm_head*=1e-6", "*.q_proj.weight=2e-3"),
    )  # fmt: skip
    chosen = choose_rates(model, options)
    rates = {name: own.rate for name, own in chosen.items()}
    assert rates["model.layers.1.mlp.up_proj.weight"] == 1
    assert rates["model.norm.weight"] == 1
    assert rates["lm_head.weight"] == pytest.approx(1e-3)
    assert rates["model.layers.1.self_attn.q_proj.weight"] == pytest.approx(2)
    with pytest.raises(ValueError, match=r"--learning-rate-for lm_haed\*: "):
        choose_rates(model, OptimizationOptions(learning_rate_for=("lm_haed*=1e-6",)))


@pytest.mark.parametrize("optimizer", [long("adamw"), long("adamw8bit"), "muon"])
def test_a_part_with_a_rate_of_0_stays_as_it_was(optimizer, inputs, world, tmp_path):
    start = load_file(Path(inputs["fused"]["model_name_or_path"]) / "model.safetensors")
    found = train(1, world, inputs["fused"], tmp_path, optimizer=optimizer, learning_rate_for=["*.layers.0.*=0"])
    for name, tensor in found.items():
        assert torch.equal(tensor, start[name]) == (".layers.0." in name), name
