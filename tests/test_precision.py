"""Weights that transformers keeps in fp32 in a bfloat16 model stay so in masters, compute and files (model.precision):
a step at learning rate 0 changes no bit of a model's files."""

from pathlib import Path

import pytest
import torch
from architectures import choose_auto_class, save_tiny_model
from breadth import long
from forked import run_forked
from in_process import train_on
from processes import flags
from recorded import RELEASES, find_signature
from small_runs import load_checkpoint, read_weights
from tiny_data import make_samples, write_samples
from tiny_models import build, check, save_tokenizer
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from mini_trainer.model.kept_weights import KeptWeights
from mini_trainer.model.precision import choose_types

# Types that keep something in fp32: at least one parameter, or buffers only.
TYPES = [
    "bailing_hybrid", "beam", "deepseek_v4", "ernie4_5_moe", "flint", "hy_v4", "inkling2_text", "inkling_text",
    "axk1", "axk2", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note_text", "exaone_moe", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "kolibri1", "mimo_v2_flash", "nemotron_h", "solar_open",
    "glm4v_moe", "inkling_mm_model", "kimi_k25", "mistral_large4",
]  # fmt: skip
CHANGES = {"mistral_large4": {"image_token_index": 127}}  # which the data does not have
SHORT = TYPES[:6]
METHOD_OPTIONS = {
    "full": {},
    "lora": dict(lora=True, lora_rank=4, lora_export="merged"),
    "osft": dict(osft=True, osft_unfreeze_rank_ratio=0.5),
}
# Types of the files and of computation, and ranks.
WAYS = [("bfloat16", "bfloat16", 2), ("float32", "bfloat16", 1), ("bfloat16", "float32", 1)]
CASES = [
    (kind, method, WAYS[(i + j) % len(WAYS)])
    for i, kind in enumerate(TYPES)
    for j, method in enumerate(METHOD_OPTIONS)
    if (kind, method) != ("nemotron_h", "lora")  # peft refuses its out_proj
]
IN_SHORT = {(kind, tuple(METHOD_OPTIONS)[i % 3]) for i, kind in enumerate(SHORT)}


def write_model(kind: str, path: Path, *, dtype: str = "bfloat16") -> Path:
    """A random model as transformers writes one of this type."""
    save_tiny_model(kind, path / "fp32", changes=CHANGES.get(kind))
    auto_class = choose_auto_class(AutoConfig.from_pretrained(path / "fp32"))
    auto_class.from_pretrained(path / "fp32", dtype=getattr(torch, dtype)).save_pretrained(path / dtype)
    return save_tokenizer(path / dtype)


def train_a_step(world, model: Path, *, num_ranks: int = 1, **options: object) -> dict[str, Tensor]:
    """The weights of the export after a step at learning rate 0."""
    root = model.parent
    data = write_samples(root / "data.arrow", make_samples(16, vocab_size=100, max_len=60))
    train_on(
        num_ranks, world, model_name_or_path=str(model), data_path=data, output_dir=root / "run", batch_size=4,
        max_tokens_per_gpu=128, max_steps=1, learning_rate=0.0, **options,
    )  # fmt: skip
    return read_weights(root / "run" / "hf_format" / "samples_4")


def find_changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    def is_same(name: str) -> bool:
        return before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])

    return {
        name for name in before.keys() | after.keys() if not {name} <= before.keys() & after.keys() or not is_same(name)
    }


@pytest.mark.parametrize(("kind", "method", "way"), [case if case[:2] in IN_SHORT else long(*case) for case in CASES])
def test_a_step_at_learning_rate_0_changes_no_bit_of_the_files(kind, method, way, world, tmp_path):
    stored, compute, num_ranks = way
    model = write_model(kind, tmp_path, dtype=stored)
    options = METHOD_OPTIONS[method] | (dict(osft_cache_dir=tmp_path / "osft") if method == "osft" else {})
    after = train_a_step(world, model, num_ranks=num_ranks, compute_dtype=compute, export_dtype=stored, **options)
    before = read_weights(model)
    assert not find_changed(before, after)
    if stored == "bfloat16" and kind in TYPES[:8]:
        assert torch.float32 in {value.dtype for value in before.values()}


TRAINED = dict(batch_size=4, max_tokens_per_gpu=128, max_steps=3, learning_rate=1e-2, compute_dtype="bfloat16",
               export_dtype="float32", checkpoint_every_steps=3)  # fmt: skip


def train_some_steps(world, model: Path, name: str, *, num_ranks: int = 1, **options: object) -> dict[str, Tensor]:
    """All tensors of the last checkpoint."""
    root = model.parent
    data = write_samples(root / "data.arrow", make_samples(16, vocab_size=100, max_len=60))
    given = TRAINED | options
    train_on(num_ranks, world, model_name_or_path=str(model), data_path=data, output_dir=root / name, **given)
    return load_checkpoint(root / name / "checkpoints" / f"step_{given['max_steps']}")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("flint", {}),
        ("ernie4_5_moe", dict(optimizer="adamw8bit", master_weights="bfloat16")),
        long("deepseek_v4", dict(activation_checkpointing="full", weight_average="ema")),
        long("flint", dict(compile=True)),
        long("flint", dict(lora=True, lora_modules_to_save=("gate",))),
        long("bailing_hybrid", dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_train_others=True)),
    ],
)
def test_one_rank_trains_them_to_the_same_bits_beside_fsdp(kind, options, world, tmp_path):
    if "osft" in options:
        options = options | dict(osft_cache_dir=tmp_path / "osft")
    model = write_model(kind, tmp_path)
    whole, beside = (
        train_some_steps(world, model, name, reshard_after_forward=name, **options) for name in ("auto", "always")
    )
    assert whole.keys() == beside.keys()
    assert not [name for name, value in whole.items() if not torch.equal(value, beside[name])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        dict(num_ranks=2),
        long(dict(num_ranks=2, cpu_offload=True)),
        long(dict(num_ranks=4, sharding="hybrid", shard_size=2)),
    ],
)
def test_their_gradients_are_summed_over_ranks(layout, world, tmp_path):
    model = write_model("ernie4_5_moe", tmp_path)
    once = dict(max_steps=1, checkpoint_every_steps=1)
    alone, shared = (train_some_steps(world, model, f"{i}", **once, **o) for i, o in enumerate(({}, layout)))
    names = [name for name in alone if "mlp.gate.weight" in name and "exp_avg" in name and "sq" not in name]
    assert names
    for name in names:
        assert (shared[name] - alone[name]).norm() <= 2e-2 * alone[name].norm(), name


@pytest.mark.slow
def test_a_plan_for_many_ranks_reckons_with_them(tmp_path):
    data = write_samples(tmp_path / "data.arrow", make_samples(16, vocab_size=100, max_len=60))
    given = dict(model_name_or_path=write_model("flint", tmp_path), data_path=data, output_dir=tmp_path / "run")
    done = run_forked(0, "train.py", *flags(**given, **TRAINED, dry_run=True, plan_for="8xH100"))
    assert "memory of a rank, at the peak of its largest micro-batch" in done.stdout, done.stderr


def test_the_start_up_check_refuses_other_types_and_other_experts(world, tmp_path, monkeypatch):
    path = write_model("ernie4_5_moe", tmp_path)
    model = build(path, world, dtype=torch.bfloat16, reshard_after_forward="always")
    check(model, world)
    monkeypatch.setattr(model, "kept", frozenset())
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight computes in torch\.float32, .*in torch\.bfloat16"):
        check(model, world)
    monkeypatch.undo()
    model.placed_weights.free()
    fill = KeptWeights._fill

    def fill_wrongly(weights: KeptWeights) -> None:
        fill(weights)
        for _, weight in weights.pairs.values():
            weight.data.copy_(weight.data.flip(0))

    monkeypatch.setattr(KeptWeights, "_fill", fill_wrongly)
    with pytest.raises(ValueError, match=r"its routers send \d+ of \d+ tokens to other experts"):
        check(model, world)


def test_a_version_of_transformers_that_does_not_say_is_refused(world, tmp_path, monkeypatch):
    path = write_model("ernie4_5_moe", tmp_path)
    monkeypatch.delattr(PreTrainedModel, "_get_dtype_plan")
    with pytest.raises(ValueError, match=r"transformers .* does not say which weights stay in float32"):
        build(path, world)


def test_the_private_functions_take_what_they_are_given_in_every_release():
    loading, models = "transformers.core_model_loading", "transformers.modeling_utils.PreTrainedModel"
    for release in RELEASES["transformers"]:
        find_signature("transformers", f"{models}._get_dtype_plan", release).bind(None, torch.bfloat16)
        find_signature("transformers", f"{loading}.build_glob_alternation", release).bind(["gate.weight"])


def test_types_are_those_of_transformers_own_loader(tmp_path):
    """In the type of a model's files, and in one that it has not."""
    for kind in ("flint", "hy_v4"):
        path = write_model(kind, tmp_path / kind, dtype="float32")
        auto_class = choose_auto_class(AutoConfig.from_pretrained(path))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            params = dict(auto_class.from_pretrained(path, dtype=dtype).named_parameters())
            model = auto_class.from_pretrained(path, dtype=torch.float32)
            assert choose_types(model, params, dtype) == {name: param.dtype for name, param in params.items()}
