"""Wrong files of `mini-trainer continual`: each is refused with one message that names the file and the key."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import ENV, ROOT
from safetensors.torch import save_file

from mini_trainer.continual.experiment import settle_all
from mini_trainer.continual.measuring import count_refused, read_cell
from mini_trainer.continual.replay import read_answers
from mini_trainer.continual.settings import SetSettings, read_settings
from mini_trainer.run.stages import Stage

A = {"name": "a", "input_file": "a.jsonl", "test": "test.jsonl", "metric": "exact_match"}
B = A | {"name": "b", "input_file": "b.jsonl"}
GOOD = {"model": "M", "output_dir": "out", "train": {"max_epochs": 1, "batch_size": 4}, "tasks": [A, B]}


def drop(key: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def change_task(**changes: Any) -> dict[str, Any]:
    return GOOD | {"tasks": [A, B | changes]}


def of_methods(one: Any, **changes: Any) -> dict[str, Any]:
    return GOOD | {"methods": {"one": one, "two": {}}} | changes


WRONG: list[tuple[dict[str, Any], str]] = [
    # Keys and types at the top.
    (GOOD | {"learning_rate": 1}, "unknown option 'learning_rate'"), (drop("model", GOOD), "model: required"),
    (GOOD | {"model": ["M", "N"]}, "model: given ['M', 'N']"),
    (GOOD | {"num_processes": 0}, "num_processes 0: must be at least 1"),
    (GOOD | {"seeds": [1, 1]}, "seeds: given [1, 1]"),
    (GOOD | {"export": "best"}, "tasks: a: export: best needs"),
    (GOOD | {"adapters": "continued"}, "adapters: continued: "),
    # Tasks and probes.
    (drop("tasks", GOOD), "tasks: none"), (GOOD | {"tasks": ["a"]}, "tasks[0]: given 'a'"),
    (GOOD | {"tasks": [drop("name", A)]}, "tasks[0]: name: required"),
    (change_task(name="../b"), "tasks, probes: name '../b': "), (change_task(name="b_held_out"), "name 'b_held_out': "),
    (GOOD | {"probes": [A | {"name": "p"}]}, "probes[0]: unknown option 'input_file'"),
    (GOOD | {"tasks": [A, drop("input_file", B)]}, "tasks: b: give input_file "),
    (change_task(data_path="b.arrow"), "tasks: b: give input_file "),
    (change_task(lm_eval="gsm8k"), "tasks: b: has test and lm_eval"),
    (change_task(metric="exactmatch"), "tasks: b: metric: given 'exactmatch'"),
    (GOOD | {"tasks": [A, drop("test", B) | {"held_out": "h"}]}, "tasks: b: metric has"),
    # Options of the programs.
    (GOOD | {"train": {"output_dir": "x"}}, "train: output_dir: is set"),
    (GOOD | {"train": {"max-epochs": 1, "max_epochs": 2}}, "train: max_epochs: is given"),
    (GOOD | {"train": {"max_epochs": 1, "validate_every_steps": 5}, "tasks": [A | {"validation": "v.jsonl"}, B]},
     "tasks: b: train: "),
    (GOOD | {"train": {"max_epochs": 1, "save_final_checkpoint": False}}, "save_final_checkpoint"),
    (change_task(train={"learning_rate": "fast"}), "tasks[1]: train: learning_rate cannot be 'fast'"),
    (change_task(train={"batch_size": -3}), "tasks: b: train: --batch-size -3: "),
    # Replay.
    (GOOD | {"replay": {"share": 0.1}}, "replay: kind: required"),
    (GOOD | {"replay": {"kind": "rows", "num_prompts": 3}},
     "replay: num_prompts has no effect with kind rows, only with own-answers, drawn"),
    (GOOD | {"replay": {"kind": "drawn"}}, "replay: kind: drawn: no row to learn from"),
    (GOOD | {"replay": {"kind": "rows", "keep": True, "share_of": "tokens"}}, "replay: share_of has no effect "),
    (GOOD | {"replay": {"kind": "rows", "keep": True}, "train": {"max_epochs": 1, "keep": ["o.arrow"]}},
     "replay: keep: train of a, b has keep, too"),
    (GOOD | {"replay": {"kind": "rows", "keep": True}, "train": {"max_epochs": 1, "teacher_weight": 0.5}},
     "train: --keep and --teacher-weight "),
    (GOOD | {"replay": {"kind": "drawn", "keep": True}, "adapters": "continued",
             "train": {"max_epochs": 1, "lora": True}}, "replay: kind: drawn: needs adapters: merged"),
    (GOOD | {"replay": {"kind": "rows"}, "tasks": [A]}, "replay: has no effect with one task; give known"),
    (GOOD | {"replay": {"kind": "rows", "known": "s3://x/y.jsonl"}}, "replay: known: s3://x/y.jsonl: must be local"),
    (GOOD | {"replay": {"kind": "own-answers"}, "generate": {"top_p": 0.5}}, "generate: --top-p, --top-k, "),
    # Methods.
    (GOOD | {"methods": {"full": {}}}, "methods: given {'full': {}}"),
    (GOOD | {"methods": {"a b": {}, "c": {}}}, "methods: name 'a b': "),
    (GOOD | {"methods": {"data": {}, "c": {}}}, "methods: data: "), (of_methods(3), "methods: one: given 3"),
    (of_methods({"tasks": []}), "methods: one: given ['tasks']"),
    (of_methods({"train": {"foo": 1}}), "methods: one: train: unknown option 'foo'"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_wrong_settings_are_refused_by_file_and_key(settings: dict[str, Any], message: str, tmp_path: Path):
    (path := tmp_path / "tasks.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError) as refused:
        read_settings(path)
    assert str(refused.value).startswith(f"{path}: ") and message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_problems_of_a_form_are_found_at_once_each_with_its_place(tmp_path: Path):
    given = change_task(tets="x", train={"lr": 1}) | {"seeds": 0.5}
    (path := tmp_path / "tasks.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(ValueError) as refused:
        read_settings(path)
    assert str(refused.value).split("\n  ") == [
        f"{path}: seeds cannot be 0.5, allowed: a list of int",
        f"{path}: tasks[1]: unknown option 'tets'; did you mean 'test'?",
        f"{path}: tasks[1]: train: unknown option 'lr'; did you mean 'learning_rate'?",
    ]


def test_words_of_names_may_be_joined_by_dashes(tmp_path: Path):
    methods = {"one": {"train": {"batch_size": 8}, "keep-osft-bases": False}, "two": None}
    given = drop("output_dir", GOOD) | {"train": {"max-epochs": 1, "batch-size": 4}, "methods": methods}
    (path := tmp_path / "tasks.yaml").write_text(yaml.safe_dump(given | {"output-dir": "before"}))
    one, two = read_settings(path, output_dir="out")
    assert (one.train, two.train) == ({"max_epochs": 1, "batch_size": 8}, {"max_epochs": 1, "batch_size": 4})
    assert (one.keep_osft_bases, two.keep_osft_bases, one.root.parent.name) == (False, True, "out")


@pytest.mark.parametrize("text", ["", "- a\n", "tasks: [a\n", "model: a\nmodel: b\n", "\x00", "\tmodel: a\n"])
def test_files_that_are_no_settings_are_refused(text: str, tmp_path: Path):
    (path := tmp_path / "tasks.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"tasks\.yaml: "):
        read_settings(path)


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings whose files exist."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "M").mkdir()
    (tmp_path / "M" / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(2)}, tmp_path / "M" / "model.safetensors")
    for name in ("a.jsonl", "b.jsonl", "c.jsonl", "test.jsonl", "probe.jsonl", "known.jsonl"):
        (tmp_path / name).write_text(name)
    return GOOD | {"probes": [{"name": "p", "test": "probe.jsonl", "metric": "exact_match"}]}


def settle(settings: dict[str, Any], folder: Path) -> list[list[list[str]]]:
    """What a start does before its first program."""
    (path := folder / "tasks.yaml").write_text(yaml.safe_dump(settings))
    return settle_all(read_settings(path), folder / "out")


CHANGES = {
    "settings.train.learning_rate: None before, 0.1 now": {"train": GOOD["train"] | {"learning_rate": 0.1}},
    "settings.seeds[0]: 42 before, 43 now": {"seeds": [43]},
    "settings.orders: 1 before, 2 now": {"orders": 2},
    "settings.probes: [{": {"probes": []},
    "settings.measure: 'all' before, 'seen' now": {"measure": "seen"},
    "settings.replay: None before, {'kind': 'rows'": {"replay": {"kind": "rows"}},
}  # fmt: skip


@pytest.mark.parametrize("message", CHANGES)
def test_changed_settings_are_refused_by_key(message: str, good: dict[str, Any], tmp_path: Path):
    assert settle(good, tmp_path) == settle(good, tmp_path) == [[["a", "b"]]]
    (tmp_path / "out" / "start").mkdir()
    before = (tmp_path / "out" / "continual.json").read_text()
    with pytest.raises(ValueError, match=r"out .*other settings") as refused:
        settle(good | CHANGES[message], tmp_path)
    assert message in str(refused.value) and len(str(refused.value)) < 1000
    assert (tmp_path / "out" / "continual.json").read_text() == before


READ_FIRST = ("a.jsonl", "test.jsonl", "probe.jsonl", "M/model.safetensors", "M/config.json")


@pytest.mark.parametrize(
    ("name", "methods"),
    [("known.jsonl", None), *((name, m) for name in READ_FIRST for m in (None, {"one": {}, "two": {}}))],
)
def test_changed_files_are_refused_by_name(name: str, methods: Any, good: dict[str, Any], tmp_path: Path):
    settings = good | {"replay": {"kind": "rows", "known": "known.jsonl"}}
    settings |= {} if methods is None else {"methods": methods}
    settle(settings, tmp_path)
    (tmp_path / "out" / "start").mkdir()
    if name.endswith("safetensors"):
        save_file({"weight": torch.ones(2)}, tmp_path / name)
    else:
        (tmp_path / name).write_text('{"other": 1}')
    if methods is not None:  # others, which share data with the earlier ones
        settings |= {"methods": {"three": {}, "four": {}}}
    with pytest.raises(ValueError, match="other settings") as refused:
        settle(settings, tmp_path)
    assert (f"files.{name}: '" if "M/" not in name else "model: '") in str(refused.value)


@pytest.mark.parametrize("methods", [None, {"one": {}, "two": {}}], ids=["one", "methods"])
def test_settings_and_rows_can_be_fixed_until_a_model_is_measured(methods: Any, good: dict[str, Any], tmp_path: Path):
    """Rows that process-data refuses are what a first start ends with."""
    settings = good if methods is None else good | {"methods": methods}
    settle(settings, tmp_path)
    (tokenized := tmp_path / "out" / "data" / "a").mkdir(parents=True)
    (tmp_path / "a.jsonl").write_text('{"other": 1}')
    settle(settings | {"train": {"max_epochs": 2, "batch_size": 4}}, tmp_path)
    assert not tokenized.exists()
    (tmp_path / "out" / ("one/order_1_seed_42" if methods else "order_1_seed_42")).mkdir(parents=True)
    with pytest.raises(ValueError, match="other settings"):
        settle(settings, tmp_path)


def test_tasks_come_last_if_they_are_added_and_cannot_be_removed(good: dict[str, Any], tmp_path: Path):
    more = good | {"tasks": [*good["tasks"], good["tasks"][0] | {"name": "c", "input_file": "c.jsonl"}]}
    assert settle(good | {"orders": 2}, tmp_path) == [[["a", "b"], ["b", "a"]]]
    assert settle(more | {"orders": 2}, tmp_path) == [[["a", "b", "c"], ["b", "a", "c"]]]
    (tmp_path / "out" / "start").mkdir()
    for settings in (good, more | {"tasks": more["tasks"][::-1]}):
        with pytest.raises(ValueError, match="only seeds and tasks"):
            settle(settings | {"orders": 2}, tmp_path)


def test_seeds_can_be_added_also_to_one_method_and_not_removed(good: dict[str, Any], tmp_path: Path):
    settle(good | {"methods": {"one": {}, "two": {"seeds": [1]}}}, tmp_path)
    settle(good | {"methods": {"one": {}, "two": {"seeds": [1, 2, 3]}}}, tmp_path)
    (tmp_path / "out" / "two" / "order_1_seed_1").mkdir()
    for seeds in ([1, 2], [3, 2, 1]):
        with pytest.raises(ValueError, match=r"out/two .*\n  settings.seeds"):
            settle(good | {"methods": {"one": {}, "two": {"seeds": seeds}}}, tmp_path)


def test_methods_can_be_added(good: dict[str, Any], tmp_path: Path):
    methods = {"one": {}, "two": {"train": {"learning_rate": 0.1}}}
    settle(good | {"methods": methods}, tmp_path)
    assert len(settle(good | {"methods": methods | {"three": {}}}, tmp_path)) == 3
    (tmp_path / "out" / "two" / "order_1_seed_42").mkdir()
    with pytest.raises(ValueError, match=r"out/two .*\n  settings.train.learning_rate: 0.1 before, 0.2 now"):
        settle(good | {"methods": methods | {"two": {"train": {"learning_rate": 0.2}}}}, tmp_path)


@pytest.mark.parametrize(
    "name", ["data/x.arrow", "known/x.jsonl", "training_params.json", "results.html", "order_1_seed_42/x"]
)
def test_directories_of_something_else_are_refused(name: str, good: dict[str, Any], tmp_path: Path):
    (path := tmp_path / "out" / name).parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ValueError, match=f"out has {Path(name).parts[0]} "):
        settle(good, tmp_path)
    assert list(path.parent.iterdir()) == [path]


def test_a_changed_record_is_refused_by_key(good: dict[str, Any], tmp_path: Path):
    settle(good, tmp_path)
    whole = json.loads((path := tmp_path / "out" / "continual.json").read_text())
    for changes in ({"orders": 3}, {"files": None}, {"model": 1}, {"settings": []}, {}):
        path.write_text(json.dumps(whole | changes if changes else {}))
        with pytest.raises(ValueError, match=rf"^{path}: .*\(see {', '.join(changes or whole)}\)"):
            settle(good, tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [("{}", "(see options)"), ('{"options": 3}', "(see options)"), ("[]", "a list"), ("", "Expecting value")],
)
def test_a_damaged_record_of_a_stage_is_refused_by_key(text: str, told: str, tmp_path: Path):
    stage = Stage(program="train", folder=tmp_path, options={"output_dir": str(tmp_path / "run"), "max_steps": 1})
    stage.write_options()
    stage.file("done").write_text(text)
    with pytest.raises(ValueError, match=rf"{tmp_path}/train\.done: .*{re.escape(told)}.*run train "):
        _ = stage.is_done
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training_params.json").write_text(text)
    with pytest.raises(ValueError, match=rf"training_params\.json: .*{tmp_path}/run to train"):
        _ = stage.has_ended


ONE = SetSettings(name="a", test="a.jsonl", metric="exact_match")


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("score", "{}", "a.scores.jsonl: line 1 "),
        ("score", '{"scores": {"exact_match": 1}}\n{"scores": {"exact_match": "x"}}', "as exact_match"),
        ("score", "", "as exact_match"),
        ("loss", "3", "a_held_out.losses.jsonl: line 1 "),
        ("loss", '{"num_targets": "x", "loss_sum": 1}', "see num_targets"),
        ("loss", None, "a_held_out.losses.jsonl: "),
    ],
)
def test_damaged_measurements_are_refused_by_file(kind: str, text: str | None, told: str, tmp_path: Path):
    (folder := tmp_path / "samples" / "last").mkdir(parents=True)
    if text is not None:
        (folder / ("a.scores.jsonl" if kind == "score" else "a_held_out.losses.jsonl")).write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(told)}.*{tmp_path} to measure"):
        read_cell(tmp_path, ONE, kind, root=tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]"])
def test_damaged_results_of_evaluate_and_answers_are_refused_by_file_and_line(text: str, tmp_path: Path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/results\.json: .*; remove {tmp_path} to measure again$"):
        count_refused(tmp_path)
    (path := tmp_path / "answers.jsonl").write_text(f'{{"index": 1, "answer": "a", "finish_reason": "stop"}}\n{text}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl: line 2 .*see index.*generate\.done"):
        read_answers(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probes": [{"name": "p", "test": "x.jsonl"}]}, r"probes: p: test: .*x\.jsonl "),
        ({"tasks": [A | {"input_file": "x.jsonl"}]}, r"tasks: a: input_file: .*x\.jsonl "),
        ({"replay": {"kind": "rows", "known": "x.jsonl"}, "probes": []}, r"replay: known: .*x\.jsonl does not exist"),
        ({"model": "x", "probes": []}, "model: .*x: "),
        ({"train": {"max_epochs": 1, "osft": True, "osft_unfreeze_rank_ratio": 0.5, "osft_basis": "activations"}},
         r"tasks: a: train: osft_basis: activations: .*osft_calib"),
    ],
)  # fmt: skip
def test_missing_files_models_and_data_are_refused_by_key(changes: Any, message: str, good: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        settle(good | changes, tmp_path)


@pytest.mark.long
def test_an_experiment_is_one_process(tmp_path):
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(GOOD))
    command = [sys.executable, "-m", "mini_trainer", "continual", str(tmp_path / "tasks.yaml")]
    env = ENV | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: srun or torchrun has started 2 processes") and "--ntasks=1" in done.stderr
