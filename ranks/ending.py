"""How a process ends: exit codes, the reason of a run's end and its report, and the last call of every process."""

import _thread
import contextlib
import faulthandler
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from .messages import hide_secrets, say

log = logging.getLogger("mini_trainer")  # the one logger; see `setup_logging`

EXIT_FILE = "exit.json"  # in a run's directory: how its last start ended
SECONDS_TO_BE_ENDED = 3  # for torchrun to end the other ranks when one has failed
SECONDS_TO_START_THREAD = 1.0


class ExitCode(IntEnum):
    """How a script ended. train.py also writes it to exit.json, since torchrun itself always returns 1."""

    DONE = 0
    FAILED = 1  # a bug, ours or a library's: a traceback says where
    BAD_INPUT = 2  # an error in options, data or model that the user can fix
    SAVED_AND_REQUEUE = 3  # stopped by the scheduler or by --max-time: start it again to resume
    NO_VALID_CHECKPOINT = 4  # there are checkpoints, and none can be trusted
    NON_FINITE = 5  # loss or gradient
    HANG = 6  # a rank gave no sign of life, or none moved on
    LOCKED = 7  # another run has the output directory
    IO = 8  # a file could not be read or written
    OUT_OF_MEMORY = 9
    STOPPED_BY_USER = 10  # Ctrl-C or the stop file: not to be started again by itself
    PEER_DIED = 11  # a rank, or its torchrun, was killed or crashed
    INTERRUPTED = 130  # ended at once, without saving: Ctrl-C before the first step, or a second signal


class RunError(ValueError):
    """What ends a run with one message and an exit code of its own."""

    def __init__(self, code: ExitCode, message: str):
        super().__init__(message)
        self.code = code


class RanksDiffer(RunError):
    """The ranks disagree: each of them raises it and prints it."""

    def __init__(self, message: str):
        super().__init__(ExitCode.BAD_INPUT, message)


@dataclass(frozen=True)
class Cause:
    """Why the run ends, as it travels over the lifeline and stands in exit.json."""

    code: int
    message: str
    rank: int
    host: str
    step: int  # steps completed
    details: str = ""  # the traceback, if there is one
    died: bool = False  # True if others have seen it die: then this is their report, not its own.
    is_printed_by_all: bool = False  # otherwise by rank 0 and the first rank of every other node

    @property
    def text(self) -> str:
        """What is printed: `message`, and who says so if it is not rank 0, which speaks for all."""
        if self.code in (ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER):
            return self.message
        is_known = self.rank == 0 or self.code in (ExitCode.HANG, ExitCode.PEER_DIED)
        return f"{self.details}error: {'' if is_known else f'rank {self.rank} on {self.host}: '}{self.message}"

    @property
    def record(self) -> dict[str, int | str]:
        """What exit.json says, with the time at which it is asked for."""
        return {
            "code": int(self.code),
            "name": ExitCode(self.code).name.lower(),
            "message": hide_secrets(self.message),
            "rank": self.rank,
            "step": self.step,
            "host": self.host,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def choose_cause(causes: list[Cause]) -> Cause:
    """The first cause, of those that came in together; a death outranks reports, which are its consequences.

    Of ranks that say the same, the lowest speaks.
    """
    first = min(causes, key=lambda cause: not cause.died)  # Of equals min takes the earliest.
    others = sorted(cause.rank for cause in causes if cause.died and cause.message != first.message)
    if others:
        return replace(first, message=f"{first.message}; and so did rank {', '.join(map(str, others))}")
    return min((cause for cause in causes if cause.message == first.message), key=lambda cause: cause.rank)


def describe_error(error: BaseException, where: str = "a call on rank 0") -> tuple[ExitCode, str, str]:
    """The exit code, the message and the traceback (for errors that no user can fix) of an exception raised `where`."""
    if isinstance(error, RunError):
        return error.code, str(error), ""
    if is_out_of_memory(error):
        return (
            ExitCode.OUT_OF_MEMORY,
            f"out of memory in {where}: lower --max-tokens-per-gpu, use --activation-checkpointing full, or use more"
            f" GPUs ({(str(error).splitlines() or [type(error).__name__])[0]})",
            "",
        )
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted", ""
    if isinstance(error, ValueError):
        return ExitCode.BAD_INPUT, str(error), ""
    if isinstance(error, OSError):
        return ExitCode.IO, str(error), ""
    message = f"failed in {where}: {type(error).__name__}: {str(error)[:1000]}"
    return ExitCode.FAILED, message, "".join(traceback.format_exception(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, NumPy's and torch's errors, on CUDA (torch.OutOfMemoryError, cuBLAS, NCCL) and on the CPU."""
    words = r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(re.search(words, str(error))))


def exit_with_message(message: str, *, code: int = ExitCode.BAD_INPUT) -> NoReturn:
    """Prints one message to stderr and ends this process with `code`.

    Under torchrun a mistake usually shows on every rank at once. Local rank 0 speaks; the others wait to be ended
    by torchrun, and speak only if they are still there, because then the mistake was theirs alone.
    """
    rank, local_rank = os.environ.get("RANK"), os.environ.get("LOCAL_RANK", "0")
    if local_rank != "0":
        time.sleep(SECONDS_TO_BE_ENDED)
    where = "" if rank in (None, "0") else f"[rank {rank}] "
    say(f"{where}error: {message}", is_error=True)
    os._exit(code)  # not sys.exit: threads and process groups must not hold up the end of a failed rank


def dump_stacks(head: str, path: Path | None) -> None:
    """Writes `head` and every thread's stack to `path`, whose directory is made; to stderr if it is None."""
    if path is None:
        print(head, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
        return
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write(head)
        file.flush()
        faulthandler.dump_traceback(file)


def within(seconds: float, function: Callable[[], None]) -> None:
    """Runs `function` and does not wait longer than this: a file system or a pipe can keep one waiting for ever."""
    started, done = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        try:
            function()
        finally:
            done.set()

    # Not a Thread: its start() waits for ever for a thread that dies before its first line, for lack of memory.
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        return function()
    if not started.wait(SECONDS_TO_START_THREAD):
        return function()
    done.wait(seconds)


def wait_forever() -> NoReturn:
    while True:
        time.sleep(3600)


def leave(code: int) -> NoReturn:
    """Ends this process at once.

    Not sys.exit: a rank must not wait for the others in an exit handler, and the interpreter's teardown races with
    native threads (gloo, Arrow), which now and then aborts a run that is done.
    """

    def flush() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()

    within(1.0, flush)
    os._exit(code)
