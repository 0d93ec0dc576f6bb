"""Folders with files of other kinds, endings in other spellings, and JSON that is not laid out in lines.

The oracles: the same rows in one .jsonl file, pandas' and the json module's own writers.
"""

import gzip
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from data_runs import read_file, tokenize_rows
from stock_templates import make_tokenizer
from tiny_data import read_lines, write_jsonl
from trait_templates import TRAITS

from mini_trainer.data.rows.files import find_sources
from mini_trainer.data.rows.lines import find_fault
from mini_trainer.data.rows.prompts import read_prompts

CHATS = [
    {"messages": [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"Answer {i}."}]}
    for i in range(6)
]
MARK = "\ufeff"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tokenizer(*TRAITS["content that may not be null"]).save_pretrained(path)
    return path


def tokenize(model: Path, *inputs: Path, **options) -> list[dict]:
    return read_lines(tokenize_rows(model, inputs, model / "out.jsonl", **options))


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory) -> list[dict]:
    return tokenize(model, write_jsonl(tmp_path_factory.mktemp("rows") / "in.jsonl", CHATS))


def write(path: Path, rows: list[dict]) -> None:
    """Rows in the kind of file that the name says, by pandas and the json module."""
    name, content = path.name.lower(), "".join(json.dumps(row) + "\n" for row in rows)
    if ".parquet" in name:
        pd.DataFrame(rows).to_parquet(path)
    elif ".csv" in name:
        pd.DataFrame([{key: json.dumps(value) for key, value in row.items()} for row in rows]).to_csv(path, index=False)
    elif ".json." in name or name.endswith(".json"):
        content = json.dumps(rows, indent=1)
    if ".parquet" not in name and ".csv" not in name:
        packed = gzip.compress(content.encode()) if name.endswith(".gz") else content.encode()
        path.write_bytes(pa.compress(packed, "zstd", asbytes=True) if name.endswith(".zst") else packed)


NAMES = ["a.ndjson", "a.JSONL", "a.NdJson.GZ", "a.JSON", "a.Json.gz", "a.jsonl.ZST", "a.CSV", "a.Parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_endings_in_any_case(name, model, expected, tmp_path):
    write(tmp_path / name, CHATS)
    assert tokenize(model, tmp_path / name) == expected
    assert tokenize(model, tmp_path) == expected
    (source,) = find_sources([str(tmp_path / name)])
    assert source.has_sections == (name in ("a.ndjson", "a.JSONL", "a.Parquet"))


def test_all_files_of_a_folder_are_read_or_named(model, expected, tmp_path, capsys):
    (tmp_path / "q").mkdir()
    for i, name in enumerate(("part-0.jsonl", "part-1.ndjson", "q/part-2.JSONL")):
        write(tmp_path / name, CHATS[2 * i : 2 * i + 2])
    assert tokenize(model, tmp_path) == expected
    assert "not read" not in capsys.readouterr().out
    no_data = (".hidden.jsonl", ".git/d.jsonl", "out.meta.json", "out.rejected.jsonl", "t.tokenizer/a.md")
    for name in ("README.md", "paper.pdf", "deeper/x.jsonl.bz2", *no_data):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert tokenize(model, tmp_path) == expected
    said = capsys.readouterr().out
    assert f"note: {tmp_path}: 3 files " in said and "'README.md', 'deeper/x.jsonl.bz2', 'paper.pdf'" in said
    assert "hidden" not in said and "a.md" not in said
    with pytest.raises(ValueError, match=r"--input-file: .*part-0.jsonl .*twice"):
        tokenize(model, tmp_path, tmp_path / "part-0.jsonl")
    read_prompts([str(tmp_path)], None)
    assert f"note: {tmp_path}: 3 files " in capsys.readouterr().out
    for i in range(20):
        (tmp_path / f"{i:02}.log").write_text("x")
    tokenize(model, tmp_path)
    assert f"note: {tmp_path}: 23 files " in capsys.readouterr().out


def test_formats_of_a_folder_may_not_differ(model, expected, tmp_path):
    folder = tmp_path / "chats"
    folder.mkdir()
    write(folder / "train.jsonl", CHATS)
    (folder / "empty.jsonl").write_text("")
    assert tokenize(model, folder) == expected
    (folder / "requirements.txt").write_text("torch\n")
    with pytest.raises(ValueError, match=r"chats: .*requirements.txt .*document, train.jsonl .*messages\."):
        tokenize(model, folder)
    with pytest.raises(ValueError, match=r"requirements.txt:1: 'messages' "):
        tokenize(model, folder, format="messages")
    assert tokenize(model, folder / "train.jsonl") == expected
    assert len(tokenize(model, folder / "train.jsonl", folder / "requirements.txt")) == len(CHATS) + 1
    (folder / "requirements.txt").unlink()
    write_jsonl(folder / "more.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    with pytest.raises(ValueError, match=r"chats: .*more.jsonl .*completion, train.jsonl .*messages\."):
        tokenize(model, folder)
    other = tmp_path / "documents"
    other.mkdir()
    (other / "a.txt").write_text("Once upon a time")
    (folder / "more.jsonl").unlink()
    assert len(tokenize(model, folder, other)) == len(CHATS) + 1


def test_parts_of_a_folder_whose_formats_differ_are_not_joined(model, tmp_path):
    write(tmp_path / "a.jsonl", CHATS)
    (tmp_path / "b.txt").write_text("x" * (tmp_path / "a.jsonl").stat().st_size)
    tokenize_rows(model, tmp_path, model / "parts.jsonl", shard="1/2")
    with pytest.raises(ValueError, match=r"a.jsonl .*messages, b.txt .*document"):
        tokenize_rows(model, tmp_path, model / "parts.jsonl", shard="2/2")


# --- JSON that is not in lines


def wrap(rows: list[dict], **others: object) -> dict:
    return {"version": 1, **others, "data": rows}


LAYOUTS = {
    "an object around the list": (json.dumps(wrap(CHATS), indent=1), "several lines"),
    "the same, with more before the list": (
        json.dumps(wrap(CHATS, license={"name": "x", "terms": ["a"]}, tags=["a", "b"]), indent=2),
        "several lines",
    ),
    "objects one after the other": ("\n".join(json.dumps(row, indent=2) for row in CHATS), "several lines"),
    "objects with a list of their own": (json.dumps({"turns": CHATS}, indent=1) * 2, "several lines"),
    "one object": (json.dumps(CHATS[0], indent=4), "several lines"),
    "a byte-order mark before": (MARK + json.dumps(wrap(CHATS), indent=1), "several lines"),
    "a first line without a break within": (json.dumps(wrap(CHATS)).replace('"data"', '\n"data"'), "several lines"),
}


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".json.gz"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_other_than_lines_is_one_error(layout, ending, model, tmp_path):
    text, reason = LAYOUTS[layout]
    path, content = tmp_path / f"in{ending}", text.encode()
    path.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    with pytest.raises(ValueError, match=rf"in{ending}: .*{reason}") as error:
        tokenize(model, path, skip_invalid=True)
    assert len(str(error.value).splitlines()) == 1
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=f"in{ending}: "):
        read_prompts([str(path)], None)


def test_a_list_in_a_file_of_lines(model, expected, tmp_path):
    for indent in (1, None):
        (tmp_path / "in.jsonl").write_text(json.dumps(CHATS, indent=indent))
        with pytest.raises(ValueError, match="in.jsonl: .*JSON list" if indent else "in.jsonl:1: .*object, got"):
            tokenize(model, tmp_path / "in.jsonl")
        (tmp_path / "in.jsonl").rename(tmp_path / "in.json")
        assert tokenize(model, tmp_path / "in.json") == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}\n{"a": 2}\n', '{"a": 1}', '{"messages": [{"role": "us\n{"messages": []}\n', '\n\n{"a": 1}\n',
        '{"a": 1,}\n{"a": 2}\n', '{\n{"a": 2}\n{"a": 3}\n', '[\n\n{"a": 2}\n', "{'a': 1}\n{'a': 2}\n",
        "[1, 2]\n[3]\n", "nonsense\nmore\n", "", "\n", '"text"\n',
    ],
)  # fmt: skip
def test_lines_and_damaged_lines_are_left_to_the_rows(text):
    assert find_fault(text.encode(), may_be_list=False) is None


@pytest.mark.parametrize("num_bytes", [60, 200, 500])
def test_a_beginning_that_is_cut_off_is_enough(num_bytes):
    wrapped = json.dumps(wrap(CHATS), indent=1).encode()[:num_bytes]
    assert "several lines" in find_fault(wrapped, may_be_list=True)
    assert "several lines" in find_fault(json.dumps(CHATS[0], indent=1).encode()[:num_bytes], may_be_list=True)
    assert "JSON list" in find_fault(json.dumps(CHATS, indent=1).encode()[:num_bytes], may_be_list=False)
    assert find_fault(json.dumps(CHATS, indent=1).encode()[:num_bytes], may_be_list=True) is None


# --- files that were joined as they are


def test_byte_order_marks_between_joined_files(model, expected, tmp_path):
    lines = [json.dumps(row) + "\n" for row in CHATS]
    for text in (MARK + "".join(lines[:3]) + MARK + "".join(lines[3:]), f"{MARK}{MARK}".join(["", *lines])):
        (tmp_path / "in.jsonl").write_text(text + MARK)
        assert tokenize(model, tmp_path / "in.jsonl") == expected


def test_tables_joined_with_their_headers(tmp_path):
    table = pd.DataFrame({"prompt": ["2+2=", "3+3="], "completion": ["4", "6"]}).to_csv(index=False)
    for between, reason in (("", "header"), (MARK, "byte-order mark")):
        (tmp_path / "in.csv").write_text(table + between + table)
        rows = [row.value for row in read_file(tmp_path / "in.csv")]
        assert [reason in getattr(row, "reason", "") for row in rows] == [False, False, True, False, False]
