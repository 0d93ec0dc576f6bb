"""torchrun as `mini-trainer` starts it: it says whom it waits for, and one line says what it failed for."""

import os
import re
import socket
import subprocess
import sys

import pytest
from processes import ENV, ROOT, free_port

from mini_trainer.distributed import launcher
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.distributed.launcher import Meeting, count_machines, launch

ON_TWO = ["--nproc-per-node=1", "--nnodes=2"]


def start(tmp_path, *words: str) -> tuple[list[str], int]:
    """The lines of a train that never gets as far as training, and its exit code."""
    given = ["--model-name-or-path", "m", "--data-path", "d", "--max-steps", "1", "--output-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "mini_trainer", "train", *given, *ON_TWO, *words]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=90)
    return done.stderr.splitlines(), done.returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-conf=join_timeout=4",
         r"error: the rendezvous at localhost, port \d+: 1 of 2 machines came \(\S+\), in \d+ s"),
        ("--rdzv-backend=c10d --rdzv-endpoint=no.such.host.invalid:{port} --rdzv-conf=read_timeout=3",
         r"error: the rendezvous at no.such.host.invalid, port \d+ cannot be reached: [A-Z].*, in \d+ s \(.*\)"),
        ("--node-rank=1 --master-addr=127.0.0.1 --master-port={port} --rdzv-conf=timeout=3",
         r"error: the rendezvous at 127.0.0.1, port \d+ cannot be reached: Connection refused, in \d+ s \(.*\)"),
        ("--node-rank=0 --master-addr=127.0.0.1 --master-port={port} --rdzv-conf=timeout=3",
         r"error: the rendezvous at 127.0.0.1, port \d+: 1 of 2 machines came \(\S+\), in \d+ s \(.* 1/2 clients .*\)"),
    ],
    ids=["a machine never comes", "no such host", "nobody listens", "no other machine"],
)  # fmt: skip
def test_machines_that_do_not_meet_are_one_line(words, said, tmp_path):
    lines, code = start(tmp_path, *words.format(port=free_port()).split(), "--local-addr=127.0.0.1")
    *waiting, last = lines
    assert re.fullmatch(said, last) and code == ExitCode.PEER_DIED
    assert all(line.startswith("waiting for the rendezvous at ") for line in waiting) and len(waiting) <= 1


def test_an_endpoint_without_an_answer_is_said_within_seconds(capfd, monkeypatch):
    meeting = Meeting({"nnodes": "2", "rdzv-backend": "c10d", "rdzv-endpoint": f"127.0.0.1:{free_port()}"})
    meeting.started -= launcher.SECONDS_UNTIL_TOLD
    looks = iter([[], [os.getpid()]])
    monkeypatch.setattr(launcher, "list_children", lambda: next(looks))
    monkeypatch.setattr(socket, "getfqdn", lambda: "no.such.host.invalid")
    meeting.tell()
    own, waiting = capfd.readouterr().err.splitlines()
    assert own.startswith("this machine's own name, no.such.host.invalid, leads nowhere (")
    assert own.endswith("): pass --local-addr") and waiting.endswith(f"port {meeting.port}: Connection refused")


@pytest.mark.parametrize(("given", "added"), [({}, ["--local-addr=127.0.0.1"]), ({"nnodes": "2"}, []),
                                              ({"local-addr": "10.0.0.1"}, [])])  # fmt: skip
def test_one_machine_needs_no_name_of_its_own(given, added, monkeypatch):
    started = []
    monkeypatch.setattr("torch.distributed.run.main", started.append)
    monkeypatch.setattr(Meeting, "tell", lambda self: None)
    assert launch(given, ["python"]) == (ExitCode.DONE, "")
    options = [f"--{name}={value}" for name, value in given.items()]
    assert started == [[*options, *added, "--no-python", "python"]]


def test_what_torchrun_raises_beside_is_one_line_too(monkeypatch):
    def fail(words: list[str]) -> None:
        raise NotImplementedError("a bug")

    monkeypatch.setattr("torch.distributed.run.main", fail)
    assert launch({}, ["python"]) == (ExitCode.FAILED, "torchrun: NotImplementedError: a bug")


def test_the_number_of_machines_is_also_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "3:5")
    assert (count_machines({}), count_machines({"nnodes": "2"}), count_machines({"nnodes": "?"})) == (5, 2, 1)


def test_ranks_that_are_left_when_the_run_is_over_are_ended():
    program = (
        "import os, signal, subprocess; from mini_trainer.distributed import launcher\n"
        "launcher.SECONDS_TO_LEAVE, looks = 0.1, iter([None, 1, 1])\n"
        "with subprocess.Popen(['sleep', '60']) as child:\n"
        "    child.send_signal(signal.SIGSTOP)\n"
        "    launcher.end_ranks(lambda: next(looks))\n"
        "    print(child.wait(5))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=ENV, cwd=ROOT
    )
    assert done.stdout == "-9\n"
