"""OSFT over tasks in a row: all that earlier tasks kept stays kept."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from breadth import long, wide
from in_process import train_on
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, build, load_source, make_osft, save_model, save_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from mini_trainer.distributed.ending import RunError
from mini_trainer.model.build import make_meta_model
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.options import TrainOptions, group_options

LEAK = 1e-5
STEPS = 5
KINDS = {  # the options of three tasks
    "weights": [dict(osft_unfreeze_rank_ratio=ratio, learning_rate=5e-2) for ratio in (0.6, 0.5, 0.4)],
    "weights, bf16": [
        dict(osft_unfreeze_rank_ratio=ratio, learning_rate=5e-2, compute_dtype="bfloat16") for ratio in (0.6, 0.5, 0.4)
    ],
    "activations": [
        dict(osft_basis="activations", osft_unfreeze_rank_ratio=ratio) for ratio in (0.75, 0.5, 0.25)
    ],
    "energy": [dict(osft_basis="activations", osft_keep_energy=0.8)] * 3,
}  # fmt: skip


def is_by_activations(kind: str) -> bool:
    return "osft_basis" in KINDS[kind][0]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Two models, and the data of four tasks: the first is what the model came with."""
    root = tmp_path_factory.mktemp("inputs")
    for family in ("llama_tied_bias", "gpt2"):
        save_tokenizer(save_model(FAMILIES[family], root / family))
    for i in range(4):
        write_samples(root / f"task_{i}.arrow", make_samples(30, vocab_size=VOCAB_SIZE, seed=i))
    return root


def options_of(task: int, kind: str, inputs: Path, model: Path, **changes: object) -> dict:
    """The options of the run that learns task 1, 2 or 3 from `model`."""
    own = KINDS[kind][task - 1]
    if is_by_activations(kind):
        own = own | dict(osft_calibration_data=inputs / f"task_{task - 1}.arrow")
    return dict(
        model_name_or_path=model, data_path=inputs / f"task_{task}.arrow", batch_size=9, max_tokens_per_gpu=45,
        learning_rate=1e-2, weight_decay=0.1, export_dtype="float32", max_steps=STEPS, osft=True,
        osft_cache_dir=inputs / "cache",
    ) | own | changes  # fmt: skip


def run(world, output_dir: Path, *, num_ranks: int = 1, **options: object) -> Path:
    """Trains; the export."""
    train_on(num_ranks, world, output_dir=output_dir, **options)
    return output_dir / "hf_format" / f"samples_{9 * int(options['max_steps'])}"


def bases_of(export: Path) -> Path:
    return export / "osft" / "bases.safetensors"


@pytest.fixture(scope="module")
def chain(world, inputs, tmp_path_factory) -> Callable[[str, str, int], list[Path]]:
    """The model as it begins and its exports after some tasks, whose bases are handed on; trained once."""
    root = tmp_path_factory.mktemp("chains")
    exports: dict[tuple[str, str], list[Path]] = {}

    def train_tasks(family: str, kind: str, num_tasks: int) -> list[Path]:
        known = exports.setdefault((family, kind), [inputs / family])
        for task in range(len(known), num_tasks + 1):
            given = options_of(task, kind, inputs, known[-1], osft_bases=bases_of(known[-1]) if task > 1 else "new")
            if is_by_activations(kind):
                given["osft_statistics"] = root / f"{family}_{kind}_{task}.safetensors"  # of this task's data alone
            known.append(run(world, root / f"{family}_{kind}_{task}", **given))
        return known[: num_tasks + 1]

    return train_tasks


def read_kept(export: Path) -> dict[str, tuple[Tensor | None, Tensor]]:
    """U and V of the directions that the run of this export kept, of each layer; V is what V_free leaves."""
    stored = load_file(bases_of(export))
    kept = {}
    for key, free in stored.items():
        if key.endswith(".V_free"):
            name = key.removesuffix(".V_free")
            left = torch.linalg.svd(free.double(), full_matrices=True).U[:, free.shape[1] :]
            U_kept = stored.get(f"{name}.U_kept")
            kept[name] = (None if U_kept is None else U_kept.double(), left)
    return kept


def load_matrix(export: Path, name: str, *, transposed: bool) -> Tensor:
    weight = load_file(export / "model.safetensors")[f"{name}.weight"].double()
    return weight.T if transposed else weight


def is_transposed(family: str, kind: str, export: Path, name: str) -> bool:
    """Whether a layer's directions are those of its weight's transpose: of inputs, or of the shorter side."""
    rows, columns = load_file(export / "model.safetensors")[f"{name}.weight"].shape
    is_conv1d = family == "gpt2"
    inputs_, outputs = (rows, columns) if is_conv1d else (columns, rows)
    on_input = is_by_activations(kind) or inputs_ <= outputs
    return is_conv1d == on_input


def measure_leaks(exports: list[Path], *, family: str, kind: str) -> list[float]:
    """For each run the largest share, over layers, of the change from its start to its end, or to that of a later run,
    that lies in the directions it kept."""
    leaks = []
    for i in range(1, len(exports)):
        worst = 0.0
        for name, (U_kept, V_kept) in read_kept(exports[i]).items():
            flip = is_transposed(family, kind, exports[0], name)
            before = load_matrix(exports[i - 1], name, transposed=flip)
            for later in exports[i:]:
                change = load_matrix(later, name, transposed=flip) - before
                if change.norm() > 0:
                    found = [(change @ V_kept).norm(), *([] if U_kept is None else [(U_kept.T @ change).norm()])]
                    worst = max(worst, (max(found) / change.norm()).item())
        leaks.append(worst)
    return leaks


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        long("llama_tied_bias", "weights"),
        long("llama_tied_bias", "weights, bf16"),
        wide("llama_tied_bias", "activations"),
        long("gpt2", "energy"),
        wide("gpt2", "weights"),
    ],
)
def test_what_every_earlier_task_kept_stays(family, kind, chain, world, inputs, tmp_path):
    same = dict(family=family, kind=kind)
    handed = chain(family, kind, 3)
    anew = handed[:2]  # and from here on each run chooses for itself
    for task in (2, 3):
        anew.append(run(world, tmp_path / str(task), **options_of(task, kind, inputs, anew[-1], osft_bases="new")))
    assert 0 < max(measure_leaks(handed, **same)) <= LEAK
    first, second, last = measure_leaks(anew, **same)
    assert min(first, second) > 1e-2 and last <= LEAK
    numbers = [{name: V.shape[1] for name, (_, V) in read_kept(export).items()} for export in handed[1:]]
    for before, after in pairwise(numbers):
        assert all(after[name] >= before[name] for name in before) and sum(after.values()) > sum(before.values())
    for export in handed[1:]:
        rows = (export.parents[1] / "training_metrics_0.jsonl").read_text().splitlines()
        assert 0 < json.loads(rows[-1])["osft_leak"] <= LEAK


def remove(matrix: Tensor, U_kept: Tensor, V_kept: Tensor) -> Tensor:
    """(I - U U^T) M (I - V V^T)"""
    matrix = matrix - U_kept @ (U_kept.T @ matrix)
    return matrix - matrix @ V_kept @ V_kept.T


@pytest.mark.parametrize("kind", ["weights", long("activations"), "energy"])
def test_new_directions_are_the_leading_ones_of_what_is_not_kept(kind, chain):
    start, first, second = chain("llama_tied_bias", kind, 2)
    assert max(measure_leaks([start, first, second], family="llama_tied_bias", kind=kind)) <= LEAK
    seen = {} if kind == "weights" else load_file(second.parents[1].with_suffix(".safetensors"))
    kept = read_kept(second)
    for name, (U_before, V_before) in read_kept(first).items():
        _, V_after = kept[name]
        num_before, num_after = V_before.shape[1], V_after.shape[1]
        assert (V_before - V_after @ (V_after.T @ V_before)).norm() <= LEAK
        if kind == "weights":
            weight = load_matrix(first, name, transposed=is_transposed("llama_tied_bias", kind, first, name))
            rest = remove(weight, U_before, V_before)
            assert num_after == int(len(V_after) * (1 - 0.5))
        else:
            if name not in seen:  # has the inputs of another layer
                continue
            rest, energy = remove(seen[name], V_before, V_before), seen[name].trace()
        U, S, Vh = torch.linalg.svd(rest)
        new = V_after @ V_after.T - V_before @ V_before.T
        expected = Vh[: num_after - num_before].T
        assert (new - expected @ expected.T).norm() <= 1e-3
        if kind == "weights":
            expected = torch.cat([U_before, U[:, : num_after - num_before]], dim=1)
            assert (kept[name][0] - expected @ (expected.T @ kept[name][0])).norm() <= 1e-3
        if kind == "energy":
            carried = energy - rest.trace()
            shares = [(carried + S[:number].sum()) / energy for number in range(num_after - num_before + 1)]
            assert shares[-1] >= 0.8 and (len(shares) == 1 or shares[-2] < 0.8)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "kind"), [long(4, "weights"), wide(2, "energy")])
def test_ranks_change_nothing(num_ranks, kind, chain, world, inputs, tmp_path):
    start, first, alone = chain("llama_tied_bias", kind, 2)
    given = options_of(2, kind, inputs, first, osft_bases=bases_of(first), osft_cache_dir=tmp_path / "cache")
    hybrid = dict(sharding="hybrid", shard_size=2) if num_ranks == 4 else {}
    sharded = run(world, tmp_path / "sharded", num_ranks=num_ranks, **given, **hybrid)
    begin, expected, found = (load_file(export / "model.safetensors") for export in (first, alone, sharded))
    for name, weight in found.items():
        assert (weight - expected[name]).norm() <= 1e-2 * (expected[name] - begin[name]).norm(), name
    kept = read_kept(sharded)
    for name, bases in read_kept(alone).items():
        for one, other in zip(bases, kept[name], strict=True):
            assert one is other is None or (one @ one.T - other @ other.T).norm() <= LEAK, name
    assert max(measure_leaks([start, first, sharded], family="llama_tied_bias", kind=kind)) <= LEAK


@pytest.mark.parametrize("kind", ["weights", long("energy")])
def test_a_resumed_run_exports_the_same_model_and_bases(kind, chain, world, inputs, tmp_path):
    _, first, whole = chain("llama_tied_bias", kind, 2)
    given = options_of(2, kind, inputs, first, osft_bases=bases_of(first), checkpoint_every_steps=1)
    for max_steps in (2, STEPS):
        parts = run(world, tmp_path / "parts", **given | dict(max_steps=max_steps))
    for name in ("model.safetensors", "osft/bases.safetensors"):
        assert (
            hashlib.sha256((whole / name).read_bytes()).digest() == hashlib.sha256((parts / name).read_bytes()).digest()
        )
    other = tmp_path / "other.safetensors"
    with safe_open(bases_of(first), "pt") as file:
        save_file({key: value.neg() for key, value in load_file(bases_of(first)).items()}, other, file.metadata())
    with pytest.raises(ValueError, match=r"step_5 .*other data "):
        run(world, tmp_path / "parts", **given | dict(osft_bases=other, max_steps=9))


def test_new_bases_change_nothing_but_the_export(chain, world, inputs, tmp_path):
    start, new = chain("llama_tied_bias", "weights", 1)
    plain = run(world, tmp_path / "run", **options_of(1, "weights", inputs, start))
    assert (plain / "model.safetensors").read_bytes() == (new / "model.safetensors").read_bytes()
    assert not (plain / "osft").exists()


@pytest.fixture
def first(chain) -> Path:
    """The export of the first task, by weights."""
    return chain("llama_tied_bias", "weights", 1)[-1]


def rewrite(bases: Path, path: Path, **changes: Tensor | None) -> Path:
    """A copy of a file of bases with other tensors, or without those that are None."""
    tensors = {key: tensor for key, tensor in (load_file(bases) | changes).items() if tensor is not None}
    with safe_open(bases, "pt") as file:
        save_file(tensors, path, file.metadata())
    return path


LAYER = "model.layers.1.mlp.up_proj"  # of 48 x 32


def test_a_layer_that_is_kept_whole_stays_so(world, inputs, first, tmp_path):
    whole = {f"{LAYER}.V_free": torch.zeros(32, 0), f"{LAYER}.U_kept": None}
    bases = rewrite(bases_of(first), tmp_path / "bases.safetensors", **whole)
    second = run(world, tmp_path / "run", **options_of(2, "weights", inputs, first, osft_bases=bases))
    before, after = (load_file(export / "model.safetensors") for export in (first, second))
    assert torch.equal(before[f"{LAYER}.weight"], after[f"{LAYER}.weight"])
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
    stored = load_file(bases_of(second))
    assert stored[f"{LAYER}.V_free"].shape == (32, 0) and f"{LAYER}.U_kept" not in stored


@pytest.mark.long
def test_weights_of_low_rank_are_kept_too(world, inputs, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(inputs / "llama_tied_bias", model)
    weights = load_file(model / "model.safetensors")
    for name, rank in ((LAYER, 5), ("model.layers.0.self_attn.o_proj", 5), ("model.layers.0.mlp.down_proj", 0)):
        weight = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = weight[:, :rank] @ weight[:rank]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    exports = [model]
    for task in (1, 2, 3):
        given = options_of(
            task, "weights", inputs, exports[-1], osft_bases=bases_of(exports[-1]) if task > 1 else "new"
        )
        exports.append(run(world, tmp_path / str(task), **given))
    assert 0 < max(measure_leaks(exports, family="llama_tied_bias", kind="weights")) <= LEAK


def test_without_room_nothing_new_is_kept_and_the_rest_trains(world, inputs, first, tmp_path, caplog):
    # 0.6 leaves 12 of 32 directions and 6 of 16 to keep, which the first task has filled: 14 layers
    same = dict(osft_bases=bases_of(first), osft_unfreeze_rank_ratio=0.6)
    second = run(world, tmp_path / "run", **options_of(2, "weights", inputs, first, **same))
    told = r"14 of 14 layers --osft-bases .*144 directions, .*--osft-unfreeze-rank-ratio 0\.6"
    assert re.search(told, caplog.text)
    kept = read_kept(second)
    for name, (U_kept, V_kept) in read_kept(first).items():
        assert kept[name][1].shape == V_kept.shape and torch.equal(U_kept, kept[name][0])
    models = [inputs / "llama_tied_bias", first, second]
    assert max(measure_leaks(models, family="llama_tied_bias", kind="weights")) <= LEAK
    bases = rewrite(
        bases_of(first),
        tmp_path / "bases.safetensors",
        **{key: None if key.endswith("U_kept") else value[:, :0] for key, value in load_file(bases_of(first)).items()},
    )
    with pytest.raises(RunError, match=r"--osft-unfreeze-rank-ratio 0\.6: "):
        run(world, tmp_path / "none", **options_of(2, "weights", inputs, first, **same | dict(osft_bases=bases)))


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({}, dict(osft_basis="activations"), "--osft-basis weights, not activations"),
        ({}, dict(osft_target_patterns=("mlp",)), r"bases of model\.layers\.0\.self_attn\.k_proj, "),
        ({f"{LAYER}.V_free": None}, {}, f"no bases of {LAYER}, "),
        ({f"{LAYER}.V_free": torch.zeros(48, 20)}, {}, rf"{LAYER} has bases .* 48 x 32"),
        ({f"{LAYER}.U_kept": None}, {}, rf"{LAYER} has bases .*\(32, 20\) and None"),
    ],
)
def test_bases_of_something_else_are_refused_by_name(tensors, options, message, world, inputs, first, tmp_path):
    bases = rewrite(bases_of(first), tmp_path / "bases.safetensors", **tensors)
    given = options_of(2, "weights", inputs, first, osft_bases=bases, **options)
    if "osft_basis" in options:
        given["osft_calibration_data"] = inputs / "task_1.arrow"
    with pytest.raises(RunError, match=f"--osft-bases {bases}: .*{message}.*--osft-target-patterns"):
        run(world, tmp_path / "run", **given)
    planned = make_osft(tmp_path, **{key: value for key, value in given.items() if key.startswith("osft_")})
    with pytest.raises(ValueError, match=message):
        lay_out(planned, first)


def test_a_file_that_is_none_is_refused_before_the_model_loads(world, inputs, first, tmp_path):
    (tmp_path / "bad.safetensors").write_text("nothing")
    for bad in (tmp_path / "bad.safetensors", tmp_path / "missing.safetensors", first / "model.safetensors", tmp_path):
        given = options_of(2, "weights", inputs, first, osft_bases=bad)
        with pytest.raises(RunError, match=rf"--osft-bases {bad}: .*'new'"):
            run(world, tmp_path / "run", **given)


def lay_out(method, model: Path) -> PreTrainedModel:
    """The model as a plan lays it out with the method."""
    options = group_options(TrainOptions, model_name_or_path=str(model), data_path="", output_dir="")
    meta = make_meta_model(
        load_source(model), options.compute, family=TextFamily(), method=method, device=torch.device("cpu")
    )
    method.choose_layers(meta)
    method.lay_out(meta)
    return meta.model


@pytest.mark.parametrize("ratio", [0.7, 0.3])
def test_a_plan_counts_what_is_kept(ratio, world, inputs, first, tmp_path):
    options = dict(osft_unfreeze_rank_ratio=ratio, osft_bases=str(bases_of(first)))
    planned, built = make_osft(tmp_path, **options), make_osft(tmp_path, **options)
    sizes = [
        {name: param.shape for name, param in model.named_parameters()}
        for model in (lay_out(planned, first), build(first, world, method=built).model)
    ]
    assert sizes[0] == sizes[1]
    num_kept = 12 if ratio == 0.7 else 22
    assert all(layer.num_kept == num_kept for layer in built.layers if layer.num_columns == 32)
    built.write_extras(tmp_path, None)  # nothing was gathered yet
    assert not (tmp_path / "osft").exists()
    built.bases = built.gather_bases(build(first, world, method=built).model, world)
    built.write_extras(tmp_path, None)
    written = sum(tensor.nbytes for tensor in load_file(bases_of(tmp_path)).values())
    assert planned.count_export_bytes(1000) == 1000 + written
