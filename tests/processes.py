"""Runs the project's scripts as their users do: in processes, under torchrun."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def torchrun(num_processes: int, *argv: object) -> list[str]:
    """The command that runs `argv` in `num_processes` on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}",
            *map(str, argv)]  # fmt: skip


def torchrun_node(num_nodes: int, port: int, *argv: object) -> list[str]:
    """The command of one of `num_nodes` agents, one process each, that meet at `port` on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_nodes}", "--nproc-per-node=1",
            "--rdzv-id=test", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", *map(str, argv)]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(command: list[str], *, timeout: float = 240, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Runs to the end and returns what was printed; a run longer than `timeout` seconds fails the test."""
    return subprocess.run(
        command, cwd=ROOT, env=ENV | (env or {}), capture_output=True, text=True, timeout=timeout, check=False
    )


def flags(**options: object) -> list[str]:
    """Options as command-line flags."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words
