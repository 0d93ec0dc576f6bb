"""The tests' own way to run scripts: forked processes behave as started ones, and none outlives its session."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from breadth import long
from forked import ForkedTorchrunJob
from processes import ENV, is_alive, wait_until

pytestmark = pytest.mark.slow

RANK = """
import os, sys, time
rank = int(os.environ.get("RANK", -1))
print("rank", rank, *sys.argv[1:])
print("in", os.getcwd(), file=sys.stderr)
if sys.argv[1] == "fail" and rank == 1:
    raise SystemExit(7)
if sys.argv[1] != "end":
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(RANK)
    return path


@pytest.mark.parametrize(("word", "code"), [long("end", 0), ("fail", 1)])
def test_a_forked_torchrun_is_its_ranks_parent_and_ends_as_torchrun_does(word, code, script, tmp_path):
    first = "import os; print(os.getppid(), os.environ['LOCAL_RANK'], 'TORCHELASTIC_RUN_ID' in os.environ, flush=True)"
    script.write_text(f"{first}\n{RANK}")
    job = ForkedTorchrunJob(2, [script, word], tmp_path / "job")
    try:
        assert job.process.wait() == code, job.log.read_text()
    finally:
        job.kill()
    lines = job.log.read_text().splitlines()
    assert {f"{job.process.pid} {rank} True" for rank in range(2)} <= set(lines)


@pytest.mark.long
def test_no_process_outlives_a_session_that_is_killed(script, tmp_path):
    session = tmp_path / "session.py"
    session.write_text(f"from forked import run_forked\nif __name__ == '__main__': run_forked(2, {str(script)!r}, 'x')")
    script.write_text(f"import os, time\nopen({str(tmp_path)!r} + '/pid_' + str(os.getpid()), 'w')\ntime.sleep(600)")
    with subprocess.Popen([sys.executable, session], env=ENV) as process:
        while len(found := list(tmp_path.glob("pid_*"))) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    wait_until(lambda: not any(is_alive(int(path.name.removeprefix("pid_"))) for path in found), seconds=100)
