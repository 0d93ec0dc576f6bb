"""Values of tables that JSON has not, and messages that tables hold as JSON text: read as the row's own, or refused.

The oracles: pyarrow's own conversions, numpy's dates, what the datasets library gives for the same rows, and the same
rows in a .jsonl file.
"""

import datetime
import decimal
import json
import re
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_runs import read_file, tokenize_rows
from stock_templates import make_tokenizer
from tiny_data import read_lines, write_jsonl
from trait_templates import TRAITS

from mini_trainer.data.rows.chat_rows import build_chat, read_column
from mini_trainer.data.rows.column_names import RefusedColumn
from mini_trainer.data.rows.formats import OWN_NAMES, read_example, read_fields
from mini_trainer.data.rows.labelled import check_values
from mini_trainer.data.rows.lines import parse_row
from mini_trainer.data.rows.preference_rows import read_feedback, read_preference
from mini_trainer.data.rows.prompts import read_prompts
from mini_trainer.options import RowOptions

USER = {"role": "user", "content": "Weather?"}
TEMPLATE = TRAITS["content that may not be null"]  # writes arguments as JSON


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tokenizer(*TEMPLATE).save_pretrained(path)
    return path


def tokenize(model: Path, source: Path | str, **options) -> list[dict]:
    """The samples that process_data.py makes of a file, or of a folder of the datasets library."""
    if Path(source).is_dir():
        options |= dict(input_file=(), input_dataset=str(source))
    return read_lines(tokenize_rows(model, source, model / "out.jsonl", **options))


def calling(arguments: object) -> list[dict]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]


def read_values(path: Path) -> list[dict]:
    return [row.value for row in read_file(path)]


def write_table(directory: Path, rows: list[dict]) -> Path:
    path = directory / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_arguments(path: Path, values: list, kind: pa.DataType | None = None) -> Path:
    """Parquet of chats, each with a call that has one of the values as its argument `a`."""
    column = pa.array(values, kind.storage_type).cast(kind) if kind == pa.json_() else pa.array(values, kind)
    arguments = pa.StructArray.from_arrays([column], ["a"])
    function = pa.StructArray.from_arrays([pa.array(["f"] * len(values)), arguments], ["name", "arguments"])
    call = pa.StructArray.from_arrays([pa.array(["function"] * len(values)), function], ["type", "function"])
    offsets = pa.array(np.arange(len(values) + 1), pa.int32())
    calls = pa.ListArray.from_arrays(offsets, call)
    said = [pa.array([text] * len(values)) for text in ("assistant", "")]
    message = pa.StructArray.from_arrays([*said, calls], ["role", "content", "tool_calls"])
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays(offsets, message)}), path)
    return path


DAY = datetime.date(2025, 1, 2)
INSTANT = datetime.datetime(2025, 1, 2, 3, 4, 5, 678901)
CONVERTED = [
    (pa.date32(), DAY, str(np.datetime64(DAY))),
    (pa.date64(), DAY, str(np.datetime64(DAY))),
    (pa.timestamp("us"), INSTANT, str(np.datetime64(INSTANT))),
    (pa.timestamp("ns"), pd.Timestamp(INSTANT) + pd.Timedelta(1), "2025-01-02T03:04:05.678901001"),
    (pa.timestamp("s", tz="UTC"), pd.Timestamp("2025-01-02T03:04:05Z"), "2025-01-02T03:04:05+00:00"),
    (pa.time64("us"), datetime.time(3, 4, 5), "03:04:05"),
    (pa.dictionary(pa.int8(), pa.string()), "red", "red"),
    (pa.large_list(pa.large_string()), ["x", None], ["x", None]),
    (pa.float32(), 0.1, float(str(np.float32(0.1)))),
    (pa.float16(), np.float16(0.1), 0.1),
    (pa.uint64(), 2**64 - 1, 2**64 - 1),
    (pa.json_(), '{"n": null, "deep": [1, {"x": null}]}', {"n": None, "deep": [1, {"x": None}]}),
]


@pytest.mark.parametrize(("kind", "value", "expected"), CONVERTED, ids=[str(kind) for kind, _, _ in CONVERTED])
def test_types_become_those_of_json(kind, value, expected, tmp_path):
    (row,) = read_values(write_arguments(tmp_path / "in.parquet", [value], kind))
    found = row["messages"][0]["tool_calls"][0]["function"]["arguments"]["a"]
    assert found == expected and type(found) is type(expected)
    json.dumps(row, allow_nan=False)


REFUSED = [
    (pa.float64(), float("nan"), r"nan at tool_calls\[0\].function.arguments.a"),
    (pa.float32(), float("inf"), r"inf at tool_calls\[0\]"),
    (pa.list_(pa.float64()), [1.0, float("-inf")], r"-inf at tool_calls\[0\].function.arguments.a\[1\]"),
    (pa.decimal128(10, 2), decimal.Decimal("12.50"), r"Decimal\('12.50'\) at tool_calls"),
    (pa.binary(), b"x", r"b'x' at tool_calls"),
    (pa.duration("s"), datetime.timedelta(1), r"datetime.timedelta\(days=1\) at tool_calls"),
    (pa.map_(pa.string(), pa.int8()), [("x", 1)], "a map<string, int8>: .*JSON text at tool_calls"),
]


@pytest.mark.parametrize(("kind", "value", "reason"), REFUSED, ids=[f"{kind} {value}" for kind, value, _ in REFUSED])
def test_what_json_has_not_is_refused_by_row_and_key(kind, value, reason, model, tmp_path):
    path = write_arguments(tmp_path / "in.parquet", [value], kind)
    with pytest.raises(ValueError, match=rf"in.parquet:1: message 1 \(assistant\) .*{reason}"):
        tokenize(model, path)
    with pytest.raises(ValueError, match=r"'tools' .* at \[0\].a"):
        build_chat([USER], {"tools": [{"a": read_values(path)[0]["messages"][0]["tool_calls"][0]["function"]}]})


def test_columns_that_are_not_read_may_hold_anything(model, tmp_path, capsys):
    """Embeddings with NaN, hashes, prices, arguments that are not of calls."""
    rows = [{"messages": [USER, {"role": "assistant", "content": "20"}]}] * 2
    others = dict(embedding=[[float("nan")], [1.0]], hash=[b"\xff", b""], price=[decimal.Decimal("1.5"), None],
                  took=[datetime.timedelta(1), None], arguments=[{"for": "x"}, {"against": "y"}])  # fmt: skip
    columns = pa.Table.from_pylist(rows).to_pydict() | others
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    assert tokenize(model, tmp_path / "in.parquet") == tokenize(model, write_jsonl(tmp_path / "in.jsonl", rows))
    assert "left out" not in capsys.readouterr().out


def test_nulls_that_only_the_schema_adds_are_left_out_and_counted(model, tmp_path, capsys):
    chats = [[USER, *calling(arguments)[1:]] for arguments in ({"city": "Lima"}, {"n": 3, "city": None}, {"n": 4})]
    tool = {"type": "function", "function": {"name": "f", "description": "Says it."}}
    rows = [{"messages": chat, "tools": [tool]} for chat in chats]
    rows[0]["tools"] = [tool | {"strict": True}]
    path = write_table(tmp_path, rows)
    read = read_values(path)
    arguments = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in read]
    assert arguments == [{"city": "Lima"}, {"n": 3}, {"n": 4}] and "tool_calls" not in read[0]["messages"][0]
    tokenize(model, write_table(tmp_path, [{"messages": row["messages"]} for row in rows]))
    assert re.search(r"3 of 3 rows: .*'arguments' .*left out .*in\.parquet:1", capsys.readouterr().out)
    tokenize(model, write_table(tmp_path, [{"messages": calling({"city": city})} for city in ("Lima", "Rome")]))
    assert "left out" not in capsys.readouterr().out
    lost = [row.lost for row in read_file(write_table(tmp_path, rows[::-1]))]
    assert lost == [("arguments", "tools"), ("arguments", "tools"), ("arguments",)]


def test_columns_and_rows_that_python_cannot_hold_name_the_file(model, tmp_path):
    pq.write_table(pa.table([pa.array(["a"])] * 2, ["text", "text"]), tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice.parquet: .*'text' twice"):
        read_values(tmp_path / "twice.parquet")
    pq.write_table(pa.table({"text": ["a"], "at": pa.array([2**60], pa.timestamp("us"))}), tmp_path / "far.parquet")
    with pytest.raises(ValueError, match=r"far.parquet: .*column 'at', "):
        read_values(tmp_path / "far.parquet")


# --- JSON's own values


def test_numbers_that_would_become_infinity_are_refused_and_others_are_what_python_reads():
    for number in ("1e400", "-1e400", "1" + "0" * 400 + ".0"):
        with pytest.raises(ValueError, match="infinity"):
            parse_row(f'{{"messages": [], "n": {number}}}'.encode(), "json")
    for number in ("1e308", "-0.0", "5e-324", "1e-400", "0.1", "12345678901234567890.5"):
        assert parse_row(f'{{"n": {number}}}'.encode(), "json") == json.loads(f'{{"n": {number}}}')


# --- the Json type of the datasets library

MIXED = [
    {"messages": calling({"t": "2025", "none": None})},
    {"messages": calling({"t": 5, "u": [1, None, {"v": None}]})},
    {"messages": [USER, {"role": "assistant", "content": "20"}]},
]


@pytest.mark.parametrize("form", ["a list of Json", "all of it Json", "arguments"])
def test_json_of_the_datasets_library(form, model, tmp_path):
    """Saved to disk, in Parquet, and in Parquet without Arrow's own schema: what the library itself reads."""
    Json, List, Value = datasets.Json, datasets.List, datasets.Value
    function = {"name": Value("string"), "arguments": Json()}
    calls = List({"type": Value("string"), "function": function})
    message = {"role": Value("string"), "content": Value("string"), "tool_calls": calls}
    kind = {"a list of Json": List(Json()), "all of it Json": Json(), "arguments": List(message)}[form]
    rows = datasets.Dataset.from_list(MIXED, features=datasets.Features({"messages": kind}))
    expected = tokenize(model, write_jsonl(tmp_path / "in.jsonl", MIXED))
    theirs, ours = ([row["messages"][1].get("tool_calls") or None for row in one] for one in (rows, MIXED))
    assert theirs == ours
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet" / "train-0.parquet")
    bare = pq.read_table(tmp_path / "parquet" / "train-0.parquet")
    pq.write_table(bare, tmp_path / "bare.parquet", store_schema=False)
    for source in ("saved", "parquet", "parquet/train-0.parquet", "bare.parquet"):
        assert tokenize(model, tmp_path / source) == expected, source


def test_text_that_is_marked_as_json_and_is_none(model, tmp_path):
    texts = pa.array([['{"role": "user"']], pa.list_(pa.string())).cast(pa.list_(pa.json_()))
    pq.write_table(pa.table({"messages": texts}), tmp_path / "in.parquet")
    with pytest.raises(ValueError, match=r"in.parquet:1: message 1 .*not JSON"):
        tokenize(model, tmp_path / "in.parquet")


# --- messages as JSON text

CHAT = [USER, {"role": "assistant", "content": 'It is "20", é.'}]
SHAREGPT = [{"from": "human", "value": "Weather?"}, {"from": "gpt", "value": 'It is "20", é.'}]
NO = [{"role": "assistant", "content": "No."}]
AS_TEXT = {
    "messages": {"messages": CHAT},
    "calls": {"messages": calling({"city": "Lima", "none": None})},
    "conversations": {"conversations": SHAREGPT, "system": "Be brief."},
    "prompt and completion": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "another name": {"turns": CHAT},
    "another name, ShareGPT": {"turns": SHAREGPT},
}


def in_cells(row: dict) -> dict:
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}


@pytest.mark.parametrize("name", AS_TEXT)
def test_messages_as_json_text_in_tables(name, model, tmp_path):
    row = AS_TEXT[name]
    options = {"columns": ("messages=turns",)} if "turns" in row else {}
    expected = tokenize(model, write_jsonl(tmp_path / "in.jsonl", [row] * 2), **options)
    frame = pd.DataFrame([in_cells(row)] * 2)
    frame.to_csv(tmp_path / "in.csv", index=False)
    frame.to_csv(tmp_path / "in.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "in.parquet")
    for ending in ("csv", "tsv", "parquet"):
        assert tokenize(model, tmp_path / f"in.{ending}", **options) == expected


def read_pair(row: dict, columns: tuple[str, ...] = ()):
    return read_preference(row, RowOptions(columns=columns), Counter())


def read_rated(row: dict):
    return read_feedback(row | {"label": True}, None, Counter(), options=RowOptions())[0]


def read_classified(row: dict):
    return check_values(row, RowOptions(), Counter())


def test_messages_as_json_text_for_the_other_readers(tmp_path):
    for read, row in (
        (read_pair, {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": NO}),
        (read_pair, {"chosen": CHAT, "rejected": [USER, *NO]}),
        (partial(read_pair, columns=("prompt=p", "chosen=c", "rejected=r")), {"p": CHAT[:1], "c": CHAT[1:], "r": NO}),
        (read_rated, {"messages": CHAT}),
        (read_rated, {"prompt": CHAT[:1], "completion": CHAT[1:]}),
        (read_classified, {"messages": CHAT, "label": "a"}),
    ):
        assert read(in_cells(row)) == read(row)
    for row in ({"messages": CHAT}, {"prompt": CHAT[:1]}, {"prompt": CHAT[:1], "completion": CHAT[1:]}):
        write_jsonl(tmp_path / "p.jsonl", [row])
        pd.DataFrame([in_cells(row)]).to_csv(tmp_path / "p.csv", index=False)
        (expected,), (found,) = (read_prompts([str(tmp_path / f"p.{ending}")], None) for ending in ("jsonl", "csv"))
        assert (found.messages, found.references) == (expected.messages, expected.references)
        assert found.messages == CHAT[:1]


NO_LISTS = {'[{"role": "user"': "not JSON", "['a']": "not JSON", "hello": ".*got 'hello'", "[]": r".*got \[\]"}


def test_marks_in_messages_as_json_text_are_checked_as_in_lists_and_other_texts_are_refused(model, tmp_path):
    row = {"messages": [USER, {"role": "assistant", "content": "20", "score": 0.1}]}
    pd.DataFrame([in_cells(row)]).to_csv(tmp_path / "in.csv", index=False)
    with pytest.raises(RefusedColumn, match=r"in.csv:2: has 'messages.score'"):
        tokenize(model, tmp_path / "in.csv")
    for text, reason in NO_LISTS.items():
        pd.DataFrame({"messages": [text]}).to_csv(tmp_path / "in.csv", index=False)
        with pytest.raises(ValueError, match=f"'messages':? {reason}"):
            tokenize(model, tmp_path / "in.csv")


def test_texts_that_only_look_like_lists_stay_texts():
    for text in ("[{'role': 'user'}] is Python", "[1, 2]", '[{"a": 1}]', "[", '["role"]', "[]"):
        fields = read_fields(dict(prompt=text, completion=text), "completion", paths=OWN_NAMES, tally=Counter())
        assert read_example(fields, "completion", is_given=False).completion == text
        assert read_pair(dict(prompt=text, chosen=text, rejected="No.")).chosen.completion == text


def test_cells_that_pandas_prints_for_missing_values_are_noted(model, tmp_path, capsys):
    answers, notes = ["4", np.nan, None, "None"], ["x", "x", "None", "x"]
    frame = pd.DataFrame({"prompt": ["2+2=", "3+3=", "4+4=", "5+5="], "completion": answers, "note": notes})
    frame.to_csv(tmp_path / "in.csv", index=False, na_rep="nan")
    tokenize(model, tmp_path / "in.csv")
    said = capsys.readouterr().out
    assert re.search(r"'nan' \(completion\), .*in\.csv:3", said) and "'None' (completion)" in said
    assert "'note'" not in said


def test_lists_as_python_prints_them_are_refused(model, tmp_path):
    """What pandas writes to .csv of a column of lists, also of numpy's; as texts they would be trained as they are."""
    said = [{"role": "user", "content": "It's 20?"}]
    frames = [pd.DataFrame({name: [said] for name in names}) for names in (["messages"], ["prompt", "completion"])]
    frames[0].to_parquet(tmp_path / "in.parquet")
    frames.append(pd.read_parquet(tmp_path / "in.parquet"))
    for frame in frames:
        frame.to_csv(tmp_path / "in.csv", index=False)
        with pytest.raises(ValueError, match=r"in.csv:2: .*Python .*JSON"):
            tokenize(model, tmp_path / "in.csv")
        with pytest.raises(ValueError, match=r"--prompts: .*\n  in.csv:2: .*Python .*JSON"):
            read_prompts([str(tmp_path / "in.csv")], None)
    printed = str(said)
    for read, row in (
        (read_pair, {"prompt": "a", "chosen": printed, "rejected": "b"}),
        (read_pair, {"prompt": printed, "chosen": "a", "rejected": "b"}),
        (read_rated, {"prompt": printed, "completion": "a"}),
        (read_classified, {"messages": printed, "label": "a"}),
        (read_classified, {"tokens": "['a', 'b']", "labels": "[1, 0]"}),
        (read_classified, {"text": "a", "labels": "['a']"}),
    ):
        with pytest.raises(ValueError, match=r"Python .*JSON"):
            read(row)


def test_words_labels_and_images_as_json_text():
    words = {"tokens": ["Lima", "is"], "labels": ["B", "O"]}
    for row in (words, {"text": "a", "label": ["x", "y"]}, {"text": "a", "labels": [1, 2]}):
        assert read_classified(in_cells(row)) == row
    only_alike = {"tokens": "['s is", "label": "a"}
    for row in (only_alike, {"text": "[a]", "label": "[OTHER]"}, {"text": '["a"]', "label": "x"}):
        assert read_classified(row) == row
    assert read_column({"images": '["a.png", "b.png"]'}) == ["a.png", "b.png"]
    assert read_column({"image": "[a].png"}) == ["[a].png"]


def test_answers_of_prompts_that_json_has_not_and_other_columns_that_are_the_same_when_read_again(tmp_path):
    """NaN differs from itself, so a continued run took such a row for another one."""
    for question, answer in product(("question", "prompt"), (float("nan"), b"x", decimal.Decimal("1.5"))):
        pq.write_table(pa.table({question: ["2+2?"], "answer": pa.array([answer])}), tmp_path / "p.parquet")
        with pytest.raises(ValueError, match=r"p.parquet:1: the answer .*JSON"):
            read_prompts([str(tmp_path / "p.parquet")], None)
    columns = {"question": ["2+2?"], "score": [float("nan")], "deep": [{"x": [float("inf"), 1.0]}]}
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    (prompt,) = read_prompts([str(tmp_path / "p.parquet")], None)
    assert prompt.row == {"question": "2+2?", "score": None, "deep": {"x": [None, 1.0]}}
    assert json.loads(json.dumps(prompt.row, allow_nan=False)) == prompt.row
