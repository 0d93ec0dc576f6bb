"""Settings of other programs' adapters: followed exactly as peft follows them, or refused by name."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from breadth import long
from peft import LoraConfig, get_peft_model
from peft_runs import load_with_adapter, logits_of, make_inputs, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mini_trainer.distributed.ending import RunError
from mini_trainer.model.methods import adapter_files as patterns
from mini_trainer.model.methods.adapter_files import (
    ADAPTER_WEIGHTS,
    BY_PEFT,
    FOLLOWED,
    INERT,
    NOT_BY_VLLM,
    PREFIX,
    check_settings,
)
from mini_trainer.model.methods.lora_layers import choose_names, shorten
from mini_trainer.options.tools import MergeAdapterOptions
from mini_trainer.tools.merge_adapter import merge_adapter
from mini_trainer.use.inference.loading import find_answering_model, load_answering_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft's, of settings that are seldom used

LAYERS = ["q_proj", "down_proj"]
WITH_BIAS = dict(target_modules=["q_proj"])


def make_adapter(inputs: dict[str, str], directory: Path, **settings: object) -> torch.Tensor:
    """Writes an adapter by peft whose every tensor has moved; the logits of the model with it, before it is saved."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"], dtype=torch.float32)
    given = dict(r=4, lora_alpha=8, target_modules=LAYERS, task_type="CAUSAL_LM") | settings
    model = get_peft_model(base, LoraConfig(**given))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_" in name or ".modules_to_save." in name or "trainable_tokens_delta" in name:
                param += 0.05 * torch.randn_like(param)
    logits = logits_of(model)
    model.save_pretrained(directory)
    return logits


def merge(inputs: dict[str, str], adapter: Path, output_dir: Path, world) -> torch.Tensor:
    """The logits of the model that mini-trainer merge-adapter writes."""
    name = inputs["model_name_or_path"]
    options = dict(model_name_or_path=name, adapter=str(adapter), output_dir=str(output_dir), export_dtype="float32")
    merge_adapter(MergeAdapterOptions(**options), world)
    return logits_of(AutoModelForCausalLM.from_pretrained(output_dir, dtype=torch.float32))


def load_to_answer(inputs: dict[str, str], adapter: Path) -> torch.nn.Module:
    found = find_answering_model(inputs["model_name_or_path"], adapter=str(adapter))
    return load_answering_model(found, dtype=torch.float32, device=torch.device("cpu"))


FOLLOWED_CASES = [
    ("llama", dict(rank_pattern={"down_proj": 2, "layers.1.self_attn.q_proj": 7})),
    ("llama", dict(alpha_pattern={"q_proj": 32}, rank_pattern={"q_proj": 3}, use_rslora=True)),
    long("llama", dict(exclude_modules=["layers.0.mlp.down_proj"])),
    ("llama", dict(target_modules=r".*\.(q_proj|k_proj)", exclude_modules=r".*layers\.1.*k_proj")),
    long("llama", dict(layers_to_transform=[1], layers_pattern="layers", use_dora=True)),
    long("llama", dict(layers_to_transform=0)),
    long("llama", dict(target_modules="all-linear", init_lora_weights="gaussian")),
    long("llama", dict(init_lora_weights="orthogonal")),
    long("llama", dict(init_lora_weights="eva")),
    ("llama", dict(init_lora_weights=False, modules_to_save=["lm_head", "norm"])),
    ("gpt2", dict(target_modules=["c_attn"], fan_in_fan_out=True, rank_pattern={"h.1.attn.c_attn": 2})),
    long("qwen3", dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),  # tied
    ("qwen3_moe", dict(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])),
]


@pytest.mark.parametrize(("family", "settings"), FOLLOWED_CASES, ids=str)
def test_settings_that_are_followed_give_pefts_model(family, settings, world, tmp_path):
    inputs, adapter = make_inputs(tmp_path, family), tmp_path / "given"
    expected = make_adapter(inputs, adapter, **settings)
    own = logits_of(AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"], dtype=torch.float32))
    assert (expected - own).abs().max() > 1e-2
    torch.testing.assert_close(logits_of(load_with_adapter(inputs, adapter)), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merge(inputs, adapter, tmp_path / "merged", world), expected, rtol=2e-5, atol=2e-5)

    # A run that begins from it and does not move it exports the same model, in both forms.
    given = dict(lora_adapter=str(adapter), lora_rank=None, lora_alpha=None, learning_rate=0.0, max_steps=1)
    export = train(world, inputs, tmp_path / "run", **given)
    exported = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    torch.testing.assert_close(logits_of(exported), expected, rtol=2e-5, atol=2e-5)
    beside = logits_of(load_with_adapter(inputs, export / "adapter"))
    torch.testing.assert_close(beside, expected, rtol=1e-5, atol=1e-5)


def test_copies_of_a_tied_weight_that_differ_are_refused(world, tmp_path):
    inputs, adapter = make_inputs(tmp_path, "qwen3"), tmp_path / "given"
    given = dict(lora_adapter=str(adapter), lora_rank=None, lora_alpha=None, learning_rate=0.0, max_steps=1)
    for wholes in (["embed_tokens", "lm_head"], ["lm_head"]):  # the second leaves the embedding as it was
        make_adapter(inputs, adapter, modules_to_save=wholes)
        with pytest.raises(RunError, match=r"another copy of .*tie_word_embeddings: false"):
            train(world, inputs, tmp_path / "run", **given)
        with pytest.raises(RunError, match=r"another copy of .*tie_word_embeddings: false"):
            merge(inputs, adapter, tmp_path / "merged", world)


@pytest.mark.parametrize("wholes", [("embed_tokens",), long(("lm_head",)), ("embed_tokens", "lm_head")])
def test_peft_goes_on_with_a_tied_models_adapter_and_so_do_we_with_pefts(wholes, world, tmp_path):
    inputs = make_inputs(tmp_path, "qwen3")
    export = train(world, inputs, tmp_path / "run", lora_modules_to_save=wholes)
    model = load_with_adapter(inputs, export / "adapter")
    trained = {id(param): param.numel() for param in model.parameters() if param.requires_grad}
    ours = {name: value for name, value in load_file(export / "adapter" / "adapter_model.safetensors").items()}
    assert sum(trained.values()) == sum(value.numel() for name, value in ours.items() if "lm_head" not in name)
    given = dict(lora_adapter=str(export / "adapter"), lora_rank=None, lora_alpha=None, learning_rate=0.0)
    again = train(world, inputs, tmp_path / "again", **given)
    assert torch.equal(logits_of(load_with_adapter(inputs, again / "adapter")), logits_of(model))
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param += 0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "by_peft")
    again = merge(inputs, tmp_path / "by_peft", tmp_path / "merged", world)
    torch.testing.assert_close(again, logits_of(model), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_beside_changed_weights_is_refused_and_peft_computes_it(init, world, tmp_path):
    inputs, adapter = make_inputs(tmp_path, "llama"), tmp_path / "given"
    expected = make_adapter(inputs, adapter, init_lora_weights=init)
    with pytest.raises(ValueError, match=f"--adapter .*init_lora_weights '{init}'"):
        merge(inputs, adapter, tmp_path / "merged", world)
    given = dict(lora_adapter=str(adapter), lora_rank=None, lora_alpha=None)
    with pytest.raises(ValueError, match=f"--lora-adapter .*init_lora_weights '{init}'"):
        train(world, inputs, tmp_path / "run", **given)
    torch.testing.assert_close(logits_of(load_to_answer(inputs, adapter)), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=f"--engine vllm: --adapter .*init_lora_weights '{init}'"):
        check_settings(adapter, flag="--engine vllm: --adapter", runner="vllm")


@pytest.mark.parametrize("init", ["pissa_niter_4", "corda", "lora_ga", "loftq", "mica", "something_new"])
@pytest.mark.parametrize("reader", ["here", "peft", "vllm"])
def test_initializations_that_nobody_can_repeat_are_refused(init, reader, tmp_path):
    write_settings(tmp_path, init_lora_weights=init)
    with pytest.raises(ValueError, match=f"--x .*init_lora_weights '{init}'"):
        check_settings(tmp_path, flag="--x", runner=reader)


def write_settings(directory: Path, **settings: object) -> None:
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4} | settings))


@pytest.mark.parametrize("reader", ["here", "peft", "vllm"])
@pytest.mark.parametrize("value", [True, 3, "all", [[0, 2]], {"a": 1}])
def test_every_other_setting_is_refused_by_its_name(value, reader, tmp_path):
    names = {field.name for field in dataclasses.fields(LoraConfig)} | {"a_setting_of_tomorrow"}
    followed = {"here": FOLLOWED, "peft": FOLLOWED | BY_PEFT, "vllm": FOLLOWED - NOT_BY_VLLM}[reader]
    others = names - followed - INERT
    assert len(others) >= 10
    for name in others:
        write_settings(tmp_path, **{name: value})
        with pytest.raises(ValueError, match=f"--x .*: {name}(: | is )"):
            check_settings(tmp_path, flag="--x", runner=reader)


WRONG_VALUES = [
    *(("r", value) for value in ("8", 8.5, 0, None, True, float("nan"))),
    *(("lora_alpha", value) for value in (float("nan"), float("inf"), "16", 0, 1e300, 10**400, None)),
    *(("rank_pattern", value) for value in ([1], {"q_proj": "x"}, {"q_proj": 0})),
    *(("alpha_pattern", value) for value in ({".*": None}, {".*": float("nan")})),
]


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES, ids=lambda value: str(value)[:20])
def test_a_value_that_nothing_can_compute_with_is_refused_by_its_key(name, value, world, tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    write_settings(tmp_path, **{name: value})
    ((key, given),) = value.items() if isinstance(value, dict) else [("", value)]
    key = re.escape(f"{name}: {key}" if key else name)
    message = f"^--adapter .*adapter_config.json: {key} is {re.escape(json.dumps(given)[:60])}, "
    with pytest.raises(ValueError, match=message):
        merge_adapter(MergeAdapterOptions(adapter=str(tmp_path), output_dir=str(tmp_path / "merged")), world)
    for reader in ("here", "peft"):
        with pytest.raises(ValueError, match=message):
            check_settings(tmp_path, flag="--adapter", runner=reader)


def test_without_peft_one_message_says_what_to_install(world, tmp_path, monkeypatch):
    (tmp_path / "adapter_model.safetensors").touch()
    write_settings(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    message = f"^--adapter {tmp_path} .*pip install peft$"
    with pytest.raises(ValueError, match=message):
        merge_adapter(MergeAdapterOptions(adapter=str(tmp_path), output_dir=str(tmp_path / "merged")), world)
    with pytest.raises(ValueError, match=message):
        find_answering_model("base", adapter=str(tmp_path))


@pytest.mark.parametrize("text", ['{"peft_type": "LORA", "r": 4, "r": 8}', '{"peft_type": [1]}', "[" * 10**5])
def test_a_config_that_is_no_config_is_one_message(text, tmp_path):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^--adapter "):
        check_settings(tmp_path, flag="--adapter")


@pytest.mark.parametrize("settings", [dict(bias="all"), dict(lora_bias=True), dict(trainable_token_indices=[5, 6])])
def test_settings_that_peft_alone_follows_are_generated_with(settings, world, tmp_path):
    inputs, adapter = make_inputs(tmp_path, "llama_tied_bias"), tmp_path / "given"
    expected = make_adapter(inputs, adapter, **WITH_BIAS | settings)
    torch.testing.assert_close(logits_of(load_to_answer(inputs, adapter)), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=f"^--adapter .*: {next(iter(settings))}: "):
        merge(inputs, adapter, tmp_path / "merged", world)


def test_a_file_with_more_or_less_than_its_settings_say_is_refused(world, tmp_path):
    inputs, adapter = make_inputs(tmp_path, "llama"), tmp_path / "given"
    make_adapter(inputs, adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = min(tensors)
    cases = [
        ({name: tensor for name, tensor in tensors.items() if name != first}, "missing"),
        (tensors | {first.replace("layers.0", "layers.9"): tensors[first].clone()}, "unexpected"),
    ]
    for written, what in cases:
        save_file(written, adapter / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=f"^--adapter {adapter}: .*{what}"):
            load_to_answer(inputs, adapter)
        with pytest.raises(RunError, match=f"^adapter {adapter}: .*--model-name-or-path: 1 {what}"):
            merge(inputs, adapter, tmp_path / "merged", world)


def test_layers_that_cannot_be_adapted_are_named(world, tmp_path):
    inputs, adapter = make_inputs(tmp_path, "llama"), tmp_path / "given"
    make_adapter(inputs, adapter, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="adapts lm_head"):
        merge(inputs, adapter, tmp_path / "merged", world)


NESTED = "((.*)*)*!"  # its time doubles with every letter of a name
SLOW_PATTERNS = [
    {"target_modules": NESTED},
    {"exclude_modules": NESTED},
    {"modules_to_save": [NESTED]},
    {"layers_to_transform": [0], "layers_pattern": [NESTED]},
    {"rank_pattern": {NESTED: 4}},
    {"alpha_pattern": {NESTED: 4}},
]


@pytest.mark.parametrize("settings", SLOW_PATTERNS, ids=lambda settings: list(settings)[-1])
def test_a_pattern_that_takes_for_ever_is_refused_by_its_key(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    write_settings(tmp_path, **settings)
    save_file({f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(8, 32)}, tmp_path / ADAPTER_WEIGHTS)
    key = list(settings)[-1]
    for reader in ("here", "peft"):
        message = re.escape(f"--x {tmp_path}: adapter_config.json: {key} {NESTED}: ") + r".*0\.2 seconds"
        with pytest.raises(ValueError, match=message):
            check_settings(tmp_path, flag="--x", runner=reader)


def test_a_pattern_that_is_slow_on_other_names_of_the_model_is_refused_too(world, tmp_path, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    inputs, adapter = make_inputs(tmp_path, "llama"), tmp_path / "given"
    make_adapter(inputs, adapter, target_modules=["q_proj"])
    slow = rf".*\.q_proj|model\.layers\.1\.mlp\.{NESTED}"
    write_settings(adapter, lora_alpha=8, target_modules=slow, task_type="CAUSAL_LM")
    check_settings(adapter, flag="--x")
    message = r"adapter_config.json: target_modules .*: .*0\.2 seconds"
    with pytest.raises(ValueError, match=message):
        merge(inputs, adapter, tmp_path / "merged", world)
    with pytest.raises(ValueError, match=message):
        load_to_answer(inputs, adapter)


def test_a_pattern_of_ones_own_has_the_same_limit(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    with pytest.raises(ValueError, match=r"--lora-target-modules .*: .*0\.2 seconds"):
        choose_names([NESTED], names, "--lora-target-modules")
    assert choose_names([r"layers\.[12]\..*", "q_proj"], names, "--x") == names
    assert (shorten(names[1:], names), shorten(names, names)) == (names[1:], ["q_proj"])


@pytest.mark.parametrize("rank", [40, 10**9])
@pytest.mark.parametrize("key", ["r", "rank_pattern: q_proj"])
def test_a_rank_that_the_file_cannot_hold_is_refused_before_memory_is_taken(key, rank, tmp_path):
    write_settings(tmp_path, **({"r": rank} if key == "r" else {"rank_pattern": {"q_proj": rank}}))
    save_file({f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(8, 32)}, tmp_path / ADAPTER_WEIGHTS)
    for reader in ("here", "peft"):
        with pytest.raises(ValueError, match=f"adapter_config.json: {key} is {rank}, .*1 to 32"):
            check_settings(tmp_path, flag="--x", runner=reader)
