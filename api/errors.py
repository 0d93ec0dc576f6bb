"""What `run_training` and `process_data` raise: one class for each cause that a process ends with."""

from ..ranks.ending import ExitCode


class TrainingError(RuntimeError):
    """A process that did not come to its end. `code` is its exit code, `message` what it said."""

    def __init__(self, message: str, *, code: int):
        super().__init__(message)
        self.message = message
        self.code = code


class BadInputError(TrainingError, ValueError):
    """Errors in options, data or model that the user can fix."""


class NoValidCheckpointError(TrainingError):
    """There are checkpoints, and none can be trusted."""


class NonFiniteError(TrainingError):
    """A loss or a gradient is not a number."""


class HangError(TrainingError):
    """A rank stopped sending heartbeats or stopped making progress."""


class LockedError(TrainingError):
    """Another run has the output directory."""


class StorageError(TrainingError):
    """A file could not be read or written."""


class OutOfMemoryError(TrainingError):
    """Out of memory, on a GPU or on the machine."""


class PeerDiedError(TrainingError):
    """A rank, or its torchrun, was killed or crashed."""


class StartedProcessError(TrainingError):
    """A bug, ours or a library's, or a signal that nothing could answer."""


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


def make_error(code: int, message: str) -> TrainingError:
    return ERRORS.get(code, StartedProcessError)(message, code=code)
