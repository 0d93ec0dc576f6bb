"""Parts of a data set: joined they are what one process writes, and no other part is taken for one of them."""

import gzip
import json
import os
import pickle
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_runs import chat, command_for, options_for, write_rows
from forked import ForkedRanks
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ROOT
from tiny_data import read_files

from mini_trainer.data.chat.conversation import Pictures, Remark, TokenizedChat, TrainedSpan
from mini_trainer.data.columns.encoding import add_mismatched, pair_up
from mini_trainer.data.rows import files as data_files
from mini_trainer.data.rows import parts, preparing
from mini_trainer.data.rows.column_names import RefusedColumn
from mini_trainer.data.rows.files import find_sources, iterate_rows, read_chunks
from mini_trainer.data.rows.labelled_tokens import TokenizedText
from mini_trainer.data.rows.parts import Part, divide, name_directory
from mini_trainer.data.rows.report import Totals
from mini_trainer.data.rows.writer import TokenizedSample
from mini_trainer.data.stores import json_lines
from mini_trainer.distributed.lock import RunLock
from mini_trainer.distributed.process import find_task
from mini_trainer.options import replace_options
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.reading import hash_file
from mini_trainer.options.tools import ProcessDataOptions, VerifyOptions
from mini_trainer.process_data import process_data
from mini_trainer.tools.verify import verify

MODEL = "tokenizer"
COUNT = 3
SMALL_SECTIONS = ROOT / "tests" / "workers" / "small_sections.py"
SECTION_BYTES, CHUNK_ROWS = 3000, 7


@pytest.fixture
def small_sections(monkeypatch):
    monkeypatch.setattr(data_files, "SECTION_BYTES", SECTION_BYTES)
    monkeypatch.setattr(data_files, "CHUNK_ROWS", CHUNK_ROWS)


def write_chats(directory: Path) -> None:
    """JSON lines with blank and unusable ones, a compressed file, and Parquet of several row groups."""
    lines: list = [chat(i, words=i % 30) for i in range(200)]
    lines[120:120] = [b"\n", b"not a row\n", chat(1, words=3000)]
    write_rows(directory / "a.jsonl", lines)
    (directory / "b.jsonl.gz").write_bytes(gzip.compress((json.dumps(chat(300)) + "\n").encode() * 3))
    rows = [chat(i) | {"messages": [m | {"weight": 0.5} for m in chat(i)["messages"]]} for i in range(90)]
    pq.write_table(pa.Table.from_pylist(rows), directory / "c.parquet", row_group_size=11)
    write_rows(directory / "d.jsonl", [])


DOCUMENTS = [{"text": f"How many are {i}?" + " and" * (i % 40)} for i in range(300)]
LABELLED = [{"text": f"{i} and" * 9, "label": "odd" * (i % 2) or "even"} for i in range(200)]
PROMPTS = [f"How many are {i}?" + " and" * 30 for i in range(150)]
PAIRS = [{"prompt": prompt, "chosen": f"{i}", "rejected": "no"} for i, prompt in enumerate(PROMPTS)]
ANSWERS = [{"prompt": prompt, "completion": f"{i}", "label": i % 3 == 0} for i, prompt in enumerate(PROMPTS)]
CASES = {  # rows, or None for `write_chats`
    "chats": (None, "out.arrow", dict(skip_invalid=True, validation_share=0.2, preview=3)),
    "chats as Parquet": (None, "out.parquet", dict(skip_invalid=True, max_sample_num_tokens=60)),
    "chats as lines": (None, "out.jsonl", dict(skip_invalid=True, chat_template="chatml")),
    "blocks": (DOCUMENTS, "out.arrow", dict(block_size=32, validation_share=0.1)),
    "labels": (LABELLED, "out.arrow", dict(format="classification")),
    "pairs": (PAIRS, "out.arrow", dict(format="preference")),
    "answers": (ANSWERS, "out.arrow", dict(format="feedback", preview=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_joined_parts_are_what_one_process_writes(case, model, small_sections, tmp_path, capsys):
    rows, output, options = CASES[case]
    for name in ("rows", "one", "many"):
        (tmp_path / name).mkdir()
    if rows is None:
        write_chats(tmp_path / "rows")
    else:
        write_rows(tmp_path / "rows" / "a.jsonl", rows)

    def options_of(name: str, **more) -> ProcessDataOptions:
        page = str(tmp_path / name / "page.html")
        return options_for(model, tmp_path / "rows", tmp_path / name / output, preview_html=page, **options, **more)

    process_data(options_of("one"))
    shown = [line for line in capsys.readouterr().out.splitlines() if "rows/s" not in line]
    for index in (2, COUNT, 1):
        process_data(options_of("many", shard=f"{index}/{COUNT}"))
    assert read_files(tmp_path / "many") == read_files(tmp_path / "one")
    printed = capsys.readouterr().out.replace("/many/", "/one/").splitlines()
    assert [line for line in printed if "rows/s" not in line][-len(shown) :] == shown  # the same report and samples
    assert any(f"part 2/{COUNT}: " in line for line in printed)


def number_rows(source) -> list[tuple[int, int, object]]:
    return [(row.number, row.line, row.value) for chunk in read_chunks(source) for row in iterate_rows(chunk)]


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.tuples(st.binary(max_size=200), st.booleans()), min_size=1, max_size=3),
    count=st.integers(1, 6),
    section_bytes=st.integers(4, 60),
    max_row_bytes=st.integers(1, 80),
)
def test_each_line_is_in_one_part_with_its_number(files, count, section_bytes, max_row_bytes, tmp_path_factory):
    directory = tmp_path_factory.mktemp("lines")
    for number, (content, has_mark) in enumerate(files):
        content = content.translate(bytes(range(251)) + b"\n" * 5)  # more line feeds than by chance
        (directory / f"{number}.jsonl").write_bytes(b"\xef\xbb\xbf" * has_mark + content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_files, "SECTION_BYTES", section_bytes)
        patch.setattr(json_lines, "MAX_ROW_BYTES", max_row_bytes)
        sources = find_sources([str(directory)])
        whole = [(source.name, row) for source in sources for row in number_rows(source)]
        chunks = [chunk for source in sources for chunk in read_chunks(source)]
        divided = [one for index in range(1, count + 1) for one in divide(sources, index, count)]
        assert [(one.name, row) for one in divided for row in number_rows(one)] == whole
        cut = [chunk for one in divided for chunk in read_chunks(one)]
        assert [(chunk.first_row, chunk.lines) for chunk in cut] == [(chunk.first_row, chunk.lines) for chunk in chunks]
        ends = {one.name: one.sha256 for one in divided if one.sections.end is None}
        assert ends == {source.name: source.sha256 for source in sources}  # each file's end is in one part


def test_parts_are_of_about_the_same_size(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "SECTION_BYTES", 1000)
    write_rows(tmp_path / "a.jsonl", [chat(i) for i in range(900)])
    sources = find_sources([str(tmp_path)])
    sizes = [sum(chunk.size for one in divide(sources, i, 7) for chunk in read_chunks(one)) for i in range(1, 8)]
    assert max(sizes) - min(sizes) < 2000 < min(sizes)


def test_a_part_names_the_line_of_the_file_and_leaves_nothing(model, small_sections, tmp_path):
    rows = [chat(i) for i in range(200)]
    rows[150] = b"no row\n"
    source = write_rows(tmp_path / "in.jsonl", rows)
    with pytest.raises(ValueError, match=r"^1 of \d+ rows .*\n  in\.jsonl:151: "):
        process_data(options_for(model, source, tmp_path / "out.arrow", shard="3/4"))
    assert list((tmp_path / "out.arrow.parts").iterdir()) == []
    rows[150] = {"messages": chat(1)["messages"], "label": False}  # changes the training signal
    source = write_rows(tmp_path / "in.jsonl", rows)
    with pytest.raises(RefusedColumn, match=r"^in\.jsonl:151: .*'label'"):
        process_data(options_for(model, source, tmp_path / "out.arrow", shard="3/4"))


def test_the_format_is_that_of_the_file_s_first_row(model, small_sections, tmp_path):
    rows = [{"text": "12 and"}, *(chat(i) for i in range(100)), *({"text": "30 and"} for _ in range(200))]
    source = write_rows(tmp_path / "in.jsonl", rows)
    with pytest.raises(ValueError, match=r"in\.jsonl:\d+: .*format .*messages, .*document"):
        process_data(options_for(model, source, tmp_path / "out.arrow", shard="2/4"))
    with pytest.raises(ValueError, match=r"--columns text=body: .* 7 rows .*in\.jsonl"):
        process_data(options_for(model, source, tmp_path / "out.arrow", shard="4/4", columns=("text=body",)))


@pytest.fixture
def made(model, small_sections, tmp_path):
    """Options of three parts, of which the first and the third are made."""
    source = write_rows(tmp_path / "in.jsonl", [chat(i) for i in range(100)])
    options = options_for(model, source, tmp_path / "out.arrow")
    for index in (1, 3):
        process_data(replace_options(options, shard=f"{index}/{COUNT}"))
    return options


def test_what_is_not_a_part_of_this_data_set_is_refused_by_name(made, tmp_path, capsys):
    join = replace_options(made, join=True)
    directory = name_directory(tmp_path / "out.arrow")
    with pytest.raises(ValueError, match=r"^1 of 3 parts .*\n  part 2/3 is not .*--shard 2/3$"):
        process_data(join)
    process_data(replace_options(made, shard="2/3", max_sample_num_tokens=9))  # others are not: nothing is joined
    assert ": 1/3, 3/3\n" in capsys.readouterr().out and not (tmp_path / "out.arrow").exists()
    with pytest.raises(ValueError, match=r"^1 of 3 parts .*\n  part 2/3 .*--max-sample-num-tokens was 9, is None"):
        process_data(join)
    process_data(replace_options(made, shard="1/4"))
    with pytest.raises(ValueError, match=r"--join: \S*out\.arrow\.parts .* of 3 and of 4: "):
        process_data(join)
    Part(directory, 1, 4).manifest.unlink()
    os.utime(tmp_path / "in.jsonl")
    with pytest.raises(ValueError, match=r"part 1/3 .*input in\.jsonl has changed"):
        process_data(join)
    assert not (tmp_path / "out.arrow").exists()


def test_damaged_parts_are_refused_and_made_again_alone(made, tmp_path, capsys):
    third = Part(name_directory(tmp_path / "out.arrow"), 3, COUNT)
    content = third.rows.read_bytes()
    third.rows.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"part 3/3: \S*\.rows .*--shard 3/3 "):
        process_data(replace_options(made, shard="2/3"))
    assert not (tmp_path / "out.arrow").exists()
    third.rows.write_bytes(content[:-1])  # cut off: not there
    process_data(replace_options(made, shard="2/3"))
    assert "part 2/3: already" in capsys.readouterr().out
    process_data(replace_options(made, shard="3/3"))
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.arrow", "out.arrow.meta.json"]


def test_verify_looks_for_the_rows_of_a_part_elsewhere(made, tmp_path, capsys):
    verify(VerifyOptions(path=(str(tmp_path),)))
    assert capsys.readouterr().out.count("ok ") == 2
    third = Part(name_directory(tmp_path / "out.arrow"), 3, COUNT)
    third.rows.write_bytes(third.rows.read_bytes()[:-1])
    with pytest.raises(ValueError, match="1 damaged"):
        verify(VerifyOptions(path=(str(tmp_path),)))
    assert f"DAMAGED {third.rows}: " in capsys.readouterr().out


class Harmful:
    """An object whose pickle runs a program."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return subprocess.check_call, (["touch", str(self.witness)],)


def replace_rows(part: Part, write: Callable[[Path], object], *, with_hash: bool) -> None:
    """Lets `write` replace the part's results, and its manifest's hash if wanted."""
    content = json.loads(part.manifest.read_text())
    write(part.rows)
    if with_hash:
        part.manifest.write_text(json.dumps(content | {"file": hash_file(part.rows)}))


@pytest.mark.parametrize("with_hash", [False, True])
def test_a_part_replaced_by_a_pickle_runs_no_code(with_hash, made, tmp_path):
    """The pickle has the length that the manifest records, and once also its hash."""
    part, witness = Part(name_directory(tmp_path / "out.arrow"), 1, COUNT), tmp_path / "made by a part"
    harmful = pickle.dumps(Harmful(witness)).ljust(part.rows.stat().st_size, b" ")
    pickle.loads(harmful)
    witness.unlink()  # it would have run
    replace_rows(part, lambda rows: rows.write_bytes(harmful), with_hash=with_hash)
    with pytest.raises(ValueError, match=r"part 1/3: \S*\.rows is damaged .*--shard 1/3 again"):
        process_data(replace_options(made, shard="2/3"))
    assert not witness.exists() and not (tmp_path / "out.arrow").exists()


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("batch", {"Popen": {"args": ["touch", "x"]}}),
        ("batch", {"Totals": {"num_shown": 1, "unknown": 2}}),
        ("batch", {"Counter": [[["a list"], 1]]}),
        ("batch", {"Remark": {}, "tuple": []}),
        ("pickle", {"Totals": {"num_shown": 1}}),
    ],
)
def test_a_part_with_other_contents_than_its_own_classes_is_refused(kind, counts, made, tmp_path):
    part = Part(name_directory(tmp_path / "out.arrow"), 1, COUNT)
    with pa.ipc.open_stream(part.rows.read_bytes()) as batches:
        (row, *_) = batches.read_all().to_pylist()

    def write(rows: Path) -> None:
        other = row | {"counts": json.dumps([[[kind, counts]], [], 0])}
        batch = pa.RecordBatch.from_pylist([other], schema=parts.SCHEMA)
        with pa.OSFile(str(rows), "wb") as file, pa.ipc.new_stream(file, parts.SCHEMA) as writer:
            writer.write_batch(batch)

    replace_rows(part, write, with_hash=True)
    with pytest.raises(ValueError, match=r"part 1/3: \S*\.rows is damaged .*--shard 1/3 again"):
        process_data(replace_options(made, shard="2/3"))


def test_counts_come_back_from_json_as_they_were():
    """With objects of every class that they may hold."""
    remark, span = Remark("kind", "a \ud800", "b"), TrainedSpan(1, 3, "assistant", 0.1)
    pictures = Pictures(("a.png",), ((2, 3),), ((0, 2),), 2, (5, 6))
    chat = TokenizedChat([5, 6, 7], [span], is_weighted=True, pictures=pictures, remarks=(remark,))
    text = TokenizedText([5], [0.5, float("inf")], True, None, False, {"odd": 1}, [0.5], "value: 0.5")
    shown = [chat, pair_up(chat, chat, margin=0.5), add_mismatched(chat, None, is_good=False), text]
    totals = Totals(4, rows=Counter(kept=3), lengths=Counter({3: 2}))
    totals.count_remark(remark, 2, "a:1")
    totals.shown = [(0.1 * i, TokenizedSample("a:1", one)) for i, one in enumerate(shown)]
    written = json.dumps(parts.encode_counts(totals))
    assert parts.decode_counts(json.loads(written)) == totals
    assert [name for name in parts.RECORDS if f'"{name}":' not in written] == []


def test_parts_of_an_older_format_are_refused_by_its_number(made, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_trainer.process_data.FORMAT_VERSION", 4)
    process_data(replace_options(made, shard="2/3"))
    monkeypatch.undo()
    told = r"part 2/3 .*another configuration: format of parts was 4, is 6: .*--shard 2/3"
    with pytest.raises(ValueError, match=told):
        process_data(replace_options(made, join=True))


def test_an_input_that_changes_while_it_is_read_is_noticed(made, tmp_path, monkeypatch):
    def change(*args):
        os.utime(tmp_path / "in.jsonl", ns=(0, 0))
        return pack(*args)

    pack = parts.pack_result
    monkeypatch.setattr(parts, "pack_result", change)
    with pytest.raises(ValueError, match=r"part 2/3: .*input .*changed"):
        process_data(replace_options(made, shard="2/3"))
    assert Part(name_directory(tmp_path / "out.arrow"), 2, COUNT).content is None


def test_one_process_joins_at_a_time(made, tmp_path, capsys):
    lock = RunLock(name_directory(tmp_path / "out.arrow"))
    process_data(replace_options(made, shard="2/3"))  # as the other process: no failure, which would end both
    assert "process joins" in capsys.readouterr().out and not (tmp_path / "out.arrow").exists()
    with pytest.raises(parts.JoinedElsewhere, match=r"--join: \S*out\.arrow\.parts .*pid"):
        process_data(replace_options(made, join=True))
    lock.release()
    process_data(replace_options(made, join=True))
    assert (tmp_path / "out.arrow").exists() and not name_directory(tmp_path / "out.arrow").exists()


def test_a_part_that_others_joined_while_this_process_started_is_not_made_again(made, tmp_path, capsys, monkeypatch):
    """An array is started again after its join was killed: its first process joins, and the others find no parts."""
    prepare = preparing.prepare

    def prepare_late(*args):
        monkeypatch.undo()
        process_data(replace_options(made, shard="2/3"))
        return prepare(*args)

    monkeypatch.setattr(preparing, "prepare", prepare_late)
    process_data(replace_options(made, shard="1/3"))
    assert re.search(r"part 1/3: .*has joined .*out\.arrow", capsys.readouterr().out)
    assert (tmp_path / "out.arrow").exists() and not name_directory(tmp_path / "out.arrow").exists()


def test_what_is_joined_already_is_not_made_again(made, tmp_path, capsys):
    """--join after the last part's own join, and a task that was requeued after it."""
    process_data(replace_options(made, shard="2/3"))
    before = read_files(tmp_path)
    for again in (dict(join=True), dict(shard="3/3")):
        capsys.readouterr()
        process_data(replace_options(made, **again))
        assert re.fullmatch(r"all parts are joined already, to \S*out\.arrow: .*\n", capsys.readouterr().out)
        assert read_files(tmp_path) == before
    others = [dict(max_sample_num_tokens=99), dict(columns=("messages=messages",), labels_from="none"),
              dict(preview_html=str(tmp_path / "page.html"))]  # fmt: skip
    for other in others:
        with pytest.raises(ValueError, match=r"--join: \S*out\.arrow\.parts has no complete part"):
            process_data(replace_options(made, join=True, **other))
    source = tmp_path / "in.jsonl"
    times = source.stat().st_atime_ns, source.stat().st_mtime_ns
    source.write_bytes(source.read_bytes().replace(b"12", b"13"))
    os.utime(source, ns=times)
    with pytest.raises(ValueError, match="no complete part"):
        process_data(replace_options(made, join=True))
    process_data(replace_options(made, shard="3/3"))
    assert (name_directory(tmp_path / "out.arrow") / "part_3_of_3.meta.json").exists()


@pytest.mark.parametrize("source_kind", ["lines", "table"])
def test_a_part_s_progress_ends_at_its_own_end(source_kind, model, small_sections, tmp_path, capsys, monkeypatch):
    """Parts are of different sizes, and files are read ahead of their rows."""
    monkeypatch.setattr("mini_trainer.data.rows.report.SECONDS_PER_LINE", 0)
    rows = [chat(i, words=20) for i in range(60)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    if source_kind == "table":
        source = tmp_path / "in.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=25)
    sources, count = find_sources((str(source),)), 2
    whole = [parts.count_bytes(divide(sources, index, count)) for index in (1, 2)]
    assert sum(whole) == source.stat().st_size and whole[0] != whole[1]
    for index in (1, 2):
        process_data(options_for(model, source, tmp_path / "out.arrow", shard=f"{index}/{count}", num_proc=1))
        shares = list(map(int, re.findall(r" rows, (\d+)%", capsys.readouterr().err)))
        assert shares and 90 <= max(shares) <= 100, shares


def test_rows_that_cannot_be_divided(model, tmp_path):
    (tmp_path / "in.csv").write_text("text\nHow many\n")
    options = options_for(model, tmp_path / "in.csv", tmp_path / "out.arrow", shard="1/2")
    with pytest.raises(ValueError, match=r"in\.csv: .* 2 processes; \.jsonl"):
        process_data(options)
    with pytest.raises(ValueError, match=r"only files .*--input-file"):
        process_data(replace_options(options, mock_data=9, input_file=()))


def test_shards_that_are_none_and_joining_takes_none():
    words = ["--input-file", "i", "--output-file", "o.arrow", "--model-name-or-path", "m"]
    options = parse_options(ProcessDataOptions, [*words, "--shard", "3/8"])
    assert options.shard == "3/8" and not options.join and find_problems(options) == []
    for shard in ("0/8", "9/8", "3", "3/8/1", "a/b", "-1/8"):
        (problem,) = find_problems(replace_options(options, shard=shard))
        assert problem.startswith(f"--shard {shard}: ")
    (problem,) = find_problems(replace_options(options, join=True))
    assert problem.startswith("--shard ") and "--join" in problem


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # the batch script of a job, not one of its tasks
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, (4, 4)),
        # torchrun by srun
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "5", "WORLD_SIZE": "8"}, (6, 8)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}, (2, 2)),
    ],
)
def test_tasks_of_torchrun_and_srun(environment, task, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_task() == task


class Started(ForkedRanks):
    """A process of process_data.py with small sections."""

    def __init__(self, model: Path, source: Path, output: Path, *flags: str, **environment: str):
        self.log = source.with_name(f"{time.monotonic_ns()}.log")
        self.log.touch()
        _, _, *words = command_for(model, source, output, "--num-proc", "1", *flags)
        command = [str(SMALL_SECTIONS), str(SECTION_BYTES), str(CHUNK_ROWS), *words]
        super().__init__(0, command, self.log, self.log, env=environment)

    def end(self) -> tuple[int, str]:
        """Its exit code and what it has said."""
        return self.wait(timeout=300), self.log.read_text()


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_part_is_made_again_alone_and_one_of_two_processes_joins(model, small_sections, tmp_path):
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    source = write_rows(tmp_path / "in.jsonl", [chat(i, words=40) for i in range(3000)])
    output = tmp_path / "many" / "out.arrow"
    process_data(options_for(model, source, tmp_path / "one" / "out.arrow"))
    directory = name_directory(output)

    killed = Started(model, source, output, RANK="1", WORLD_SIZE="3")
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in directory.glob(".part_2_of_3.rows.*.part")):
        assert killed.poll() is None and time.monotonic() < deadline, killed.log.read_text()
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert [part.content for part in parts.list_parts(directory, 3)] == [None] * 3
    (leftover,) = directory.iterdir()

    tasks = [Started(model, source, output, SLURM_PROCID=str(i), SLURM_STEP_NUM_TASKS="3") for i in (0, 2)]
    ended = [task.end() for task in tasks]
    assert all(code == 0 and re.search(r"made: .*2/3", said) for code, said in ended), ended
    assert not output.exists() and leftover.exists()

    lock = RunLock(directory)
    code, said = Started(model, source, output, "--shard", "2/3").end()
    assert code == 0 and "process joins" in said, said
    lock.release()
    joins = [Started(model, source, output, "--join") for _ in range(2)]
    ended = [join.end() for join in joins]
    # The other found them in use, or joined.
    assert sorted(code for code, _ in ended) in ([0, 2], [0, 0]), ended
    assert not directory.exists()
    assert read_files(tmp_path / "many") == read_files(tmp_path / "one")
