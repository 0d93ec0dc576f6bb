"""Files that cannot grow, as on a full disk: programs say which file and how much room, and end with code 8."""

import errno
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from data_runs import chat, write_rows
from in_process import train_here
from processes import ROOT, run
from run_directories import write_run
from small_runs import OPTIONS, make_inputs
from tiny_data import read_lines

from mini_trainer.data.stores.disk import describe_failed_write, make_aside, naming_failed_writes, written_aside
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.options.tools import ImportConfigOptions
from mini_trainer.tools.import_config import import_config
from mini_trainer.use.evaluation.results import write_made

LIMITED = ROOT / "tests" / "workers" / "limited.py"
ROOM = r"File too large.*; .*[0-9,]+ free"


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# The words of each program, and the file that it cannot write.
PROGRAMS = {
    "page": ("mini_trainer/tools/plot_metrics.py RUN --output OUT/c.html", "OUT/c.html"),
    "rows": ("process_data.py --input-file ROWS --output-file OUT/d.arrow --model-name-or-path MODEL", "OUT/d.arrow"),
    "answers": (
        "generate.py --model MODEL --prompts ROWS --output OUT/a.jsonl --max-new-tokens 1",
        "OUT/a.jsonl.part0",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("what", PROGRAMS)
def test_programs_name_the_file_and_end_with_the_code_of_runs(what, model, tmp_path):
    words, name = PROGRAMS[what]
    rows, out = write_rows(tmp_path / "rows.jsonl", [chat(i) for i in range(300)]), tmp_path / "out"
    out.mkdir()
    places = {"RUN": write_run(tmp_path / "run", num_steps=50), "OUT": out, "ROWS": rows, "MODEL": model}
    for word, path in places.items():
        words, name = words.replace(word, str(path)), name.replace(word, str(path))
    result = run([sys.executable, str(LIMITED), "16384", *f"{ROOT}/{words}".split()])
    assert result.returncode == ExitCode.IO and "Traceback" not in result.stderr, result.stderr
    assert re.search(f"error: .*cannot write {re.escape(name)}: .*{ROOM}", result.stderr), result.stderr
    assert {path.name for path in out.iterdir()} == ({"a.jsonl.part0"} if what == "answers" else set())


def test_what_is_written_aside_names_the_file_that_grew(tmp_path):
    with (
        files_limited_to(1000),
        pytest.raises(OSError, match=rf"cannot write .*/b\.txt: {ROOM}"),
        written_aside(tmp_path / "a.txt", tmp_path / "b.txt") as (first, second),
    ):
        first.write_text("x" * 10)
        second.write_text("x" * 2000)
    with files_limited_to(1000), pytest.raises(OSError, match=rf"cannot write .*/answers\.jsonl: {ROOM}"):
        write_made(tmp_path / "answers.jsonl", "x" * 2000, {})
    assert not list(tmp_path.iterdir())


def test_an_imported_configuration_of_which_one_file_does_not_fit_leaves_none(tmp_path):
    unknown = "".join(f"unknown_{i}: 1\n" for i in range(100))  # each is a comment in train.yaml
    path, output, known = tmp_path / "a.yaml", tmp_path / "out", "base_model: m\nmicro_batch_size: 1\n"
    path.write_text(f"{known}datasets: [{{path: a.jsonl, type: chat_template}}]\n{unknown}")
    options = ImportConfigOptions(config_file=str(path), output_dir=str(output))
    with files_limited_to(1000), pytest.raises(OSError, match=rf"cannot write .*/train\.yaml: {ROOM}"):
        import_config(options)
    assert not list(output.iterdir())
    import_config(options)
    assert {path.name for path in output.iterdir()} == {"data.yaml", "train.yaml"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_other_errors_stay_what_they_are(number, tmp_path):
    path = tmp_path / "a"
    message = rf"cannot write .*/a: {os.strerror(number)}; .* 7 bytes, .* free"
    with pytest.raises(OSError, match=message), naming_failed_writes(path, parts=[path], needed_bytes=7):
        raise OSError(number, "from a library")
    with pytest.raises(PermissionError, match="mine"), naming_failed_writes(path, parts=[path]):
        raise PermissionError(errno.EACCES, "mine")


def test_a_missing_directory_is_no_lack_of_space(tmp_path):
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a")
    message = describe_failed_write("the checkpoint c", missing, tmp_path / "aside", 7)
    assert message == "cannot write the checkpoint c: [Errno 2] No such file or directory: 'a'"
    unknown = RuntimeError("a library's error")
    assert describe_failed_write("c", unknown, tmp_path / "aside", 7).endswith(" free")


def test_a_twentieth_has_to_be_left(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1050})
    monkeypatch.setattr("mini_trainer.data.stores.disk.shutil.disk_usage", lambda path: usage)
    make_aside(tmp_path / "step_1", 1000, what="the checkpoint")
    with pytest.raises(OSError, match=r"^no room for the checkpoint \S*/step_2: .* 1,051 bytes .* has 1,050 free"):
        make_aside(tmp_path / "step_2", 1001, what="the checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == [".writing_step_1"]


def test_a_run_finds_no_room_for_its_adapter_only_after_it_has_trained(world, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_trainer.data.stores.disk.shutil.disk_usage", lambda path: type("Usage", (), {"free": 9}))
    options = make_inputs(tmp_path, "llama") | OPTIONS | dict(lora=True, output_dir=str(tmp_path / "run"))
    with pytest.raises(RunError, match=rf"^no room for an adapter in --output-dir {tmp_path}/run: it needs "):
        train_here(world, **options)
    assert read_lines(tmp_path / "run" / "training_metrics_0.jsonl") == []
