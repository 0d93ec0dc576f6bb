"""Runs the project's scripts as their users do: in processes, under torchrun."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FOLDERS = [TESTS, *(TESTS / name for name in ("models", "rows", "runs", "servers"))]
PATHS = [ROOT, *FOLDERS, ROOT / "examples" / "quickstart", ROOT / "benchmarks"]
PYTHONPATH = os.pathsep.join(filter(None, [*map(str, PATHS), os.environ.get("PYTHONPATH")]))
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"}

# Makes the third optimizer step of rank 1 fail.
RAISING_RANK = """
import os
if os.environ.get("RANK") == "1":
    import torch
    step, calls = torch.optim.AdamW.step, []
    def fail_at_the_third(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("injected: a bug of rank 1")
        return step(*args, **kwargs)
    torch.optim.AdamW.step = fail_at_the_third
"""


def torchrun(num_processes: int, *argv: object) -> list[str]:
    """The command that runs `argv` in `num_processes` on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}",
            *map(str, argv)]  # fmt: skip


def torchrun_node(num_nodes: int, port: int, *argv: object) -> list[str]:
    """The command of one of `num_nodes` agents, one process each, that meet at `port` on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", *name_node(num_nodes, port), *map(str, argv)]


def name_node(num_nodes: int, port: int) -> list[str]:
    """torchrun's words for one of `num_nodes` agents, one process each, that meet at `port` on this machine."""
    return [f"--nnodes={num_nodes}", "--nproc-per-node=1", "--rdzv-id=test", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}"]  # fmt: skip


def free_port() -> int:
    """A port for processes that must know it before any of them listens: none that the system gives to others."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = first_given // 2 + secrets.randbelow(first_given // 2)
        if not is_listening(port):
            return port


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run(
    command: list[str], *, timeout: float = 240, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess:
    """Runs to the end and returns what was printed; a run longer than `timeout` seconds fails the test."""
    return subprocess.run(
        command, cwd=cwd, env=ENV | (env or {}), capture_output=True, text=True, timeout=timeout, check=False
    )


def run_and_list(report: Path, *argv: object) -> dict:
    """Runs a program to its end; what it had imported, and how the collector was."""
    done = run([sys.executable, "tests/workers/loaded.py", str(report), *map(str, argv)])
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())


def run_unread(command: list[str]) -> subprocess.CompletedProcess:
    """Runs to the end with a stdout that nobody reads, as `| head` leaves it."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(command, cwd=ROOT, env=ENV, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=240)
    finally:
        os.close(writer)


def check_serving(command: list[str], what: str) -> None:
    """Checks that the command serves `what` and ends quietly on Ctrl-C, and that a second one finds the port taken."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, "--port", "0"], cwd=ROOT, env=ENV, stdout=pipe, stderr=pipe, text=True)
    try:
        line = process.stdout.readline()
        address = re.fullmatch(rf"{what}: http://127\.0\.0\.1:(\d+)/ \(Ctrl-C stops it\)\n", line)
        assert address, line or process.stderr.read()
        second = run([*command, "--port", address[1]])
        assert second.returncode == 2 and f"--port {address[1]}: not available" in second.stderr
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()


def wait_until(
    holds: Callable[[], object], *, seconds: float, by: subprocess.Popen | None = None, said: Callable[[], object] = str
) -> None:
    """Returns once it holds; fails after so many seconds, or if the process `by` has ended, with what was `said`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert (by is None or by.poll() is None) and time.monotonic() < deadline, said()
        time.sleep(0.05)


def flags(**options: object) -> list[str]:
    """Options as command-line flags."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        values = map(str, value if isinstance(value, tuple) else (value,))
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", *values]
    return words


class Job:
    """A training run in the background, whose processes can be found, signalled and waited for."""

    def __init__(self, command: list[str], output_dir: Path, *, env: dict[str, str] | None = None):
        self.output_dir, self.log = output_dir, output_dir.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=ENV | (env or {}), stdout=log, stderr=log)
        self.ranks = {}

    def wait_for_step(self, step: int, *, timeout: float = 300) -> None:
        """Returns once the metrics file has `step` lines, at once for 0; then `ranks` has each rank's process id."""
        wait_until(
            lambda: count_steps(self.output_dir) >= step, seconds=timeout, by=self.process, said=self.log.read_text
        )
        self.find_ranks()

    def find_ranks(self) -> None:
        """Fills `ranks` with the processes that torchrun has started, or with this one process."""
        for pid in list_children(self.process.pid):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            self.ranks |= {int(word.removeprefix(b"RANK=")): pid for word in environ if word.startswith(b"RANK=")}
        self.ranks = self.ranks or {0: self.process.pid}

    def wait_until_gone(self, *, timeout: float = 100) -> None:
        """Returns once no rank is left; torchrun may still be writing its report."""
        wait_until(lambda: not any(map(is_alive, self.ranks.values())), seconds=timeout, said=self.log.read_text)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.ranks.values():
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)

    def outcome(self) -> dict:
        return json.loads((self.output_dir / "exit.json").read_text())


def list_children(pid: int) -> list[int]:
    """The processes that the main thread of process `pid` has started."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def count_steps(output_dir: Path) -> int:
    """The lines that a run has written so far; what follows the last one is still being written."""
    path = output_dir / "training_metrics_0.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
