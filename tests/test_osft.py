"""OSFT keeps what it says it keeps, reaches everything else, and exports an ordinary model."""

import json
import re

import numpy as np
import pytest
import torch
from breadth import long, thin, wide
from hand_made import pack_samples
from in_process import train_here, train_on
from safetensors.torch import load_file
from tiny_data import make_samples, read_lines, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, build, check, compile_by, make_osft, save_model, save_tokenizer
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import RunError
from mini_trainer.model.methods import osft_directions
from mini_trainer.model.methods.osft_directions import Statistics, prepare_statistics
from mini_trainer.model.methods.osft_subspaces import (
    count_kept,
    decompose,
    make_subspace,
    oriented_shape,
    prepare_subspaces,
)
from mini_trainer.model.optim.optimizers import build_optimizer, clip_gradients, local_gradients
from mini_trainer.model.weights import gather_all
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import DataOptions, OptimizationOptions
from mini_trainer.osft import (
    OSFT,
    OSFTLinear,
    fill_layer,
    gather_merged,
    measure_leak,
    project_gradients,
    project_updates,
)

LEAK = 1e-5
SHAPES = {"tall": (48, 32), "wide": (32, 48), "square": (32, 32)}


def random_matrix(out_features: int, in_features: int, seed: int = 0, *, least: int = -2) -> torch.Tensor:
    """A matrix whose singular values fall over three orders of magnitude, as those of trained ones do, or more."""
    generator = torch.Generator().manual_seed(seed)
    U, _, Vh = torch.linalg.svd(
        torch.randn(out_features, in_features, generator=generator, dtype=torch.float64), full_matrices=False
    )
    values = torch.logspace(1, least, len(Vh), dtype=torch.float64)
    return (U * values @ Vh).float()


def make_layer(world, tmp_path, weight: torch.Tensor, ratio: float, *, conv1d: bool = False, bias=None):
    """An OSFTLinear for `weight` (out, in), sharded by itself."""
    with torch.device("meta"):
        module = Conv1D(*weight.shape) if conv1d else nn.Linear(*weight.shape[::-1])
    module.bias = None if bias is None else nn.Parameter(bias)
    shape = oriented_shape(module, "weights")
    layer = OSFTLinear(module, num_kept=count_kept(shape[1], ratio), basis="weights", dtype=torch.float32)
    stored = weight.T.contiguous() if conv1d else weight
    matrix = weight if layer.on_input else weight.T.contiguous()
    subspace = make_subspace(matrix, device=world.device)
    fill_layer(layer, "layer", {"layer.weight": lambda: stored}, subspace, world=world)
    return fully_shard(layer, mesh=world.mesh)


def count_exactly(num_directions: int, ratio: float) -> int:
    """Kept directions, without floating point: ratios have at most two decimals."""
    return num_directions * (100 - round(100 * ratio)) // 100


def test_the_number_of_kept_directions_is_the_whole_part_of_the_exact_product():
    for number in range(130):
        for percent in range(101):
            assert count_kept(number, percent / 100) == count_exactly(number, percent / 100), (number, percent)


def kept_directions(weight: torch.Tensor, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """U_high and V_high of a weight, from its fp64 SVD; without those whose singular value is zero."""
    U, S, Vh = torch.linalg.svd(weight.double(), full_matrices=False)
    num_kept = min(count_exactly(len(S), ratio), int(S.gt(1e-6 * S[0]).sum()))
    return U[:, :num_kept], Vh[:num_kept].T


def leak(update: torch.Tensor, weight: torch.Tensor, ratio: float) -> float:
    U_high, V_high = kept_directions(weight, ratio)
    update = update.double()
    return (max((U_high.T @ update).norm(), (update @ V_high).norm()) / update.norm()).item()


def free_part(matrix: torch.Tensor, weight: torch.Tensor, ratio: float) -> torch.Tensor:
    """What of a matrix is a reachable update."""
    U_high, V_high = kept_directions(weight, ratio)
    matrix = matrix.double()
    matrix = matrix - U_high @ (U_high.T @ matrix)
    return (matrix - matrix @ V_high @ V_high.T).float()


@pytest.mark.parametrize("shape", [(60, 40), (40, 40)])
@pytest.mark.parametrize("spectrum", ["falling", "steep", "degenerate", "rank_deficient", "zero"])
def test_subspaces_are_those_of_the_fp64_svd(shape, spectrum):
    values = {
        "falling": torch.logspace(1, -3, 40, dtype=torch.float64),
        "steep": torch.logspace(0, -12, 40, dtype=torch.float64),
        "degenerate": torch.tensor([5.0] * 13 + [2.0] * 17 + [1.0] * 10, dtype=torch.float64),
        "rank_deficient": torch.tensor([3.0] * 5 + [2.0] * 5 + [0.0] * 30, dtype=torch.float64),
        "zero": torch.zeros(40, dtype=torch.float64),
    }[spectrum]
    generator = torch.Generator().manual_seed(0)
    U, _, Vh = torch.linalg.svd(torch.randn(*shape, generator=generator, dtype=torch.float64), full_matrices=False)
    matrix = U * values @ Vh
    basis, singular_values = decompose(matrix)
    torch.testing.assert_close(basis.T @ basis, torch.eye(40, dtype=torch.float64))
    torch.testing.assert_close(singular_values, values, rtol=1e-6, atol=1e-12)
    for k in range(1, 40):
        if values[k - 1] > 1.1 * values[k] and values[k - 1] > 1e-10:  # else the subspace is not unique
            kept = basis[:, :k]
            error = (kept - Vh[:k].T @ (Vh[:k] @ kept)).norm()
            assert error <= 1e-5, f"k = {k}: {error:.1e}"


@pytest.mark.parametrize("ratio", [0.25, 0.75, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "bias", "conv1d"])
def test_forward_and_backward_are_those_of_the_dense_layer(shape, ratio, kind, world, tmp_path):
    weight, is_conv1d = random_matrix(*SHAPES[shape]), kind == "conv1d"
    bias = torch.randn(len(weight)) if kind == "bias" else None
    layer = make_layer(world, tmp_path, weight, ratio, conv1d=is_conv1d, bias=bias)
    assert torch.equal(layer.merged_weight(torch.float32), weight.T if is_conv1d else weight)  # before it trains
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, weight.shape[1], generator=generator, requires_grad=True)
    slope = torch.randn(3, 7, weight.shape[0], generator=generator)
    with torch.no_grad():
        coefficients = layer.coefficients.to_local()
        coefficients.copy_(torch.randn(coefficients.shape, generator=generator) * 0.1)
    dense = layer.merged_weight(torch.float32).requires_grad_()
    assert torch.equal(layer.merged_weight(torch.bfloat16), dense.bfloat16())  # rounded once
    output = layer(x)
    torch.testing.assert_close(layer.weight, dense)
    (output * slope).sum().backward()
    gradient, x.grad = x.grad, None
    expected = nn.functional.linear(x, dense.T if is_conv1d else dense, bias)
    (expected * slope).sum().backward()
    for value, reference in ((output, expected), (gradient, x.grad)):
        assert (value - reference).norm() <= 1e-6 * reference.norm()
    d_matrix = dense.grad if layer.on_input != is_conv1d else dense.grad.T  # of A
    expected = d_matrix @ layer.V_low.full_tensor()
    if layer.U_low is not None:
        expected = layer.U_low.full_tensor().T @ expected
    assert (layer.coefficients.grad.full_tensor() - expected).norm() <= 1e-6 * expected.norm()
    assert layer.base.grad is None and layer.V_low.grad is None


def learn(layer, target: torch.Tensor, *, steps: int = 150, weight_decay: float = 0.0) -> torch.Tensor:
    """The layer's weight after AdamW has pulled it towards `target` (out, in)."""
    optimizer = build_optimizer(layer, OptimizationOptions(learning_rate=0.1, weight_decay=weight_decay))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + np.cos(np.pi * step / steps))
        ((layer(torch.eye(target.shape[1])).T - target) ** 2).sum().backward()
        project_gradients([layer])
        optimizer.step()
        project_updates([layer])
        optimizer.zero_grad()
    return layer.merged_weight(torch.float32)


@pytest.mark.parametrize("ratio", [0.25, long(0.5), long(0.75), 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_allowed_update_is_reached_and_no_other(shape, ratio, world, tmp_path):
    weight = random_matrix(*SHAPES[shape])
    wanted = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    allowed = free_part(wanted, weight, ratio)
    update = learn(make_layer(world, tmp_path, weight, ratio), weight + wanted) - weight
    assert (update - allowed).norm() <= 1e-3 * allowed.norm()
    if ratio < 1:
        assert (update - wanted).norm() >= 0.1 * wanted.norm()
        assert leak(update, weight, ratio) <= LEAK


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spectrum", ["rank_deficient", "zero", "degenerate", "steep"])
def test_weights_without_a_full_spectrum_are_trained_within_theirs(shape, spectrum, world, tmp_path):
    out_features, in_features = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    weight = {
        "rank_deficient": random_matrix(out_features, 5) @ random_matrix(5, in_features),
        "zero": torch.zeros(out_features, in_features),
        "degenerate": torch.eye(out_features, in_features),
        "steep": random_matrix(out_features, in_features, least=-5),
    }[spectrum]
    wanted = torch.randn(weight.shape, generator=generator)
    layer = make_layer(world, tmp_path, weight, 0.25)
    update = learn(layer, weight + wanted, steps=50) - weight
    assert update.isfinite().all() and update.norm() > 0
    assert measure_leak([layer]) <= LEAK
    if spectrum in ("rank_deficient", "steep"):
        assert leak(update, weight, 0.25) <= LEAK


@pytest.mark.parametrize("shape", SHAPES)
def test_the_leak_rises_with_what_moves_into_kept_directions_of_either_side(shape, world, tmp_path):
    """Measured by the fp64 SVD of the weight: of the output side, of the input side, and of none."""
    weight, ratio = random_matrix(*SHAPES[shape]), 0.75
    generator = torch.Generator().manual_seed(1)
    layer, other = (make_layer(world, tmp_path, weight, ratio) for _ in range(2))
    assert layer.projects  # B, whose columns may hold anything
    U_high, V_low = layer.U_high.to_local(), layer.V_low.to_local()

    def measure(*others: OSFTLinear, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
        found = layer.merged_weight(dtype).float() - weight
        return measure_leak([layer, *others], dtype), leak(found, weight, ratio)

    with torch.no_grad():
        free = torch.randn(layer.coefficients.shape, generator=generator)
        free -= U_high @ (U_high.T @ free)
        layer.coefficients.to_local().copy_(free)
        assert max(measure()) <= LEAK
        rounded, expected = measure(dtype=torch.bfloat16)
        assert rounded == pytest.approx(expected, rel=1e-3) and rounded > LEAK
        for share in (0.1, 0.5, 1.0):
            kept = U_high @ torch.randn(U_high.shape[1], free.shape[1], generator=generator)
            kept *= free.norm() / kept.norm()
            layer.coefficients.to_local().copy_(share * kept + (1 - share**2) ** 0.5 * free)
            assert measure(other) == pytest.approx((share, share), rel=1e-4)
        layer.coefficients.to_local().copy_(free)
        V_low += 0.1 * torch.randn(V_low.shape, generator=generator)
        assert min(measure()) > 0.05


@pytest.mark.parametrize("side", ["U_low", "V_low"])
def test_the_leak_of_a_square_core_rises_with_directions_of_either_side_that_are_no_longer_the_free_ones(
    side, world, tmp_path
):
    weight, generator = random_matrix(32, 32), torch.Generator().manual_seed(1)
    layer = make_layer(world, tmp_path, weight, 0.25)
    assert layer.is_core
    with torch.no_grad():
        layer.coefficients.to_local().copy_(torch.randn(layer.coefficients.shape, generator=generator))
        assert measure_leak([layer]) <= LEAK
        directions = getattr(layer, side).to_local()
        directions += 0.1 * torch.randn(directions.shape, generator=generator)
        assert measure_leak([layer]) > 0.05
        assert leak(layer.merged_weight(torch.float32) - weight, weight, 0.25) > 0.05


def test_weight_decay_pulls_towards_the_start(world, tmp_path):
    weight = random_matrix(48, 32)
    target = weight + 10 * torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    free, decayed = (
        learn(make_layer(world, tmp_path, weight, 0.5), target, weight_decay=decay) - weight for decay in (0.0, 20.0)
    )
    assert decayed.norm() < 0.7 * free.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_that_is_clipped_is_the_one_that_is_applied(shape, world, tmp_path):
    weight = random_matrix(*SHAPES[shape])
    layer = make_layer(world, tmp_path, weight, 0.25)
    x = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(1))
    layer(x).square().sum().backward()
    method = make_osft(tmp_path)
    method.layers = [layer]
    method.constrain_gradients()
    dense = weight.clone().requires_grad_()
    (x @ dense.T).square().sum().backward()
    allowed = free_part(dense.grad, weight, 0.25)
    assert layer.coefficients.grad.full_tensor().norm().item() == pytest.approx(allowed.norm().item(), rel=1e-5)


def test_the_norm_that_a_step_clips_by_is_of_what_it_applies(world, tmp_path):
    """In a run, by transformers' gradients of the whole batch; all but the blocks' matrices are frozen."""
    path = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    samples = make_samples(4, vocab_size=VOCAB_SIZE)
    data = write_samples(tmp_path / "data.arrow", samples)
    train_here(
        world, model_name_or_path=str(path), data_path=str(data), output_dir=str(tmp_path / "run"), batch_size=4,
        max_tokens_per_gpu=512, max_steps=1, osft=True, osft_unfreeze_rank_ratio=0.25, osft_cache_dir=str(tmp_path),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path)
    num_targets = sum(label != -100 for _, labels in samples for label in labels[1:])
    for ids, labels in samples:
        logits = model(torch.tensor([ids])).logits[0, :-1]
        losses = nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
        (losses / num_targets).backward()
    matrices = [param for name, param in model.named_parameters() if ".layers." in name and param.ndim == 2]
    norms = torch.stack([free_part(param.grad, param.detach(), 0.25).norm() for param in matrices])
    (row,) = read_lines(tmp_path / "run" / "training_metrics_0.jsonl")
    assert row["grad_norm"] == pytest.approx(norms.norm().item(), rel=1e-4)


# -- whole models ------------------------------------------------------------------------------------------------------

SAMPLES = [(np.array(ids), np.array(labels), None) for ids, labels in make_samples(6, vocab_size=VOCAB_SIZE)]


def settings(tmp_path, ratio: float | None = 0.25, *, statistics: Statistics | None = None, **changes) -> OSFT:
    """The method; `changes` are its options without their prefix."""
    values = {f"osft_{name}": value for name, value in (dict(unfreeze_rank_ratio=ratio) | changes).items()}
    method = make_osft(tmp_path, **values)
    if statistics is not None:
        method.study = lambda *args, **kwargs: None
        method.statistics = statistics
    return method


def layers_of(model: nn.Module) -> list[OSFTLinear]:
    return [module for module in model.modules() if isinstance(module, OSFTLinear)]


def gather(model, world) -> dict[str, torch.Tensor]:
    """The weights that an export of the built `model` holds."""
    return gather_all(gather_merged(model.model, torch.float32, world=world))


def train_steps(model, num_steps: int, *, learning_rate: float = 1e-2) -> list[float]:
    """AdamW steps with weight decay and clipping, as train.py does them; their losses."""
    layers = layers_of(model)
    optimizer = build_optimizer(model, OptimizationOptions(learning_rate=learning_rate, weight_decay=0.1))
    losses = []
    for _ in range(num_steps):
        loss = model(pack_samples(SAMPLES)).loss / 100
        loss.backward()
        project_gradients(layers)
        gradients = local_gradients(model)
        norm = torch.stack(torch._foreach_norm(gradients)).norm().item()
        clip_gradients(gradients, grad_norm=norm, max_grad_norm=0.5)
        optimizer.step()
        project_updates(layers)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", thin(FAMILIES, step=3))
def test_every_family_is_trained_exported_and_keeps_what_it_must(family, world, tmp_path):
    path = save_model(FAMILIES[family], tmp_path / "model")
    model = build(path, world, method=settings(tmp_path))
    check(model, world)
    before = {name: weight.clone() for name, weight in gather(model, world).items()}
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")  # which knows soft-capping
    assert before.keys() == dict(reference.named_parameters()).keys()
    for name, param in reference.named_parameters():
        assert torch.equal(before[name], param), name
    losses = train_steps(model, 6)
    assert losses[-1] < losses[0]

    trained = {name for name, module in model.model.named_modules() if isinstance(module, OSFTLinear)}
    assert trained and all(".0." in name or ".1." in name for name in trained)
    after = gather(model, world)
    for name, weight in after.items():
        if name.removesuffix(".weight") in trained and name.endswith(".weight"):
            assert leak(weight - before[name], before[name], 0.25) <= LEAK, name
        else:
            assert torch.equal(weight, before[name]), name
    assert 0 < measure_leak(layers_of(model)) <= LEAK
    reference.load_state_dict(after, strict=False)
    prompt = torch.randint(3, VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(0)).numpy()
    with torch.no_grad():
        model.model.set_attn_implementation("eager")
        hidden, loss_sum = model.eval().reference(pack_samples([(prompt, prompt, None)]))
        expected = reference.eval()(torch.from_numpy(prompt)[None], labels=torch.from_numpy(prompt)[None],
                                    output_hidden_states=True)  # fmt: skip
        torch.testing.assert_close(hidden, expected.hidden_states[-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loss_sum / 19, expected.loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change", [dict(activation_checkpointing="full"), pytest.param(dict(compile=True), marks=pytest.mark.long)]
)
def test_how_it_is_computed_does_not_change_what_is_computed(change, world, tmp_path, monkeypatch):
    compile_by("eager", monkeypatch, dynamic=False)
    path = save_model(FAMILIES["llama_tied_bias"], tmp_path / "model")
    losses = [train_steps(build(path, world, method=settings(tmp_path), **options), 5) for options in ({}, change)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_second_start_and_another_ratio_decompose_nothing(world, tmp_path, monkeypatch):
    path = save_model(FAMILIES["gpt2"], tmp_path / "model")
    first = gather(build(path, world, method=settings(tmp_path)), world)
    num_files = len(list((tmp_path / "cache").iterdir()))
    monkeypatch.setattr("mini_trainer.model.methods.osft_subspaces.make_subspace", None)
    again = gather(build(path, world, method=settings(tmp_path, 0.6)), world)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert len(list((tmp_path / "cache").iterdir())) == num_files == 8


def test_a_long_start_shows_that_it_moves_on(world, tmp_path):
    matrices, seen = {"a": random_matrix(8, 8), "b": random_matrix(12, 8), "c": random_matrix(9, 8)}, []
    options = dict(dtype=torch.float32, cache_dir=tmp_path / "cache", world=world, progress=seen.append)
    shapes = {name: tuple(matrix.shape) for name, matrix in matrices.items()}
    prepare_subspaces(shapes, matrices.get, **options)
    assert seen == [f"OSFT, after {done} of 3 decompositions" for done in range(3)]
    prepare_subspaces(shapes, matrices.get, **options)
    assert len(seen) == 3
    matrices["b"][1, 1] = torch.nan
    with pytest.raises(RunError, match=r"^b: not finite"):
        prepare_subspaces(shapes, matrices.get, **options)


@pytest.mark.parametrize(
    ("family", "train_others", "said"),
    [("mixtral", False, "frozen"), ("gpt_oss_sinks", True, "constraint"), ("llama_tied_bias", False, None)],
)
def test_experts_that_are_not_covered_are_named_at_the_start(family, train_others, said, world, tmp_path, caplog):
    path = save_model(FAMILIES[family], tmp_path / "model")
    with caplog.at_level("WARNING", logger="mini_trainer"):
        build(path, world, method=settings(tmp_path, train_others=train_others))
    assert (said is None and "experts" not in caplog.text) or re.search(f"fused experts: .*{said}", caplog.text)


def test_a_broken_cache_is_refused_with_the_file_to_remove(world, tmp_path):
    path = save_model(FAMILIES["gpt2"], tmp_path / "model")
    build(path, world, method=settings(tmp_path))
    file = next((tmp_path / "cache").iterdir())
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=f"--osft-cache-dir: .*{file}: "):
        build(path, world, method=settings(tmp_path))
    (tmp_path / "a_file").write_text("")
    with pytest.raises(RunError, match=f"--osft-cache-dir {tmp_path}/a_file: "):
        build(path, world, method=settings(tmp_path, cache_dir=str(tmp_path / "a_file")))


def test_only_what_the_patterns_name_is_trained_and_they_are_checked_before_the_weights_are_read(world, tmp_path):
    path = save_model(FAMILIES["llama_tied_bias"], tmp_path / "model")
    model = build(path, world, method=settings(tmp_path, target_patterns=("q_proj", "1.mlp")))
    trained = {name for name, param in model.model.named_parameters() if param.requires_grad}
    names = ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj")
    assert trained == {f"model.layers.{name}.coefficients" for name in names}
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"--osft-target-patterns embed_tokens: .*q_proj"):
        build(path, world, method=settings(tmp_path, target_patterns=("mlp", "embed_tokens")))


def test_without_free_directions_targets_stay_and_others_train(world, tmp_path):
    path = save_model(FAMILIES["llama_tied_bias"], tmp_path / "model")
    method = settings(tmp_path, 0.0, train_others=True)
    model = build(path, world, method=method)
    assert method.describe() == "OSFT keeps all of 14 layers, which do not train; everything else does"
    before = {name: weight.clone() for name, weight in gather(model, world).items()}
    train_steps(model, 3)
    after = gather(model, world)
    for name, weight in after.items():
        is_target = "_proj.weight" in name
        assert torch.equal(weight, before[name]) == is_target, name


# -- whole runs --------------------------------------------------------------------------------------------------------


STEPS = 6


def train_run(num_ranks, world, root, output_dir, *, model, data, **options) -> None:
    train_on(
        num_ranks, world, model_name_or_path=model, data_path=data, output_dir=output_dir, batch_size=9,
        max_tokens_per_gpu=45, learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, export_dtype="float32",
        osft=True, osft_unfreeze_rank_ratio=0.25, osft_cache_dir=root / "cache", **(dict(max_steps=STEPS) | options),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layouts"), [("qwen3", (1, 4)), wide("gpt2", (1, 2))])
def test_ranks_change_nothing_and_exports_keep_what_they_must(family, layouts, world, tmp_path):
    model = save_tokenizer(save_model(FAMILIES[family], tmp_path / "model"))
    data = write_samples(tmp_path / "data.arrow", make_samples(40, vocab_size=VOCAB_SIZE, max_len=40))
    start = load_file(model / "model.safetensors")
    rows, exports = {}, {}
    for num_ranks in layouts:
        output_dir = tmp_path / f"run_{num_ranks}"
        root = tmp_path / str(num_ranks)  # a cache of its own: every number of ranks decomposes
        hybrid = dict(sharding="hybrid", shard_size=2) if num_ranks == 4 else {}
        train_run(num_ranks, world, root, output_dir, model=model, data=data, **hybrid)
        rows[num_ranks] = read_lines(output_dir / "training_metrics_0.jsonl")
        export_dir = output_dir / "hf_format" / f"samples_{9 * STEPS}"
        exports[num_ranks] = load_file(export_dir / "model.safetensors")
        assert exports[num_ranks].keys() == start.keys()
        _, report = AutoModelForCausalLM.from_pretrained(export_dir, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert [row["osft_leak"] is None for row in rows[num_ranks]] == [True] * (STEPS - 1) + [False]
        assert 0 < rows[num_ranks][-1]["osft_leak"] <= LEAK
    num_trained = 0
    for name, weight in start.items():
        for num_ranks, exported in exports.items():
            update = exported[name] - weight
            if update.norm() > 0:
                num_trained += 1
                assert leak(update, weight, 0.25) <= LEAK, f"{name} on {num_ranks} ranks"
                assert (exported[name] - exports[1][name]).norm() <= 1e-2 * update.norm(), f"{name}, {num_ranks} ranks"
    assert num_trained == len(layouts) * {"qwen3": 14, "gpt2": 8}[family]
    for num_ranks in layouts[1:]:
        for row, expected in zip(rows[num_ranks], rows[1], strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


# -- directions from activations ---------------------------------------------------------------------------------------


def write_earlier(tmp_path, *, seed: int = 0) -> TokenizedData:
    """An earlier task's data."""
    return TokenizedData(write_samples(tmp_path / f"{seed}.arrow", make_samples(12, vocab_size=VOCAB_SIZE, seed=seed)))


def watch(path, world, data, *, statistics_file=None, seed=0, patterns=()):
    """Statistics of the model at `path` on `data`."""
    options = DataOptions(data_path="", seed=seed, max_tokens_per_gpu=64)
    own = dict(build_plain=lambda: build(path, world), family=CausalLM().family, world=world, patterns=patterns)
    return prepare_statistics(statistics_file, data, options, **own)


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_the_covariances_of_what_the_layers_see(family, world, tmp_path):
    path = save_model(FAMILIES[family], tmp_path / "model")
    samples = make_samples(12, vocab_size=VOCAB_SIZE)
    statistics = watch(path, world, TokenizedData(write_samples(tmp_path / "data.arrow", samples)))
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    layers = {name: module for name, module in model.named_modules() if name in statistics.inputs}
    seen = {name: [] for name in layers}
    for name, module in layers.items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].flatten(0, -2).double()))
    with torch.no_grad():
        for input_ids, _ in samples:
            model(torch.tensor(input_ids)[None], use_cache=False)
    assert layers
    for name, inputs in seen.items():
        inputs = torch.cat(inputs)
        torch.testing.assert_close(statistics.covariance(name), inputs.T @ inputs / len(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama_tied_bias", "gpt2"])
@pytest.mark.parametrize("room", [0, 20_000])
def test_statistics_that_do_not_fit_into_memory_take_several_passes(room, family, world, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger=osft_directions.log.name)
    path = save_model(FAMILIES[family], tmp_path / "model")
    data = write_earlier(tmp_path)
    whole = watch(path, world, data)
    assert "passes" not in caplog.text
    monkeypatch.setattr(osft_directions, "find_room", lambda world: room)
    parts = watch(path, world, data)
    num_passes = int(re.search(r"statistics in (\d+) passes", caplog.text)[1])
    assert num_passes == len(whole.covariances) if room == 0 else 1 < num_passes < len(whole.covariances)
    assert parts.inputs == whole.inputs
    assert all(torch.equal(parts.covariances[name], whole.covariances[name]) for name in whole.covariances)
    monkeypatch.setattr(osft_directions, "available_memory", lambda: 1000)
    with pytest.raises(RunError, match=r"OSFT by activations needs 0\.0 GiB more of rank 0's CPU memory"):
        watch(path, world, data)


def test_only_targets_have_statistics_but_a_file_has_all_layers(world, tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path / "model")
    data = write_earlier(tmp_path)
    some = watch(path, world, data, patterns=("down_proj", "v_proj"))
    assert {name.rpartition(".")[2] for name in some.inputs} == {"down_proj", "v_proj"}
    every = watch(path, world, data, patterns=("down_proj",), statistics_file=tmp_path / "statistics")
    assert {name.rpartition(".")[2] for name in every.inputs} > {"q_proj", "up_proj", "down_proj"}
    assert all(torch.equal(some.covariance(name), every.covariance(name)) for name in some.inputs)


@pytest.mark.parametrize("family", ["llama_tied_bias", "gpt2"])
def test_outputs_on_kept_inputs_do_not_change(family, world, tmp_path):
    path = save_model(FAMILIES[family], tmp_path / "model")
    statistics = watch(path, world, write_earlier(tmp_path))
    keep = settings(tmp_path, 0.4, basis="activations", statistics=statistics)
    model = build(path, world, method=keep)
    assert not keep.statistics.covariances and not keep.directions.statistics.covariances  # memory is given back
    before = {name: weight.clone() for name, weight in gather(model, world).items()}
    losses = train_steps(model, 6)
    assert losses[-1] < losses[0]
    after = gather(model, world)
    for name in statistics.inputs:
        update = (after[f"{name}.weight"] - before[f"{name}.weight"]).double()
        update = update.T if family == "gpt2" else update  # (out, in)
        values, vectors = torch.linalg.eigh(statistics.covariance(name))
        num_kept = count_exactly(len(values), 0.4)
        assert update.norm() > 0
        assert (update @ vectors[:, -num_kept:]).norm() <= LEAK * update.norm(), name
        energy = (update @ statistics.covariance(name) @ update.T).trace()  # mean of |dW x|^2 over old inputs
        assert energy <= 1.001 * update.norm() ** 2 * values[-num_kept - 1]
    assert measure_leak(layers_of(model)) <= LEAK


def test_keep_energy_keeps_as_few_directions_as_carry_it(world, tmp_path):
    path = save_model(FAMILIES["llama_tied_bias"], tmp_path / "model")
    statistics = watch(path, world, write_earlier(tmp_path))
    keep = settings(tmp_path, None, keep_energy=0.9, basis="activations", statistics=statistics)
    model = build(path, world, method=keep).model
    for name in statistics.inputs:
        values = torch.linalg.eigvalsh(statistics.covariance(name)).flip(0)
        shares = values.cumsum(0) / values.sum()
        num_kept = model.get_submodule(name).num_kept
        assert shares[num_kept - 1] >= 0.9 > (shares[num_kept - 2] if num_kept > 1 else 0)
    with pytest.raises(RunError, match=r"--osft-keep-energy 1\.0: "):
        build(path, world, method=settings(tmp_path, None, keep_energy=1.0, basis="activations", statistics=statistics))


def test_statistics_of_two_tasks_are_added_once_each(world, tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path / "model")
    file = tmp_path / "statistics.safetensors"
    data = [write_earlier(tmp_path, seed=i) for i in range(2)]
    alone = [watch(path, world, one) for one in data]
    for one in (*data, *data):
        both = watch(path, world, one, statistics_file=file)
    without_data = watch(path, world, None, statistics_file=file)
    for name in both.inputs:
        expected = alone[0].covariance(name) + alone[1].covariance(name)
        for statistics in (both, without_data):
            torch.testing.assert_close(statistics.covariance(name), expected)
    other = save_model(FAMILIES["phi3"], tmp_path / "other")
    with pytest.raises(RunError, match=r"--osft-statistics: .* 32 inputs of model\.layers\.0\.self_attn\.qkv_proj: "):
        build(other, world, method=settings(tmp_path, basis="activations", statistics=both))
    file.write_text("nothing")
    for bad in (file, tmp_path / "missing.safetensors"):
        with pytest.raises(RunError, match=f"--osft-statistics {bad}: "):
            watch(path, world, None, statistics_file=bad)


def test_data_of_another_tokenizer_is_refused_before_the_model_loads(world, tmp_path):
    model = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    data = write_samples(tmp_path / "data.arrow", make_samples(12, vocab_size=VOCAB_SIZE))
    sidecar = dict(tokenizer_fingerprint="of another", max_token_id=5)
    (tmp_path / "old.arrow.meta.json").write_text(json.dumps(sidecar))
    old = write_samples(tmp_path / "old.arrow", make_samples(12, vocab_size=VOCAB_SIZE))
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"--osft-calibration-data {old} .*tokenizer than --data-path"):
        train_run(
            1, world, tmp_path, tmp_path / "run", model=model, data=data, osft_calibration_data=old,
            osft_basis="activations",
        )  # fmt: skip


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama_tied_bias", wide("gpt2")])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(family, world, tmp_path):
    model = save_tokenizer(save_model(FAMILIES[family], tmp_path / "model"))
    data = write_samples(tmp_path / "data.arrow", make_samples(40, vocab_size=VOCAB_SIZE))
    common = dict(
        model_name_or_path=str(model), data_path=str(data), batch_size=9, max_tokens_per_gpu=45, learning_rate=1e-2,
        weight_decay=0.1, export_dtype="float32", osft=True, osft_unfreeze_rank_ratio=0.3,
        osft_target_patterns=("attn", "mlp"), checkpoint_every_steps=1,
    )  # fmt: skip
    caches = iter(range(9))

    def start(name: str, max_steps: int) -> dict[str, torch.Tensor]:
        cache_dir = str(tmp_path / f"cache_{next(caches)}")  # decomposed anew: the checkpoint has the directions
        output_dir = tmp_path / name
        train_here(world, output_dir=str(output_dir), max_steps=max_steps, osft_cache_dir=cache_dir, **common)
        return load_file(output_dir / "hf_format" / f"samples_{9 * max_steps}" / "model.safetensors")

    whole = start("whole", 4)
    start("parts", 2)
    parts = start("parts", 4)
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    leaks = [read_lines(tmp_path / name / "training_metrics_0.jsonl")[-1]["osft_leak"] for name in ("whole", "parts")]
    assert leaks[0] == leaks[1] and 0 < leaks[0] <= LEAK
