"""The server that the tests' processes are forked from: one for all workers of pytest-xdist, which whoever starts them
starts, or one of a session's own. It has imported preloaded.py, which takes 12 CPU seconds.

`share_server` and `use_server` reach into multiprocessing, whose server is otherwise that of the process that began it.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

from processes import ENV
from pytest import MonkeyPatch

SERVER = forkserver._forkserver
PRIVATE = ("_forkserver_address", "_forkserver_authkey")  # the second from Python 3.14 on


def start_server() -> BaseContext:
    """The context whose processes are forked from the server; starts it unless it is there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ENV["PYTHONPATH"])  # Python 3.11's server does not receive sys.path
        SERVER.ensure_running()
    return context


def share_server() -> dict[str, str]:
    """Starts the server; what another process has to know to use it. It ends with this process."""
    start_server()
    return {name: getattr(SERVER, name) for name in PRIVATE if getattr(SERVER, name, None) is not None}


def use_server(shared: dict[str, str]) -> None:
    """Lets this process use another one's server."""
    for name, value in shared.items():
        setattr(SERVER, name, value)
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # handed to each process, which only keeps it open
    SERVER.ensure_running = lambda: None


def silence() -> None:
    """In a process of the server, whose stderr is the terminal: what is logged there is seen by nobody."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def measure_server() -> float:
    """CPU seconds of this process's server and of all processes that were forked from it; 0 without one."""
    if SERVER._forkserver_pid is None:
        return 0.0
    numbers = Path(f"/proc/{SERVER._forkserver_pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK")
