"""Data sets and exports at object stores: the same bytes as on the disk, complete or not there."""

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from data_runs import chat, write_rows
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from in_process import train_forked
from range_server import RangeServer
from s3_server import SECRET, read_bucket, serve_bucket
from tiny_data import read_files

from mini_trainer.data.stores import remote
from mini_trainer.data.stores.remote import BrokenTransfer, describe_upload, is_final, make_error, upload_directory
from mini_trainer.data.tokenized.fetched import fetch_sets, find_sets, locate_sets
from mini_trainer.data.tokenized.reader import TokenizedData, name_source
from mini_trainer.distributed.ending import ExitCode, RunError, describe_error
from mini_trainer.distributed.watch import RunControl
from mini_trainer.distributed.world import World, call_on_each_node
from mini_trainer.options import HubOptions, TrainOptions, group_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.options.urls import RefusedRedirect
from mini_trainer.process_data import process_data
from mini_trainer.run import uploads as uploads_module
from mini_trainer.run.raw_rows import make_data_local
from mini_trainer.run.uploads import BEST, REGULAR, WRITTEN_LAST, Hub, Store, Uploads
from mini_trainer.train import train

MODEL, ROWS = "llama_tied_bias", [chat(i) for i in range(40)]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serve_bucket() as client:
        yield client


@pytest.fixture
def bucket(server, tmp_path, monkeypatch) -> Iterator[Any]:
    """The client of an empty bucket, with a directory of its own for temporary files."""
    monkeypatch.setattr(remote, "SECONDS_TO_WAIT", (0, 0))
    monkeypatch.setattr(uploads_module, "SECONDS_TO_WAIT", (0, 0))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield server
    for name in read_bucket(server):
        server.delete_object(Bucket="bucket", Key=name)


def tokenize(model: Path, tmp_path: Path, output: str | Path, **options: object) -> None:
    """Writes a data set; one for a URL is made here and uploaded."""
    rows = options.pop("rows", ROWS)
    source = write_rows(tmp_path / "rows.jsonl", rows)
    if isinstance(output, str):
        folder, _, name = output.rpartition("/")
        made = tmp_path / "made"
        made.mkdir(exist_ok=True)
        tokenize(model, tmp_path, made / name, rows=rows, **options)
        return upload_directory(made, folder)
    paths = dict(input_file=str(source), output_file=str(output), model_name_or_path=str(model))
    process_data(group_options(ProcessDataOptions, **paths | {"num_proc": 1, "preview": 0} | options))


def raising(error: BaseException) -> Callable:
    def fail(*_: object) -> None:
        raise error

    return fail


def spoil_puts(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[str, str], Any]) -> list[str]:
    """Calls `spoil` with the local and the remote path before each upload of a file; the names of those, as they come.

    A file is not uploaded if it returns something.
    """
    files, names = fsspec.filesystem("s3"), []
    really_put = files.put_file

    def put(source: str, target: str) -> None:
        names.append(target.removeprefix("bucket/"))
        if spoil(source, target) is None:
            really_put(source, target)

    monkeypatch.setattr(files, "put_file", put)
    return names


# --- Copies of data sets


def fetch(url: str, cache: Path, **options: Any) -> str:
    given = {"data_path": [url]}
    found = find_sets(given, **options)
    fetch_sets(found, str(cache))
    return locate_sets(given, found, str(cache))["data_path"][0]


def test_a_data_set_is_copied_once_and_again_if_it_changes(bucket, model, tmp_path, caplog):
    url, cache = "s3://bucket/a/t.arrow", tmp_path / "cache"
    tokenize(model, tmp_path, url, add_special_tokens=("<x>",))
    caplog.set_level("INFO", logger="mini_trainer")
    first = fetch(url, cache)
    expected = read_bucket(bucket, "a/")
    copied = read_files(Path(first).parent)
    assert json.loads(copied.pop("source.json")) == {"url": url} and copied.pop("made.json") and copied == expected
    inode = os.stat(first).st_ino
    assert fetch(url, cache) == first and os.stat(first).st_ino == inode
    messages = [record.message for record in caplog.records if record.name == "mini_trainer"]
    assert [message.split()[1] for message in messages] == ["copying", url]
    assert name_source(first) == url and name_source(str(tmp_path / "t.arrow")) == str(tmp_path / "t.arrow")
    tokenize(model, tmp_path, url, rows=ROWS[1:], add_special_tokens=("<x>",))
    second = fetch(url, cache)
    assert len(TokenizedData(second).lengths) == len(ROWS) - 1 and len(TokenizedData(first).lengths) == len(ROWS)
    bucket.put_object(Bucket="bucket", Key="a/t.arrow.teacher.scores", Body=b"1")
    assert Path(f"{fetch(url, cache, beside=['.teacher.scores'])}.teacher.scores").read_bytes() == b"1"


def test_a_part_of_remote_rows_is_made_again_after_the_join_if_the_store_has_others(bucket, model, tmp_path, capsys):
    output = tmp_path / "out.arrow"
    content = write_rows(tmp_path / "rows.jsonl", ROWS).read_bytes()
    bucket.put_object(Bucket="bucket", Key="in/rows.jsonl", Body=content)
    given = dict(input_file="s3://bucket/in/", output_file=str(output), model_name_or_path=str(model), preview=0)

    def make(shard: str) -> str:
        process_data(group_options(ProcessDataOptions, **given, num_proc=1, shard=shard))
        return capsys.readouterr().out

    assert "still to be made: 2/2" in make("1/2")
    make("2/2")
    made = output.read_bytes()
    for shard in ("1/2", "2/2"):
        assert re.fullmatch(r"all parts are joined already, to \S*out\.arrow: .*\n", make(shard))
    assert output.read_bytes() == made
    bucket.put_object(Bucket="bucket", Key="in/rows.jsonl", Body=content.replace(b"12", b"13"))
    assert "still to be made: 2/2" in make("1/2")


def test_a_copy_is_whole_or_not_there(bucket, model, tmp_path, monkeypatch):
    url, cache = "s3://bucket/t.arrow", tmp_path / "cache"
    tokenize(model, tmp_path, url)
    found = find_sets({"data_path": [url]})

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(remote.RemoteFile, "check_unchanged", raising(KeyboardInterrupt()))
        fetch_sets(found, str(cache))
    assert [path for path in cache.rglob("*") if path.is_file() and not path.name.endswith(".lock")] == []
    content = read_bucket(bucket)["t.arrow"]
    bucket.put_object(Bucket="bucket", Key="t.arrow", Body=content[:-9] + b"\0" * 9)  # another upload's
    with pytest.raises(ValueError, match=r"t.arrow: changed"):
        fetch_sets(found, str(cache))
    with pytest.raises(ValueError, match=r"t\.arrow: .*SHA-256 .*\.meta\.json"):
        fetch(url, cache)
    bucket.put_object(Bucket="bucket", Key="t.arrow", Body=content)
    assert Path(fetch(url, cache)).read_bytes() == content


def test_data_sets_that_cannot_be_copied(bucket, model, tmp_path, monkeypatch):
    tokenize(model, tmp_path, tmp_path / "t.arrow", add_special_tokens=("<x>",))
    web = RangeServer()
    web.files = {path.name: path.read_bytes() for path in tmp_path.glob("t.arrow*") if path.is_file()}
    cases = {
        "s3://bucket/none.arrow": "s3://bucket/none.arrow: no such",
        "s3://nowhere/t.arrow": "s3://nowhere/t.arrow: no such",
        "s3://no bucket's name/t.arrow": "cannot be read: ParamValidationError",
        "s3://bucket/rows/": r"s3://bucket/rows/: .*\.arrow, \.parquet or \.jsonl",
        f"{web.url}/t.arrow": "t.arrow.tokenizer: web servers",
        "s3://me:hunter2@bucket/t.arrow": "password",
    }
    for url, reason in cases.items():
        with pytest.raises(ValueError, match=f"--data-path .*{reason}") as error:
            find_sets({"data_path": [url]})
        assert "hunter2" not in str(error.value) and describe_error(error.value)[0] == ExitCode.BAD_INPUT
    web.close()
    with pytest.raises(ValueError, match=r"--data s3://bucket/t.arrow: .*local"):
        TokenizedData("s3://bucket/t.arrow", option="--data")


def test_the_first_rank_of_a_node_does_the_work_and_a_failure_ends_all(world, monkeypatch):
    calls = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    call_on_each_node(world, lambda: calls.append(1))
    monkeypatch.setenv("LOCAL_RANK", "0")
    call_on_each_node(world, lambda: calls.append(0))
    assert calls == [0]

    with pytest.raises(RunError, match="no room"):
        call_on_each_node(world, raising(ValueError("no room")))


# --- A run


def start(world: World, **options: object) -> TrainOptions:
    """Trains as the script does; the options with local paths."""
    given = group_options(TrainOptions, **options)
    assert find_problems(given) == []
    control = RunControl(hang_timeout=600, max_seconds=None)
    try:
        local = make_data_local(given, world, control)
        train(local, world, control)
    finally:
        if control.files.lock is not None:
            control.files.lock.release()
    return local


def test_a_run_from_a_store_to_a_store(bucket, model, world, tmp_path, monkeypatch):
    """Tokenized to S3, trained from there, and exported to there."""
    url, to = "s3://bucket/data/t.arrow", "s3://bucket/runs/x"
    tokenize(model, tmp_path, url, validation_share=0.3)
    names = spoil_puts(monkeypatch, lambda *paths: None)
    run = tmp_path / "run"
    options = dict(model_name_or_path=str(model), output_dir=str(run), data_cache_dir=str(tmp_path / "cache"),
                   batch_size=8, max_tokens_per_gpu=256, checkpoint_every_steps=1, upload_to=to, data_path=url,
                   validation_data_path=url.replace("t.arrow", "t.validation.arrow"), min_samples_per_checkpoint=8,
                   weight_average="ema", average_over=1, learning_rate=1e-2)  # fmt: skip
    local = start(world, **options, max_steps=1)

    # Every export is there, as it is here, and its config was written last.
    exports = run / "hf_format"
    assert {path.name for path in exports.iterdir()} == {"samples_8", "best", "average_samples_8", "latest"}
    assert read_bucket(bucket, "runs/x/") == read_files(exports)
    written = [name.removeprefix("runs/x/samples_8/") for name in names if name.startswith("runs/x/samples_8/")]
    assert written[-1] == "config.json" and len(written) == len(set(written)), written

    # The run has recorded the URL, and no credentials; it is the one that local paths give.
    params = json.loads((run / "training_params.json").read_text())
    assert params["options"]["data_path"] == [url] and params["options"]["upload_to"] == to
    assert Path(local.data.data_path[0]).is_relative_to(tmp_path / "cache")
    found = [path for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert found == []

    # It resumes with the same data, also if that was written again, and not with other data.
    tokenize(model, tmp_path, url, validation_share=0.3)
    start(world, **options, max_steps=2)
    assert json.loads((run / "training_params.json").read_text())["starts"][-1]["first_step"] == 1
    assert "runs/x/samples_16/config.json" in read_bucket(bucket)
    tokenize(model, tmp_path, url, rows=ROWS[3:], validation_share=0.3)
    with pytest.raises(ValueError, match=r"step_2 .*other data"):
        start(world, **options, max_steps=3)


@pytest.mark.slow
def test_one_process_of_a_node_copies_the_data_for_all(model, tmp_path):
    tokenize(model, tmp_path, tmp_path / "t.arrow")
    web, run = RangeServer(), tmp_path / "run"
    web.files = {path.name: path.read_bytes() for path in tmp_path.glob("t.arrow*")}
    url = f"{web.url}/t.arrow"
    train_forked(2, model_name_or_path=model, data_path=url, output_dir=run, data_cache_dir=tmp_path / "cache",
                 max_steps=1, batch_size=4, max_tokens_per_gpu=256, save_final_checkpoint=False)  # fmt: skip
    web.close()
    assert sorted(web.names) == ["t.arrow", "t.arrow.meta.json", "t.arrow.meta.json"]  # read first, to know its files
    assert json.loads((run / "training_params.json").read_text())["options"]["data_path"] == [url]


@pytest.fixture
def export(tmp_path) -> Path:
    directory = tmp_path / "hf_format" / "samples_8"
    (directory / "adapter").mkdir(parents=True)
    for name in ("config.json", "model-1.safetensors", "model.safetensors.index.json", "adapter/adapter_config.json",
                 "tokenizer.json", "manifest.json"):  # fmt: skip
        (directory / name).write_text(f"new {name}")
    return directory


def test_an_upload_that_is_not_whole_is_taken_for_no_model(bucket, export, monkeypatch):
    """Wherever it ends, also where an older export is replaced, whose other files go."""
    expected = read_files(export)
    for num_written in range(len(expected)):
        for name in ("config.json", "adapter_config.json", "model-2.safetensors"):
            bucket.put_object(Bucket="bucket", Key=f"x/{name}", Body=b"old")

        def end(source: str, target: str) -> None:
            if len(names) > num_written:  # noqa: B023
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            names = spoil_puts(patch, end)
            with pytest.raises(KeyboardInterrupt):
                upload_directory(export, "s3://bucket/x", last=WRITTEN_LAST)
        there = read_bucket(bucket, "x/")
        assert not {"config.json", "adapter_config.json", "model-2.safetensors"} & there.keys()
        assert there.items() <= expected.items()
    upload_directory(export, "s3://bucket/x", last=WRITTEN_LAST)
    assert read_bucket(bucket, "x/") == expected


def upload(url: str, export: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Uploads `export` as a run does; the warnings."""
    with caplog.at_level("INFO", logger="mini_trainer"):
        uploads = Uploads(Store(url))
        uploads.add(export, kind=REGULAR, message="")
        uploads.close(is_done=True)
    assert [path.name for path in export.parent.iterdir()] == ["samples_8"], "links are left"
    return [message for message in caplog.messages if message.startswith("warning")]


def test_a_store_in_trouble_is_asked_again_for_what_is_missing(bucket, export, caplog, monkeypatch):
    faults, put = [None, OSError, None, OSError, OSError], []
    really_upload = uploads_module.Uploads._upload

    def upload_here(self: Uploads, one: Any) -> bool:
        """In the uploads' own thread, which has its own client."""
        with pytest.MonkeyPatch.context() as patch:
            put.append(spoil_puts(patch, fail))
            return really_upload(self, one)

    def fail(source: str, target: str) -> None:
        if faults and (fault := faults.pop(0)) is not None:
            raise fault("no network")

    monkeypatch.setattr(Uploads, "_upload", upload_here)
    assert upload("s3://bucket/runs/x/", export, caplog) == []
    assert read_bucket(bucket, "runs/x/samples_8/") == read_files(export)
    ((first, *others),) = put
    assert others.count(first) == 0 and len(others) == 5 + 3, "what is there was uploaded again"


def test_a_store_that_refuses_is_told_once_and_how_to_upload_later(bucket, export, caplog):
    first, last = upload("s3://nowhere/x", export, caplog)
    assert first.startswith("warning: --upload-to s3://nowhere/x: ") and "such bucket" in first
    assert "training continues" in first
    command = f"aws s3 sync {export} s3://nowhere/x/samples_8"
    told = "warning: exports that were not uploaded to s3://nowhere/x: 1. To upload them:"
    assert last.splitlines() == [told, f"  {command}"]


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def answer(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("m", response=SimpleNamespace(status_code=status, headers={}, request=None))


FINAL = [
    *(FileNotFoundError(), PermissionError(), ValueError(), LocalTokenNotFoundError(), OfflineModeIsEnabled()),
    *(caused(FileNotFoundError(), by) for by in (FileNotFoundError(), answer(404), RefusedRedirect("m"))),
    *(answer(403), OSError(errno.EINVAL, "InvalidBucketName")),  # s3fs's
]
PASSING = [
    *(OSError(), OSError(errno.EBUSY, "SlowDown"), BrokenTransfer(), answer(429), answer(503)),
    caused(FileNotFoundError(), ConnectionResetError()),  # fsspec's of a web server
    caused(FileNotFoundError(), caused(FileNotFoundError(), answer(503))),  # the hub's
]


@pytest.mark.parametrize("error", [*FINAL, *PASSING])
def test_errors_that_another_attempt_may_not_meet_end_with_2_and_others_with_8(error):
    assert is_final(error) == (error in FINAL)
    assert make_error(error, "m").code == (ExitCode.BAD_INPUT if error in FINAL else ExitCode.IO)


def test_what_is_denied_is_a_users_mistake_only_at_the_start(bucket, export, monkeypatch):
    """Credentials expire. A bucket that does not exist stays a mistake."""
    spoil_puts(monkeypatch, raising(PermissionError("ExpiredToken")))
    assert make_error(PermissionError(), "m").code == ExitCode.BAD_INPUT
    for url, code in (("s3://bucket/x", ExitCode.IO), ("s3://nowhere/x", ExitCode.BAD_INPUT)):
        with pytest.raises(RunError, match=url) as error:
            upload_directory(export, url, waits=())
        assert error.value.code == code


def test_commands_that_upload():
    here = Path("runs/a b")
    assert describe_upload(here, "s3://b/x") == "aws s3 sync 'runs/a b' s3://b/x"
    assert describe_upload(here, "gs://b/x") == "gcloud storage rsync --recursive 'runs/a b' gs://b/x"
    assert describe_upload(here, "hf://datasets/me/d/x/y") == "hf upload me/d 'runs/a b' x/y --repo-type dataset"
    assert describe_upload(here, "hf://me/m") == "hf upload me/m 'runs/a b' ."
    hub = Hub(HubOptions(push_to_hub="me/m"))
    assert hub.describe_command(here, REGULAR) == "hf upload me/m 'runs/a b' ."
    assert hub.describe_command(here, BEST) == "hf upload me/m 'runs/a b' . --revision best"
