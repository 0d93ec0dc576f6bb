"""Rows of preferences: what is read of them, what is trained, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from bad_preference_rows import ASKED, BAD, BAD_FEEDBACK, BAD_PAIRS, FEEDBACK, GOOD, PAIR, USER, say
from processes import flags
from tiny_data import write_jsonl

from mini_trainer.data.columns.base import COLUMNS, PREFERENCE, DataTask, RowFacts, check_sample, list_sequences
from mini_trainer.data.columns.base import FEEDBACK as FEEDBACK_TASK
from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data

CHAT = f"<|im_start|>user\n{USER}<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"


def process(rows: list[dict], model: Path, root: Path, *more: str, form: str = "preference") -> None:
    """What process_data.py does; ValueError where it ends with a message."""
    paths = dict(input_file=write_jsonl(root / "rows.jsonl", rows), output_file=root / "data.arrow")
    words = flags(**paths, format=form, model_name_or_path=model, num_proc=1)
    process_data(parse_options(ProcessDataOptions, [*words, *more]))


def refuse(*args, **kwargs) -> str:
    """Why `process` refuses."""
    with pytest.raises(ValueError) as refusal:
        process(*args, **kwargs)
    return str(refusal.value)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": [say(GOOD)], "rejected": [say(BAD)]},
        {"prompt": USER, "chosen": [say(GOOD)], "rejected": say(BAD)},
        {"prompt": USER, "chosen": [*ASKED, say(GOOD)], "rejected": [*ASKED, say(BAD)], "score_chosen": 9.0},
        {"chosen": f"\n\nHuman: {USER}\n\nAssistant: {GOOD}", "rejected": f"\n\nHuman: {USER}\n\nAssistant: {BAD}"},
        {"question": USER, "chosen": GOOD, "rejected": BAD},
        {"instruction": USER, "input": "", "chosen_response": GOOD, "rejected_response": BAD},
        {"conversations": [{"from": "human", "value": USER}], "chosen": {"from": "gpt", "value": GOOD},
         "rejected": {"from": "gpt", "value": BAD}},
        {"messages": ASKED, "chosen": GOOD, "rejected": BAD},
        {"prompt": [ASKED[0] | {"train": True}], "chosen": GOOD, "rejected": BAD},
    ],
    ids=["messages", "text and messages", "whole chats", "hh", "question", "instruction", "sharegpt", "chat and texts",
         "marked"],
)  # fmt: skip
def test_formats_say_the_same(row, model, tmp_path):
    process([row], model, tmp_path)
    assert read_sides(tmp_path / "data.arrow", model) == [(CHAT, GOOD + END), (CHAT, BAD + END)]


def read_sides(data: Path, model: Path, row: int = 0) -> list[tuple[str, str]]:
    """Of each side the text that is not trained, and the text that is; nothing trained stands before."""
    tokenizer, sample, sides, start = load_tokenizer(str(model)), TokenizedData(data).read(row), [], 0
    for ids in list_sequences(sample):
        trained = sample["labels"][start : start + len(ids)] != -100
        first, end = trained.argmax(), len(ids) - trained[::-1].argmax()
        assert trained[first:end].all() and not trained[:first].any()
        sides.append((tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:end])))
        start += len(ids)
    return sides


def test_texts_are_continued_without_a_template(model, tmp_path):
    process([{"prompt": "red is ", "chosen": "blue", "rejected": "a cat"}], model, tmp_path)
    end = load_tokenizer(str(model)).eos_token
    assert read_sides(tmp_path / "data.arrow", model) == [("red is ", "blue" + end), ("red is ", "a cat" + end)]


def test_only_what_follows_the_common_beginning_is_trained(model, tmp_path):
    beginning = [*ASKED, say("one"), {"role": "user", "content": "two"}]
    row = {"chosen": [*beginning, say(GOOD)], "rejected": [*beginning, say(BAD)], "weight": 2, "margin": 0.5}
    process([row, {"prompt": ASKED, "chosen": "yes", "rejected": "no"}], model, tmp_path)
    prompt = f"{CHAT}one{END}\n<|im_start|>user\ntwo{END}\n<|im_start|>assistant\n"
    assert read_sides(tmp_path / "data.arrow", model) == [(prompt, GOOD + END), (prompt, BAD + END)]
    data = TokenizedData(tmp_path / "data.arrow")
    assert [data.read(0)["pair_weight"].tolist(), data.read(0)["margin"].tolist()] == [[2], [0.5]]
    assert [data.read(1)["pair_weight"].tolist(), data.read(1)["margin"].tolist()] == [[1], [0]]
    process([{"messages": row["chosen"], "label": True}], model, tmp_path, form="feedback")
    assert read_sides(tmp_path / "data.arrow", model) == [(prompt, GOOD + END)]


def test_names_of_columns_are_options(model, tmp_path):
    row = {"ask": ASKED, "up": GOOD, "down": {"text": BAD}}
    options = ("--columns", "prompt=ask", "chosen=up", "rejected=down.text")
    process([row], model, tmp_path, *options)
    assert read_sides(tmp_path / "data.arrow", model) == [(CHAT, GOOD + END), (CHAT, BAD + END)]


@pytest.mark.parametrize(
    ("good", "form", "row", "reason"),
    [(PAIR, "preference", *bad) for bad in BAD_PAIRS] + [(FEEDBACK, "feedback", *bad) for bad in BAD_FEEDBACK],
)
def test_bad_rows_are_refused_with_their_line(good, form, row, reason, model, tmp_path):
    message = refuse([good, row], model, tmp_path, form=form)
    assert "rows.jsonl:2: " in message and reason in message
    assert not (tmp_path / "data.arrow").exists()


@pytest.mark.parametrize(
    ("old", "new", "rejected", "reason"),
    [
        ("message['content']", "(message['content'] | trim)", f"{GOOD}\n", "same tokens"),
        ("{% for", "{{ messages | length }}{% for", [say(BAD), *ASKED, say(GOOD)], "tokens before their answers"),
    ],
)
def test_answers_that_a_template_makes_equal_and_prompts_that_it_makes_differ(
    old, new, rejected, reason, model, tmp_path
):
    template = (model / "chat_template.jinja").read_text()
    assert old in template
    (changed := tmp_path / "changed.jinja").write_text(template.replace(old, new, 1))
    row = PAIR | {"rejected": rejected}
    process([row], model, tmp_path)
    message = refuse([PAIR, row], model, tmp_path, "--chat-template", str(changed))
    assert "rows.jsonl:2: " in message and reason in message


def test_columns_that_change_the_prompt_or_the_weights_are_refused(model, tmp_path):
    for name in ("context", "images", "loss_weight", "functions"):
        message = refuse([PAIR | {name: "x"}], model, tmp_path)
        assert f"{name!r}" in message and "--ignore-columns" in message


def test_long_pairs_are_dropped_whole_and_one_prompts_pairs_fall_on_one_side(model, tmp_path):
    rows = [{"prompt": f"red {i // 3}", "chosen": [say(f"one {i}")], "rejected": [say("two")]} for i in range(60)]
    rows.append(PAIR | {"rejected": "cat " * 200})
    process(rows, model, tmp_path, "--validation-share", "0.3", "--max-sample-num-tokens", "300")
    paths = [tmp_path / f"data{side}.arrow" for side in ("", ".validation")]
    training, held_out = ([read_sides(path, model, i)[0][0] for i in range(len(TokenizedData(path).lengths))]
                          for path in paths)  # fmt: skip
    assert len(training) + len(held_out) == 60 and held_out and not {*training} & {*held_out}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "completion": [say(GOOD)], "label": True},
        {"prompt": ASKED, "completion": GOOD, "kto_tag": True},
        {"messages": [*ASKED, say(GOOD)], "label": True},
        {"conversations": [{"from": "human", "value": USER}, {"from": "gpt", "value": GOOD}], "label": True},
        {"question": USER, "completion": GOOD, "label": True},
    ],
    ids=["messages", "text", "whole chat", "sharegpt", "question"],
)
def test_feedback_is_an_answer_and_an_unrelated_one(row, model, tmp_path):
    other = {"prompt": [{"role": "user", "content": "Who?"}], "completion": BAD, "label": False, "weight": 2}
    process([row, other], model, tmp_path, form="feedback")
    data = TokenizedData(tmp_path / "data.arrow")
    assert read_sides(tmp_path / "data.arrow", model) == [(CHAT, GOOD + END), (CHAT, BAD + END)]
    asked = CHAT.replace(USER, "Who?")
    assert read_sides(tmp_path / "data.arrow", model, 1) == [(asked, BAD + END), (asked, GOOD + END)]
    assert [[data.read(i)[name].item() for name in ("good", "pair_weight")] for i in range(2)] == [[1, 1], [0, 2]]


def test_pairs_become_feedback(model, tmp_path):
    rows = [PAIR, PAIR | {"prompt": [{"role": "user", "content": "Who?"}], "weight": 2}]
    process(rows, model, tmp_path, "--feedback-from-pairs")
    data = TokenizedData(tmp_path / "data.arrow")
    numbers = [[data.read(i)[name].item() for name in ("good", "pair_weight")] for i in range(4)]
    assert numbers == [[1, 1], [0, 1], [1, 2], [0, 2]]
    first, second = (read_sides(tmp_path / "data.arrow", model, i) for i in range(2))
    assert [first[0], second[0]] == [(CHAT, GOOD + END), (CHAT, BAD + END)]
    assert first[1] == (CHAT, GOOD + END)  # the next row with another prompt


PAIR_OF_SIDES = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8], "sequence_lengths": [2, 2]}


@pytest.mark.parametrize(
    ("objective", "change", "reason"),
    [
        (PREFERENCE, {"sequence_lengths": [2, 1, 1]}, r"\[2, 1, 1\], expected two"),
        (PREFERENCE, {"labels": [-100, 6, -100, -100]}, "the rejected sequence must train"),
        (PREFERENCE, {"labels": [5, -100, -100, 8]}, "the chosen sequence must train .* not its first"),
        (PREFERENCE, {"margin": [-1.0]}, r"margin is \[-1.0\]"),
        (PREFERENCE, {"pair_weight": [0.0]}, r"pair_weight is \[0.0\]"),
        (FEEDBACK_TASK, {"sequence_lengths": [2, 1, 1]}, "one or two sequences"),
        (FEEDBACK_TASK, {"labels": [-100, 6, -100, -100]}, "must train"),
        (FEEDBACK_TASK, {"good": [2.0]}, r"good is \[2.0\], expected one number from 0 to 1"),
        (FEEDBACK_TASK, {"labels": [-100, 6, -100, 9]}, "vocabulary of 9"),
    ],
)
def test_a_sample_that_breaks_the_contract_is_named(objective, change, reason):
    labels = change.get("labels", PAIR_OF_SIDES["labels"])[: 4 if objective == PREFERENCE else 2]
    num_counted = sum(label != -100 for label in labels[1:])
    sample = {name: np.array(value) for name, value in (PAIR_OF_SIDES | change).items()}
    with pytest.raises(ValueError, match=f"^a.arrow: row 1: .*{reason}"):
        check_sample(COLUMNS[objective], sample, RowFacts(DataTask(objective), 4, num_counted, 9, "a.arrow: row 1"))
