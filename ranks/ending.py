"""How a process ends: the exit codes, and the error that carries one."""

import logging
from enum import IntEnum

log = logging.getLogger("mini_trainer")  # the one logger; see `setup_logging`

SECONDS_TO_BE_ENDED = 3  # that torchrun has to end the other ranks when one has failed


class ExitCode(IntEnum):
    """How a script ended. train.py also writes it to exit.json, since torchrun itself always returns 1."""

    DONE = 0
    FAILED = 1  # a bug, ours or a library's: a traceback says where
    BAD_INPUT = 2  # options, data or model that the user can mend
    SAVED_AND_REQUEUE = 3  # stopped by the scheduler or by --max-time: start it again to go on
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
