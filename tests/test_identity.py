"""Which run a checkpoint belongs to, and what of it may change; what ends generation in an export."""

import dataclasses
import json
from pathlib import Path

import pytest
from in_process import train_here
from small_runs import make_inputs
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE, change_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_trainer import options
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer
from mini_trainer.distributed.ending import RunError
from mini_trainer.run.identity import check_same_run
from mini_trainer.run.record import OF_METHOD

IDENTITY = {"seed": 42, "osft-basis": "weights", OF_METHOD: [], "data": "0" * 64}


def check(before: dict, now: dict, *, allow_changes: bool = False, needs_model: bool = False) -> list[str]:
    state = {"identity": before}
    return check_same_run(Path("step_1"), state, now, allow_changes=allow_changes, needs_model=needs_model)


def test_another_model_can_be_allowed_only_where_the_checkpoint_holds_all_weights():
    before, now = (IDENTITY | {"model": digit * 64} for digit in "01")
    assert check(before, now, allow_changes=True) == ["model"]
    with pytest.raises(ValueError, match=r"step_1 .*other model: "):
        check(before, now, allow_changes=True, needs_model=True)


def test_what_an_older_version_did_not_note_down_counts_as_the_default():
    before = {name: value for name, value in IDENTITY.items() if name not in ("osft-basis", OF_METHOD)}
    assert check(before, IDENTITY) == []
    assert check(before, IDENTITY | {OF_METHOD: ["f" * 64]}) == []  # which cannot be compared
    with pytest.raises(ValueError, match=r"osft-basis \(weights .* activations\)"):
        check(before, IDENTITY | {"osft-basis": "activations"})


def test_an_option_that_is_gone_counts_unless_its_value_was_like_none():
    before = IDENTITY | {"warmup-ratio": None}
    assert check(before, IDENTITY) == []
    with pytest.raises(ValueError, match=r"warmup-ratio \(0.1 before"):
        check(before | {"warmup-ratio": 0.1}, IDENTITY)


def test_changes_are_named_and_only_some_can_be_allowed():
    assert check(IDENTITY, IDENTITY) == []
    with pytest.raises(ValueError, match=r"seed \(42 .* 7\): .*--allow-changed-options"):
        check(IDENTITY, IDENTITY | {"seed": 7})
    assert check(IDENTITY, IDENTITY | {"seed": 7}, allow_changes=True) == ["seed (42 before, now 7)"]
    for fixed in ({"osft-basis": "activations"}, {OF_METHOD: ["f" * 64]}):
        with pytest.raises(ValueError, match="not even --allow-changed-options"):
            check(IDENTITY, IDENTITY | {"seed": 7} | fixed, allow_changes=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("inputs")
    sizes = dict(batch_size=8, max_tokens_per_gpu=200, max_steps=2, checkpoint_every_steps=1)
    return make_inputs(root, "llama", num_samples=30) | sizes | dict(osft_cache_dir=str(root / "cache"))


def test_a_run_whose_directions_come_from_elsewhere_does_not_go_on(inputs, world, tmp_path):
    old = str(write_samples(tmp_path / "old.arrow", make_samples(10, vocab_size=VOCAB_SIZE, seed=5)))
    older = str(write_samples(tmp_path / "older.arrow", make_samples(10, vocab_size=VOCAB_SIZE, seed=6)))
    run = dict(output_dir=str(tmp_path / "run"), osft=True, osft_unfreeze_rank_ratio=0.5)
    by_activations = dict(osft_basis="activations", osft_calibration_data=old)
    train_here(world, **inputs, **run, **by_activations)
    train_here(world, **inputs | dict(max_steps=3), **run, **by_activations)
    for changes in (dict(osft_basis="activations", osft_calibration_data=older), dict(osft_basis="weights")):
        with pytest.raises(ValueError, match=f"step_3 .*other {OF_METHOD}"):
            train_here(world, **inputs | dict(max_steps=4), **run, **changes)
        with pytest.raises(ValueError, match="not even --allow-changed-options"):
            train_here(world, **inputs | dict(max_steps=4, allow_changed_options=True), **run, **changes)


def test_nothing_left_to_train_shows_before_any_decomposition(inputs, world, tmp_path):
    nothing = dict(osft=True, osft_unfreeze_rank_ratio=1e-12)
    with pytest.raises(RunError, match="--osft-unfreeze-rank-ratio 1e-12: "):
        train_here(world, **inputs | dict(osft_cache_dir=str(tmp_path / "cache")), **nothing,
                   output_dir=str(tmp_path / "run"))  # fmt: skip
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("published", "has_own_template", "expected"),
    [
        (2, False, [3, 2]),  # the model's own still ends generation
        ([2, 5], False, [3, 2, 5]),
        (3, False, 3),
        ([5, 3], False, [5, 3]),
        (None, False, 3),
        (2, True, 3),  # the data's chat template is not the model's
    ],
)
def test_the_datas_stop_token_ends_generation_in_the_export(
    published, has_own_template, expected, inputs, world, tmp_path, caplog
):
    model = Path(inputs["model_name_or_path"])
    for name in ("config.json", "generation_config.json"):
        change_json(model / name, eos_token_id=published)
    tokenizer = AutoTokenizer.from_pretrained(model)
    data_path = tmp_path / "data.arrow"
    write_samples(data_path, make_samples(30, vocab_size=VOCAB_SIZE))
    if has_own_template:
        tokenizer.save_pretrained(tmp_path / "data.arrow.tokenizer")
    sidecar = {
        "num_samples": 30,
        "tokenizer_fingerprint": fingerprint_tokenizer(tokenizer),
        "chat_template_fingerprint": fingerprint_chat_template(tokenizer),
        "tokenizer_dir": "data.arrow.tokenizer" if has_own_template else None,
        "max_token_id": VOCAB_SIZE - 1,
        "stop_token_id": 3,
    }
    Path(f"{data_path}.meta.json").write_text(json.dumps(sidecar))
    plain = {name: value for name, value in inputs.items() if not name.startswith("osft")}
    with caplog.at_level("INFO", logger="mini_trainer"):
        train_here(world, **plain | dict(data_path=str(data_path), max_steps=1), output_dir=str(tmp_path / "run"))
    (export,) = (tmp_path / "run" / "hf_format").glob("samples_*")
    exported = AutoModelForCausalLM.from_pretrained(export)
    assert exported.generation_config.eos_token_id == exported.config.eos_token_id == expected
    assert ("exports: generation " in caplog.text) == (
        (isinstance(expected, list) and expected[0] == 3) or not published
    )
    exported_tokenizer = AutoTokenizer.from_pretrained(export)
    for name in ("bos_token_id", "pad_token_id"):
        token_id = getattr(exported_tokenizer, name)
        if token_id is not None:
            assert getattr(exported.config, name) == getattr(exported.generation_config, name) == token_id


def test_a_run_that_only_times_steps_needs_no_export(inputs, world, tmp_path, caplog):
    plain = {name: value for name, value in inputs.items() if not name.startswith("osft")}
    train_here(world, **plain, save_final_checkpoint=False, output_dir=str(tmp_path / "run"))
    assert "--no-save-final-checkpoint: " in caplog.text
    assert not (tmp_path / "run" / "hf_format").exists()


PATHS = tuple(name for name, facts in options.list_facts(options.TrainOptions).items() if facts.is_path)
# Options that decide no numbers of a run, by why not; all others identify it.
CONTENT = (  # the content is part of the identity: of models, of tokenized rows that are kept, of files of the method
    *("model_name_or_path", "model_revision", "trust_remote_code", "data_path", "drop_overlong", "subset", "config"),
    *("preset", *(option.name for option in dataclasses.fields(options.RowOptions)), "data_cache_dir"),
    *("compute_dtype", *PATHS),
)
ROUNDING = (  # the numbers are the same but for their rounding
    *("max_tokens_per_gpu", "max_image_tokens_per_gpu", "attention", "activation_checkpointing", "tiled_mlp"),
    *("offload_activations", "memory_budget_gb", "compile", "kernels"),
    *(option.name for option in dataclasses.fields(options.ShardingOptions)),
)
LENGTH = tuple(option.name for option in dataclasses.fields(options.EndOptions))  # see "number of steps"
OUTPUT = (  # what is measured, written and said
    *("output_dir", "logging_level", "skip_verification", "lora_export"),
    *(
        option.name
        for name in ("Validation", "Checkpoint", "Export", "Tracking", "Hub", "Callback", "Profiling", "Plan")
        for option in dataclasses.fields(getattr(options, f"{name}Options"))
    ),
)


def test_every_option_identifies_a_run_or_is_known_to_decide_no_numbers():
    free = [*CONTENT, *ROUNDING, *LENGTH, *OUTPUT]
    every = [option.name for option, _ in options.iterate_fields(options.TrainOptions)]
    assert sorted([*free, *options.list_identifying_options()]) == sorted(every)
