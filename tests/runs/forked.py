"""Runs the project's scripts in new processes that are forked from one that has imported all they need.

A process that `torchrun` starts takes seconds of importing before its first line; a forked one takes a tenth of one.
Apart from that it is the same: a script as `__main__`, torchrun's environment, a store that the ranks meet at, pipes
that are files, a real exit code. What is not there is Python's own start, and torchrun, unless it is asked for, forked
too; tests about what a user starts take processes.py.

The server ends with the test session, and the processes with it, also when the session is killed.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from fork_server import start_server
from processes import ROOT, Job, list_children
from torch.distributed import TCPStore

TORCHRUN = ROOT / "tests" / "workers" / "torchrun.py"
SECONDS_TO_END = 30  # for a rank whose neighbour has failed, as torchrun gives it


def run_forked(
    num_ranks: int, *argv: object, timeout: float = 240, env: dict[str, str] | None = None, folder: Path = ROOT
) -> subprocess.CompletedProcess:
    """What `run(torchrun(num_ranks, *argv))` returns; with 0 ranks, what `python *argv` does, in `folder`.

    The first of `argv` is a script. AssertionError if that takes longer than `timeout` seconds.
    """
    words = [str(word) for word in argv]
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / name for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        ranks = ForkedRanks(num_ranks, words, *outputs, env=env, folder=folder)
        try:
            code = ranks.wait(timeout=timeout)
        finally:
            ranks.kill()
        stdout, stderr = (path.read_text() for path in outputs)
    assert code is not None, f"still running after {timeout} s:\n{stderr}"
    return subprocess.CompletedProcess(words, code, stdout, stderr)


def succeed(num_ranks: int, *argv: object, **options: object) -> subprocess.CompletedProcess:
    """What `run_forked` returns; AssertionError if the exit code is not 0."""
    done = run_forked(num_ranks, *argv, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class ForkedRanks:
    """A script's processes, as many as there are ranks; 0 ranks are one process without torchrun's environment.

    Seen from outside they are one process of subprocess.Popen, that of rank 0.
    """

    def __init__(
        self,
        num_ranks: int,
        argv: Sequence[str],
        stdout: Path,
        stderr: Path,
        *,
        env: dict[str, str] | None = None,
        folder: Path = ROOT,
    ):
        """Starts them; returns once every process is there. What they print is appended to the two files."""
        context = start_server()
        self.num_ranks, self.processes = num_ranks, []
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # there as long as this is
        for rank in range(max(1, num_ranks)):
            environment = describe_rank(rank, num_ranks, self.store.port) if num_ranks else {}
            arguments = (list(argv), environment | (env or {}), str(stdout), str(stderr), str(folder))
            process = context.Process(target=run_script, args=arguments)
            process.start()
            self.processes.append(process)
        self.pids = [process.pid for process in self.processes]
        self.pid = self.pids[0]

    @property
    def returncode(self) -> int | None:
        """None while one of them is left; then the code of the one process, or, as torchrun's, 0 or 1."""
        codes = [process.exitcode for process in self.processes]
        if None in codes:
            return None
        return codes[0] if self.num_ranks == 0 else int(any(codes))

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = 240) -> int | None:
        """Waits for their end as torchrun does, which ends the others when one has failed."""
        wait_for_all(self.processes, timeout=timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signals all of them that are left, as torchrun hands a signal on."""
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class ForkedJob(Job):
    """A run of a script on forked ranks in the background.

    There is no torchrun: when a rank is killed, the others have to end by themselves.
    """

    def __init__(self, num_ranks: int, argv: Sequence[str], output_dir: Path, *, env: dict[str, str] | None = None):
        self.output_dir, self.log = output_dir, output_dir.with_suffix(".log")
        self.log.write_text("")
        self.process = ForkedRanks(num_ranks, argv, self.log, self.log, env=env)
        self.find_ranks()

    def find_ranks(self) -> None:
        self.ranks = dict(enumerate(self.process.pids))

    def kill(self) -> None:
        self.process.kill()


class ForkedTorchrun(ForkedRanks):
    """torchrun itself, with `words` of its own; it is forked, and forks its ranks. All print to `log`, a new file."""

    def __init__(self, words: Sequence[str], argv: Sequence[object], log: Path):
        log.touch(exist_ok=False)
        super().__init__(0, [str(TORCHRUN), *words, *map(str, argv)], log, log)


class ForkedTorchrunJob(Job):
    """A run of a script under such a torchrun in the background."""

    def __init__(self, num_ranks: int, argv: Sequence[object], output_dir: Path):
        self.output_dir, self.log, self.ranks = output_dir, output_dir.with_suffix(".log"), {}
        self.process = ForkedTorchrun(["--standalone", f"--nproc-per-node={num_ranks}"], argv, self.log)

    def find_ranks(self) -> None:
        self.ranks = dict(enumerate(list_children(self.process.pid)))


def describe_rank(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """torchrun's environment, for what the program and torch read of it."""
    return dict(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there: no rank opens one
    )


def wait_for_all(processes: Sequence, *, timeout: float) -> None:
    """Waits until the processes have ended, at most this long; once one has failed, the others receive SIGTERM."""
    deadline, waiting = time.monotonic() + timeout, {process.sentinel: process for process in processes}
    has_failed = False
    while waiting and time.monotonic() < deadline:
        for sentinel in wait(list(waiting), timeout=deadline - time.monotonic()):
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode != 0 and not has_failed:
                has_failed, deadline = True, min(deadline, time.monotonic() + SECONDS_TO_END)
                for other in waiting.values():
                    other.terminate()


def run_script(argv: list[str], env: dict[str, str], stdout: str, stderr: str, folder: str) -> None:
    """In the new process: becomes `python *argv` in `folder`."""
    assert "preloaded" in sys.modules, "the fork server could not import preloaded.py"
    threading.Thread(target=end_with_session, daemon=True).start()
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ |= env
    os.chdir(folder)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def end_with_session() -> None:
    """Kills this process when the one that asked for it is gone."""
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
