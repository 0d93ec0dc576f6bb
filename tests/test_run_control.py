"""Runs end together, soon, and say why: dead, failing, frozen ranks, requests to stop, two runs on one directory."""

import _thread
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from breadth import wide
from in_process import Unwatched
from processes import ENV, ROOT, is_alive, wait_until

from mini_trainer.distributed.ending import (
    BY_USER,
    STOPS,
    Cause,
    ExitCode,
    Flag,
    RunError,
    choose_cause,
    describe_error,
    stop_reason,
    within,
)
from mini_trainer.distributed.hang import Peer, describe_hang, is_hanging
from mini_trainer.distributed.lock import RunLock, read_boot_id, write_exit_file
from mini_trainer.distributed.process import may_be_launcher
from mini_trainer.distributed.watch import FIRST_STEPS
from mini_trainer.options import TrainOptions, group_options, parse_duration
from mini_trainer.run.due import Calendar
from mini_trainer.sampler import RunPosition

pytestmark = pytest.mark.slow
SECRET = "hunter2-hunter2"
PROMISE = 10.0  # seconds within which all ranks are gone


class Ranks:
    """`num_ranks` processes of workers/controlled.py under a parent that stands for torchrun, also if that has started
    each on a node of its own."""

    def __init__(
        self,
        directory: Path,
        num_ranks: int,
        *,
        hang_timeout: float = 60,
        max_seconds: float = 0,
        num_local: int | None = None,
    ):
        self.directory, self.num_ranks = directory, num_ranks
        words = [sys.executable, str(ROOT / "tests/workers/controlled.py"), str(directory), str(hang_timeout)]
        num_local = num_local or num_ranks
        start = "".join(
            f"RANK={r} LOCAL_RANK={r % num_local} {' '.join(words)} {max_seconds} 2> {directory}/stderr_{r} & "
            for r in range(num_ranks)
        )
        env = ENV | {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_local), "TORCHELASTIC_RUN_ID": "test"}
        env |= {"MASTER_ADDR": "127.0.0.1", "TEST_API_KEY": SECRET}
        self.parent = subprocess.Popen(["sh", "-c", f"{start} wait"], env=env)

    def wait(self, pattern: str = "steps_*") -> "Ranks":
        """Returns once every rank has made a step, or has started (`pid_*`)."""
        deadline = time.monotonic() + 60
        while len([path for path in self.directory.glob(pattern) if path.read_text()]) < self.num_ranks:
            assert time.monotonic() < deadline, self.stderr()
            time.sleep(0.02)
        self.pids = [int((self.directory / f"pid_{rank}").read_text()) for rank in range(self.num_ranks)]
        return self

    def order(self, rank: int, what: str) -> None:
        (self.directory / f"rank_{rank}").write_text(what)

    def send(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def wait_until_gone(self, *ranks: int, seconds: float = PROMISE) -> None:
        pids = [self.pids[rank] for rank in ranks or range(self.num_ranks)]
        deadline = time.monotonic() + seconds
        while any(map(is_alive, pids)):
            assert time.monotonic() < deadline, f"alive: {[is_alive(pid) for pid in self.pids]}\n{self.stderr()}"
            time.sleep(0.02)

    def are_alive(self) -> bool:
        return all(map(is_alive, self.pids))

    def stderr(self) -> str:
        return "".join((self.directory / f"stderr_{rank}").read_text() for rank in range(self.num_ranks))

    def outcome(self) -> dict:
        return json.loads((self.directory / "run" / "exit.json").read_text())

    def close(self) -> None:
        self.parent.kill()
        self.parent.wait()
        for path in self.directory.glob("pid_*"):
            if is_alive(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def ranks(tmp_path):
    """Starts `Ranks`, and leaves none of them behind."""
    started = []

    def start(num_ranks: int, **options) -> Ranks:
        started.append(Ranks(tmp_path, num_ranks, **options))
        return started[-1]

    yield start
    for group in started:
        group.close()


def check_outcome(group: Ranks, code: ExitCode, rank: int, words: str) -> None:
    """The cause stands in exit.json, and is printed by one rank, once."""
    outcome = group.outcome()
    assert (outcome["code"], outcome["name"], outcome["rank"]) == (code, code.name.lower(), rank)
    assert words in outcome["message"]
    assert outcome["step"] >= 0 and outcome["host"] == socket.gethostname() and outcome["time"]
    assert group.stderr().count(outcome["message"]) == 1, group.stderr()
    assert group.stderr().count("error: ") == (code not in (ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER))


def test_all_ranks_end_together_once_the_last_is_done(ranks):
    group = ranks(3).wait()
    group.order(0, "finish")
    group.order(2, "finish")
    time.sleep(1)
    assert group.are_alive()
    group.order(1, "finish")
    group.wait_until_gone()
    assert group.outcome()["name"] == "done"
    assert group.stderr() == ""
    assert sorted(os.listdir(group.directory / "run")) == ["exit.json", "params.json"]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_raises_is_named_first_and_once(rank, ranks):
    group = ranks(4).wait()
    group.order(rank, "raise")
    group.wait_until_gone()
    check_outcome(group, ExitCode.FAILED, rank, "RuntimeError: the third wheel came off")
    assert group.stderr().count("Traceback") == 1
    assert (f"error: rank 2 on {socket.gethostname()}: " in group.stderr()) == (rank == 2)


def test_what_a_user_can_mend_has_no_traceback(ranks):
    group = ranks(3).wait()
    for rank in (2, 1):
        group.order(rank, "refuse")
    group.wait_until_gone()
    check_outcome(group, ExitCode.BAD_INPUT, group.outcome()["rank"], "row 7 is bad")
    assert group.outcome()["rank"] in (1, 2)
    assert "Traceback" not in group.stderr()


def test_each_node_prints_the_cause_once_without_secrets(ranks):
    group = ranks(4, num_local=2).wait()
    group.order(3, "leak")
    group.wait_until_gone()
    said = [(group.directory / f"stderr_{rank}").read_text().splitlines() for rank in range(4)]
    line = f"error: rank 3 on {socket.gethostname()}: the key *** is wrong"
    assert said == [[line], [], [f"[rank 2] {line}"], []]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others(rank, ranks):
    group = ranks(3).wait()
    group.send(rank, signal.SIGKILL)
    group.wait_until_gone()
    check_outcome(group, ExitCode.PEER_DIED, rank, f"rank {rank} (pid {group.pids[rank]} on")
    assert (group.directory / "run" / ".lock").exists() == (rank == 0)
    RunLock(group.directory / "run").release()  # the next start takes the lock of a dead process over


def test_a_watch_that_fails_ends_its_process(ranks):
    group = ranks(2).wait()
    group.order(1, "break_the_watch")
    group.wait_until_gone()
    assert (group.outcome()["name"], group.outcome()["rank"]) == ("peer_died", 1)
    assert "ZeroDivisionError" in (group.directory / "stderr_1").read_text()


def test_ranks_whose_parent_was_killed_end(ranks):
    group = ranks(2).wait()
    group.parent.kill()
    group.parent.wait()
    group.wait_until_gone()
    assert group.outcome()["name"] == "peer_died"
    assert group.stderr().count(f"error: torchrun (pid {group.parent.pid}") == 1


def test_what_adopts_an_orphan_is_not_taken_for_torchrun():
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    for more, is_launcher in (({}, False), ({"TORCHELASTIC_RUN_ID": "test"}, True)):
        with subprocess.Popen(["cat"], env=env | more, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()  # it runs
            assert may_be_launcher(process.pid) == is_launcher
    assert may_be_launcher(os.getpid())  # a Python program, as torchrun is


def test_a_call_with_a_time_limit_is_made_although_no_thread_can_start(monkeypatch):
    monkeypatch.setattr(_thread, "start_new_thread", lambda function, args: None)  # it died before its first line
    called = []
    within(1.0, lambda: called.append(1))
    assert called == [1]


@pytest.mark.parametrize("rank", [wide(0), 1])
def test_a_frozen_rank_is_named_and_the_others_leave_their_stacks(rank, ranks):
    group = ranks(3, hang_timeout=4).wait()
    group.send(rank, signal.SIGSTOP)
    others = [other for other in range(3) if other != rank]
    group.wait_until_gone(seconds=4 + PROMISE)  # the frozen one, too, although nothing wakes it
    outcome = group.outcome()
    assert outcome["name"] == "hang"
    assert f"rank {rank} (pid {group.pids[rank]} on" in outcome["message"]
    assert group.stderr().count("error: ") == 1
    for other in others:
        text = (group.directory / "run" / "errors" / f"rank_{other}.txt").read_text()
        assert f"rank {other}, pid {group.pids[other]} on " in text
        assert "take_part" in text and "distributed/watch.py" in text  # the training thread and the watch
        assert "steps done" in text


def test_a_rank_that_stands_still_ends_the_run(ranks):
    group = ranks(2, hang_timeout=4).wait()
    group.order(1, "stand_still")
    group.wait_until_gone(seconds=4 + PROMISE)
    check_outcome(group, ExitCode.HANG, 0, "(--hang-timeout): ")
    assert "rank 1 in step" in group.outcome()["message"]
    errors = {path.name: path.read_text() for path in (group.directory / "run" / "errors").iterdir()}
    assert errors.keys() == {"rank_0.txt", "rank_1.txt", "summary.txt"}
    assert re.search(r"\nrank 1:\n(  .*\n)*  .*controlled.py:\d+ in take_part\n", errors["summary.txt"])


def test_neither_a_slow_phase_nor_a_suspended_job_is_a_hang(ranks):
    group = ranks(2, hang_timeout=2).wait()
    for rank in (0, 1):
        group.send(rank, signal.SIGSTOP)
    time.sleep(4)
    for rank in (1, 0):
        group.send(rank, signal.SIGCONT)
    for rank in (0, 1):
        group.order(rank, "save_slowly")
    time.sleep(3.5)
    assert group.are_alive(), group.stderr()
    group.wait_until_gone()
    assert group.outcome()["name"] == "done"


def test_strangers_at_the_lifelines_port_change_nothing(ranks):
    group = ranks(2).wait()
    address = json.loads((group.directory / "lifeline.json").read_text())
    place, token = ("127.0.0.1", address["port"]), address["token"]
    hello = dict(kind="hello", rank=1, host="x", pid=1)
    for text in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"x" * 300_000,
        b"[" * 150_000,
        b'{"kind": "hello", "rank": Infinity, "token": "no"}',
        json.dumps(hello | {"token": "no"}).encode(),
    ):
        with socket.create_connection(place) as stranger:
            stranger.sendall(text + b"\n")
    with socket.create_connection(place) as second:  # a rank that is there already
        second.sendall(json.dumps(hello | {"token": token}).encode() + b"\n")
        assert second.recv(100) == b""
    group.order(0, "finish")
    group.order(1, "finish")
    group.wait_until_gone()
    assert group.outcome()["name"] == "done"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, ExitCode.SAVED_AND_REQUEUE),
        (signal.SIGUSR1, ExitCode.SAVED_AND_REQUEUE),
        (signal.SIGINT, ExitCode.STOPPED_BY_USER),
    ],
)
def test_a_signal_ends_the_run_after_the_step(number, code, ranks):
    group = ranks(1).wait()
    group.send(0, number)
    with contextlib.suppress(ProcessLookupError):  # SLURM and torchrun both send one
        group.send(0, number)
    group.wait_until_gone()
    check_outcome(group, code, 0, f"{number.name}")


@pytest.mark.parametrize(
    ("num_ranks", "first"),
    [(1, [signal.SIGTERM]), (2, [signal.SIGTERM]), (1, [signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM])],
)
def test_a_second_signal_ends_a_rank_that_cannot_finish_its_step(num_ranks, first, ranks):
    """Repeated warnings of the scheduler do not, nor does the first signal after them."""
    group = ranks(num_ranks).wait()
    group.order(0, "stand_still")
    time.sleep(0.2)
    for number in first:
        group.send(0, number)
        time.sleep(2.2)
        assert group.are_alive()
    group.send(0, signal.SIGTERM)
    group.wait_until_gone()
    check_outcome(group, ExitCode.INTERRUPTED, 0, "second signal (SIGTERM)")


def test_a_warning_to_the_launcher_reaches_a_rank_that_it_starts_later():
    rank = "import time; from mini_trainer.distributed.watch import RunControl\ntime.sleep(1)\n"
    rank += "RunControl(hang_timeout=60, max_seconds=None).start(); time.sleep(60)"
    launcher = f"""
import os, signal, subprocess, sys
from mini_trainer.distributed import children
children.SECONDS_BETWEEN_WARNINGS = 0.2
children.hand_on_warning()
os.kill(os.getpid(), signal.SIGUSR1)
sys.exit(subprocess.call([sys.executable, "-c", {rank!r}]))
"""
    done = subprocess.run([sys.executable, "-c", launcher], env=ENV, cwd=ROOT, capture_output=True, text=True)
    said = "SIGUSR1 before the first step: nothing new to save\n"
    assert (done.returncode, done.stderr) == (ExitCode.SAVED_AND_REQUEUE, said)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.SAVED_AND_REQUEUE)]
)
def test_a_signal_before_the_first_step_ends_at_once(number, status, ranks, tmp_path):
    (tmp_path / "wait_at_the_start").touch()
    group = ranks(1).wait("pid_*")
    group.send(0, number)
    group.wait_until_gone()
    assert f"{number.name} before the first step" in group.stderr()
    assert not (tmp_path / "run").exists()


def test_max_time_and_the_stop_file(ranks, tmp_path):
    group = ranks(1, max_seconds=1).wait()
    group.wait_until_gone()
    check_outcome(group, ExitCode.SAVED_AND_REQUEUE, 0, "--max-time")
    group.close()
    for path in tmp_path.glob("*_0"):
        path.unlink()
    group = ranks(1).wait()
    (tmp_path / "run" / "stop").touch()
    group.wait_until_gone()
    check_outcome(group, ExitCode.STOPPED_BY_USER, 0, "the stop file")
    assert sorted(os.listdir(tmp_path / "run")) == ["exit.json", "params.json"]


def test_a_directory_in_use_is_refused_and_its_lock_touched(ranks, tmp_path):
    group = ranks(1).wait()
    with pytest.raises(RunError, match=rf"--output-dir \S*run .*pid {group.pids[0]} on ") as refusal:
        RunLock(tmp_path / "run")
    assert refusal.value.code == ExitCode.LOCKED
    os.utime(tmp_path / "run" / ".lock", (0, 0))
    wait_until(lambda: (tmp_path / "run" / ".lock").stat().st_mtime > 0, seconds=30)  # its heartbeat
    group.order(0, "finish")
    group.wait_until_gone()
    lock = RunLock(tmp_path / "run")
    with pytest.raises(RunError):
        RunLock(tmp_path / "run")
    lock.release()
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("lives", [True, False])
def test_the_lock_of_another_host_is_watched(lives, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_trainer.distributed.lock.SECONDS_TO_WATCH", 3)
    holder = {"host": "node7", "boot_id": "another", "pid": 12, "started": "2026-01-01"}
    (tmp_path / ".lock").write_text(json.dumps(holder))
    if not lives:
        lock = RunLock(tmp_path)
        assert json.loads((tmp_path / ".lock").read_text())["boot_id"] == read_boot_id()
        lock.release()
        return
    touch = f"import os, time\nfor _ in range(20): os.utime({str(tmp_path / '.lock')!r}); time.sleep(0.5)"
    toucher = subprocess.Popen([sys.executable, "-c", touch])
    with pytest.raises(RunError, match=r"pid 12 on node7, .*\.lock$"):
        RunLock(tmp_path)
    toucher.kill()
    toucher.wait()
    assert json.loads((tmp_path / ".lock").read_text()) == holder


def test_only_the_first_steps_may_start_over_and_the_limit_of_a_slow_phase_ends_with_it():
    control = Unwatched(hang_timeout=60, max_seconds=None)
    control.marks.fewer_tokens = 512
    for step in range(1, FIRST_STEPS + 1):
        assert control.marks.fewer_tokens == 512
        control.step_done(step)
    assert control.marks.fewer_tokens is None
    with control.slow("uploads", least=9):
        assert control.marks.least_slow == 9
    assert control.marks.least_slow == 0
    control.close()


def test_the_first_to_end_a_run_writes_the_exit_file(tmp_path):
    assert write_exit_file(tmp_path, {"code": 5})
    assert not write_exit_file(tmp_path, {"code": 6})
    assert json.loads((tmp_path / "exit.json").read_text()) == {"code": 5}
    assert os.listdir(tmp_path) == ["exit.json"]


def test_reasons_to_stop():
    assert stop_reason(0) is None
    assert stop_reason(Flag.CHECKPOINT_DUE) is stop_reason(Flag.EXPORT_DUE) is None
    assert stop_reason(Flag.SIGUSR1 | Flag.CHECKPOINT_DUE) == (ExitCode.SAVED_AND_REQUEUE, "SIGUSR1")
    assert stop_reason(STOPS ^ Flag.CALLBACK_FAILED)[0] == stop_reason(BY_USER)[0] == ExitCode.STOPPED_BY_USER
    assert stop_reason(STOPS)[0] == ExitCode.FAILED  # an error is not to be taken for a stop that was asked for


def test_what_is_due_after_a_step():
    """An epoch of 10 samples in batches of 4, validated and exported at its end, and a checkpoint every 4 steps."""
    given = dict(model_name_or_path="m", output_dir="o", validation_data_path=("v",), validate_at_epoch=True)
    given |= dict(checkpoint_at_epoch=True, save_final_checkpoint=True)

    def find_due(step: int, flags: int = 0, *, every: int | None = 4) -> tuple[str, ExitCode | None]:
        options = group_options(TrainOptions, **given, checkpoint_every_steps=every)
        calendar = Calendar(options.validation, options.checkpoints, options.exports, 10)
        due = calendar.find_due(RunPosition(step, 4 * step, 99, 4), num_steps=6, flags=flags)
        names = [name for name in ("validation", "checkpoint", "export", "is_last") if getattr(due, name)]
        return " ".join(names), due.stop and due.stop[0]

    expected = ["", "", "validation export", "checkpoint", "validation export", "validation checkpoint export is_last"]
    assert [find_due(step) for step in range(1, 7)] == [(names, None) for names in expected]
    assert find_due(1, Flag.SIGTERM) == ("checkpoint is_last", ExitCode.SAVED_AND_REQUEUE)
    assert find_due(1, Flag.CHECKPOINT_DUE | Flag.EXPORT_DUE) == ("checkpoint export", None)
    # A stop that the last step makes needless: the run is done.
    assert find_due(6, Flag.SIGTERM) == find_due(6)
    assert find_due(6, STOPS, every=None) == ("validation export is_last", None)


def make_cause(rank: int, message: str, *, died: bool = False) -> Cause:
    return Cause(ExitCode.PEER_DIED if died else ExitCode.FAILED, message, rank, f"host{rank}", 3, died=died)


def test_a_death_explains_errors_and_the_lowest_of_equals_speaks():
    reports = [make_cause(1, "connection closed"), make_cause(0, "connection reset"), make_cause(2, "gone", died=True)]
    assert choose_cause(reports).rank == 2
    assert choose_cause(reports[:2]).rank == 1
    assert choose_cause([make_cause(3, "the same"), make_cause(1, "another"), make_cause(2, "the same")]).rank == 2
    two = choose_cause([make_cause(5, "rank 5 died", died=True), make_cause(4, "rank 4 died", died=True)])
    assert two.rank == 5 and two.message.startswith("rank 5 died; ") and two.message.endswith(" rank 4")


def test_every_kind_of_error_has_its_code():
    import torch

    def code_of(error: BaseException) -> ExitCode:
        return describe_error(error, "step 3")[0]

    assert code_of(RunError(ExitCode.NON_FINITE, "x")) == ExitCode.NON_FINITE
    assert code_of(ValueError("x")) == ExitCode.BAD_INPUT
    assert code_of(OSError("x")) == ExitCode.IO
    assert code_of(RuntimeError("x")) == code_of(KeyError("x")) == ExitCode.FAILED
    assert code_of(torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == ExitCode.OUT_OF_MEMORY
    for allocate in (lambda: torch.empty(2**60), lambda: bytearray(2**60)):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            allocate()
        code, message, details = describe_error(raised.value, "step 3, micro-batch 1 of 2 (900 tokens)")
        assert code == ExitCode.OUT_OF_MEMORY and details == ""
        assert "step 3, micro-batch 1 of 2 (900 tokens): " in message and "--max-tokens-per-gpu" in message


def test_when_a_run_hangs_and_what_is_said():
    def peer(*, heard: float, moved: float, limit: float = 60.0, where: str = "step 5") -> Peer:
        return Peer("h", 10, heard, moved, limit, where)

    fine = {0: peer(heard=100, moved=100), 1: peer(heard=99, moved=45)}
    assert not is_hanging(fine, 100, 60, is_rank0=True)
    assert is_hanging(fine | {2: peer(heard=99, moved=39)}, 100, 60, is_rank0=True)
    assert not is_hanging(fine | {2: peer(heard=99, moved=39, limit=3600)}, 100, 60, is_rank0=True)
    silent = fine | {2: peer(heard=39, moved=39, limit=3600)}
    assert is_hanging(silent, 100, 60, is_rank0=True)
    assert re.match(r"rank 2 \(pid 10 on h\) .* 61 s, .*step 5", describe_hang(silent, 100))
    assert not is_hanging({0: peer(heard=39, moved=0), 1: fine[0]}, 100, 60, is_rank0=False)  # rank 0 speaks first
    assert is_hanging({0: peer(heard=31, moved=0), 1: fine[0]}, 100, 60, is_rank0=False)
    stuck = {0: peer(heard=100, moved=39, where="A"), 1: peer(heard=99, moved=40, where="B"), 2: fine[0]}
    assert " 61 s (--hang-timeout): rank 0 in A; rank 1 in B" in describe_hang(stuck, 100)


def test_durations():
    durations = {None: None, "90": 5400, "0.5": 30, "1:30:00": 5400, "100:00:01": 360001}
    assert {text: parse_duration(text) for text in durations} == durations
    for text in ("", "soon", "0", "-5", "0:00:00", "1:30", "1:60:00", "inf", "nan"):
        with pytest.raises(ValueError, match=f"^{text}: .*minutes"):
            parse_duration(text)
