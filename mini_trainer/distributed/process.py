"""This process: its parent, its number among those started together, its garbage collector, and its open files.

Imports of torch and transformers make over half a million objects, which live as long as the process. The collector
would scan them all eight times: over one CPU second of the six until a tiny model's first step
(benchmarks/start_up.py).
"""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mini_trainer.options.reading import read_bytes, read_text

START_TIMEOUT = 600.0  # seconds for all ranks to join
SECONDS_UNTIL_TOLD, SECONDS_PER_NOTICE = 2.0, 30.0  # of a wait for other machines
NO_AGENT_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torch's: rank 0 then hosts the store

NAMES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))  # torchrun's and srun's variables
# Read at import, since this process is re-parented once torchrun has died.
PARENT = os.getppid()


def find_task() -> tuple[int, int] | None:
    """This process's number, from 1, and the number of processes; None if there is only one."""
    for names in NAMES:
        number, count = (os.environ.get(name, "") for name in names)
        if number.isdecimal() and count.isdecimal() and int(count) > 1:
            return int(number) + 1, int(count)
    return None


def check_tasks() -> None:
    """ValueError for one of several tasks of srun without torchrun: each would be a separate run, on one GPU."""
    if (task := find_task()) is not None and "RANK" not in os.environ:
        raise ValueError(
            f"srun has started {task[1]} tasks without torchrun, and each would be a separate run. For one run start"
            f" torchrun once per node, which starts the ranks, as examples/clusters/multi_node.sbatch does: srun"
            " --ntasks-per-node=1 torchrun ...; for a run each: torchrun --standalone --nproc-per-node=1 ..."
        )


def pause_collector() -> None:
    """Stops automatic collections; a script calls this before its heavy imports."""
    gc.disable()


def resume_collector() -> None:
    """Resumes automatic collections, which never scan what exists now."""
    gc.freeze()
    gc.enable()


@contextmanager
def without_collector() -> Iterator[None]:
    """Stops automatic collections for as long as the block runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def raise_open_file_limit() -> None:
    """Raises the soft limit on open files to the hard one, as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def may_be_launcher(pid: int) -> bool:
    """False if process `pid` has merely adopted this one, because torchrun died before this process read its parent.
    torchrun is a Python program; a wrapper between it and this program has torchrun's environment variables."""
    process = Path(f"/proc/{pid}")
    try:
        if b"python" in read_bytes(process / "cmdline").split(b"\0")[0].lower():
            return True
    except OSError:
        return True  # Unknown; a false alarm would end a healthy run.
    try:
        # A process can change its name.
        is_python = "python" in os.readlink(process / "exe").lower()
        return is_python or b"\0TORCHELASTIC_RUN_ID=" in b"\0" + read_bytes(process / "environ")
    except OSError:
        return False  # another user's process, such as init


def count_local_ranks() -> int:
    """Number of ranks per node, from torchrun's environment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def list_children() -> list[int]:
    """The processes that this one has started; empty where the system does not say."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread is gone
            found += map(int, read_text(path).split())
    return found
