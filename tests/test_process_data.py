"""Files in, files out: formats, sidecar, report, and what is refused, with the real script where processes matter."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from breadth import long, wide
from data_runs import chat, command_for, options_for, read_arrow, write_rows
from forked import run_forked
from make_tiny_model import CHATML_TEMPLATE
from processes import list_children, run_unread, wait_until
from small_tokenizers import wrap
from tiny_data import read_lines
from transformers import AutoTokenizer

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.report import percentile
from mini_trainer.data.stores.json_lines import MAX_ROW_BYTES
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options import replace_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.process_data import process_data

MODEL = "tokenizer"


def run(*args) -> subprocess.CompletedProcess:
    return run_forked(0, *command_for(*args)[1:], timeout=120)


READERS = {
    ".jsonl": lambda path: [{"loss_weights": None} | sample for sample in read_lines(path)],
    ".arrow": read_arrow,
    ".parquet": lambda path: pq.read_table(path).to_pylist(),
}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_formats_hold_the_same_samples(model, tokenizer, tmp_path):
    rows = [chat(i) for i in range(2345)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    for ending in (".jsonl", ".arrow", ".parquet"):
        process_data(options_for(model, source, tmp_path / f"out{ending}"))
    samples = read_lines(tmp_path / "out.jsonl")
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
        assert table.schema.field("loss_weights").type == pa.list_(pa.float32())
        without_weights = [sample | {"loss_weights": None} for sample in samples]
        assert table.to_pylist() == without_weights
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == without_weights


def test_sidecar(model, tokenizer, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [chat(1), b"\n", chat(2), chat(3, words=90)])
    process_data(options_for(model, source, tmp_path / "out.jsonl", max_sample_num_tokens=80))
    samples = read_lines(tmp_path / "out.jsonl")
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
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert sidecar["sources"] == [{"file": "in.jsonl", "format": "messages", "sha256": digest}]
    assert str(tmp_path) not in text and str(model) not in text


def test_report_and_visible_masks(model, tmp_path, capsys):
    only_user = {"messages": [{"role": "user", "content": "How many?"}]}
    source = write_rows(tmp_path / "in.jsonl", [chat(12), only_user, chat(30)])
    process_data(options_for(model, source, tmp_path / "out.jsonl", string_for_printing_masks="[...]"))
    out = capsys.readouterr().out
    assert "3 rows" in out and "nothing trained" in out
    assert "\n[...]12 42 42 42 42 42<|im_end|>[...]\n" in out and "\n[...]30 42 42<|im_end|>[...]\n" in out


@pytest.mark.long
@pytest.mark.slow
def test_a_report_that_nobody_reads_is_no_error(model, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [chat(12)])
    done = run_unread(command_for(model, source, tmp_path / "out.jsonl"))
    assert (done.returncode, done.stderr) == (0, "")
    assert names(tmp_path) == {"in.jsonl", "out.jsonl", "out.jsonl.meta.json"}


def test_lines_that_only_look_hostile(model, tokenizer, tmp_path):
    strange = chat(1)
    strange["messages"][1]["content"] = "a\u2028b\x85c\x0bd\x00e\u2029"
    raw = json.dumps(strange, ensure_ascii=False).encode()
    source = write_rows(tmp_path / "in.jsonl", [b"\xef\xbb\xbf" + raw + b"\r\n", b" \r\n", b"\n", raw])
    process_data(options_for(model, source, tmp_path / "out.jsonl"))
    first, second = read_lines(tmp_path / "out.jsonl")
    assert first == second
    assert "a\u2028b\x85c\x0bd\x00e\u2029<|im_end|>" in tokenizer.decode(first["input_ids"])


# Each kind of damage once; tests/test_data_formats.py has every way in which a row can be wrong.
HOSTILE_LINES = {
    b'{"messages": [{"role": "us': "not JSON",
    b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}': "not UTF-8",
    b"[1, 2]": "object",
    b'{"messages": [{"role": "user", "content": "a\\ud800"}]}': r"\\ud800",
}
TOO_LONG = 200_000_000  # bytes, in a line after the others


def write_hostile_rows(path: Path) -> Path:
    write_rows(path, [chat(1), *(line + b"\n" for line in HOSTILE_LINES)])
    with open(path, "ab") as file:
        file.write(b'{"messages": "')
        for _ in range(TOO_LONG // 1_000_000):
            file.write(b"a" * 1_000_000)
        file.write(b'"}\n' + json.dumps(chat(2)).encode())
    return path


def test_hostile_rows_stop_everything(model, tmp_path):
    source = write_hostile_rows(tmp_path / "in.jsonl")
    result = run(model, source, tmp_path / "out.jsonl")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert f"{len(HOSTILE_LINES) + 1} of {len(HOSTILE_LINES) + 3} rows" in result.stderr
    for number, reason in enumerate(HOSTILE_LINES.values(), start=2):
        assert re.search(rf"\n  in\.jsonl:{number}: .*{reason}", result.stderr), (number, reason, result.stderr)
    assert names(tmp_path) == {"in.jsonl"}


def test_skip_invalid_goes_on_and_keeps_the_rejected_rows(model, tmp_path):
    source = write_hostile_rows(tmp_path / "in.jsonl")
    tracemalloc.start()
    process_data(options_for(model, source, tmp_path / "out.jsonl", skip_invalid=True))
    most_memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_memory < 3 * MAX_ROW_BYTES, "what is too long is not held"
    assert len(read_lines(tmp_path / "out.jsonl")) == 2
    rejected = read_lines(tmp_path / "out.jsonl.rejected.jsonl")
    assert [row["line"] for row in rejected] == list(range(2, len(HOSTILE_LINES) + 3))
    assert all(row["file"] == "in.jsonl" for row in rejected)
    assert all(re.search(reason, row["reason"]) for row, reason in zip(rejected, HOSTILE_LINES.values(), strict=False))
    assert rejected[0]["row"] == '{"messages": [{"role": "us' and "\\xff" in rejected[1]["row"]
    assert re.search(f"{TOO_LONG + 17:,} bytes .*{MAX_ROW_BYTES:,}", rejected[-1]["reason"])
    assert rejected[-1]["row"].startswith('{"messages": "aaa') and len(rejected[-1]["row"]) < 1000
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_text())["rows"]["invalid"] == len(rejected)

    source = write_rows(tmp_path / "in.jsonl", [chat(1)])  # mended: the rejected rows of the older run go
    process_data(options_for(model, source, tmp_path / "out.jsonl", skip_invalid=True))
    assert names(tmp_path) == {"in.jsonl", "out.jsonl", "out.jsonl.meta.json"}


REJECTED = "out.jsonl.rejected.jsonl"  # where rows that are not valid go


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        ([], {}, "in.jsonl: .*no rows"),
        ([b"\n", b" \n"], {}, "in.jsonl: .*no rows"),
        ([chat(1)], {"max_sample_num_tokens": 3}, "1 dropped: .*--max-sample-num-tokens 3$"),
        ([b"{}\n"], {"skip_invalid": True}, "in.jsonl: .*1 invalid"),
        ([chat(1)], {"input_file": ("missing.jsonl",)}, "--input-file missing.jsonl: .*no such"),
        ([chat(1)], {"input_file": ("directory.jsonl",)}, r"--input-file directory.jsonl: .*\.jsonl, \.json"),
        ([chat(1)], {"output_file": "in.jsonl"}, "output in.jsonl .*overwrite"),
        ([chat(1)], {"input_file": (REJECTED,)}, f"{REJECTED} .*overwrite"),
        ([chat(1)], {"output_file": "in.jsonl/out.jsonl"}, "--output-file in.jsonl/out.jsonl: .*not a directory"),
        ([chat(1)], {"output_file": "directory.jsonl"}, "output directory.jsonl .*a directory"),
        ([chat(1)], {"model_name_or_path": "/missing/model"}, "--model-name-or-path /missing/model: .*directory"),
    ],
)
def test_refusals_leave_everything_as_it_was(model, tmp_path, monkeypatch, rows, options, reason):
    monkeypatch.chdir(tmp_path)
    Path("directory.jsonl").mkdir()
    for name in ("in.jsonl", REJECTED):
        write_rows(Path(name), rows)
    Path("out.jsonl").write_text("an older output\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=reason):
        process_data(replace_options(options_for(model, Path("in.jsonl"), Path("out.jsonl")), **options))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_without_a_chat_template_only_documents_are_tokenized(tokenizer, tmp_path):
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path / "model")
    tokenizer.chat_template = template
    document = {"messages": [{"role": "pretrain", "content": "How many are 12?"}]}
    source = write_rows(tmp_path / "in.jsonl", [document])
    process_data(options_for(tmp_path / "model", source, tmp_path / "out.jsonl"))
    (sample,) = read_lines(tmp_path / "out.jsonl")
    assert sample["labels"] == sample["input_ids"]
    assert sample["num_loss_counted_tokens"] == sample["len"] - 1  # no token comes before the first
    source = write_rows(tmp_path / "in.jsonl", [document, chat(1)])
    with pytest.raises(ValueError, match=r"chat template: .*--chat-template"):
        process_data(options_for(tmp_path / "model", source, tmp_path / "out2.jsonl", skip_invalid=True))
    with pytest.raises(ValueError, match=r"--missing-stop-token allow .*no chat"):
        process_data(options_for(tmp_path / "model", source, tmp_path / "out2.jsonl", missing_stop_token="allow"))
    assert "out2.jsonl" not in names(tmp_path)


def test_a_model_without_a_tokenizer_is_refused_by_that_name(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    source = write_rows(tmp_path / "in.jsonl", [chat(1)])
    with pytest.raises(ValueError, match=r"--model-name-or-path .*model: .*tokenizer.json"):
        process_data(options_for(tmp_path / "model", source, tmp_path / "out.jsonl"))


def test_templates_that_cannot_be_masked_are_refused_first(tokenizer, tmp_path):
    template, tokenizer.chat_template = tokenizer.chat_template, CHATML_TEMPLATE.replace("<|im_end|>", "")
    tokenizer.save_pretrained(tmp_path / "model")
    tokenizer.chat_template = template
    source = write_rows(tmp_path / "in.jsonl", [b"not looked at"])
    with pytest.raises(ValueError, match=r"^the model's .*end-of-turn"):
        process_data(options_for(tmp_path / "model", source, tmp_path / "out.jsonl"))


def trained_texts(path: Path, tokenizer) -> list[str]:
    """Of each sample, what is trained."""
    return [tokenizer.decode([label for label in sample["labels"] if label != IGNORED]) for sample in read_lines(path)]


def test_the_same_chats_in_every_format_train_the_same(model, tokenizer, tmp_path):
    chats = [(f"How many are {i}?", f" {i} and\n{i} \u20ac") for i in range(30)]
    formats = {
        "messages": [{"messages": [turn("user", q), turn("assistant", a)], "tools": []} for q, a in chats],
        "sharegpt": [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in chats],
        "alpaca": [{"instruction": q, "input": "", "output": a} for q, a in chats],
        "question and answer": [{"question": q, "answer": a} for q, a in chats],
    }
    as_excel = "".join(f'{q};"{a}"\r\n' for q, a in [("question", "answer"), *chats])
    (tmp_path / "question and answer.csv").write_text(f"\ufeff{as_excel}", newline="")
    for name, rows in formats.items():
        write_rows(tmp_path / f"{name}.jsonl", rows)
        (tmp_path / f"{name}.json").write_text(json.dumps(rows, indent=2))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    outputs = []
    for source in sorted(tmp_path.iterdir()):
        output = tmp_path / f"{source.name}.out.jsonl"
        process_data(options_for(model, source, output))
        outputs.append(output.read_bytes())
        assert json.loads(Path(f"{output}.meta.json").read_text())["sources"][0]["format"] == source.stem
    assert len(outputs) == 13 and len(set(outputs)) == 1
    assert trained_texts(output, tokenizer) == [f"{answer}<|im_end|>" for _, answer in chats]

    rendered = [(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n", a) for q, a in chats]
    for key in ("completion", "generation"):
        source = write_rows(tmp_path / f"{key}.jsonl", [{"prompt": prompt, key: a} for prompt, a in rendered])
        process_data(options_for(model, source, tmp_path / f"{key}.out.jsonl"))
        assert trained_texts(tmp_path / f"{key}.out.jsonl", tokenizer) == trained_texts(output, tokenizer)


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def test_several_files_and_directories(model, tmp_path):
    (tmp_path / "more").mkdir()
    rows = {"b.jsonl": chat(1), "more/a.jsonl": {"text": "How many?"}, "c.jsonl": {"prompt": "a", "completion": "b"}}
    sources = [write_rows(tmp_path / name, [row]) for name, row in rows.items()]
    options = options_for(model, sources[0], tmp_path / "out.jsonl")
    process_data(replace_options(options, input_file=(str(sources[0]), str(tmp_path / "more"), str(sources[2]))))
    assert len(read_lines(tmp_path / "out.jsonl")) == 3
    sidecar = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert [source["file"] for source in sidecar["sources"]] == ["b.jsonl", "a.jsonl", "c.jsonl"]
    assert [source["format"] for source in sidecar["sources"]] == ["messages", "document", "completion"]
    digests = [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources]
    assert [source["sha256"] for source in sidecar["sources"]] == digests
    assert set(sidecar["num_trained_by_role"]) == {"assistant", "completion", "document"}


@pytest.mark.parametrize("block_size", [3, 4, 7, 64, 10_000])
@pytest.mark.parametrize("ending", [".jsonl", ".arrow"])
def test_blocks_are_cut_within_the_stream_of_documents(model, tokenizer, tmp_path, block_size, ending):
    texts = ["How many are 12 and 30? 42", "a", "user assistant" * 30, "system " * 5] * 9
    source = write_rows(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    process_data(options_for(model, source, tmp_path / f"out{ending}", block_size=block_size))
    samples = READERS[ending](tmp_path / f"out{ending}")
    eos = tokenizer.eos_token_id
    stream = [token for text in texts for token in [*tokenizer.encode(text), eos]]
    assert [token for sample in samples for token in sample["input_ids"]] == stream
    for sample in samples:
        assert sample["labels"] == sample["input_ids"] and sample["input_ids"][0] != eos
        assert 1 <= sample["num_loss_counted_tokens"] == sample["len"] - 1 < block_size
    for sample, following in pairwise(samples):  # only to keep an end of text from the start
        is_short = sample["len"] == block_size - 1 and following["input_ids"][1] == eos
        assert sample["len"] == block_size or is_short
    assert sum(token == eos for sample in samples for token in sample["labels"][1:]) == len(texts)
    sidecar = json.loads((tmp_path / f"out{ending}.meta.json").read_text())
    assert sidecar["num_samples"] == len(samples) and sidecar["rows"]["kept"] == len(texts)
    assert sidecar["num_tokens"] == len(stream) and sidecar["options"]["block_size"] == block_size


@pytest.mark.parametrize("ending", READERS)
def test_only_samples_of_rows_with_weights_have_some(model, tmp_path, monkeypatch, ending):
    monkeypatch.setattr("mini_trainer.data.rows.files.CHUNK_ROWS", 2)
    rows = [chat(i) for i in range(7)]
    rows[4]["messages"][1]["weight"] = 0.25
    for name, some in {"without": rows[:4], "with": rows}.items():
        write_rows(tmp_path / f"{name}.jsonl", some)
        process_data(options_for(model, tmp_path / f"{name}.jsonl", tmp_path / f"{name}.out{ending}"))
        sidecar = json.loads((tmp_path / f"{name}.out{ending}.meta.json").read_text())
        assert sidecar["has_loss_weights"] is (name == "with")
    samples = READERS[ending](tmp_path / f"with.out{ending}")
    assert READERS[ending](tmp_path / f"without.out{ending}") == samples[:4]
    assert [sample["loss_weights"] is not None for sample in samples] == [False] * 4 + [True] + [False] * 2
    assert samples[4]["loss_weights"] == [0.0 if label == IGNORED else 0.25 for label in samples[4]["labels"]]
    data = TokenizedData(tmp_path / f"with.out{ending}")
    assert "loss_weights" in data.columns
    assert "loss_weights" not in TokenizedData(tmp_path / f"without.out{ending}").columns
    for i, sample in enumerate(samples):
        weights = data.read(i)["loss_weights"].tolist()
        assert weights == (sample["loss_weights"] or [1.0] * sample["len"])


@pytest.fixture(scope="module")
def base_model(tmp_path_factory) -> Path:
    """A tokenizer without chat template, and without special tokens of chats."""
    path = tmp_path_factory.mktemp("base")
    wrap("make_bytes").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("template", "added", "stop"),
    [
        ("chatml", ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        ("llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
        ("zephyr", [], "</s>"),
        ("own.jinja", ["<|end|>"], "<|end|>"),
    ],
)
def test_a_template_and_tokens_for_a_base_model(base_model, tmp_path, monkeypatch, template, added, stop):
    monkeypatch.chdir(tmp_path)
    Path("own.jinja").write_text(CHATML_TEMPLATE.replace("<|im_end|>", "<|end|>").replace("<|im_start|>", "#"))
    source = write_rows(tmp_path / "in.jsonl", [chat(5)])
    options = options_for(base_model, source, tmp_path / "out.jsonl", chat_template=template)
    if template == "own.jinja":
        options = replace_options(options, add_special_tokens=("<|end|>",))
    process_data(options)
    sidecar = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert sidecar["tokenizer_dir"] == "out.jsonl.tokenizer"
    saved = AutoTokenizer.from_pretrained(tmp_path / sidecar["tokenizer_dir"])
    base = AutoTokenizer.from_pretrained(base_model)
    assert sidecar["added_special_tokens"] == {token: len(base) + i for i, token in enumerate(added)}
    assert len(saved) == len(base) + len(added)
    assert sidecar["tokenizer_fingerprint"] == fingerprint_tokenizer(saved)
    assert sidecar["chat_template_fingerprint"] == fingerprint_chat_template(saved)
    assert sidecar["stop_token_id"] == saved.convert_tokens_to_ids(stop)
    assert saved.eos_token == ("</s>" if template == "own.jinja" else stop)
    assert trained_texts(tmp_path / "out.jsonl", saved) == ["5 42 42 42 42 42" + stop]
    (sample,) = read_lines(tmp_path / "out.jsonl")
    expected = saved.apply_chat_template(chat(5)["messages"], return_dict=True)["input_ids"]
    assert sample["input_ids"] == expected

    process_data(options_for(tmp_path / "out.jsonl.tokenizer", source, tmp_path / "out.jsonl"))  # as its own model
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_text())["tokenizer_dir"] is None
    assert not (tmp_path / "out.jsonl.tokenizer").exists(), "it belonged to the older run"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chat_template": "chatnl"}, "--chat-template chatnl: .*chatml, llama3, zephyr"),
        ({"chat_template": "broken.jinja"}, "--chat-template broken.jinja .*fails"),
        ({"chat_template": "no_stop.jinja"}, "--chat-template no_stop.jinja .*end-of-turn"),
        ({"add_special_tokens": ("</s>",)}, "--add-special-tokens </s>: "),
        ({"chat_template": "endless.jinja"}, r"--chat-template endless.jinja .*0\.3 seconds"),
    ],
)
def test_templates_and_tokens_that_are_refused(base_model, tmp_path, monkeypatch, options, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mini_trainer.data.chat.rendering.RENDER_SECONDS", 0.3)
    Path("broken.jinja").write_text("{% for message in messages %}")
    Path("no_stop.jinja").write_text(CHATML_TEMPLATE.replace("<|im_end|>", ""))
    loop = "{% for i in range(99999) %}"
    Path("endless.jinja").write_text(loop * 3 + "{% endfor %}" * 3)
    source = write_rows(tmp_path / "in.jsonl", [chat(1)])
    before = names(tmp_path)
    with pytest.raises(ValueError, match=reason):
        process_data(options_for(base_model, source, tmp_path / "out.jsonl", **options))
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"block_size": 2}, "--block-size 2: .*3"),
        ({"block_size": 8, "max_sample_num_tokens": 9}, "--max-sample-num-tokens .*--block-size"),
        ({"block_size": 8, "format": "alpaca"}, "--block-size .*--format alpaca"),
        ({"preview": -1}, "--preview -1: .*0"),
        ({"preview": 0, "string_for_printing_masks": "x"}, "--string-for-printing-masks .*--preview"),
        ({"images": True, "format": "classification"}, "--images .*--format classification"),
    ],
)
def test_options_that_contradict_each_other(options, problem):
    (found,) = find_problems(options_for(Path("m"), Path("in.jsonl"), Path("out.jsonl"), **options))
    assert re.match(problem, found)


def start_long_run(model: Path, directory: Path) -> subprocess.Popen:
    """The script at work, with two workers: chunks are being written."""
    source = write_rows(directory / "in.jsonl", [chat(i, words=200) for i in range(15_000)])
    process = subprocess.Popen(
        command_for(model, source, directory / "out.jsonl", "--num-proc", "2"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    parts = partial(directory.glob, ".out.jsonl.*.part")
    wait_until(lambda: any(path.stat().st_size for path in parts()), seconds=60, by=process, said=process.communicate)
    return process


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
@pytest.mark.parametrize("ended_by", [long("Ctrl-C"), wide("SIGTERM"), long("a worker killed")])
def test_ends_cleanly(model, tmp_path, ended_by):
    process = start_long_run(model, tmp_path)
    workers = list_children(process.pid)
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
    assert ("worker process" if ended_by == "a worker killed" else "interrupted") in err
    assert names(tmp_path) == {"in.jsonl"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_percentile_is_a_value_that_occurs():
    counts = Counter({1: 50, 2: 49, 9: 1})
    assert [percentile(counts, share) for share in (0, 0.5, 0.51, 0.99, 1)] == [1, 1, 2, 2, 9]
