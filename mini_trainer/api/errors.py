"""Exceptions raised by `run_training` and `process_data`: one class per exit code."""

from pathlib import Path

from mini_trainer.distributed.ending import ExitCode, RunError


class TrainingError(RuntimeError):
    """A process failed. `code` is its exit code, `message` its error message, `log_file` has its output. `log_file` is
    None for errors before a run was started, and for `process_data`, whose output is printed."""

    def __init__(self, message: str, *, code: int, log_file: Path | None = None):
        super().__init__(message)
        self.message = message
        self.code = code
        self.log_file = log_file

    # Lets pickle, by which pools return errors, pass on `code` and `log_file`, which are not among `args`.
    __reduce__ = RunError.__reduce__


class BadInputError(TrainingError, ValueError):
    """Errors in options, data or model that the user can fix."""


class NoValidCheckpointError(TrainingError):
    """Checkpoints exist, but all are corrupt."""


class NonFiniteError(TrainingError):
    """A loss or gradient is not finite."""


class HangError(TrainingError):
    """A rank stopped sending heartbeats or stopped making progress."""


class LockedError(TrainingError):
    """Another run is using the output directory."""


class StorageError(TrainingError):
    """A file could not be read or written."""


class OutOfMemoryError(TrainingError):
    """Out of memory, on a GPU or on the machine."""


class PeerDiedError(TrainingError):
    """A rank, or its torchrun, was killed or crashed."""


class StartedProcessError(TrainingError):
    """A bug, ours or a library's, or death by a signal."""


ERRORS: dict[int, type[TrainingError]] = {
    ExitCode.BAD_INPUT: BadInputError,
    ExitCode.NO_VALID_CHECKPOINT: NoValidCheckpointError,
    ExitCode.NON_FINITE: NonFiniteError,
    ExitCode.HANG: HangError,
    ExitCode.LOCKED: LockedError,
    ExitCode.IO: StorageError,
    ExitCode.OUT_OF_MEMORY: OutOfMemoryError,
    ExitCode.PEER_DIED: PeerDiedError,
}


def make_bad_input(message: str) -> BadInputError:
    return BadInputError(message, code=ExitCode.BAD_INPUT)


def make_error(code: int, message: str, log_file: Path | None = None) -> TrainingError:
    return ERRORS.get(code, StartedProcessError)(message, code=code, log_file=log_file)
