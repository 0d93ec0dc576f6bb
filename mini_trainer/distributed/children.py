"""Runs the program's words as child processes: forwards Ctrl-C, and leaves no process behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import IO, NoReturn

from mini_trainer.distributed.messages import print_as_is
from mini_trainer.distributed.process import list_children
from mini_trainer.root_files import ROOT, is_checkout

ENDS_WITH_PARENT = "MINI_TRAINER_PARENT"  # environment variable: the process that the child must not outlive
SECONDS_TO_SAVE = 600  # for a run that is terminated because its caller raises
# Variables that torchrun and srun set for the processes that they start; PET_*: defaults of torchrun's own options.
OF_LAUNCHERS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
SECONDS_BETWEEN_WARNINGS = 5
LAUNCHERS = ("TORCHELASTIC_", "PET_")  # prefixes of others
NUM_LINES_KEPT = 200  # lines of output to search for the error message


def run_child(
    words: list[str],
    log: IO[str] | None = None,
    *,
    more: Mapping[str, str] = MappingProxyType({}),
    prints: bool = True,
    pass_fds: Collection[int] = (),
) -> tuple[int, str]:
    """Runs `python -m mini_trainer WORDS`; returns its exit code, and its error message or else its last lines.

    Its environment is this process's plus `more`, and it inherits the open files `pass_fds`. Its output is printed,
    unless `prints` is False, and written to `log`. Ctrl-C is forwarded, and raised here once the child has ended; a
    second one ends it without saving, a third kills it.
    """
    child = start_child(words, subprocess.PIPE, more=more, pass_fds=pass_fds)
    lines, num_interrupts = [], 0
    try:
        while True:
            try:
                for line in child.stdout:
                    if prints:
                        print_as_is(line, sys.stdout)
                    lines = [*lines[1 - NUM_LINES_KEPT :], line]
                    if log is not None:
                        log.write(line)
                        log.flush()
                code = child.wait()
                break
            except KeyboardInterrupt:
                num_interrupts += 1
                if num_interrupts > 2:
                    raise
                child.send_signal(signal.SIGINT)
    finally:
        end_child(child)
    if num_interrupts:
        raise KeyboardInterrupt
    last_words = find_last_words("".join(lines))
    if code < 0:
        return 128 - code, f"killed by {signal.Signals(-code).name}; last output:\n{last_words}"
    return code, last_words


def start_child(
    words: Sequence[str],
    output: int | IO[str] | None,
    *,
    errors: int = subprocess.STDOUT,
    more: Mapping[str, str] = MappingProxyType({}),
    pass_fds: Collection[int],
) -> subprocess.Popen:
    """Starts `python -m mini_trainer WORDS`, which writes to `output` (None: this process's) and is asked to end when
    this process is gone."""
    # A child is alone, or starts its own ranks: with this process's rank it would wait for the other ranks.
    own = {name: value for name, value in os.environ.items()
           if name not in OF_LAUNCHERS and not name.startswith(LAUNCHERS)}  # fmt: skip
    return subprocess.Popen(
        [*name_module("mini_trainer"), *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        encoding="utf-8",
        errors="replace",
        env=own | dict(more) | find_this_package() | {ENDS_WITH_PARENT: str(os.getpid())},
        pass_fds=pass_fds,
        process_group=0,  # a terminal's Ctrl-C reaches only this process, which forwards it once
    )


def name_module(module: str) -> list[str]:
    """`python -m MODULE`, which does not take a user's datasets.py in the current directory for the package."""
    return [sys.executable, "-P", "-u", "-m", module]


def find_this_package() -> dict[str, str]:
    """Environment of a child that imports the same checkout's package, of several that may be installed."""
    if not is_checkout(ROOT):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def hand_on_warning() -> None:
    """From now on a SIGUSR1 to this process, the warning of schedulers, goes to its children until it ends. They begin
    with the signal blocked: one that comes before they are ready for it takes effect once they are. It is repeated for
    children that are yet to be started; this program's runs take it once."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # inherited by threads and children
    threading.Thread(target=repeat_warning, daemon=True).start()


def repeat_warning() -> NoReturn:
    signal.sigwait({signal.SIGUSR1})
    while True:
        for child in list_children():
            with contextlib.suppress(OSError):  # it is gone
                os.kill(child, signal.SIGUSR1)
        time.sleep(SECONDS_BETWEEN_WARNINGS)


def end_child(child: subprocess.Popen) -> None:
    """Ends the child and its processes, however reading its output ended."""
    if child.poll() is not None:
        return
    child.terminate()  # SIGTERM: a run saves its state
    try:
        child.wait(SECONDS_TO_SAVE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def find_last_words(output: str) -> str:
    """The error message in `output`, without torchrun's report, or else the last lines."""
    start = max(output.rfind("\nerror: "), output.rfind("] error: "), 0 if output.startswith("error: ") else -1)
    if start < 0:
        return "\n".join(output.strip().splitlines()[-5:])
    message = output[output.index("error: ", start) + len("error: ") :]
    return re.split(r"\n(?=[EWI]\d{4} |\[rank)", message)[0].strip()
