"""Runs the project's scripts in new processes that are forked from one that has imported all they need.

A process that `torchrun` starts takes seconds of importing before its first line; a forked one takes a tenth of one.
Apart from that it is the same: a script as `__main__`, torchrun's environment, a store that the ranks meet at, pipes
that are files, a real exit code. What is not there is torchrun itself, and Python's own start; tests about these take
processes.py.

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
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path

from processes import ROOT
from torch.distributed import TCPStore

SECONDS_TO_END = 30  # for a rank whose neighbour has failed, as torchrun gives it


def start_server() -> BaseContext:
    """The context whose processes are forked from a server that has imported preloaded.py."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Python 3.11's server takes no other
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    return context


def run_forked(
    num_ranks: int, *argv: object, timeout: float = 240, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """What `run(torchrun(num_ranks, *argv))` returns; with 0 ranks, what `python *argv` does.

    The first of `argv` is a script. AssertionError if that takes longer than `timeout` seconds.
    """
    context = start_server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [str(word) for word in argv]
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / name for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        processes = []
        for rank in range(max(1, num_ranks)):
            environment = describe_rank(rank, num_ranks, store.port) if num_ranks else {}
            process = context.Process(target=run_script, args=(words, environment | (env or {}), *map(str, outputs)))
            process.start()
            processes.append(process)
        try:
            codes = wait_for_all(processes, timeout=timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        stdout, stderr = (path.read_text() for path in outputs)
    assert None not in codes, f"still running after {timeout} s:\n{stderr}"
    code = codes[0] if num_ranks == 0 else int(any(codes))
    return subprocess.CompletedProcess(words, code, stdout, stderr)


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


def wait_for_all(processes: Sequence, *, timeout: float) -> list[int | None]:
    """The processes' exit codes, None of one that goes on; once one has failed, the others are told to end."""
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
    return [process.exitcode for process in processes]


def run_script(argv: list[str], env: dict[str, str], stdout: str, stderr: str) -> None:
    """In the new process: becomes `python *argv` in the root of the project."""
    assert "preloaded" in sys.modules, "the fork server could not import preloaded.py"
    threading.Thread(target=end_with_session, daemon=True).start()
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ |= env
    os.chdir(ROOT)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def end_with_session() -> None:
    """Kills this process when the one that asked for it is gone."""
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
