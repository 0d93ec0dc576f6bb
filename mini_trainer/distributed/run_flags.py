"""Flags of events that all ranks act on together, and the stop that they request."""

import signal
from enum import IntFlag

from mini_trainer.distributed.ending import ExitCode


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
    stops = Flag(flags & STOPS)
    if not stops:
        return None
    if stops & Flag.CALLBACK_FAILED:
        code = ExitCode.FAILED
    else:
        code = ExitCode.STOPPED_BY_USER if stops & BY_USER else ExitCode.SAVED_AND_REQUEUE
    return code, " and ".join(FLAG_NAMES.get(flag, flag.name) for flag in stops)
