"""Adapters: what peft computes, on any ranks and from any resume, in files that peft and transformers load."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from breadth import long, wide
from forked import run_forked, succeed
from hand_made import read_triple
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft_runs import CONFIGS, TABLE, make_inputs, run_beside_peft, train
from processes import flags
from safetensors.torch import load_file
from small_runs import make_micro_batch, read_rows
from tiny_models import SHAPE, VOCAB_SIZE, build, compile_by, save_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import RunError
from mini_trainer.model.methods import lora_layers
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.model.methods.nf4 import NF4Linear, pack, unpack
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options import DataOptions, LoRAOptions
from mini_trainer.run.checkpoint_files import read_manifest

ALWAYS = [("llama", {}), ("qwen3_moe", {}), ("gpt2", dict(lora_use_dora=True)), ("gpt_oss_sinks", {})]


@pytest.mark.parametrize(("family", "options"), [case if case in ALWAYS else wide(*case) for case in TABLE])
def test_a_run_is_pefts_and_its_exports_load_there(family, options, world, tmp_path):
    found = run_beside_peft(family, options, tmp_path, world=world)
    assert found.loss <= 1e-6
    assert found.adapter <= 1e-4
    assert found.loads_bit_for_bit
    assert found.effect > 1e-3
    assert max(found.merged, found.merged_by_peft) <= 1e-5
    vocabularies = [AutoTokenizer.from_pretrained(folder).get_vocab() for folder in found.exports]
    assert vocabularies[0] == vocabularies[1]


OFFLOADED = dict(num_ranks=2, max_tokens_per_gpu=48, cpu_offload=True, activation_checkpointing="none")
HYBRID = dict(num_ranks=4, sharding="hybrid", shard_size=2, micro_batch_grad_sync="last",
              activation_checkpointing="selective")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "layout"),
    [
        wide("llama_tied_bias", {}, OFFLOADED),
        ("llama_tied_bias", dict(base_quantization="nf4"), HYBRID),
        wide("mixtral", {}, OFFLOADED),
    ],
)
def test_ranks_and_layouts_change_nothing(family, kind, layout, world, tmp_path):
    inputs = make_inputs(tmp_path, family)
    reference = train(world, inputs, tmp_path / "one", **kind)
    export = train(world, inputs, tmp_path / "several", **kind | layout)
    for key in ("loss", "grad_norm"):
        rows, expected = (read_rows(tmp_path / name) for name in ("several", "one"))
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-5)
    adapters = [load_file(path / "adapter/adapter_model.safetensors") for path in (export, reference)]
    for name, tensor in adapters[1].items():
        assert (adapters[0][name] - tensor).norm() <= 1e-4 * tensor.norm(), name


def test_packed_weights_are_bitsandbytes_own(world):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from bitsandbytes.nn import Linear4bit
    from torch import nn

    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((96, 64), (33, 50), (256, 1024)):
            whole = nn.Linear(shape[1], shape[0], dtype=dtype)
            layer = NF4Linear(whole, compute_dtype=dtype)
            layer.packed = nn.Parameter(pack(whole.weight.data), requires_grad=False)
            codes, state = quantize_4bit(whole.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4")
            unpacked = unpack(layer.packed, shape)
            assert torch.equal(unpacked, dequantize_4bit(codes, state))
            assert layer.packed.nbytes < 0.6 * whole.weight.numel() + 2000
            x = torch.randn(7, shape[1], dtype=dtype, requires_grad=True)
            out = layer(x)
            out.sum().backward()
            torch.testing.assert_close(out, nn.functional.linear(x, unpacked, whole.bias))
            torch.testing.assert_close(x.grad, unpacked.sum(0).expand(7, -1), rtol=1e-2, atol=1e-2)
    theirs = Linear4bit(64, 96, quant_type="nf4", compress_statistics=True, compute_dtype=torch.float32)
    assert theirs.weight.blocksize == 64


def test_an_adapter_of_a_quantized_base_is_the_same_on_one_that_transformers_quantized(world, tmp_path, monkeypatch):
    # Its kernel for processors with avx512_bf16 rounds scales to bf16, and takes no rows shorter than 64.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    inputs = make_inputs(tmp_path, "llama_64")  # other columns its kernel for processors misreads
    validated = dict(validation_data_path=inputs["data_path"])
    export = train(world, inputs, tmp_path / "run", base_quantization="nf4", **validated)
    loss = json.loads((tmp_path / "run/validation_metrics_0.jsonl").read_text().splitlines()[-1])["loss"]

    # The same four-bit base, quantized by transformers and bitsandbytes.
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        inputs["model_name_or_path"], dtype=torch.float32, quantization_config=config, device_map="cpu"
    )
    theirs = PeftModel.from_pretrained(base, export / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    data = Mixture([TokenizedData(inputs["data_path"])])
    data.vocab_size = VOCAB_SIZE
    rows = [read_triple(data, i) for i in range(len(data.lengths))]
    assert mean_loss(theirs, rows) == pytest.approx(loss, abs=2e-4)
    assert mean_loss(merged, rows) != pytest.approx(loss, abs=2e-4)

    # Merged into the weights as they were, not into rounded ones.
    start = load_file(Path(inputs["model_name_or_path"]) / "model.safetensors")
    after, adapter = load_file(export / "model.safetensors"), load_file(export / "adapter/adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    A, B = (adapter[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    torch.testing.assert_close(after[f"{name}.weight"], start[f"{name}.weight"] + 4.0 * B @ A)


@torch.no_grad()
def mean_loss(model: torch.nn.Module, rows: list) -> float:
    total, count = 0.0, 0
    for ids, labels, _ in rows:
        logits = model(input_ids=torch.tensor(ids)[None].long(), use_cache=False).logits[0, :-1].float()
        targets = torch.tensor(labels[1:]).long()
        total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
        count += int((targets != -100).sum())
    return total / count


def test_going_on_from_an_adapter(world, tmp_path):
    inputs = make_inputs(tmp_path, "llama")
    options = dict(lora_target_modules=("q_proj", "down_proj"), lora_alpha=48.0)
    first = train(world, inputs, tmp_path / "first", **options)
    given = dict(lora_adapter=str(first / "adapter"), lora_rank=None, lora_alpha=None)
    second = train(world, inputs, tmp_path / "second", **given, learning_rate=0.0)
    files = [load_file(export / "adapter/adapter_model.safetensors") for export in (first, second)]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    configs = [json.loads((export / "adapter/adapter_config.json").read_text()) for export in (first, second)]
    assert {k: sorted(v) if isinstance(v, list) else v for k, v in configs[0].items()} == {
        k: sorted(v) if isinstance(v, list) else v for k, v in configs[1].items()
    }
    torch.testing.assert_close(
        *(load_file(export / "model.safetensors")["model.layers.1.mlp.down_proj.weight"] for export in (first, second))
    )

    # Other adapters are refused: than before, of another base, or of another shape.
    with pytest.raises(ValueError, match=r"step_\d+ .*other data of the method"):
        train(world, inputs, tmp_path / "first", **given, allow_changed_options=True)
    save_model(CONFIGS["llama"], Path(inputs["model_name_or_path"]), seed=1)
    with pytest.raises(RunError, match=r"^adapter .*different model .*--model-name-or-path .*/model"):
        train(world, inputs, tmp_path / "third", **given)
    (first / "adapter/base_model.json").unlink()
    third = make_inputs(tmp_path / "third_model", "qwen2") if (tmp_path / "third_model").mkdir() is None else None
    wider = type(CONFIGS["qwen2"]).from_dict(CONFIGS["qwen2"].to_dict() | dict(intermediate_size=80))
    save_model(wider, Path(third["model_name_or_path"]))
    with pytest.raises(RunError, match=r"^adapter .*--model-name-or-path: .*\(4, 48\), not \(4, 80\)"):
        train(world, third, tmp_path / "fourth", **given)


def build_adapted(
    world, inputs: dict[str, str], kind: dict | None = None, *, seed: int = 0, **options: object
) -> PackedModel:
    """The model as a run builds it; `kind` are the method's options, `options` those of `build`."""
    method = LoRA(LoRAOptions(lora=True, lora_rank=4, **kind or {}), seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(inputs["model_name_or_path"])
    method.open_files(tokenizer, DataOptions(data_path=inputs["data_path"], batch_size=8, max_tokens_per_gpu=64))
    return build(Path(inputs["model_name_or_path"]), world, method=method, **options)


def test_frozen_weights_are_held_in_the_compute_type_without_gradients(world, tmp_path):
    whole = dict(lora_modules_to_save=("lm_head",))
    model = build_adapted(world, make_inputs(tmp_path, "llama"), whole, dtype=torch.bfloat16)
    model(make_micro_batch((5, 9), seed=0)).loss.backward()
    for name, param in model.named_parameters():
        trains = ".lora_" in name or "lm_head" in name
        assert param.dtype == (torch.float32 if trains else torch.bfloat16), name
        assert (param.grad is not None) == trains, name
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert {scale for layer in layers for scale in layer.scaling.values()} == {2.0}  # alpha is twice the rank
    again = build_adapted(world, make_inputs(tmp_path, "llama"), seed=1)
    firsts = [each.get_parameter(f"model.model.layers.{i}.mlp.up_proj.lora_A.default.weight").to_local()
              for each in (model, again) for i in (0, 1)]  # fmt: skip
    assert not any(torch.equal(*pair) for pair in itertools.combinations(firsts, 2))


@pytest.mark.parametrize("family", ["mixtral", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_start_says_which_weights_are_not_in_4_bits(family, dtype, world, tmp_path):
    inputs = make_inputs(tmp_path, family)
    method = LoRA(LoRAOptions(lora=True, lora_rank=4, base_quantization="nf4"), seed=0)
    build(Path(inputs["model_name_or_path"]), world, method=method, dtype=dtype)
    own = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"], dtype=dtype)
    linear = {id(module.weight) for module in own.modules() if isinstance(module, torch.nn.Linear)}
    others = [param for param in own.model.layers.parameters() if param.ndim > 1 and id(param) not in linear]
    assert bool(others) == (family == "mixtral") == ("except for" in method.describe())
    if others:
        num_bytes = sum(param.nbytes for param in others if param.ndim == 2)
        assert f" {num_bytes:,} bytes (0.00 GB) in {str(dtype)[6:]}: gate.weight" in method.describe()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", dict(lora_target_modules=("q_prj",)), "--lora-target-modules q_prj: .* q_proj, k"),
        ("llama", dict(lora_target_modules=("lm_head",)), "--lora-target-modules lm_head: "),
        ("llama", dict(lora_target_modules=("q_proj(",)), r"--lora-target-modules q_proj\(: .*expression"),
        ("llama", dict(lora_modules_to_save=("head",)), "--lora-modules-to-save head: "),
        ("mixtral", dict(lora_dropout=0.1), "--lora-dropout 0.1 .*fused experts"),
        ("mixtral", dict(lora_use_dora=True), "--lora-use-dora .*fused experts"),
        ("llama", dict(lora_adapter="nowhere"), "--lora-adapter nowhere: has no adapter_config.json"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(family, options, message, world, tmp_path):
    inputs = make_inputs(tmp_path, family)
    with pytest.raises(ValueError, match=message):
        train(world, inputs, tmp_path / "run", **options)


def test_another_base_or_rank_is_refused_at_a_resume_which_has_what_trains_alone(world, tmp_path):
    inputs = make_inputs(tmp_path, "llama")
    export = train(world, inputs, tmp_path / "run")
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step_2")
    sizes = [entry["shape"] for name, entry in read_manifest(Path(checkpoint))["tensors"].items() if "model/" in name]
    trained = load_file(export / "adapter/adapter_model.safetensors").values()
    assert sum(map(math.prod, sizes)) == sum(tensor.numel() for tensor in trained)
    with pytest.raises(ValueError, match=r"step_2 .*lora-rank \(4 .*8\): .*--allow-changed-options"):
        train(world, inputs, tmp_path / "other", resume=checkpoint, lora_rank=8, allow_changed_options=True)
    save_model(CONFIGS["llama"], Path(inputs["model_name_or_path"]), seed=1)
    with pytest.raises(ValueError, match=r"step_2 .*other model: .*--allow-changed-options"):
        train(world, inputs, tmp_path / "other", resume=checkpoint, allow_changed_options=True)


KINDS = [wide({}), dict(base_quantization="nf4"), wide(dict(lora_use_dora=True))]


def compute_adapted(world, inputs: dict[str, str], kind: dict, **options: object) -> dict[str, torch.Tensor]:
    """The loss of a row, and the gradients of all that trains, from adapters that have begun to learn."""
    model, generator = build_adapted(world, inputs, kind, **options), torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        if ".lora_B" in name:  # begins as zeros, which would leave the other half without a gradient
            local = param.data.to_local()
            local.copy_(torch.randn(local.shape, generator=generator) * 0.1)
    loss = model(make_micro_batch((13, 2, 22, 7), seed=0)).loss
    loss.backward()
    grads = {name: param.grad.to_local() for name, param in model.named_parameters() if param.grad is not None}
    return {"loss": loss.detach()} | grads


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_how_it_is_computed_does_not_change_what_is_computed(kind, world, tmp_path, monkeypatch):
    inputs = make_inputs(tmp_path, "phi3")  # which has few linear layers to compile
    expected = compute_adapted(world, inputs, kind)
    compile_by("eager", monkeypatch, dynamic=False)
    changes = [
        dict(activation_checkpointing="selective"), dict(activation_checkpointing="full"), dict(attention="eager"),
        dict(compile=True),
    ]  # fmt: skip
    for change in changes:
        found = compute_adapted(world, inputs, kind, **change)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value.norm() > 0, name
            assert (found[name] - value).norm() <= 1e-5 * value.norm(), (change, name)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["qwen2", long("phi3")])
def test_layers_of_one_input_that_read_it_once_compute_the_same(family, mode, world, tmp_path, monkeypatch):
    """The expected values are those of peft's own layers. On GPUs, layers of one input share the reading of it. qwen2's
    layers have biases; phi3 has no two layers of one input."""
    inputs = make_inputs(tmp_path, family)
    with monkeypatch.context() as patch:
        patch.setattr(lora_layers, "speed_up", lambda *args, **options: None)
        expected = compute_adapted(world, inputs, {}, activation_checkpointing=mode)
    for shares in (False, True):
        monkeypatch.setattr(lora_layers, "shares_inputs", lambda device, shares=shares: shares)
        found = compute_adapted(world, inputs, {}, activation_checkpointing=mode)
        assert found.keys() == expected.keys() and len(found) > 8
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-5 * value.norm(), (shares, name)


def test_an_input_is_read_once_and_forgotten(world, tmp_path, monkeypatch):
    monkeypatch.setattr(lora_layers, "shares_inputs", lambda device: True)
    model = build_adapted(world, make_inputs(tmp_path, "llama"), {}, activation_checkpointing="full")
    calls, compute = [], lora_layers.SharedInput.compute
    monkeypatch.setattr(
        lora_layers.SharedInput, "compute", lambda shared, x: calls.append(shared) or compute(shared, x)
    )
    for seed in (0, 1):
        model(make_micro_batch((13, 2, 22, 7), seed=seed)).loss.backward()
    groups = set(calls)
    assert len(groups) == 4 and len(calls) == 2 * 2 * len(groups)  # two blocks, recomputed, two micro-batches
    assert all(group.x is None and not group.outputs for group in groups)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapted_layer_is_compiled_for_any_number_of_tokens(kind, world, tmp_path):
    model = build_adapted(world, make_inputs(tmp_path, "llama_tied_bias"), kind)
    model.placed_weights.gather()
    layer, counter = model.model.model.layers[0].mlp.down_proj, CompileCounterWithBackend("eager")
    compiled, counts = torch.compile(layer.forward, dynamic=True, backend=counter), []
    for num_tokens in (20, 31):
        x = torch.randn(1, num_tokens, SHAPE["intermediate_size"], generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(compiled(x), layer(x))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] > 0


def test_dropped_inputs_are_a_function_of_the_seed(world, tmp_path):
    inputs = make_inputs(tmp_path, "llama")
    losses = []
    for name, options in (("a", {}), ("b", {}), ("c", dict(lora_dropout=0.0)), ("d", dict(seed=1))):
        train(world, inputs, tmp_path / name, **dict(lora_dropout=0.5, max_steps=2, lora_export="adapter") | options)
        losses.append([row["loss"] for row in read_rows(tmp_path / name)])
    assert losses[0] == losses[1] != losses[2] and losses[0] != losses[3]


@pytest.mark.slow
def test_an_adapter_is_merged_later(world, tmp_path):
    inputs = make_inputs(tmp_path, "mixtral")
    export = train(world, inputs, tmp_path / "run")
    program, given = "mini_trainer/tools/merge_adapter.py", dict(output_dir=tmp_path / "m", export_dtype="float32")
    succeed(0, program, *flags(adapter=export / "adapter", **given))
    merged, expected = load_file(tmp_path / "m" / "model.safetensors"), load_file(export / "model.safetensors")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    AutoTokenizer.from_pretrained(tmp_path / "m")
    again = run_forked(0, program, *flags(adapter=export / "adapter", **given))
    assert again.returncode == 2 and "already exists" in again.stderr
    none = run_forked(0, program, *flags(adapter=tmp_path, output_dir=tmp_path / "n"))
    assert none.returncode == 2 and "no adapter_config.json" in none.stderr
