"""Calls that only a GPU answers: their arguments fit every supported release, and streams wait where they must."""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from cuda_streams import CurrentStream, install_streams
from program import list_sources
from recorded import RECORDED, RELEASES, find_signature, list_names, stand_in
from small_runs import full_gradients, make_micro_batch
from tiny_models import FAMILIES, build, save_model
from torch import Tensor, nn

from mini_trainer.model import float8, weights
from mini_trainer.objectives.families.text_tower import find_blocks
from mini_trainer.objectives.objective import PackedModel

LENGTHS = (13, 1, 22, 7)
# Objects of other packages with methods of these names.
NOT_CUDA = {"forward", "stream", "is_available"}


def list_calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Calls by the name of the function, or ops.name of an operator."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            name = text.rpartition(".")[2]
            if text.startswith("torch.cuda.") or name not in NOT_CUDA:
                yield f"ops.{name}" if text.startswith("ops.") else name, node


def find_recorded(name: str) -> Iterator[tuple[str, str, str]]:
    """(package, full name, release) of the functions with this name."""
    for package, known in RECORDED["signatures"].items():
        for full in known:
            own = "ops." + full.partition("::")[2] if "::" in full else full.rpartition(".")[2]
            if own == name:
                yield from (
                    (package, full, release) for release in RELEASES[package] if full in list_names(package, release)
                )


def check_call(call: ast.Call, signature: inspect.Signature) -> None:
    """TypeError if the call gives what the function does not take; **arguments are not looked at."""
    given = [object()] * len(call.args)
    if next(iter(signature.parameters), None) == "self" and isinstance(call.func, ast.Attribute):
        given = [object(), *given]
    named = {each.arg: object() for each in call.keywords if each.arg is not None}
    signature.bind_partial(*given, **named) if len(named) < len(call.keywords) else signature.bind(*given, **named)


def test_every_call_fits_every_release():
    checked = set()
    for path, source in list_sources().items():
        for name, call in list_calls(source):
            for package, full, release in find_recorded(name):
                try:
                    check_call(call, find_signature(package, full, release))
                except TypeError as error:
                    raise AssertionError(f"{path}:{call.lineno}: {full} of {package} {release}: {error}") from error
                checked.add(full)
    names = {full.rpartition(".")[2] for full in checked}
    assert {"max_memory_allocated", "wait_event", "record_event", "convert_to_float8_training"} <= names
    assert {"varlen_attn", "flash_attn_varlen_func", "from_recipe_name", "quantize_4bit"} <= names
    assert {"bitsandbytes::dequantize_4bit", "bitsandbytes::dequantize_blockwise"} <= checked


def test_every_function_of_torch_cuda_is_recorded():
    known = {full.rpartition(".")[2] for full in RECORDED["signatures"]["torch"]} | {"Event", "Stream"}
    for path, source in list_sources().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
                assert node.attr in known, f"{path}:{node.lineno}: record torch.cuda.{node.attr}"


def add_up_as_cuda_does(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, beta: float, alpha: float, out: Tensor
) -> Tensor:
    """What the operator checks in torch 2.11 to 2.13, and what it computes."""
    assert mat1.dim() == mat2.dim() == 2 and mat1.shape[1] == mat2.shape[0]
    assert mat1.dtype == mat2.dtype == torch.bfloat16 and out_dtype == out.dtype == torch.float32
    assert self.dtype in (out_dtype, mat1.dtype) and self.shape == out.shape
    product = alpha * (mat1.float() @ mat2.float())
    return out.copy_(beta * self + product if beta else product)  # with beta 0, NaN in `self` does not spread


@pytest.mark.parametrize("release", RELEASES["torch"])
def test_the_heads_gradient_is_summed_in_fp32(release, world, tmp_path, monkeypatch):
    """The model in bf16; `addmm` with another type of output is CUDA's alone."""
    model = build(save_model(FAMILIES["llama"], tmp_path), world, dtype=torch.bfloat16)
    expected = measure_gradients(model)
    num_calls = []
    schema = stand_in("torch", "addmm.dtype_out", release, add_up_as_cuda_does)
    monkeypatch.setattr(torch, "addmm", lambda *args, **kwargs: num_calls.append(1) or schema(*args, **kwargs))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    ours = measure_gradients(model)
    assert num_calls
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def measure_gradients(model: PackedModel) -> dict[str, Tensor]:
    model.zero_grad()
    model(make_micro_batch(LENGTHS, seed=0)).loss.backward()
    return full_gradients(model)


@pytest.fixture
def offloaded(world, tmp_path, monkeypatch):
    """Gradients without offloading; a function that measures those with it, on the stand-in for a stream."""
    path = save_model(FAMILIES["llama"], tmp_path)
    expected = measure_gradients(build(path, world, activation_checkpointing="full"))
    model = build(path, world, activation_checkpointing="full", offload_activations=True)
    offloader = find_blocks(model.model)[0].forward.args[0]

    def measure():
        offloader.stream = install_streams(monkeypatch)
        return measure_gradients(model), offloader.stream

    return expected, measure


def test_offloaded_inputs_are_waited_for_and_kept_until_copied(offloaded):
    expected, measure = offloaded
    gradients, stream = measure()
    assert len(stream.queue) == 2 * FAMILIES["llama"].num_hidden_layers  # there and back
    for name, value in expected.items():
        assert torch.equal(gradients[name], value), name


def test_a_wait_that_is_left_out_shows(offloaded, monkeypatch):
    expected, measure = offloaded
    monkeypatch.setattr(CurrentStream, "wait", lambda self, event: None)
    gradients, _ = measure()
    assert any(not torch.equal(gradients[name], value) for name, value in expected.items())


def test_a_source_that_is_freed_before_its_copy_shows(offloaded, monkeypatch):
    _, measure = offloaded
    monkeypatch.setattr(
        "mini_trainer.model.activation_memory.Offloader.leaving",
        property(lambda self: None, lambda self, value: None),
        raising=False,
    )
    with pytest.raises(AssertionError, match="freed"):
        measure()


def test_gathered_tensors_are_copied_to_pinned_memory_unless_large(monkeypatch):
    empty_like, asked = torch.empty_like, []

    def make_empty(tensor: Tensor, *, device: str, pin_memory: bool) -> Tensor:
        asked.append((tensor.nbytes, device, pin_memory))
        return empty_like(tensor)

    monkeypatch.setattr(torch, "empty_like", make_empty)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(weights, "PINNED_BYTES", 40)
    for size in (10, 11):
        tensor = torch.randn(size)
        assert torch.equal(weights.copy_to_cpu(tensor), tensor)
    assert asked == [(40, "cpu", True)]


@dataclass(frozen=True)
class Recipe:
    name: str
    round_scales_to_power_of_2: bool = True


def test_the_linear_layers_of_blocks_become_fp8s(world, tmp_path, monkeypatch):
    release = RELEASES["torchao"][-1]
    converted, beginning = [], "torchao.float8."

    def convert(module: nn.Module, module_filter_fn, config: Recipe) -> nn.Module:
        assert f"Float8LinearRecipeName({config.name})" in list_names("torchao", release)
        assert not config.round_scales_to_power_of_2
        names = [name for name, each in module.named_modules() if isinstance(each, nn.Linear)]
        converted.extend(name for name in names if module_filter_fn(module.get_submodule(name), name))
        return module

    package = ModuleType("torchao.float8")
    function = f"{beginning}config.Float8LinearConfig.from_recipe_name"
    recipe = stand_in("torchao", function, release, lambda recipe_name: Recipe(recipe_name))
    package.Float8LinearConfig = SimpleNamespace(from_recipe_name=recipe)
    function = f"{beginning}float8_linear_utils.convert_to_float8_training"
    package.convert_to_float8_training = stand_in("torchao", function, release, convert)
    monkeypatch.setitem(sys.modules, "torchao.float8", package)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(float8, "MIN_SIZE", 32)
    model = build(save_model(FAMILIES["llama"], tmp_path), world)
    float8.apply_float8(find_blocks(model.model), torch.device("cuda"))
    assert {name.rpartition(".")[2] for name in converted} >= {"gate_proj", "down_proj", "q_proj", "o_proj"}
    assert not any(name.endswith("k_proj") for name in converted)  # 16 rows
