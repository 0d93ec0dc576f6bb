"""The actions due after a step: a pure function of the run's position and the flags of all ranks."""

from dataclasses import dataclass

from mini_trainer.distributed.ending import ExitCode, Flag, stop_reason
from mini_trainer.options import CheckpointOptions, ExportOptions, ValidationOptions
from mini_trainer.sampler import RunPosition


@dataclass(frozen=True)
class Due:
    """Actions after a step, in the order in which they are taken."""

    validation: bool
    checkpoint: bool
    export: bool
    stop: tuple[ExitCode, str] | None  # exit code and reason; None: the run continues, or has ended
    is_last: bool  # no step follows


@dataclass(frozen=True)
class Calendar:
    """When a run validates its model, writes checkpoints and exports."""

    validation: ValidationOptions
    checkpoints: CheckpointOptions
    exports: ExportOptions
    epoch_length: int  # samples

    def find_due(self, position: RunPosition, *, num_steps: int | None, flags: int = 0) -> Due:
        """What is due at `position`, the end of a step; `flags` are OR-ed over ranks (see distributed.ending.Flag)."""
        is_last, exports, validation = position.step == num_steps, self.exports, self.validation
        stop = None if is_last else stop_reason(flags)
        ends_epoch = has_crossed(position, self.epoch_length)
        is_validated = is_last or is_multiple(position.step, validation.validate_every_steps)
        is_validated = is_validated or (validation.validate_at_epoch and ends_epoch)
        every = self.checkpoints.checkpoint_every_steps
        is_saved = is_multiple(position.step, every) or (every is not None and is_last)
        is_exported = has_crossed(position, exports.min_samples_per_checkpoint)
        is_exported = is_exported or (exports.checkpoint_at_epoch and ends_epoch)
        is_exported = is_exported or (exports.save_final_checkpoint and is_last)
        return Due(
            validation=is_validated,
            checkpoint=is_saved or stop is not None or bool(flags & Flag.CHECKPOINT_DUE),
            export=is_exported or bool(flags & Flag.EXPORT_DUE),
            stop=stop,
            is_last=is_last or stop is not None,
        )


def is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def has_crossed(position: RunPosition, every: int | None) -> bool:
    """Whether the last step's samples reached another multiple of `every`."""
    if every is None:
        return False
    return position.num_samples // every > (position.num_samples - position.num_in_step) // every
