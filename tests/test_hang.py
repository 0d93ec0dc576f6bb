"""What is found of a hang: who has not entered which collective, and processes that nothing wakes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from forked import ForkedJob
from processes import ENV, ROOT, flags
from small_runs import OPTIONS, make_inputs

from mini_trainer.distributed import hang
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.distributed.hang import Peer, compare, describe_stands, end_silent, find_silent, limit_slow


def make_peers(*stands: dict | None) -> dict[int, Peer]:
    return {rank: Peer("h", 7, 9.0, 9.0, 60.0, stand=stand) for rank, stand in enumerate(stands)}


def at(stack: str, **collectives: tuple[int, str]) -> dict:
    return {"stack": f"  {stack}", "collectives": {name: list(last) for name, last in collectives.items()}}


def test_ranks_that_have_not_entered_a_collective_are_named():
    ahead, behind = at("b", world=(41, "all_reduce"), own=(9, "x")), at("a", world=(40, "all_gather"))
    (line,) = compare(make_peers(ahead, ahead, behind, ahead, None))
    assert line == "the last collective of rank 2 is all_gather 40, others have entered all_reduce 41"
    assert list(compare(make_peers(ahead, ahead, None))) == []  # who has not answered is not accused


def test_ranks_that_have_answered_are_silent():
    peers = make_peers(at("a"), None, None)
    assert list(find_silent(peers, 12.0)) == [] and list(find_silent(peers, 12.1)) == [1, 2]


def test_equal_stacks_stand_together():
    assert describe_stands(make_peers(at("b"), at("a"), at("b"), None)) == "ranks 0, 2:\n  b\n\nrank 1:\n  a\n"


def test_slow_phases_follow_the_option():
    assert [limit_slow(seconds) for seconds in (600, 60, 5)] == [3600, 360, 120]  # the least is two minutes


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "60"], env=ENV | {"RANK": "2"}) as process:
        yield process
        process.kill()


def test_a_stopped_process_of_this_host_and_launch_is_ended_and_no_other(sleeper):
    host = socket.gethostname()
    sleeper.send_signal(signal.SIGSTOP)
    strangers = [(2, "elsewhere", sleeper.pid), (2, host, sleeper.pid)]  # not started by this process's parent
    assert end_silent(strangers, host) == [] and sleeper.poll() is None
    program = (
        "import socket, sys; from mini_trainer.distributed.hang import end_silent\n"
        "for rank in (1, 2):\n"  # of which one is another's
        "    told = end_silent([(rank, socket.gethostname(), int(sys.argv[1]))], socket.gethostname())\n"
        "    print(told, open(f'/proc/{sys.argv[1]}/stat').read().rpartition(')')[2].split()[0])\n"
    )
    command = [sys.executable, "-c", program, str(sleeper.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=ENV)
    assert done.stdout == "[] T\n[] Z\n" and sleeper.wait(5) == -signal.SIGKILL


def test_a_process_that_the_kernel_holds_is_named_and_left(monkeypatch):
    monkeypatch.setattr(hang, "read_status", lambda pid: ("D", os.getppid()))
    monkeypatch.setattr(hang, "is_rank", lambda pid, rank: True)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    (line,) = end_silent([(0, "here", 4)], "here")
    assert line.startswith("pid 4 on here is in an uninterruptible call of the kernel") and "is left" in line


STUCK = """
import os, runpy, sys, time
from mini_trainer.run import step
update, num_updates = step.update_weights, 0

def update_or_sleep(*args, **named):
    global num_updates
    num_updates += 1
    if num_updates == 3 and os.environ["RANK"] == "2":
        time.sleep(1000)
    return update(*args, **named)

step.update_weights = update_or_sleep
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_rank_that_enters_no_collective_is_named_with_the_traces_of_all(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    given = (
        OPTIONS
        | make_inputs(tmp_path, "llama")
        | dict(output_dir=tmp_path / "run", max_steps=99, hang_timeout=5, checkpoint_every_steps=50)
    )
    job = ForkedJob(3, [script, *flags(**given)], tmp_path / "run")
    try:
        job.wait_for_step(2)
        job.wait_until_gone()
    finally:
        job.kill()
    outcome = job.outcome()
    assert outcome["code"] == ExitCode.HANG
    behind = r"; the last collective of rank 2 is gloo:\w+ (\d+), others have entered gloo:\w+ (\d+); "
    found = re.search(behind, outcome["message"])
    assert found and int(found[1]) < int(found[2]), outcome["message"]
    errors = tmp_path / "run" / "errors"
    summary = (errors / "summary.txt").read_text()
    assert "\nranks 0-1:\n" in summary and summary.rstrip().endswith("in update_or_sleep")
    for rank in range(3):
        assert "Thread 0x" in (errors / f"rank_{rank}.txt").read_text()
        (trace,) = json.loads((errors / f"rank_{rank}_collectives.json").read_text()).values()
        assert {"collective_seq_id", "profiling_name", "state"} <= trace["entries"][-1].keys()
