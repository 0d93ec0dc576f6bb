"""Files in, files out: formats, sidecar, report, and what is refused, with the real script where processes matter."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from make_tiny_model import CHATML_TEMPLATE, train_tokenizer

from chat_masking import IGNORED, fingerprint_chat_template, fingerprint_tokenizer
from process_data import BYTES_PER_WORKER, percentile, process_data, read_chat
from training_args import ProcessDataOptions

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["How many are 12 and 30? 42 user assistant system"] * 9, vocab_size=300)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    return path


def chat(i: int, *, words: int = 3) -> dict:
    turns = [("user", f"How many are {i}?" + " and" * words), ("assistant", f"{i}" + " 42" * (i % 7))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_rows(path: Path, rows: list) -> Path:
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return path


def options_for(model: Path, source: Path, output: Path, **options) -> ProcessDataOptions:
    return ProcessDataOptions(
        input_file=str(source), output_file=str(output), model_name_or_path=str(model), **{"num_proc": 1} | options
    )


def command_for(model: Path, source: Path, output: Path, *flags: str) -> list[str]:
    script = [sys.executable, str(ROOT / "process_data.py"), "--input-file", str(source), "--output-file", str(output)]
    return [*script, "--model-name-or-path", str(model), *flags]


def run(*args, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(command_for(*args), capture_output=True, text=True, timeout=120, **kwargs)


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_formats_hold_the_same_samples(model, tokenizer, tmp_path):
    rows = [chat(i) for i in range(2345)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    for ending in (".jsonl", ".arrow", ".parquet"):
        process_data(options_for(model, source, tmp_path / f"out{ending}"))
    samples = read_jsonl(tmp_path / "out.jsonl")
    assert [s["input_ids"] for s in samples] == [
        tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"] for row in rows
    ]
    for sample in samples:
        assert set(sample) == {"input_ids", "labels", "len", "num_loss_counted_tokens"}
        assert sample["len"] == len(sample["input_ids"]) == len(sample["labels"])
        assert sample["num_loss_counted_tokens"] == sum(label != IGNORED for label in sample["labels"][1:])
    with pa.memory_map(str(tmp_path / "out.arrow")) as file:
        reader = pa.ipc.open_file(file)
        assert [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)] == [1000, 1000, 345]
        table = reader.read_all()
        assert table.schema.field("input_ids").type == table.schema.field("labels").type == pa.list_(pa.int32())
        assert table.schema.field("len").type == table.schema.field("num_loss_counted_tokens").type == pa.int32()
        assert table.to_pylist() == samples
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == samples


def test_sidecar(model, tokenizer, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [chat(1), b"\n", chat(2), chat(3, words=90)])
    process_data(options_for(model, source, tmp_path / "out.jsonl", max_sample_num_tokens=80))
    samples = read_jsonl(tmp_path / "out.jsonl")
    text = (tmp_path / "out.jsonl.meta.json").read_text()
    sidecar = json.loads(text)
    assert sidecar["tokenizer_fingerprint"] == fingerprint_tokenizer(tokenizer)
    assert sidecar["chat_template_fingerprint"] == fingerprint_chat_template(tokenizer)
    assert sidecar["num_samples"] == len(samples) == 2
    assert sidecar["num_tokens"] == sum(sample["len"] for sample in samples)
    assert sidecar["num_loss_counted_tokens"] == sum(sample["num_loss_counted_tokens"] for sample in samples)
    assert sidecar["max_len"] == max(sample["len"] for sample in samples)
    assert sidecar["max_token_id"] == max(max(sample["input_ids"]) for sample in samples)
    assert sidecar["rows"] == {
        "blank_lines": 1, "in": 3, "kept": 2, "too_long": 1, "nothing_trained": 0, "invalid": 0
    }  # fmt: skip
    assert sidecar["source"] == {"file": "in.jsonl", "sha256": hashlib.sha256(source.read_bytes()).hexdigest()}
    assert str(tmp_path) not in text and str(model) not in text


def test_report_and_visible_masks(model, tmp_path, capsys):
    only_user = {"messages": [{"role": "user", "content": "How many?"}]}
    source = write_rows(tmp_path / "in.jsonl", [chat(12), only_user, chat(30)])
    process_data(options_for(model, source, tmp_path / "out.jsonl", string_for_printing_masks="[...]"))
    out = capsys.readouterr().out
    assert "3 rows" in out and "nothing trained" in out
    assert "\n[...]12 42 42 42 42 42<|im_end|>[...]\n" in out and "\n[...]30 42 42<|im_end|>[...]\n" in out


def test_output_does_not_depend_on_the_number_of_processes(model, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [chat(i, words=120) for i in range(2100)])
    assert source.stat().st_size > BYTES_PER_WORKER  # enough for two workers
    results = [run(model, source, tmp_path / f"out{n}.arrow", "--num-proc", str(n)) for n in (1, 2)]
    assert [result.returncode for result in results] == [0, 0], results
    samples_shown = [result.stdout.partition("---")[2] for result in results]
    assert samples_shown[0] == samples_shown[1] != ""
    for ending in ("arrow", "arrow.meta.json"):
        assert (tmp_path / f"out1.{ending}").read_bytes() == (tmp_path / f"out2.{ending}").read_bytes()
    assert names(tmp_path) == {"in.jsonl", *(f"out{n}.arrow{end}" for n in (1, 2) for end in ("", ".meta.json"))}


HOSTILE_ROWS = [
    (b'{"messages": [{"role": "us', "not JSON"),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "not UTF-8"),
    (b"[1, 2]", "expected an object"),
    (b"null", "expected an object"),
    (b'"text"', "expected an object"),
    (b"{}", "'messages' has to be a list"),
    (b'{"messages": []}', "'messages' has to be a list"),
    (b'{"messages": "hi"}', "'messages' has to be a list"),
    (b'{"messages": ["hi"]}', "message 1 is 'hi'"),
    (b'{"messages": [{"role": "wizard", "content": "a"}]}', "the role 'wizard', allowed: system"),
    (b'{"messages": [{"role": ["user"], "content": "a"}]}', "the role"),
    (b'{"messages": [{"content": "a"}]}', "the role missing or null"),
    (b'{"messages": [{"role": "user"}]}', "message 1 (user) has the content missing or null"),
    (b'{"messages": [{"role": "user", "content": null}]}', "missing or null"),
    (b'{"messages": [{"role": "user", "content": " \\n"}]}', "expected text"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "the content 5, expected text"),
    (b'{"messages": [{"role": "user", "content": ["a"]}]}', "expected text"),
    (b'{"messages": [{"role": "user", "content": "a"}, {"role": "pretrain", "content": "a"}]}', "single message"),
    (b'{"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}', "has the tool calls [1], expected an"),
    (b'{"messages": [{"role": "user", "content": "a", "function_call": {}}]}', "'function_call', which is not sup"),
    (b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "'tools' is {}, expected a list"),
    (b'{"messages": [{"role": "user", "content": "a"}], "unmask": "yes"}', "'unmask' is 'yes'"),
    (b'{"messages": [{"role": "user", "content": "a\x00b"}]}', "not JSON"),
    (b'{"messages": [{"role": "user", "content": "a"}], "n": ' + b"9" * 5000 + b"}", "5000 digits"),
    (b'{"messages": [{"role": "user", "content": "a"}], "n": NaN}', "NaN is no JSON number"),
    (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "the key 'role' is there twice"),
]


@pytest.mark.parametrize(("line", "reason"), HOSTILE_ROWS, ids=[reason for _, reason in HOSTILE_ROWS])
def test_hostile_rows_are_refused(line, reason):
    with pytest.raises(ValueError) as error:
        read_chat(line)
    assert reason in str(error.value)


def test_lines_that_only_look_hostile(model, tokenizer, tmp_path):
    strange = chat(1)
    strange["messages"][1]["content"] = "a\u2028b\x85c\x0bd\x00e\u2029"
    raw = json.dumps(strange, ensure_ascii=False).encode()
    source = write_rows(tmp_path / "in.jsonl", [b"\xef\xbb\xbf" + raw + b"\r\n", b" \r\n", b"\n", raw])
    process_data(options_for(model, source, tmp_path / "out.jsonl"))
    first, second = read_jsonl(tmp_path / "out.jsonl")
    assert first == second
    assert "a\u2028b\x85c\x0bd\x00e\u2029<|im_end|>" in tokenizer.decode(first["input_ids"])


def test_invalid_rows_stop_everything(model, tmp_path):
    surrogate = b'{"messages": [{"role": "user", "content": "a\\ud800"}]}\n'
    bad = [line + b"\n" for line, _ in HOSTILE_ROWS]
    source = write_rows(tmp_path / "in.jsonl", [chat(1), surrogate, *bad])
    result = run(model, source, tmp_path / "out.jsonl")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert f"{len(bad) + 1} of {len(bad) + 2} rows cannot be used" in result.stderr
    assert "in.jsonl:2: contains half a character" in result.stderr
    assert "in.jsonl:3: not JSON" in result.stderr and "in.jsonl:11:" in result.stderr
    assert "in.jsonl:12:" not in result.stderr  # ten are shown
    assert names(tmp_path) == {"in.jsonl"}


def test_skip_invalid_goes_on_and_keeps_the_rejected_rows(model, tmp_path):
    bad = [line + b"\n" for line, _ in HOSTILE_ROWS]
    source = write_rows(tmp_path / "in.jsonl", [chat(1), *bad, chat(2)])
    process_data(options_for(model, source, tmp_path / "out.jsonl", skip_invalid=True))
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 2
    rejected = read_jsonl(tmp_path / "out.rejected.jsonl")
    assert [row["line"] for row in rejected] == list(range(2, len(bad) + 2))
    assert all(reason in row["reason"] for row, (_, reason) in zip(rejected, HOSTILE_ROWS, strict=True))
    assert rejected[0]["row"] == '{"messages": [{"role": "us' and "\\xff" in rejected[1]["row"]
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_text())["rows"]["invalid"] == len(bad)

    source = write_rows(tmp_path / "in.jsonl", [chat(1)])  # mended: the rejected rows of the older run go
    process_data(options_for(model, source, tmp_path / "out.jsonl", skip_invalid=True))
    assert names(tmp_path) == {"in.jsonl", "out.jsonl", "out.jsonl.meta.json"}


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        ([], {}, "has no rows"),
        ([b"\n", b" \n"], {}, "has no rows"),
        ([chat(1)], {"max_sample_num_tokens": 3}, "no row is left of 1: 1 dropped: too long"),
        ([b"{}\n"], {"skip_invalid": True}, "no row is left of 1: 1 invalid"),
        ([chat(1)], {"input_file": "missing.jsonl"}, "no such file"),
        ([chat(1)], {"input_file": "."}, "is a directory"),
        ([chat(1)], {"output_file": "in.jsonl"}, "would overwrite the input"),
        ([chat(1)], {"output_file": "missing/out.jsonl"}, "there is no directory missing"),
        ([chat(1)], {"output_file": "directory.jsonl"}, "is a directory"),
        ([chat(1)], {"model_name_or_path": "/missing/model"}, "no tokenizer"),
    ],
)
def test_refusals_leave_everything_as_it_was(model, tmp_path, monkeypatch, rows, options, reason):
    monkeypatch.chdir(tmp_path)
    Path("directory.jsonl").mkdir()
    write_rows(Path("in.jsonl"), rows)
    Path("out.jsonl").write_text("an older output\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=reason):
        process_data(dataclasses.replace(options_for(model, Path("in.jsonl"), Path("out.jsonl")), **options))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_the_input_may_not_be_the_file_of_rejected_rows(model, tmp_path):
    source = write_rows(tmp_path / "out.rejected.jsonl", [chat(1)])
    with pytest.raises(ValueError, match="would overwrite the input"):
        process_data(options_for(model, source, tmp_path / "out.jsonl"))
    assert names(tmp_path) == {"out.rejected.jsonl"}


def test_without_a_chat_template_only_documents_are_tokenized(tokenizer, tmp_path):
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path / "model")
    tokenizer.chat_template = template
    document = {"messages": [{"role": "pretrain", "content": "How many are 12?"}]}
    source = write_rows(tmp_path / "in.jsonl", [document])
    process_data(options_for(tmp_path / "model", source, tmp_path / "out.jsonl"))
    (sample,) = read_jsonl(tmp_path / "out.jsonl")
    assert sample["labels"] == sample["input_ids"]
    assert sample["num_loss_counted_tokens"] == sample["len"] - 1  # no token comes before the first
    source = write_rows(tmp_path / "in.jsonl", [document, chat(1)])
    with pytest.raises(ValueError, match="no chat template: use"):
        process_data(options_for(tmp_path / "model", source, tmp_path / "out2.jsonl", skip_invalid=True))
    assert "out2.jsonl" not in names(tmp_path)


def test_templates_that_cannot_be_masked_are_refused_first(tokenizer, tmp_path):
    template, tokenizer.chat_template = tokenizer.chat_template, CHATML_TEMPLATE.replace("<|im_end|>", "")
    tokenizer.save_pretrained(tmp_path / "model")
    tokenizer.chat_template = template
    source = write_rows(tmp_path / "in.jsonl", [b"not looked at"])
    with pytest.raises(ValueError, match=r"chat template cannot be used: .* no end-of-turn token"):
        process_data(options_for(tmp_path / "model", source, tmp_path / "out.jsonl"))


def start_long_run(model: Path, directory: Path) -> subprocess.Popen:
    """The script at work, with two workers: chunks are being written."""
    source = write_rows(directory / "in.jsonl", [chat(i, words=200) for i in range(15_000)])
    process = subprocess.Popen(
        command_for(model, source, directory / "out.jsonl", "--num-proc", "2"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in directory.glob(".out.jsonl.*.part")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    return process


def workers_of(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
@pytest.mark.parametrize("ended_by", ["Ctrl-C", "SIGTERM", "a worker killed"])
def test_ends_cleanly(model, tmp_path, ended_by):
    process = start_long_run(model, tmp_path)
    workers = workers_of(process)
    assert len(workers) == 2
    if ended_by == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    elif ended_by == "SIGTERM":
        process.terminate()
    else:
        os.kill(workers[0], signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert process.returncode == (2 if ended_by == "a worker killed" else 130)
    assert err.count("error: ") == 1 and "Traceback" not in err and out == ""
    assert ("a worker process was killed" if ended_by == "a worker killed" else "interrupted") in err
    assert names(tmp_path) == {"in.jsonl"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_help_imports_nothing_heavy():
    code = "import sys, process_data; print({'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_percentile_is_a_value_that_occurs():
    counts = Counter({1: 50, 2: 49, 9: 1})
    assert [percentile(counts, share) for share in (0, 0.5, 0.51, 0.99, 1)] == [1, 1, 2, 2, 9]
