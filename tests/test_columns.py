"""Columns that change what should be learned: read as their authors mean them, or the file is refused by their name."""

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from data_runs import tokenize_rows
from forked import run_forked
from processes import flags
from tiny_data import read_lines, write_jsonl

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.chat_rows import read_marks
from mini_trainer.data.rows.column_names import RefusedColumn, check_messages, find_meaning
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.run.raw_rows import find_data

MODEL = "tokenizer"
ASK, ANSWER = {"role": "user", "content": "How many are 12 and 30?"}, {"role": "assistant", "content": "42"}
HUMAN, GPT = {"from": "human", "value": "How many are 12 and 30?"}, {"from": "gpt", "value": "41"}
WEATHER = [
    {"role": "user", "content": "Tell me tomorrow's weather"},
    {"role": "assistant", "content": "Tomorrow's weather will be sunny"},
]


def prepare(model: Path, source: Path, **options) -> list[dict]:
    return read_lines(tokenize_rows(model, source, source.with_suffix(".out.jsonl"), **options))


# Rows as the documentation of ms-swift, TRL, LLaMA-Factory, Axolotl and OpenAI has them, and the columns to be named.
OF_OTHERS = {
    "KTO of ms-swift": ({"messages": WEATHER, "label": False}, ["label"]),
    "DPO of ms-swift": ({"messages": WEATHER, "rejected_response": "I don't know"}, ["rejected_response"]),
    "messages of ms-swift": ({"messages": WEATHER, "rejected_messages": WEATHER}, ["rejected_messages"]),
    "unpaired preference of TRL": ({"prompt": "The sky is", "completion": " blue.", "label": True}, ["label"]),
    "preference of TRL": ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, ["chosen", "rejected"]),
    "implicit preference of TRL": ({"chosen": WEATHER, "rejected": WEATHER}, ["chosen", "rejected"]),
    "KTO of LLaMA-Factory": ({"conversations": [HUMAN, GPT], "kto_tag": False}, ["kto_tag"]),
    "DPO of LLaMA-Factory": ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, ["chosen", "rejected"]),
    "DPO of OpenAI": ({"input": {"messages": [ASK]}, "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]},
                      ["preferred_output", "non_preferred_output"]),
    "details of Axolotl": ({"conversations": [HUMAN, GPT | {"train_detail": [{"begin_offset": 0, "end_offset": 1}]}]},
                           ["conversations.train_detail"]),
    "a sample's weight": ({"text": "a b", "sample_weight": 0.1}, ["sample_weight"]),
    "a score": ({"messages": WEATHER, "score": 0.1}, ["score"]),
    "a label of a message": ({"messages": [ASK, ANSWER | {"label": False}]}, ["messages.label"]),
    "unmask where no chat is": ({"prompt": "a", "completion": "b", "unmask": True}, ["unmask"]),
    "images that are not read": ({"messages": WEATHER, "images": ["a.png"]}, ["images"]),
    "a system prompt that is not read": ({"messages": WEATHER, "system": "Be brief."}, ["system"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OTHERS)
def test_rows_of_other_objectives_refuse_the_file_by_their_columns(name, model, tmp_path):
    row, columns = OF_OTHERS[name]
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": WEATHER}, row] if "messages" in row else [row])
    for options in ({}, {"skip_invalid": True}):
        with pytest.raises(RefusedColumn) as error:
            prepare(model, source, **options)
        line = 2 if "messages" in row else 1
        assert str(error.value).startswith(f"in.jsonl:{line}: has {columns[0]!r}")
        assert f"--ignore-columns {' '.join(columns)} " in str(error.value)
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def without(value: object, paths: list[str]) -> object:
    """The row without its columns, or its messages' keys, of these paths."""
    if isinstance(value, list):
        return [without(item, paths) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without(item, [path.removeprefix(f"{key}.") for path in paths if path.startswith(f"{key}.")])
        for key, item in value.items()
        if key not in paths
    }


IN_NO_FORMAT = {"chosen", "preferred_output"}  # columns of rows that have nothing else to train


@pytest.mark.parametrize("name", [name for name, (row, _) in OF_OTHERS.items() if IN_NO_FORMAT.isdisjoint(row)])
def test_ignored_columns_are_as_if_they_were_not_there(name, model, tmp_path, capsys):
    row, columns = OF_OTHERS[name]
    ignored = prepare(model, write_jsonl(tmp_path / "a.jsonl", [row]), ignore_columns=tuple(columns))
    assert "not read" not in capsys.readouterr().out
    assert ignored == prepare(model, write_jsonl(tmp_path / "b.jsonl", [without(row, columns)]))


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_columns_of_tables_are_refused_and_empty_cells_say_nothing(ending, model, tmp_path):
    rows = [{"prompt": "12 and 30?", "completion": "42", "label": ""}, {"prompt": "1?", "completion": "2", "label": ""}]

    def write(path: Path) -> Path:
        frame = pd.DataFrame(rows)
        frame.to_parquet(path) if ending == ".parquet" else frame.to_csv(path, index=False)
        return path

    assert len(prepare(model, write(tmp_path / f"a{ending}"))) == 2
    rows[1]["label"] = "False"
    with pytest.raises(RefusedColumn, match=r"has 'label' \('False'\)"):
        prepare(model, write(tmp_path / f"b{ending}"))


def test_other_columns_are_listed_once_with_their_rows(model, tmp_path, capsys):
    rows = [{"messages": WEATHER, "id": i, "source": "x", "prompt": "twice"} for i in range(5)]
    rows[0] |= {"notes": None, "topic": "weather"}
    prepare(model, write_jsonl(tmp_path / "in.jsonl", rows))
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "not read" in line]
    assert note.endswith(": columns id (5 rows), prompt (5 rows), source (5 rows), topic (1 row)")
    prepare(model, write_jsonl(tmp_path / "in.jsonl", rows), ignore_columns=("id", "prompt", "source", "topic"))
    assert "not read" not in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--ignore-columns nots: .*prompt, source, topic"):
        prepare(model, write_jsonl(tmp_path / "in.jsonl", rows), ignore_columns=("id", "nots"))


def test_answers_are_not_trained_without_the_prompt_beside_them(model, tmp_path):
    """TRL's preferences with explicit prompts."""
    row = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER]}
    source = write_jsonl(tmp_path / "in.jsonl", [row])
    with pytest.raises(RefusedColumn, match=r"in.jsonl:1: has 'prompt' "):
        prepare(model, source, columns=("messages=chosen",), ignore_columns=("rejected",))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("messages", "its keys are"), ("messages.content", "content missing"), ("messages.role", "role")],
)
def test_what_a_format_is_read_from_cannot_be_ignored(name, reason, model, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": WEATHER}])
    with pytest.raises(ValueError, match=rf"in.jsonl:1: .*{reason}"):
        prepare(model, source, ignore_columns=(name,))


def test_names_that_a_shell_would_split_are_quoted(model, tmp_path, capsys):
    prepare(model, write_jsonl(tmp_path / "in.jsonl", [{"messages": WEATHER, "a\nb": 1, "": 2}]))
    assert r"'' (1 row), 'a\nb' (1 row)" in capsys.readouterr().out
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": WEATHER, "Rejected Response": "no"}])
    with pytest.raises(RefusedColumn, match="--ignore-columns 'Rejected Response' "):
        prepare(model, source)


def test_parts_of_a_content_cannot_be_marked():
    """As Axolotl's parts can; tried without a template, since that of most models takes no parts."""
    part = {"type": "text", "text": "41"}
    row = {"messages": [ASK, {"role": "assistant", "content": [part | {"train": False}, part]}]}
    with pytest.raises(RefusedColumn, match=r"^has 'messages.content.train' \(False\)"):
        check_messages(row, (), Counter())
    tally = Counter()
    assert check_messages(row, ("messages.content.train",), tally)["messages"][1]["content"] == [part, part]
    assert tally == {"messages.content.train": 1}


def test_columns_beside_those_that_are_named_are_looked_at(model, tmp_path):
    row = {"chosen": WEATHER, "rejected": WEATHER, "chat": {"turns": WEATHER, "label": False}}
    source = write_jsonl(tmp_path / "in.jsonl", [row])
    with pytest.raises(RefusedColumn, match=r"in.jsonl:1: has 'rejected' "):
        prepare(model, source, columns=("messages=chosen",))
    samples = prepare(model, source, columns=("messages=chosen",), ignore_columns=("rejected",))
    with pytest.raises(RefusedColumn, match=r"'chat.label' \(False\)"):
        prepare(model, source, columns=("messages=chat.turns",), ignore_columns=("rejected", "chosen"))
    ignored = ("rejected", "chosen", "chat.label")
    assert prepare(model, source, columns=("messages=chat.turns",), ignore_columns=ignored) == samples


def test_labels_and_scores_of_what_is_classified_stay_usable_and_weights_do_not(model, tmp_path):
    rows = [{"text": f"12 and {i}", "label": "ab"[i % 2], "label_text": "x", "score": i, "rank": i} for i in range(6)]
    source, as_classes = write_jsonl(tmp_path / "in.jsonl", rows), {"format": "classification"}
    assert len(prepare(model, source, **as_classes)) == 6
    assert len(prepare(model, source, columns=("label=score",), label_type="regression", **as_classes)) == 6
    words = [{"tokens": ["12", "and"], "ner_tags": ["a", "b"], "pos_tags": ["c", "d"]}]
    assert len(prepare(model, write_jsonl(tmp_path / "w.jsonl", words), columns=("label=ner_tags",), **as_classes)) == 1
    weighed = write_jsonl(tmp_path / "in.jsonl", [*rows, rows[0] | {"weight": 0.5}])
    with pytest.raises(RefusedColumn, match=r"in.jsonl:7: has 'weight' \(0.5\)"):
        prepare(model, weighed, **as_classes)
    assert len(prepare(model, weighed, ignore_columns=("weight",), **as_classes)) == 7
    chats = [{"messages": [ASK, ANSWER | {"train": False}], "label": label} for label in "ab"]
    with pytest.raises(RefusedColumn, match=r"chats.jsonl:1: has 'messages.train' \(False\)"):
        prepare(model, write_jsonl(tmp_path / "chats.jsonl", chats), **as_classes)


@pytest.mark.long
def test_the_script_and_a_run_from_rows_end_with_the_same_message(model, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "12?", "completion": " 41", "label": False}])
    paths = flags(input_file=source, output_file=tmp_path / "o.arrow", model_name_or_path=model)
    result = run_forked(0, "process_data.py", *paths)
    message = "in.jsonl:1: has 'label' (False)"
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    options = dict(input_file=str(source), output_dir="o", data_cache_dir=str(tmp_path / "cache"), num_proc=1)
    with pytest.raises(ValueError, match=r"has 'label' \(False\)"):
        find_data(group_options(TrainOptions, model_name_or_path=str(model), **options))
    found = find_data(group_options(TrainOptions, model_name_or_path=str(model), ignore_columns=("label",), **options))
    assert Path(found["data_path"][0]).exists()


# --- marks of messages


def test_the_documented_row_of_axolotl(model, tokenizer, tmp_path):
    conversations = [
        {"from": "human", "value": "Hello", "training": False},
        {"from": "assistant", "value": "Hello", "training": True},
        {"from": "human", "value": "How are you?", "training": True},
        {"from": "assistant", "value": "I'm doing very well, thank you!", "training": False},
    ]
    (sample,) = prepare(model, write_jsonl(tmp_path / "in.jsonl", [{"conversations": conversations}]))
    trained = tokenizer.decode([label for label in sample["labels"] if label != IGNORED])
    assert trained == "Hello<|im_end|>How are you?<|im_end|>"


def test_two_marks_of_one_meaning_refuse_the_row():
    with pytest.raises(ValueError, match=r"^message 2 \(assistant\) .*both 'train' and 'training'"):
        read_marks(ANSWER | {"training": False, "train": True}, 2)


def test_ms_swift_s_marks_are_refused_with_ours(model, tmp_path):
    row = {"messages": [ASK, ANSWER | {"loss": False, "loss_scale": 0.5}]}
    with pytest.raises(RefusedColumn, match=r"messages\.loss'.* its train here.* its weight here"):
        prepare(model, write_jsonl(tmp_path / "in.jsonl", [row]))


def test_names_are_compared_by_their_words():
    same = ("rejected_response", "rejectedResponse", "Rejected Response", "REJECTED-RESPONSE", " rejected_response ")
    assert len({find_meaning(name) for name in same}) == 1 and find_meaning(same[0]) is not None
    harmless = ("id", "source", "category", "prompt_id", "model", "language_score", "difficulty", "thumbnail", "views")
    assert [find_meaning(name) for name in (*harmless, "passage", "problem")] == [None] * (len(harmless) + 2)
    graded = ("resolved", "correctness_math_verify", "isCorrect", "is_reasoning_complete", "passed", "verified")
    assert {find_meaning(name) for name in graded} == {"whether an answer is good or bad"}
