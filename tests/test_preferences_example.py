"""The whole example of docs/tasks/preferences.md: the properties that its data sets promise."""

import re
from collections import Counter

import pytest
from make_preferences import (
    ANSWER,
    CURT,
    HELD_OUT_WORDINGS,
    POLITE,
    TRAINED_WORDINGS,
    PreferenceDataOptions,
    make_files,
)
from processes import ROOT

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


def test_the_page_shows_the_wordings_of_its_data():
    page = (ROOT / "docs" / "tasks" / "preferences.md").read_text()
    assert "examples/quickstart/make_preferences.py" in page and "examples/recipes/preferences.yaml" in page
    assert f"{ANSWER.format(code='P5S')} {POLITE}" in page
