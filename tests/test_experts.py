"""A hundred and more experts a layer: read with few openings of files, multiplied in groups, exactly as one by one.

Held as one tensor in NF4, each has bitsandbytes' numbers, is unpacked for a product and not kept.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from breadth import wide
from peft import get_peft_model
from peft_runs import CONFIGS, load_with_adapter, make_inputs, train
from safetensors.torch import load_file
from small_runs import make_micro_batch, read_rows
from tiny_models import SHAPE, build, compile_by, load_source, save_model
from torch.nn.functional import cross_entropy
from transformers import AriaTextConfig, AutoModelForCausalLM, Qwen3MoeConfig

from mini_trainer.model import stored_tensors as stored
from mini_trainer.model.flops import count_flops
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.model.methods.nf4 import NF4Experts, pack, unpack
from mini_trainer.model.weights import read_weights
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.options import LoRAOptions

NUM_EXPERTS, LENGTHS = 128, (30, 1, 17)
CONFIG = Qwen3MoeConfig(
    **SHAPE, head_dim=8, num_experts=NUM_EXPERTS, num_experts_per_tok=8, moe_intermediate_size=16, norm_topk_prob=True
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """In bf16, with the experts stored apart, as releases are."""
    path = save_model(CONFIG, tmp_path_factory.mktemp("experts"))
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    names = load_file(path / "model.safetensors").keys()
    assert f"model.layers.1.mlp.experts.{NUM_EXPERTS - 1}.down_proj.weight" in names
    return path


def test_experts_are_put_together_in_their_own_type_and_a_file_is_opened_once(path, monkeypatch):
    readers = read_weights(load_source(path), TextFamily())
    opened, open_tensors = [], stored.open_tensors
    monkeypatch.setattr(stored, "open_tensors", lambda path: opened.append(path) or open_tensors(path))
    experts = readers["model.layers.0.mlp.experts.gate_up_proj"]()
    assert experts.shape == (NUM_EXPERTS, 32, 32) and experts.dtype == torch.bfloat16
    assert len(opened) == 1
    readers["model.norm.weight"]()
    assert len(opened) == 2  # nothing has stayed open


def test_grouped_products_give_the_losses_and_gradients_of_experts_one_by_one(path, world):
    model = build(path, world)
    assert model.model.config._experts_implementation == "grouped_mm"
    micro_batch = make_micro_batch(LENGTHS, seed=0)
    loss_sum = model(micro_batch).loss
    loss_sum.backward()

    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    ids, total = micro_batch.row.input_ids[0], torch.zeros(())
    for sequence in ids.split(LENGTHS):
        if len(sequence) > 1:
            logits = reference(input_ids=sequence[None].long(), use_cache=False).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, sequence[1:].long(), reduction="sum")
    total.backward()
    assert loss_sum.item() == pytest.approx(total.item(), rel=1e-6)
    own = dict(model.model.named_parameters())
    for name, param in reference.named_parameters():
        difference = own[name].grad.full_tensor() - param.grad
        assert difference.norm() <= 2e-6 * param.grad.norm(), name


@pytest.mark.parametrize(
    ("config_class", "names"),
    [(Qwen3MoeConfig, ("num_experts", "num_experts_per_tok")), (AriaTextConfig, ("moe_num_experts", "moe_topk"))],
)
def test_experts_that_a_token_does_not_go_to_cost_no_flops(config_class, names):
    """Twice the experts cost their rows of the router, and twice the choices what the chosen experts multiply."""
    counts = {}
    for num_experts, num_chosen in ((4, 2), (8, 2), (8, 4)):
        config = config_class(**SHAPE, **dict(zip(names, (num_experts, num_chosen), strict=True)))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        counts[num_experts, num_chosen] = count_flops(model).per_token
        of_one = sum(6 * param.numel() / num_experts for param in model.parameters() if param.ndim == 3)
    router_rows = 6 * 4 * SHAPE["hidden_size"] * SHAPE["num_hidden_layers"]
    assert counts[8, 2] - counts[4, 2] == pytest.approx(router_rows)
    assert counts[8, 4] - counts[8, 2] == pytest.approx(2 * of_one)


NF4_LENGTHS = (13, 2, 22, 7)


def read_as_defined(weight: torch.Tensor) -> torch.Tensor:
    """What NF4 with doubly quantized scales makes of a matrix, from bitsandbytes' codes by the formats' definitions.

    bitsandbytes' kernel for processors misreads matrices whose columns are no multiple of 64.
    """
    codes, state = quantize_4bit(weight.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4")
    nested = state.state2
    groups = nested.absmax.repeat_interleave(256)[: len(state.absmax)]
    scales = nested.code[state.absmax.long()] * groups + state.offset
    numbers = torch.stack((codes.flatten() >> 4, codes.flatten() & 15), dim=1).flatten()[: weight.numel()]
    values = state.code[numbers.long()] * scales.repeat_interleave(64)[: weight.numel()]
    return values.view(weight.shape).to(weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 96, 64), (3, 33, 50), (2, 272, 1024), (4, 32, 48), (2, 5, 5)])
def test_each_expert_is_quantized_by_itself_as_bitsandbytes_does_it(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * torch.rand(shape[0], shape[1], 1, generator=generator)
    weight[1] *= 100
    weight = weight.to(dtype)
    packed = pack(weight)
    unpacked = unpack(packed, shape)
    assert unpacked.dtype == dtype
    for own, expert in zip(unpacked, weight, strict=True):
        assert torch.equal(own, read_as_defined(expert))
        if shape[-1] % 64 == 0:
            codes = quantize_4bit(expert.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4")
            assert torch.equal(own, dequantize_4bit(*codes))
        assert torch.equal(own, unpack(pack(expert), shape[1:]))  # a matrix of its own


def build_quantized(world, inputs: dict[str, str], **options: object) -> tuple[torch.nn.Module, LoRA]:
    """The model as a run builds it, with adapters that have begun to learn."""
    method = LoRA(LoRAOptions(lora=True, lora_rank=4, base_quantization="nf4", **options.pop("lora", {})), seed=0)
    model = build(Path(inputs["model_name_or_path"]), world, method=method, **options)
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        if ".lora_B" in name:  # begins as zeros, which would leave the other half without a gradient
            local = param.data.to_local()
            local.copy_(torch.randn(local.shape, generator=generator) * 0.1)
    return model, method


def load_as_defined(inputs: dict[str, str]) -> torch.nn.Module:
    """The base in transformers, with the weights that its 4 bits stand for."""
    model = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"], dtype=torch.float32)
    with torch.no_grad():
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(read_as_defined(module.weight))
            for param in module.parameters(recurse=False):
                for expert in param if param.ndim == 3 else ():
                    expert.copy_(read_as_defined(expert))
    return model


def compute(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The loss of a row, and the gradients of all that trains."""
    loss = model(make_micro_batch(NF4_LENGTHS, seed=0)).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "targets"),
    [("qwen3_moe", ()), ("gpt_oss_sinks", ()), wide("mixtral", ()), ("qwen3_moe", ("q_proj", "experts.down_proj"))],
)
def test_losses_and_gradients_are_pefts_on_the_unpacked_weights(family, targets, world, tmp_path):
    """Models have experts as (experts, out, in), or as (experts, in, out) with biases; some may have no adapter."""
    inputs = make_inputs(tmp_path, family)
    model, method = build_quantized(world, inputs, lora=dict(lora_target_modules=targets))
    found = compute(model)
    assert any(isinstance(module, NF4Experts) for module in model.modules())

    base = load_as_defined(inputs)
    theirs = get_peft_model(base, copy.deepcopy(method.config))
    own = {name.removeprefix("model."): param for name, param in model.named_parameters() if ".lora_" in name}
    for name, param in theirs.base_model.model.named_parameters():
        if param.requires_grad:
            param.data.copy_(own[name].full_tensor())
    total = torch.zeros(())
    for ids in make_micro_batch(NF4_LENGTHS, seed=0).row.input_ids[0].long().split(NF4_LENGTHS):
        logits = theirs(input_ids=ids[None], use_cache=False).logits[0, :-1]
        total = total + cross_entropy(logits, ids[1:], reduction="sum")
    total.backward()
    assert found["loss"].item() == pytest.approx(total.item(), rel=1e-6)
    grads = {name: param.grad for name, param in theirs.base_model.model.named_parameters() if param.requires_grad}
    assert {f"model.{name}" for name in grads} == found.keys() - {"loss"} and any("experts" in name for name in grads)
    for name, grad in grads.items():
        assert grad.norm() > 0 and (found[f"model.{name}"] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", wide("gpt_oss_sinks")])
def test_how_it_is_computed_does_not_change_what_is_computed(family, world, tmp_path, monkeypatch):
    inputs = make_inputs(tmp_path, family)
    expected = compute(build_quantized(world, inputs)[0])
    compile_by("eager", monkeypatch, dynamic=False)
    for change in (
        dict(activation_checkpointing="selective"),
        dict(activation_checkpointing="full"),
        dict(compile=True, activation_checkpointing="full"),
    ):
        found = compute(build_quantized(world, inputs, **change)[0])
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-5 * value.norm(), (change, name)


def test_no_weight_is_kept_for_the_backward(world, tmp_path):
    model, _ = build_quantized(world, make_inputs(tmp_path, "qwen3_moe"))
    packed = [module for module in model.modules() if isinstance(module, NF4Experts)]
    least = min(torch.Size(experts.packed_shape).numel() for experts in packed)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        return tensor

    micro_batch = make_micro_batch((2, 3), seed=0)  # whose activations are smaller than the weights
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(micro_batch).loss
    assert kept and max(kept.values()) < least
    loss.backward()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", wide("gpt_oss_sinks")])
def test_ranks_a_resume_and_a_merge_are_those_of_any_adapter(family, world, tmp_path):
    inputs = make_inputs(tmp_path, family)
    options = dict(base_quantization="nf4")
    exports = {"one": train(world, inputs, tmp_path / "one", **options)}
    checkpoint = str(tmp_path / "one" / "checkpoints" / "step_2")
    exports["resumed"] = train(world, inputs, tmp_path / "resumed", **options, resume=checkpoint)
    exports["two"] = train(
        world, inputs, tmp_path / "two", num_ranks=2, activation_checkpointing="selective", **options
    )
    files = {name: load_file(export / "adapter/adapter_model.safetensors") for name, export in exports.items()}
    for name, tensor in files["one"].items():
        assert torch.equal(files["resumed"][name], tensor)
        assert (files["two"][name] - tensor).norm() <= 1e-4 * tensor.norm(), name
    for key in ("loss", "grad_norm"):
        rows, expected = (read_rows(tmp_path / name) for name in ("two", "one"))
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-5)

    # Merged into the weights as they were, by peft too.
    merged = AutoModelForCausalLM.from_pretrained(exports["one"], dtype=torch.float32)
    theirs = load_with_adapter(inputs, exports["one"] / "adapter").merge_and_unload()
    start = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"], dtype=torch.float32)
    for name, param in theirs.named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), param, rtol=1e-5, atol=1e-6)
    name = next(name for name, param in start.named_parameters() if param.ndim == 3)
    assert not torch.equal(merged.get_parameter(name), start.get_parameter(name))


def test_the_plan_counts_packed_experts_and_what_each_token_multiplies(world, tmp_path):
    inputs = make_inputs(tmp_path, "qwen3_moe")
    model, method = build_quantized(world, inputs)
    packed = [module for module in model.modules() if isinstance(module, NF4Experts)]
    assert len(packed) == 4 and re.search("experts .*NF4", method.describe())
    assert re.search(r"[\d,]+ bytes \(0\.00 GB\) in float32: gate\.weight$", method.describe())
    plain = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"], dtype=torch.float32)
    config = CONFIGS["qwen3_moe"]
    of_experts = sum(param.numel() for param in plain.parameters() if param.ndim == 3) / config.num_experts
    counted = count_flops(model.model).per_token
    for experts in packed:
        experts.packed_shape = (config.num_experts, 0, 0)
    assert counted - count_flops(model.model).per_token == 4 * of_experts * config.num_experts_per_tok
