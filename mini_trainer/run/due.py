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
        is_last, length = position.step == num_steps, self.epoch_length
        stop = None if is_last else stop_reason(flags)
        every = self.checkpoints.checkpoint_every_steps
        is_checkpoint_step = every is not None and (position.step % every == 0 or is_last)
        return Due(
            validation=is_validation_due(position, self.validation, epoch_length=length, is_last=is_last),
            checkpoint=is_checkpoint_step or stop is not None or bool(flags & Flag.CHECKPOINT_DUE),
            export=is_export_due(position, self.exports, epoch_length=length, is_last=is_last)
            or bool(flags & Flag.EXPORT_DUE),
            stop=stop,
            is_last=is_last or stop is not None,
        )


def is_export_due(position: RunPosition, options: ExportOptions, *, epoch_length: int, is_last: bool) -> bool:
    """Whether the step that ended at `position` crossed one of the thresholds, or was the last."""
    every = options.min_samples_per_checkpoint
    return (
        (is_last and options.save_final_checkpoint)
        or (every is not None and has_crossed(position, every))
        or (options.checkpoint_at_epoch and has_crossed(position, epoch_length))
    )


def is_validation_due(position: RunPosition, options: ValidationOptions, *, epoch_length: int, is_last: bool) -> bool:
    """Whether the model is to be validated at `position`, the end of a step."""
    if not options.validation_data_path:
        return False
    every = options.validate_every_steps
    return (
        is_last
        or (every is not None and position.step % every == 0)
        or (options.validate_at_epoch and has_crossed(position, epoch_length))
    )


def has_crossed(position: RunPosition, every: int) -> bool:
    """Whether the last step's samples reached another multiple of `every`."""
    return position.num_samples // every > (position.num_samples - position.num_in_step) // every
