"""Rows of every format and files of every kind: what they become, and what is refused with which reason."""

import gzip
import hashlib
import io
import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_runs import read_file
from hypothesis import given
from hypothesis import strategies as st

from mini_trainer.data.chat.conversation import Chat, Completion, Document
from mini_trainer.data.rows import files as data_files
from mini_trainer.data.rows import lines as data_lines
from mini_trainer.data.rows.chat_rows import ImageFolders
from mini_trainer.data.rows.files import Chunk, find_sources, iterate_rows, read_chunks
from mini_trainer.data.rows.formats import NAMES, FieldPaths, detect_format, read_example, read_text_row
from mini_trainer.data.rows.lines import parse_row
from mini_trainer.data.rows.rows import read_rows
from mini_trainer.data.stores import json_lines

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}

READ_AS = [
    ({"messages": [USER, ANSWER]}, Chat([USER, ANSWER])),
    ({"messages": [USER, ANSWER], "unmask": True, "tools": [TOOL]}, Chat([USER, ANSWER], unmask=True, tools=[TOOL])),
    ({"messages": [USER, ANSWER], "tools": json.dumps([TOOL])}, Chat([USER, ANSWER], tools=[TOOL])),
    ({"messages": [USER, ANSWER], "tools": [], "prompt": "a", "text": "b"}, Chat([USER, ANSWER])),
    ({"messages": [USER, ANSWER | {"weight": 0.5}]}, Chat([USER, ANSWER | {"weight": 0.5}])),
    ({"messages": [USER, ANSWER | {"train": False}]}, Chat([USER, ANSWER | {"train": False}])),
    ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
     Chat([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}])),
    ({"messages": [{"role": "pretrain", "content": "a"}]}, Document("a")),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, Chat([USER, ANSWER])),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}], "system": "s"},
     Chat([{"role": "system", "content": "s"}, USER, ANSWER | {"weight": 0}])),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "observation", "value": "1"},
                        {"from": "function_call", "value": json.dumps(CALL["function"])}]},
     Chat([USER, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}])),
    ({"instruction": "a", "output": "b"}, Chat([USER, ANSWER])),
    ({"instruction": "a", "input": "", "output": "b", "text": "a b"}, Chat([USER, ANSWER])),
    ({"instruction": "a", "input": "c", "output": "b"}, Chat([{"role": "user", "content": "a\n\nc"}, ANSWER])),
    ({"instruction": "a", "output": "b", "history": [["a", "b"]]}, Chat([USER, ANSWER, USER, ANSWER])),
    *(({asked: "a", answered: "b", "system": None}, Chat([USER, ANSWER])) for asked, answered in NAMES),
    ({"instruction": "a", "input": "c", "response": "b"}, Chat([{"role": "user", "content": "a\n\nc"}, ANSWER])),
    ({"prompt": "a ", "completion": "b"}, Completion("a ", "b")),
    ({"prompt": "a ", "completion": "b", "response": "c"}, Completion("a ", "b")),
    ({"prompt": "a ", "generation": " b"}, Completion("a ", " b")),
    ({"document": "a"}, Document("a")),
    ({"text": "a"}, Document("a")),
]  # fmt: skip


def read_detected(chunk: Chunk, data_format: str | None) -> list:
    """The chunk's rows and examples, read in this format."""
    return list(read_rows(replace(chunk, format=data_format), partial(read_text_row, is_given=False), Counter()))


def read_line(line: bytes, data_format: str, *, is_given: bool = False):
    fields = parse_row(line, "json")
    return None if fields is None else read_example(fields, data_format, is_given=is_given)


@pytest.mark.parametrize(("row", "example"), READ_AS, ids=[json.dumps(row)[:60] for row, _ in READ_AS])
def test_rows_and_what_they_become(row, example):
    chunk = Chunk("in.jsonl", 1, "json", [(1, b"\n"), (2, b"{"), (3, json.dumps(row).encode())], b"", 0)
    (_, blank), (_, broken), (_, read) = read_detected(chunk, detect_format(chunk))
    assert read == example
    assert blank is None and isinstance(broken, ValueError)


@pytest.mark.parametrize("folders", [None, ImageFolders({}, Path())], ids=["text", "images"])
def test_completions_become_chats_on_request_also_where_rows_may_have_images(folders):
    paths = FieldPaths(prompt="prompt", completion="completion", data_format="alpaca")
    row = {"prompt": "a", "completion": "b"}
    chunk = Chunk("in.jsonl", 1, "json", [(1, json.dumps(row).encode())], b"", 0, "alpaca")
    read = partial(read_text_row, is_given=True, paths=paths, folders=folders)
    ((_, example),) = read_rows(chunk, read, Counter())
    assert example == Chat([USER, ANSWER])


HOSTILE = [  # a row, and what its error names
    (b'{"messages": [{"role": "us', "not JSON"),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "not UTF-8", "byte 44"),
    (b"[1, 2]", "object", "[1, 2]"),
    (b"{}", "keys are []"),
    (b'{"messages": null}', "keys are ['messages']"),
    (b'{"prompt": "a", "completion": "b"}', "format", "completion"),
    (b'{"messages": []}', "'messages'", "got []"),
    (b'{"messages": "hi"}', "'messages'", "got 'hi'"),
    (b'{"messages": ["hi"]}', "message 1 is 'hi'"),
    (b'{"messages": [{"role": "wizard", "content": "a"}]}', "message 1", "role 'wizard'"),
    (b'{"messages": [{"role": ["user"], "content": "a"}]}', "message 1", "role ['user']"),
    (b'{"messages": [{"content": "a"}]}', "message 1", "role missing"),
    (b'{"messages": [{"role": "user"}]}', "message 1 (user)", "content missing"),
    (b'{"messages": [{"role": "user", "content": null}]}', "message 1 (user)", "content missing"),
    (b'{"messages": [{"role": "assistant", "content": " \\n"}]}', "message 1 (assistant)", r"content ' \n'"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "message 1 (user)", "content 5"),
    (b'{"messages": [{"role": "user", "content": ["a"]}]}', "message 1 (user)", "content part 'a'"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content part {'type': 'image'}", "--images"),
    (b'{"messages": [{"role": "assistant", "content": []}]}', "message 1 (assistant)", "content []"),
    (b'{"messages": [{"role": "assistant", "content": [{"type": "text", "text": " "}]}]}', "message 1 (assistant)",
     "{'text': ' '"),
    (b'{"messages": [{"role": "user", "content": "a"}, {"role": "pretrain", "content": "a"}]}', "message 2",
     "'pretrain'"),
    (b'{"messages": [{"role": "pretrain", "content": 1}]}', "message 1 (pretrain)", "'content' is 1"),
    (b'{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}', "message 1 (assistant)",
     "tool_calls [1]"),
    (b'{"messages": [{"role": "assistant", "content": null, "tool_calls": []}]}', "message 1 (assistant)",
     "content missing"),
    (b'{"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}', "message 1 (user)", "tool_calls"),
    (b'{"messages": [{"role": "assistant", "content": "a", "function_call": {}}]}', "'function_call'", "'tool_calls'"),
    (b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "'tools' is {}"),
    (b'{"messages": [{"role": "user", "content": "a"}], "tools": "{"}', "'tools': not JSON"),
    (b'{"messages": [{"role": "user", "content": "a"}], "unmask": "yes"}', "'unmask' is 'yes'"),
    (b'{"messages": [{"role": "user", "content": "a\x00b"}]}', "not JSON"),
    (b'{"messages": [{"role": "user", "content": "a"}], "n": ' + b"9" * 5000 + b"}", "5000 digits"),
    (b'{"messages": [{"role": "user", "content": "a"}], "n": NaN}', "NaN"),
    (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    (b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "'role'", "twice"),
    (b'{"conversations": ["a"]}', "turn 1 is 'a'"),
    (b'{"conversations": [{"from": "cat", "value": "a"}]}', "turn 1", "'cat'"),
    (b'{"conversations": [{"from": "human"}]}', "message 1 (user)", "content missing"),
    (b'{"conversations": [{"from": "function_call", "value": "{"}]}', "turn 1 (function_call)", "'value': not JSON"),
    (b'{"instruction": "a", "output": " "}', "'output' is ' '"),
    (b'{"instruction": "a", "input": 1, "output": "b"}', "'input' is 1"),
    (b'{"instruction": "a", "output": "b", "history": [["a"]]}', "'history' is [['a']]"),
    (b'{"prompt": [], "completion": "b"}', "'prompt' is []"),
    (b'{"prompt": "a", "completion": ""}', "'completion' is ''"),
    (b'{"prompt": "a", "completion": "b", "generation": "c"}', "'completion' and 'generation'"),
    (b'{"text": 5}', "'text' is 5"),
    (b'{"text": "a", "document": "b"}', "'document' and 'text'"),
]  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE, ids=[", ".join(named) for _, *named in HOSTILE])
def test_hostile_rows_are_refused(case):
    line, *named = case
    formats = {b'{"conv': "sharegpt", b'{"inst': "alpaca", b'{"prom': "completion", b'{"text': "document"}
    data_format = "messages" if "format" in named else formats.get(line[:6], "messages")
    with pytest.raises(ValueError) as error:
        read_line(line, data_format)
    assert all(name in str(error.value) for name in named)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"context": "c"}, "'context' .* what the answer is to"),
        ({"score": 1}, "'score'"),
        ({"input": "c", "output": "d"}, "keys are"),  # which of two pairs?
    ],
)
def test_a_question_and_an_answer_that_are_not_all_of_a_row_are_refused(more, message):
    row = {"question": "a", "answer": "b", **more}
    chunk = Chunk("in.jsonl", 1, "json", [(1, json.dumps(row).encode())], b"", 0)
    with pytest.raises(ValueError, match=message):
        raise read_detected(chunk, detect_format(chunk))[0][1]


def test_the_format_that_is_given_wins_over_what_a_row_looks_like():
    row = b'{"messages": [], "text": "a"}'
    assert read_line(row, "document", is_given=True) == Document("a")
    with pytest.raises(ValueError, match=r"format .*messages"):
        read_line(row, "document")
    with pytest.raises(ValueError, match="'prompt' is missing"):
        read_line(row, "completion", is_given=True)


ROWS = [{"messages": [USER, {"role": "assistant", "content": f'{i} "\\[{{\u2028\n€'}]} for i in range(2500)]


def write_lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=bool(i % 2)) + "\n" for i, row in enumerate(ROWS)))


def write_list(path: Path) -> None:
    path.write_text("\n " + json.dumps(ROWS, indent=1, ensure_ascii=False))


def write_parquet(path: Path) -> None:
    rows = [row | {"unmask": None, "number": i} for i, row in enumerate(ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)


WRITERS = {".jsonl": write_lines, ".json": write_list, ".parquet": write_parquet}


def compress(path: Path, ending: str) -> Path:
    content = path.read_bytes()
    target = path.with_name(path.name + ending)
    target.write_bytes(gzip.compress(content) if ending == ".gz" else pa.compress(content, "zstd", asbytes=True))
    return target


def read_all(*paths: Path) -> list:
    """What every row of some files becomes, with its place."""
    read = []
    for source in find_sources([str(path) for path in paths]):
        data_format = None
        for chunk in read_chunks(source):
            data_format = data_format or detect_format(chunk)
            read += [(f"{chunk.file}:{row.place}", example) for row, example in read_detected(chunk, data_format)]
        assert source.sha256 == hashlib.sha256(source.path.read_bytes()).hexdigest()
    return read


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", WRITERS)
def test_every_kind_of_file_holds_the_same_rows(tmp_path, ending, compression):
    path = tmp_path / f"in{ending}"
    WRITERS[ending](path)
    path = compress(path, compression) if compression else path
    read = read_all(path)
    assert [example for _, example in read] == [Chat(row["messages"]) for row in ROWS]
    lines = {place.partition(":")[2] for place, _ in read}
    assert len(lines) == len(ROWS)
    if ending == ".json":
        assert "3 (row 1)" in lines and "15 (row 2)" in lines
    else:
        assert lines == {str(number) for number in range(1, len(ROWS) + 1)}


def test_progress_and_chunks_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "CHUNK_BYTES", 10_000)
    for ending, write in WRITERS.items():
        write(tmp_path / f"in{ending}")
        (source,) = find_sources([str(tmp_path / f"in{ending}")])
        chunks = list(read_chunks(source))
        assert max(chunk.size for chunk in chunks) < 2 * 10_000 and len(chunks) > 5
        assert 0.95 * source.num_bytes < sum(chunk.num_bytes for chunk in chunks) <= source.num_bytes
        assert [chunk.first_row for chunk in chunks[1:]] == [list(iterate_rows(c))[-1].number + 1 for c in chunks[:-1]]


def test_json_lines_in_a_json_file(tmp_path):
    write_lines(tmp_path / "in.json")
    assert len(read_all(tmp_path / "in.json")) == len(ROWS)


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    (tmp_path / "b.txt").write_bytes(b" \n")
    read = read_all(tmp_path / "a.txt", tmp_path / "b.txt")
    assert read == [("a.txt:1", Document("one\r\n\r\ntwo\n")), ("b.txt:1", None)]


def test_each_file_has_its_own_format(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "b.jsonl").write_text('[]\n{"prompt": "a", "completion": "b"}\n')
    (_, first), (_, second), (_, third), (_, fourth) = read_all(tmp_path)
    assert first == Document("a") and fourth == Completion("a", "b")
    assert isinstance(second, ValueError) and "completion, " in str(second) and "document" in str(second)
    assert isinstance(third, ValueError) and "object, got []" in str(third)


def read_values(path: Path) -> list:
    """The raw values of a file's rows, with their lines."""
    return [(row.line, row.value) for row in read_file(path)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[]", []),
        (" \n[\n]\n", []),
        ('[{"a": "],\\""},\n{"b": [1, 2]}]', [(1, b'{"a": "],\\""}'), (2, b'{"b": [1, 2]}')]),
        ('[1, "\xff" ,NaN\n]\n', [(1, b"1"), (1, b'"\xff"'), (1, b"NaN")]),
    ],
)
def test_elements_of_a_list(tmp_path, text, values):
    (tmp_path / "in.json").write_text(text, encoding="latin-1")
    assert read_values(tmp_path / "in.json") == values


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(JSON, min_size=1), st.sampled_from([None, 1]), st.booleans())
def test_a_list_is_split_as_it_would_be_parsed(values, indent, ascii_only):
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    pieces = list(data_lines.split_json_list(io.BufferedReader(io.BytesIO(text))))
    assert [json.loads(piece) for _, piece in pieces] == values
    lines = text.splitlines()
    assert all(lines[number - 1].strip().startswith(piece[:1]) for number, piece in pieces) or indent is None


@pytest.mark.wide
def test_rows_that_are_too_long_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_ROW_BYTES", 3 << 20)
    long = json.dumps({"text": "a" * (30 << 20)})
    (tmp_path / "in.jsonl").write_text(f'{long}\n{{"text": "b"}}\n{long}')
    (tmp_path / "in.json").write_text(f'[{long},\n{{"text": "b"}},\n{long}]')
    (tmp_path / "in.txt").write_text(long)
    num_bytes = len(long)
    del long
    tracemalloc.start()
    for name, extra in (("in.jsonl", 1), ("in.json", 0)):
        (line, first), (_, second), (_, third) = read_values(tmp_path / name)
        assert (first.num_bytes, third.num_bytes) == (num_bytes + extra, num_bytes)
        assert first.beginning.startswith(b'{"text": "aaa') and line == 1
        assert json.loads(second) == {"text": "b"}
        assert name == "in.json" or tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.reset_peak()
    ((_, text),) = read_values(tmp_path / "in.txt")
    assert text.num_bytes == num_bytes
    most_memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_memory < 16 << 20
    with pytest.raises(ValueError, match=f"{first.num_bytes:,} bytes"):
        parse_row(first, "json")


@pytest.mark.parametrize(
    "text",
    ['[{"text": "a"}, {"text": "b"}', '[{"text": "a"}, {"text": "b"},', '[{"text": "a"', '["a\\', "[1,\n\n", "[",
     "[1,,2]", "[1,\n]", "[1]\n\nmore", "[1 2]", "[[[" * 9999],
)  # fmt: skip
def test_a_damaged_json_list_is_refused(tmp_path, text):
    path = tmp_path / "cut.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cut\.json: damaged.*list"):
        read_file(path)


def test_a_json_list_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data_lines, "MAX_LIST_BYTES", 2 << 20)
    (tmp_path / "in.json").write_text(f"[{' ' * (2 << 20)}]")
    with pytest.raises(ValueError, match=r"in\.json: .*list of more than .*jq -c"):
        read_values(tmp_path / "in.json")


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst", "in.parquet", "in.parquet.gz"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_files_are_refused(tmp_path, name, damage):
    path = tmp_path / name.removesuffix(".gz").removesuffix(".zst")
    WRITERS[path.suffix](path)
    path = compress(path, Path(name).suffix) if Path(name).suffix != ".parquet" else path
    content = bytearray(path.read_bytes())
    content = content[:-9] if damage == "cut" else content[:4] + bytes(byte ^ 0x5A for byte in content[4:])
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: damaged"):
        read_all(path)
