"""The continual driver: what each task is trained on, hands on and is measured by."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from continual_runs import NUM_ROWS, chat, make_inputs, read_options, run, write_lines
from safetensors.torch import load_file
from tiny_data import read_lines

from mini_trainer.continual.data import as_question, as_row
from mini_trainer.continual.matrix import read_experiment
from mini_trainer.continual.replay import keep_passing, mix
from mini_trainer.continual.settings import Replay, Task, draw_orders
from mini_trainer.data.rows.formats import read_example
from mini_trainer.data.tokenized.reader import TokenizedData


def load_weights(model: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(model) / "model.safetensors")


@pytest.mark.long
def test_tasks_are_learnt_in_turn_and_can_be_added(tmp_path: Path):
    """Two tasks in two orders, and a probe."""
    probe = write_lines(tmp_path / "probe.jsonl", [chat("first: red", "r"), chat("first: blue", "b")])
    settings = make_inputs(tmp_path) | {"orders": 2, "probes": [{"name": "first", "held_out": probe}]}
    root = run(settings, tmp_path)
    check_handing_on(root, settings)
    check_results(root)
    check_adding(root, settings)


def check_handing_on(root: Path, settings: dict[str, Any]) -> None:
    """Each task starts from the last one in full precision."""
    first, second = (read_options(root / "order_1_seed_42" / name) for name in ("1_twice", "2_shout"))
    assert first["model_name_or_path"] == settings["model"]
    assert second["model_name_or_path"] == f"{first['output_dir']}/hf_format/latest"
    weights = load_weights(second["model_name_or_path"])
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert read_options(root / "order_2_seed_42" / "1_shout")["model_name_or_path"] == settings["model"]


def check_results(root: Path) -> None:
    """The results are those of evaluate."""
    experiment = read_experiment(root)
    assert [one.tasks for one in experiment.sequences] == [("twice", "shout"), ("shout", "twice")]
    for sequence in experiment.sequences:
        assert [set(row["loss"]) for row in sequence.rows] == [{"first", "twice", "shout"}] * 3
        assert [set(row["score"]) for row in sequence.rows] == [{"twice", "shout"}] * 3
    folder = root / "order_1_seed_42" / "2_shout" / "measured" / "answers"
    sets = {one["name"]: one for one in json.loads((folder / "results.json").read_text())["sets"]}
    start, *_, row = experiment.sequences[0].rows
    for name in ("twice", "shout"):
        assert row["score"][name].mean == sets[name]["metrics"][0]["values"][0]["mean"]
        by_tokens = sets[f"{name}_held_out"]["metrics"][0]["values"][0]["mean"]
        assert row["loss"][name].mean == pytest.approx(by_tokens, rel=1e-12)
        assert (root / row["score"][name].samples).is_file()
    assert row["loss"]["shout"].mean < start["loss"]["shout"].mean
    assert "shout" in (root / "results.html").read_text()


def check_adding(root: Path, settings: dict[str, Any]) -> None:
    """Tasks can be added at the end, and nothing else can change."""
    before = {path: path.stat().st_mtime_ns for path in root.rglob("train.log")}
    changed = copy.deepcopy(settings)
    changed["train"]["learning_rate"] = 1e-3
    with pytest.raises(ValueError, match=r"train\.learning_rate: 0.01 before, 0.001 now"):
        run(changed, root.parent)
    row = chat("last: red", "d")
    file = write_lines(root.parent / "last.jsonl", [row] * NUM_ROWS)
    longer = settings | {"tasks": [*settings["tasks"], {"name": "last", "input_file": file, "held_out": file}]}
    run(longer, root.parent)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in root.rglob("train.log")}.items()
    experiment = read_experiment(root)
    assert [one.tasks for one in experiment.sequences] == [("twice", "shout", "last"), ("shout", "twice", "last")]
    assert all("last" in row["loss"] for row in experiment.sequences[0].rows)  # earlier models, too
    Path(file).write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"files\..*last\.jsonl"):
        run(longer, root.parent)


WRONG_LATER = [
    ({"max_tokens_per_gpu": 4}, {}, r"shout: train: "),
    ({"lora": True, "lora_target_modules": ["q_prj"]}, {}, "shout: train: --lora-target-modules q_prj"),
]


@pytest.mark.parametrize(("train", "changes", "message"), WRONG_LATER)
def test_what_a_later_task_would_refuse_is_refused_before_the_first(train, changes, message, tmp_path: Path):
    """By train's own checks of model and data, before any model is trained or measured."""
    settings = make_inputs(tmp_path) | changes
    settings["tasks"][1]["train"] = train
    with pytest.raises(ValueError, match=message):
        run(settings, tmp_path)
    programs = {path.name for path in (tmp_path / "runs").rglob("*.log")}
    assert programs == {"process-data.log"}


def test_tests_that_cannot_be_measured_are_refused_before_the_first_task(tmp_path: Path):
    settings = make_inputs(tmp_path) | {"measure": "seen"}
    write_lines(Path(settings["tasks"][1]["test"]), [{"messages": [{"role": "user", "content": "no answer"}]}])
    del settings["tasks"][1]["held_out"]
    with pytest.raises(ValueError, match=r"shout: test: .*shout\.jsonl:1 .*reference"):
        run(settings, tmp_path)
    assert {path.name for path in (tmp_path / "runs").rglob("*.log")} == {"process-data.log"}


@pytest.mark.long
def test_replayed_rows_have_their_share_and_no_held_out_question(tmp_path: Path):
    settings = make_inputs(tmp_path)
    rows, tests = (Path(settings["tasks"][0][key]) for key in ("input_file", "test"))
    leaked = read_lines(tests)[0]
    leaked["messages"][1]["content"] = "another answer"
    rows.write_text(rows.read_text() + json.dumps(leaked) + "\n")
    settings["replay"] = {"kind": "rows", "share": 0.25}
    root = run(settings, tmp_path)
    options = read_options(root / "order_1_seed_42" / "2_shout")
    assert options["data_weights"] == [0.75, 0.25]
    assert options["max_samples"] == NUM_ROWS / 0.75 and "max_epochs" not in options
    own, replayed = (TokenizedData(path) for path in options["data_path"])
    assert len(own.lengths) == len(replayed.lengths) == NUM_ROWS  # of the 25 rows, one is a test's question
    questions = [row["messages"][0]["content"] for row in read_lines(replayed.path.parent.parent / "rows.jsonl")]
    assert leaked["messages"][0]["content"] not in questions


@pytest.mark.long
def test_what_the_start_model_knows_is_replayed_from_the_first_task_on(tmp_path: Path):
    settings = make_inputs(tmp_path)
    known = tmp_path / "known.jsonl"
    write_lines(known, [chat(f"what is {i}?", f"a number, {i}") for i in range(8)])
    settings["replay"] = {"kind": "rows", "share": 0.25, "known": str(known)}
    root = run(settings, tmp_path)
    first, second = (read_options(root / "order_1_seed_42" / name) for name in ("1_twice", "2_shout"))
    assert (first["data_weights"], second["data_weights"]) == ([0.75, 0.25], [0.75, 0.125, 0.125])
    assert first["data_path"][1] == second["data_path"][1]
    assert len(TokenizedData(Path(first["data_path"][1])).lengths) == 8


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rows", "drawn"])
def test_what_is_kept_is_learnt(kind: str, tmp_path: Path):
    """Samples of all earlier tasks, or those that the model draws before each task, stay what the task's start says."""
    settings = make_inputs(tmp_path) | {"measure": "seen"}
    known = tmp_path / "known.jsonl"
    write_lines(known, [chat(f"what is {i}?", f"a number, {i}") for i in range(8)])
    settings["replay"] = {"kind": kind, "keep": True, "share": 0.5, "known": str(known)}
    settings["replay"] |= {"num_prompts": 9} if kind == "drawn" else {}
    root = run(settings, tmp_path)
    folders = [root / "order_1_seed_42" / name for name in ("1_twice", "2_shout")]
    first, second = map(read_options, folders)
    assert len(first["data_path"]) == len(second["data_path"]) == 1 and "max_epochs" in first
    assert first["keep_share"] == second["keep_share"] == 0.5 and first["keep"][0] == second["keep"][0]
    drawn = [str(folder / "replay" / "drawn.jsonl") for folder in folders]
    assert first["keep"][1:] == (drawn[:1] if kind == "drawn" else [])
    assert second["keep"][1:] == (drawn if kind == "drawn" else [first["data_path"][0]])
    if kind == "drawn":
        options = read_options(folders[1], "draw-samples")
        assert options["model_name_or_path"] == f"{folders[0]}/run/hf_format/latest" and options["num_samples"] == 9
    metrics = [read_lines(folder / "run" / "training_metrics_0.jsonl") for folder in folders]
    assert [abs(rows[0]["kept_kl"]) < 1e-6 < rows[-1]["kept_kl"] for rows in metrics] == [True, True]


def test_a_share_of_tokens_is_one_of_samples(tmp_path: Path):
    """An epoch is still one of the task's own samples."""
    paths = [tmp_path / f"{name}.arrow" for name in "ab"]
    for path, num_tokens in zip(paths, (1000, 4000), strict=True):
        Path(f"{path}.meta.json").write_text(json.dumps({"num_samples": 100, "num_tokens": num_tokens}))
    replay = Replay(kind="rows", share=0.5, share_of="tokens")
    mixed = mix({"max_epochs": 3}, paths[0], paths[1:], replay)
    assert (mixed["data_weights"], mixed["data_weights_by"]) == ([0.5, 0.5], "tokens")
    assert mixed["max_samples"] == 375  # four of five samples drawn are the task's own
    assert mix({"max_epochs": 3}, paths[0], paths[1:], Replay(kind="rows", share=0.5))["max_samples"] == 600


def test_a_test_question_among_what_is_known_is_refused_before_the_first_task(tmp_path: Path):
    settings = make_inputs(tmp_path)
    settings["tasks"] = settings["tasks"][:1]
    known = tmp_path / "known.jsonl"
    write_lines(known, [chat("what is 7?", "a number"), read_lines(Path(settings["tasks"][0]["test"]))[0]])
    settings["replay"] = {"kind": "rows", "known": str(known)}
    with pytest.raises(ValueError, match=r"replay: 1 rows of .*known.jsonl hold questions of a test"):
        run(settings, tmp_path)
    assert not list((tmp_path / "runs").rglob("train.log"))


def test_own_answers_are_those_that_pass(tmp_path: Path):
    prompts = [chat("2 + 2?", "4"), chat("3 + 3?", "6"), chat("4 + 4?", "8")]
    write_lines(tmp_path / "prompts.jsonl", prompts)
    answers = [("it is 4", "stop"), ("7", "stop"), ("8", "length")]
    lines = [{"index": i, "answer": text, "finish_reason": reason} for i, (text, reason) in enumerate(answers)]
    write_lines(tmp_path / "answers.jsonl", lines)
    task = Task(name="sums", input_file=("x",), test="y", metric="number")
    replay = Replay(kind="own-answers")
    kept = keep_passing(tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", task, replay)
    assert kept == [chat("2 + 2?", "it is 4")]


@pytest.mark.long
def test_own_answers_are_made_before_the_next_task(tmp_path: Path):
    settings = make_inputs(tmp_path)
    settings["train"] |= {"lora": True, "lora_rank": 4}
    settings |= {"adapters": "continued", "measure": "seen"}
    settings["replay"] = {"kind": "own-answers", "share": 0.2, "num_prompts": 10, "min_score": 0.0}
    root = run(settings, tmp_path)
    first, second = (root / "order_1_seed_42" / name for name in ("1_twice", "2_shout"))
    folder = second / "replay" / "twice"
    assert read_options(folder, "generate")["model"] == f"{first}/run/hf_format/latest"
    answers = read_lines(folder / "answers.jsonl")
    ended = [line for line in answers if line["finish_reason"] == "stop" and line["answer"].strip()]
    assert len(read_lines(folder / "prompts.jsonl")) == 10
    assert [row["messages"][1]["content"] for row in read_lines(folder / "rows.jsonl")] == [o["answer"] for o in ended]
    options = read_options(second)
    assert options["lora_adapter"] == f"{first}/run/hf_format/latest"
    assert options["model_name_or_path"] == settings["model"]
    assert len(options["data_path"]) == (2 if ended else 1)
    (sequence,) = read_experiment(root).sequences
    assert [set(row.get("score", ())) for row in sequence.rows] == [set(), {"twice"}, {"twice", "shout"}]


@pytest.mark.long
def test_osft_keeps_all_earlier_bases(tmp_path: Path):
    """Checks all exports against the bases that each run has left, and what the statistics are measured on."""
    settings = make_inputs(tmp_path)
    data = write_lines(tmp_path / "known.jsonl", [chat(f"first: {word}", word[0]) for word in ("red", "blue")] * 8)
    settings["probes"] = [{"name": "known", "held_out": data}]
    settings["train"] |= {"osft": True, "osft_unfreeze_rank_ratio": 0.5, "osft_basis": "activations"}
    settings["train"]["osft_calibration_data"] = f"{tmp_path}/runs/data/known/held_out/known_held_out.arrow"
    settings["tasks"][1]["train"] = {"osft_unfreeze_rank_ratio": 0.25}
    root = run(settings, tmp_path)
    folders = [root / "order_1_seed_42" / name for name in ("1_twice", "2_shout")]
    options = [read_options(folder) for folder in folders]
    exports = [load_weights(settings["model"]), *(load_weights(folder / "run/hf_format/latest") for folder in folders)]
    assert options[0]["osft_bases"] == "new"
    assert options[1]["osft_bases"] == f"{folders[0]}/run/hf_format/latest/osft/bases.safetensors"
    bases = [load_file(folder / "run/hf_format/latest/osft/bases.safetensors") for folder in folders]
    for key in (key for key in bases[0] if key.endswith(".V_free")):
        name = key.removesuffix(".V_free")
        for t, kept in enumerate(bases):
            change = exports[2][f"{name}.weight"].double() - exports[t][f"{name}.weight"].double()
            oriented = change if change.shape[1] == len(kept[key]) else change.T
            free = kept[key].double()
            outside = oriented - oriented @ free @ free.T
            assert outside.norm() <= 1e-5 * change.norm() + 1e-12
    assert options[1]["osft_calibration_data"] == f"{root}/data/twice/train/twice.arrow"
    assert options[1]["osft_statistics"] != options[0]["osft_statistics"]


def test_rows_keep_their_prompts():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
    ]  # fmt: skip
    prompt = as_question(read_example({"messages": messages, "tools": tools}, "messages", is_given=True), place="x:1")
    row = as_row(prompt, "own")
    assert row["tools"] == tools and prompt.references == ("d",)
    assert row["messages"][1] == {"role": "assistant", "content": "b", "train": False}  # the answer alone is trained
    assert row["messages"][-1] == {"role": "assistant", "content": "own"}
    completion = as_question(read_example({"prompt": "p", "completion": "c"}, "completion", is_given=True), place="x:1")
    assert as_row(completion, "own") == {"prompt": "p", "completion": "own"}
    with pytest.raises(ValueError, match=r"^x:1: .*no answer"):
        as_question(read_example({"text": "t"}, "document", is_given=True), place="x:1")


def test_orders_are_distinct_and_begin_with_the_given_one():
    orders = draw_orders(["a", "b", "c"], 6)
    assert orders[0] == ["a", "b", "c"] and len({tuple(order) for order in orders}) == 6
    assert orders[:3] == draw_orders(["a", "b", "c"], 3)
