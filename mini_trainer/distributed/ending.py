"""The end of processes: flags of events that all ranks act on together, exit codes, causes, and the final exit."""

import _thread
import contextlib
import copyreg
import errno
import faulthandler
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mini_trainer.distributed.messages import describe_ranks, hide_secrets, print_as_is, say
from mini_trainer.options.reading import open_own

log = logging.getLogger("mini_trainer")  # the one logger; see `setup_logging`

EXIT_FILE = "exit.json"  # in a run's directory: how its last launch ended
SECONDS_TO_BE_ENDED = 3  # for torchrun to terminate the other ranks after one has failed
SECONDS_TO_START_THREAD = 1.0


class ExitCode(IntEnum):
    """How a script ended. train.py also writes the code to exit.json, since torchrun itself always returns 1."""

    DONE = 0
    FAILED = 1  # a bug, ours, a library's or, with the state saved, a callback's: a traceback shows where
    BAD_INPUT = 2  # an error in options, data or model that the user can fix
    SAVED_AND_REQUEUE = 3  # stopped by the scheduler or by --max-time: run it again to resume
    NO_VALID_CHECKPOINT = 4  # checkpoints exist, but all are corrupt
    NON_FINITE = 5  # loss or gradient
    HANG = 6  # a rank stopped sending heartbeats or stopped making progress
    LOCKED = 7  # another run is using the output directory
    IO = 8  # a file could not be read or written, or a store or a server failed
    OUT_OF_MEMORY = 9
    STOPPED_BY_USER = 10  # Ctrl-C, the stop file or a callback: do not restart automatically
    PEER_DIED = 11  # a rank, or its torchrun, was killed or crashed; or machines did not meet
    INTERRUPTED = 130  # ended at once, without saving: Ctrl-C before the first step, or a second signal


STOPPED = (ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER)  # ends that were asked for


class RunError(ValueError):
    """An error that ends a run with one message and a specific exit code."""

    def __init__(self, code: ExitCode, message: str):
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets pickle pass on `code`, which is not among `args`, without calling a constructor."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__


class RanksDiffer(RunError):
    """The ranks differ; every rank raises and prints this."""

    def __init__(self, message: str):
        super().__init__(ExitCode.BAD_INPUT, message)


@dataclass(frozen=True)
class Cause:
    """Why the run ends, as sent over the lifeline and written to exit.json."""

    code: int
    message: str
    rank: int
    host: str
    step: int  # steps completed
    details: str = ""  # the traceback, if any
    died: bool = False  # True if other ranks saw it die: this is their report, not its own.
    is_printed_by_all: bool = False  # False: printed by rank 0 and the first rank of every other node
    afterword: str = ""  # printed below the message, and not recorded: results, commands

    @property
    def text(self) -> str:
        """Text to print: `message`, prefixed with the reporting rank unless it is rank 0."""
        if self.code in STOPPED:
            return self.message
        is_known = self.rank == 0 or self.code in (ExitCode.HANG, ExitCode.PEER_DIED)
        return f"{self.details}error: {'' if is_known else f'rank {self.rank} on {self.host}: '}{self.message}"

    @property
    def record(self) -> dict[str, int | str]:
        """Contents of exit.json, with the current time."""
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
    """Picks the root cause among those reported together: a rank's death outranks the errors that follow from it. Among
    ranks that report the same message, the lowest is named."""
    first = min(causes, key=lambda cause: not cause.died)  # min returns the earliest of equals.
    if others := sorted(cause.rank for cause in causes if cause.died and cause.message != first.message):
        return replace(first, message=f"{first.message}; and so did {describe_ranks(others)}")
    return min((cause for cause in causes if cause.message == first.message), key=lambda cause: cause.rank)


def describe_error(error: BaseException, where: str = "a call on rank 0") -> tuple[ExitCode, str, str]:
    """Exit code, message and traceback (only for errors that users cannot fix) of an exception raised `where`."""
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
    if isinstance(error, UnicodeEncodeError):  # of a path, given or found in a directory; rows are checked for it
        shown = error.object[max(0, error.start - 200) : error.end + 50].encode("utf-8", "backslashreplace").decode()
        return ExitCode.BAD_INPUT, f"{shown}: not UTF-8 text; rename that file or directory", ""
    if isinstance(error, ValueError):
        return ExitCode.BAD_INPUT, str(error), ""
    if isinstance(error, OSError):  # any option's path may have a name that no file can have
        return ExitCode.BAD_INPUT if error.errno == errno.ENAMETOOLONG else ExitCode.IO, str(error), ""
    message = f"failed in {where}: {type(error).__name__}: {str(error)[:1000]}"
    return ExitCode.FAILED, message, "".join(traceback.format_exception(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Recognizes Python's, NumPy's and torch's errors, on CUDA (torch.OutOfMemoryError, cuBLAS, NCCL) and CPU."""
    words = r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(re.search(words, str(error))))


def exit_with_message(message: str, *, code: int = ExitCode.BAD_INPUT) -> NoReturn:
    """Prints one message to stderr and ends this process with `code`. Under torchrun, all ranks usually hit the same
    error at once. Local rank 0 prints it; the others wait for torchrun to terminate them, and print only if that does
    not happen, because then the error was theirs alone."""
    rank, local_rank = os.environ.get("RANK"), os.environ.get("LOCAL_RANK", "0")
    if local_rank != "0":
        time.sleep(SECONDS_TO_BE_ENDED)
    where = "" if rank in (None, "0") else f"[rank {rank}] "
    say(f"{where}error: {message}", is_error=True)
    os._exit(code)  # not sys.exit: threads and process groups must not delay the exit of a failed rank


def shorten_interrupts() -> None:
    """Makes one message of a Ctrl-C that nothing handles, as while modules are imported, in place of a traceback."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            exit_with_message("interrupted", code=ExitCode.INTERRUPTED)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = report


@contextlib.contextmanager
def ending_with_message(*, when_interrupted: str) -> Iterator[None]:
    """User errors (ValueError, OSError) and Ctrl-C inside of it end this process with one message, and the exit code
    with which a run would end."""
    try:
        yield
    except (ValueError, OSError) as error:
        code, message, _ = describe_error(error)
        exit_with_message(message, code=code)
    except KeyboardInterrupt:
        exit_with_message(when_interrupted, code=ExitCode.INTERRUPTED)


def dump_stacks(head: str, path: Path | None) -> None:
    """Writes `head` and every thread's stack to `path`, creating its directory; to stderr if `path` is None."""
    if path is None:
        print_as_is(f"{head}\n", sys.stderr)
        faulthandler.dump_traceback(sys.stderr)
        return
    path.parent.mkdir(exist_ok=True)
    with open_own(path, "w") as file:
        file.write(head)
        file.flush()
        faulthandler.dump_traceback(file)


def within(seconds: float, function: Callable[[], None]) -> None:
    """Runs `function`, waiting at most this long: a file system or a pipe can block forever."""
    started, done = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        try:
            function()
        finally:
            done.set()

    # Not threading.Thread: its start() blocks forever if the new thread runs out of memory before its first line.
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


def exit_process(code: int) -> NoReturn:
    """Exits this process immediately. Not sys.exit: a rank must not wait for the others in an exit handler, and the
    interpreter's teardown races with native threads (gloo, Arrow), which occasionally aborts a run that has
    finished."""

    def flush() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()

    within(1.0, flush)
    os._exit(code)


FEWER_TOKENS = "MINI_TRAINER_FEWER_TOKENS"  # environment: the most tokens of a micro-batch after a start without room


def start_over(most_tokens: int) -> NoReturn:
    """Runs this process's command again, from the beginning, with at most this many tokens in a micro-batch: after a
    start whose automatic choice had no room."""
    os.environ[FEWER_TOKENS] = str(most_tokens)
    # The device's, which would keep its memory, and those of peers close with the threads that wait on them: gloo's
    # ends the process if one closes before.
    for descriptor in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            os.set_inheritable(int(descriptor), int(descriptor) < 3)
    with contextlib.suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    os._exit(ExitCode.OUT_OF_MEMORY)


class Flag(IntFlag):
    """Events seen by one rank that all must act on together; OR-ed over ranks in the step's reduction."""

    SIGTERM = 1
    SIGUSR1 = 2
    SIGHUP = 4
    MAX_TIME = 8
    SIGINT = 16
    STOP_FILE = 32
    CHECKPOINT_DUE = 64
    CHECKPOINT_UNDER_WAY = 128
    EXPORT_DUE = 256
    CALLBACK_STOP = 512
    CALLBACK_FAILED = 1024


BY_USER = Flag.SIGINT | Flag.STOP_FILE | Flag.CALLBACK_STOP
STOPS = BY_USER | Flag.SIGTERM | Flag.SIGUSR1 | Flag.SIGHUP | Flag.MAX_TIME | Flag.CALLBACK_FAILED
FLAG_NAMES = {
    Flag.SIGINT: "Ctrl-C (SIGINT)",
    Flag.STOP_FILE: "the stop file",
    Flag.MAX_TIME: "--max-time",
    Flag.CALLBACK_STOP: "a callback",
    Flag.CALLBACK_FAILED: "an error in a callback",
}
SIGNALS = {getattr(signal, flag.name): flag for flag in Flag if flag.name.startswith("SIG")}


def stop_reason(flags: int) -> tuple[ExitCode, str] | None:
    """Exit code and description of the stop requested by `flags`; None if there is no stop request."""
    if not (stops := Flag(flags & STOPS)):
        return None
    if stops & Flag.CALLBACK_FAILED:
        code = ExitCode.FAILED
    else:
        code = ExitCode.STOPPED_BY_USER if stops & BY_USER else ExitCode.SAVED_AND_REQUEUE
    return code, " and ".join(FLAG_NAMES.get(flag, flag.name) for flag in stops)
