"""What a start says in its first second, before data and models are read."""

import fcntl
import json
import pty
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import run_forked, succeed
from processes import ENV, ROOT, flags
from small_runs import OPTIONS, make_inputs
from tiny_models import FAMILIES, save_model

from mini_trainer.distributed.ending import ExitCode
from mini_trainer.options import TrainOptions, flatten_options, group_options
from mini_trainer.run.preflight import DiskUse, check_runs, check_start, estimate_use


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("first_second")
    return OPTIONS | make_inputs(root, "llama") | dict(max_steps=3, output_dir=str(root / "run"))


@pytest.fixture(scope="module")
def finished(given) -> Path:
    time.sleep(1)  # a start's record has seconds, and its inputs have to be older
    succeed(0, "train.py", *flags(**given))
    return Path(given["output_dir"])


def start(given: dict, **changes: object) -> str | None:
    options = {name: str(value) if isinstance(value, Path) else value for name, value in (given | changes).items()}
    options["data_path"] = (str(given["data_path"]),)
    return check_start(group_options(TrainOptions, **options))


def test_a_finished_run_is_done_and_says_where_its_model_is(given, finished):
    said = start(given)
    assert said.startswith("done already, since 2") and ": 3 steps, loss " in said
    assert f"\nmodel after the last step: {finished / 'hf_format' / 'samples_'}" in said
    assert (start(given, max_steps=5), start(given, resume="strict")) == (None, None)  # it would be resumed
    done = run_forked(2, "train.py", *flags(**given))
    assert done.returncode == 0 and done.stderr.count("done already") == 1


def test_a_finished_run_whose_inputs_have_changed_is_looked_at_again(given, finished):
    Path(given["data_path"]).touch()
    assert start(given) is None
    shutil.copytree(finished, finished.with_name("bare"))
    shutil.rmtree(finished.with_name("bare") / "checkpoints")
    with pytest.raises(ValueError, match=r"holds a finished run, of .* no longer the same: name a new directory$"):
        start(given, output_dir=finished.with_name("bare"))


def test_other_options_are_named_before_data_is_read(given, finished):
    with pytest.raises(
        ValueError, match=r"holds a finished run with other learning-rate \(\S+ before, now 0.5\): name"
    ):
        start(given, learning_rate=0.5)
    assert start(given, learning_rate=0.5, allow_changed_options=True) is None
    with pytest.raises(ValueError, match="holds a run, which --resume none does not resume: name a new one"):
        start(given, resume="none")


def test_nobody_is_told_to_remove_what_is_no_runs(given, tmp_path):
    for name in ("chats.jsonl", "b.csv", "c.csv", "d.csv"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError) as refused:
        start(given, output_dir=tmp_path)
    message = str(refused.value)
    assert message.endswith(f"(b.csv, c.csv, chats.jsonl and 1 more): give the run a directory of its own, such as"
                            f" {tmp_path / 'run'}")  # fmt: skip
    assert "remove" not in message.replace(str(tmp_path), "")


@pytest.mark.parametrize("free, words", [(0, "1 checkpoint of [0-9,]+ bytes and 1 export of "), (10**9, None)])
def test_a_disk_without_room_is_said_at_once(free, words, given, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("mini_trainer.data.stores.disk.shutil.disk_usage", lambda path: usage._replace(free=free))
    options = given | dict(output_dir=tmp_path / "new")
    if words is None:
        return start(options)
    with pytest.raises(OSError, match=f"^no room for {words}.* in --output-dir {tmp_path}/new: it needs .* has 0 free"):
        start(options)
    with pytest.raises(OSError, match=r"^no room for 12 exports of [0-9,]+ bytes in output_dir: "):
        check_runs(tmp_path, [({"model_name_or_path": str(given["model_name_or_path"])}, 12)], flag="output_dir: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        dict(),
        dict(optimizer="muon", export_dtype="float32"),
        dict(optimizer="adamw8bit", master_weights="bfloat16"),
        dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_cache_dir="CACHE"),
    ],
    ids=["full", "muon", "8 bits", "osft"],
)
def test_the_estimate_is_no_more_than_what_a_run_writes(method, given, tmp_path):
    """Its files, as the disk has them, are the oracle; of a model without multiples of blocks 8 bits round up."""
    method = {name: str(tmp_path / "cache") if value == "CACHE" else value for name, value in method.items()}
    options = given | method | dict(output_dir=str(tmp_path / "run"), max_steps=1)
    values = flatten_options(group_options(TrainOptions, **options | dict(data_path=(str(given["data_path"]),))))
    use = estimate_use(values | {"model_name_or_path": str(given["model_name_or_path"])})
    succeed(0, "train.py", *flags(**options))
    written = (tmp_path / "run" / "checkpoints" / "step_1" / "rank_00000.safetensors").stat().st_size
    assert 0.5 * written * (not method.get("osft")) < use.checkpoint_bytes <= written
    (export,) = (tmp_path / "run" / "hf_format").glob("samples_*/model.safetensors")
    assert 0.9 * export.stat().st_size < use.export_bytes <= export.stat().st_size


def test_the_checks_need_no_torch(given, tmp_path):
    program = (
        "import sys; sys.argv = ['train.py']\n"
        "from mini_trainer.options import TrainOptions; from mini_trainer.options.command_line import parse_options\n"
        "from mini_trainer.run.preflight import begin\n"
        "begin(parse_options(TrainOptions, sys.stdin.read().split('\\n')))\n"
        "print({'torch', 'transformers', 'numba', 'pyarrow', 'huggingface_hub'} & sys.modules.keys())\n"
    )
    words = "\n".join(map(str, flags(**given | dict(output_dir=tmp_path / "new"))))
    done = subprocess.run(
        [sys.executable, "-c", program], input=words, capture_output=True, text=True, env=ENV, cwd=ROOT, check=True
    )
    assert done.stdout == "set()\n"


# Rehearsed failures of the last write.


@pytest.mark.slow
def test_a_last_export_that_fails_leaves_a_checkpoint_from_which_the_same_command_exports(given, tmp_path):
    argv = flags(**given | dict(output_dir=tmp_path / "run", checkpoint_every_steps=None))
    (tmp_path / "run").mkdir()
    done = run_forked(2, ROOT / "tests/workers/no_exports.py", tmp_path / "run" / "hf_format", "train.py", *argv)
    assert (tmp_path / "run" / "exit.json").is_file() and done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert line.endswith("checkpoints/step_3 is complete: the same command continues there")
    assert f'"code": {ExitCode.IO.value},' in (tmp_path / "run" / "exit.json").read_text()
    (tmp_path / "run" / "hf_format").unlink()
    again = succeed(0, "train.py", *argv)
    assert "resuming from" in again.stderr and "step 3/3" not in again.stderr
    assert (tmp_path / "run" / "hf_format" / "latest" / "model.safetensors").is_file()


# Where it is started.


def test_a_terminal_without_columns_gets_lines():
    _, terminal = pty.openpty()
    program = "from mini_trainer.distributed.messages import shows_progress as shows; print(shows())"
    for columns in (0, 80):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        done = subprocess.run(
            [sys.executable, "-c", program], stderr=terminal, stdout=subprocess.PIPE, text=True, env=ENV, cwd=ROOT
        )
        assert done.stdout == f"{columns > 0}\n"


@pytest.mark.parametrize(
    ("said", "message"), [("3.10", "is Python 3.10, and mini_trainer needs 3.11"), ("", "is no Py")]
)
def test_make_says_that_python_is_too_old_before_pip_does(said, message, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncase \"$2\" in *'>='*) echo False;; *) echo {said};; esac\n")
    python.chmod(0o755)
    done = subprocess.run(["make", "-n", "test", f"PYTHON={python}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(("version", "is_made"), [("3.10.2", True), (".".join(map(str, sys.version_info[:3])), False)])
def test_make_makes_an_environment_of_another_python_anew(version, is_made, tmp_path):
    for name in ("Makefile", "tox.ini", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pyvenv.cfg").write_text(f"version = {version}\n")
    (tmp_path / ".venv" / "installed-test").touch()
    done = subprocess.run(
        ["make", "-n", "test", f"PYTHON={sys.executable}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ("venv --clear .venv" in done.stdout) == is_made == ("install.sh" in done.stdout), done.stderr


def test_a_models_folder_without_weights_is_named(given, tmp_path):
    model = save_model(FAMILIES["llama"], tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model: no weights: .*, only pytorch_model.bin. Pickles can run code"):
        start(given, output_dir=tmp_path / "new", model_name_or_path=model)


# What an attacker of these claims found.


def test_a_start_with_a_damaged_record_beside_a_good_checkpoint_is_not_refused(given, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "training_params.json").write_text("")
    assert start(given, output_dir=tmp_path / "run", max_steps=5) is None


def test_a_finished_run_resumed_from_its_own_earlier_checkpoint_is_not_refused(given, finished):
    assert start(given, resume=str(finished / "checkpoints" / "step_2"), max_steps=5) is None


@pytest.mark.parametrize("change", ["exit", "models", "data", "cwd", "starts"])
def test_what_a_start_would_look_at_is_not_done(change, given, finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    params = json.loads((run / "training_params.json").read_text())
    begun = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() + 60))  # after all files were made
    params["starts"][-1]["started"], params["options"]["output_dir"] = begun, str(run)
    (run / "training_params.json").write_text(json.dumps(params))
    assert start(given, output_dir=run).startswith("done already")
    if change == "exit":
        (run / "exit.json").write_text('{"code": 2}')  # of a later start
    if change == "starts":  # a damaged record
        (run / "training_params.json").write_text(json.dumps(params | {"starts": []}))
    if change == "models":
        shutil.rmtree(run / "hf_format")
    if change == "cwd":
        monkeypatch.chdir(tmp_path)
    data = dict(validation_data_path=("nowhere.arrow",), validate_every_steps=1) if change == "data" else {}
    assert start(given, output_dir=run, **data) is None


def test_the_disks_of_checkpoints_and_exports_are_looked_at_each(given, tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    usage, asked = shutil.disk_usage(tmp_path), []
    monkeypatch.setattr(Path, "stat", lambda path, **named: SimpleNamespace(st_dev=path.name, st_mode=0o40755))
    monkeypatch.setattr("shutil.disk_usage", lambda path: asked.append(path.name) or usage)
    DiskUse(1, 10, 1, 10).check(tmp_path / "run")
    assert asked == ["checkpoints", "hf_format"]
