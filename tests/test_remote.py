"""Rows in object stores and on web servers: the same data set as of local files, or an error that names the file."""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_runs import chat, options_for, read_file, write_rows
from range_server import RangeServer
from s3_server import KEY, serve_bucket

from mini_trainer.data.rows.files import find_sources, read_chunks
from mini_trainer.data.stores import remote
from mini_trainer.data.tokenized.sidecar import identify_source, name_rows
from mini_trainer.options import RowOptions, replace_options
from mini_trainer.process_data import process_data

MODEL = "tokenizer"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(remote, "SECONDS_TO_WAIT", (0, 0, 0))
    monkeypatch.setattr(remote, "FETCHED_BYTES", 2000)
    for module in ("files", "lines"):
        monkeypatch.setattr(f"mini_trainer.data.rows.{module}.BLOCK_BYTES", 1000)


@pytest.fixture
def server():
    server = RangeServer()
    yield server
    server.close()


@pytest.fixture
def rows(tmp_path) -> Path:
    """A folder of rows in files of several kinds."""
    folder = tmp_path / "rows"
    (folder / "inner").mkdir(parents=True)
    write_rows(folder / "a.jsonl", [chat(i) for i in range(60)])
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps(chat(i)).encode() + b"\n" for i in range(50)))
    )
    pq.write_table(pa.Table.from_pylist([chat(i) for i in range(40)]), folder / "inner" / "c.parquet")
    (folder / "a.jsonl.meta.json").write_text("{}")  # no rows
    return folder


def process_both(
    model: Path, tmp_path: Path, given: list[str], local: list[Path], *, shards: tuple[str | None, ...] = (None,)
) -> None:
    """Makes the data set of URLs, in these parts, and of local files; they and their sidecars must be the same, but for
    what a store says of its files."""
    found: dict[str, dict[str, Any]] = {"here": {}, "there": {}}
    for place, inputs, parts in (("here", map(str, local), (None,)), ("there", given, shards)):
        (tmp_path / place).mkdir()
        options = options_for(model, tmp_path, tmp_path / place / "out.arrow", preview=0)
        for shard in parts:
            process_data(replace_options(options, input_file=tuple(inputs), shard=shard))
        for path in (tmp_path / place).iterdir():
            found[place][path.name] = path.read_bytes()
            if path.name.endswith(".meta.json"):
                found[place][path.name] = sidecar = json.loads(path.read_text()) | {"sha256": None}
                for source in sidecar["sources"] * (place == "there"):
                    assert source.pop("size") > 0 and source.pop("version"), source
    assert found["there"] == found["here"]


def test_files_of_a_web_server(server, rows, model, tmp_path):
    files = [rows / "a.jsonl", rows / "b.jsonl.gz", rows / "inner" / "c.parquet"]
    server.files = {path.name: path.read_bytes() for path in files}
    server.faults = ["break", "break", None, "500", None, None, "break", "500", "break"]
    process_both(model, tmp_path, [f"{server.url}/{path.name}" for path in files], files)
    assert server.faults == []


@pytest.mark.parametrize("fault", ["break", "500", "whole"])
def test_a_connection_that_keeps_breaking_is_an_error_with_the_file_and_the_byte(server, fault):
    server.files["a.jsonl"] = b"1\n" * 9000
    server.faults = [None, *[fault] * 99]
    with pytest.raises(ValueError, match=r"http://127.0.0.1:\d+/a.jsonl: .*[1-9],000 of 18,000: "):
        read_file(f"{server.url}/a.jsonl")


def test_a_file_of_another_length_or_content_than_said_is_an_error(server):
    server.files["a.jsonl"] = b"1\n" * 9000
    (source,) = find_sources([f"{server.url}/a.jsonl"])
    server.files["a.jsonl"] = b"1\n" * 4000
    with pytest.raises(ValueError, match=r"a.jsonl: .*of 18,000: 2,000 of 3,000 bytes"):
        list(read_chunks(source))
    server.files["a.jsonl"] = b"2\n" * 9000
    with pytest.raises(ValueError, match=r"a.jsonl: changed"):
        list(read_chunks(source))
    server.says_length = False
    with pytest.raises(ValueError, match=r"a.jsonl: .*length"):
        find_sources([f"{server.url}/a.jsonl"])


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("{server}/missing.jsonl", "missing.jsonl: no such"),
        ("{server}/a.bin", r"a.bin: .*\.jsonl, \.json"),
        ("ftp://host/a.jsonl", "ftp://host/a.jsonl: .*s3://, gs://"),
        ("http://127.0.0.1:9/a.jsonl", "/a.jsonl: .*Cannot connect"),
        ("https://me:hunter2@host/a.jsonl", "password"),
        ("https://host/a.jsonl?X-Amz-Signature=hunter2", "password"),
        ("s3://key:hunter2@bucket/a.jsonl", "password"),
    ],
)
def test_urls_that_are_refused(server, url, reason):
    server.files["a.bin"] = b"1"
    with pytest.raises(ValueError, match=f"--input-file .*{reason}") as error:
        find_sources([url.format(server=server.url)])
    assert "hunter2" not in str(error.value)


def test_a_store_without_its_package_is_refused_by_the_package_s_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r"--input-file gs://bucket/a.jsonl: .*pip install gcsfs"):
        find_sources(["gs://bucket/a.jsonl"])


def test_the_cache_of_tokenized_rows_knows_remote_files_by_their_content(server):
    server.files["a.jsonl"] = b"1\n"
    url = f"{server.url}/a.jsonl"
    found = [identify_source(*find_sources([url]))]
    server.files["a.jsonl"] = b"2\n"
    found += [identify_source(*find_sources([url])), identify_source(*find_sources([url]))]
    assert found[0] != found[1] == found[2]
    assert name_rows(RowOptions(input_file=(url,))) == "a"


@pytest.fixture(scope="module")
def bucket():
    with serve_bucket() as client:
        yield client


@pytest.mark.parametrize(
    "given", [["s3://bucket/rows"], ["s3://bucket/rows/*.jsonl*", "s3://bucket/rows/inner/c.parquet"]]
)
def test_files_of_s3(bucket, rows, model, tmp_path, given):
    for path in rows.rglob("*"):
        if path.is_file():
            bucket.upload_file(str(path), "bucket", f"rows/{path.relative_to(rows)}")
    local = [rows] if len(given) == 1 else [rows / "a.jsonl", rows / "b.jsonl.gz", rows / "inner" / "c.parquet"]
    process_both(model, tmp_path, given, local)
    written = b"".join(path.read_bytes() for path in (tmp_path / "there").iterdir())
    assert KEY.encode() not in written and os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in written


def test_parts_of_a_file_on_s3(bucket, model, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_trainer.data.rows.files.SECTION_BYTES", 3000)
    source = write_rows(tmp_path / "in.jsonl", [chat(i) for i in range(100)])
    bucket.upload_file(str(source), "bucket", "in.jsonl")
    process_both(model, tmp_path, ["s3://bucket/in.jsonl"], [source], shards=("2/2", "1/2"))
