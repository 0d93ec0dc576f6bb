"""What follows a step: one pure function of where the run is and what its ranks have agreed on."""

from dataclasses import dataclass

from options import ExportOptions, TrainOptions, ValidationOptions
from ranks.ending import ExitCode
from ranks.monitor import Flag, stop_reason
from sampler import RunPosition


@dataclass(frozen=True)
class Due:
    """In the order in which it is done."""

    validation: bool
    checkpoint: bool
    export: bool
    stop: tuple[ExitCode, str] | None  # the exit code, and why; None: the run continues, or has ended


def what_is_due(
    position: RunPosition, options: TrainOptions, *, epoch_length: int, num_steps: int | None, flags: int = 0
) -> Due:
    """What is due at `position`, the end of a step; `flags` are those of all ranks (see ranks.monitor.Flag)."""
    is_last = position.step == num_steps
    stop = None if is_last else stop_reason(flags)
    every = options.checkpoints.checkpoint_every_steps
    is_checkpoint_step = every is not None and (position.step % every == 0 or is_last)
    return Due(
        validation=is_validation_due(
            position,
            options.validation,
            batch_size=options.data.batch_size,
            epoch_length=epoch_length,
            is_last=is_last,
        ),
        checkpoint=is_checkpoint_step or stop is not None or bool(flags & Flag.CHECKPOINT_DUE),
        export=is_export_due(
            position, options.exports, batch_size=options.data.batch_size, epoch_length=epoch_length, is_last=is_last
        ),
        stop=stop,
    )


def is_export_due(
    position: RunPosition, options: ExportOptions, *, batch_size: int, epoch_length: int, is_last: bool
) -> bool:
    """Whether the step that brought the run to `position` crossed one of the thresholds, or was the last."""
    every = options.min_samples_per_checkpoint
    return (
        (is_last and options.save_final_checkpoint)
        or (every is not None and has_crossed(position, every, batch_size=batch_size))
        or (options.checkpoint_at_epoch and has_crossed(position, epoch_length, batch_size=batch_size))
    )


def is_validation_due(
    position: RunPosition, options: ValidationOptions, *, batch_size: int, epoch_length: int, is_last: bool
) -> bool:
    """Whether the model is measured at `position`, the end of a step."""
    if not options.is_asked:
        return False
    every = options.validate_every_steps
    return (
        is_last
        or (every is not None and position.step % every == 0)
        or (options.validate_at_epoch and has_crossed(position, epoch_length, batch_size=batch_size))
    )


def has_crossed(position: RunPosition, every: int, *, batch_size: int) -> bool:
    """Whether the last step's samples reached another multiple of `every`."""
    return position.num_samples // every > (position.num_samples - batch_size) // every
