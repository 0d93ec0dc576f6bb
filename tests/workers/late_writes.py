"""Runs a script whose checkpoints are written only once a file has N lines: late_writes.py FILE N SCRIPT WORD..."""

import runpy
import sys
import time
from pathlib import Path

from mini_trainer.run import checkpoint_files

SECONDS = 60  # at most
file, num_lines, write = Path(sys.argv[1]), int(sys.argv[2]), checkpoint_files.write_tensors


def write_late(*args: object) -> object:
    deadline = time.monotonic() + SECONDS
    while file.read_bytes().count(b"\n") < num_lines:
        assert time.monotonic() < deadline, f"{file} has fewer than {num_lines} lines"
        time.sleep(0.01)
    return write(*args)


checkpoint_files.write_tensors = write_late
del sys.argv[:3]
runpy.run_path(sys.argv[0], run_name="__main__")
