"""A run's directory: locking, ownership, resuming, writing."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mini_trainer.data.stores.disk import check_output_dir, remove_leftovers
from mini_trainer.distributed.ending import ExitCode, Flag, RunError, log
from mini_trainer.distributed.hang import LONGEST
from mini_trainer.distributed.messages import hide_in, shows_progress
from mini_trainer.distributed.process import count_local_ranks
from mini_trainer.distributed.watch import RunControl
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options import CheckpointOptions, OptimizationOptions, TrackingOptions
from mini_trainer.run import identity, record
from mini_trainer.run.checkpoint_files import has_checkpoints
from mini_trainer.run.checkpointing import Checkpoint, Checkpointer, read_checkpoint
from mini_trainer.run.exports import Exports
from mini_trainer.run.file_names import EXPORTS_DIR
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.preflight import check_disk
from mini_trainer.run.step import TrainState
from mini_trainer.run.training_log import Console, LiveLine, MetricsFile, Sink, TimeLeft, TrainingLog
from mini_trainer.sampler import Batch, RunPosition

if TYPE_CHECKING:
    from mini_trainer.run.callbacks import Callbacks


class RunDirectory:
    """The `--output-dir` of this start. All ranks call every method. Invariant: it is locked from the beginning; until
    `claim` has verified that it belongs to this run, nothing in it is changed, except that a killed run's unfinished
    files are removed and damaged checkpoints are renamed."""

    def __init__(self, path: str, options: CheckpointOptions, world: World, control: RunControl):
        """Locks the directory and chooses the checkpoint to resume from; RunError or ValueError if it cannot."""
        self.path, self.options, self.world, self.control = Path(path), options, world, control
        call_on_rank0(world, lambda: check_output_dir(self.path))
        call_on_rank0(world, lambda: control.files.lock_directory(self.path))
        if count_local_ranks() < world.world_size:
            from mini_trainer.run.preflight_nodes import check_nodes

            check_nodes(world, self.path)
        else:
            call_on_rank0(world, lambda: check_disk(self.path))
        self.checkpointer = Checkpointer(
            self.path / "checkpoints",
            world=world,
            num_kept=options.keep_checkpoints,
            is_async=options.async_checkpoint,
            committed=lambda path: self.log.write_checkpoint(path),
        )
        if call_on_rank0(world, lambda: has_checkpoints(self.checkpointer.directory)):
            control.files.own(self.path)
        self.checkpoint: Checkpoint | None = self.checkpointer.choose(options.resume)
        self.origin: Checkpoint | None = None
        if (origin := options.continue_from) is not None:
            self.origin = call_on_rank0(world, lambda: read_origin(Path(origin), self.path))
        self.start = RunPosition(**self.checkpoint.state["position"]) if self.checkpoint else RunPosition()
        self.values: Mapping[str, Any] = {}  # all options by name
        self.identity: dict[str, Any] = {}
        self.changes: list[str] = []
        self.previous: dict[str, Any] = {} if self.checkpoint is None else self.checkpoint.state
        self.auto_settings: dict[str, Any] | None = self.previous.get("auto_settings")
        self.last_save = time.monotonic()
        self.log = TrainingLog([])
        self.callbacks: Callbacks | None = None
        if self.checkpoint is None:
            log.info(f"starting from step 0 in {self.path}")
        else:
            log.info(f"resuming from {self.checkpoint.path}: {self.start}")

    def claim(self, inputs: RunInputs, optimization: OptimizationOptions) -> None:
        """Verifies that directory and checkpoint belong to the run defined by `inputs`; ValueError if not."""
        self.values = inputs.values
        self.identity = call_on_rank0(self.world, lambda: identity.identify_run(inputs, optimization))
        if not identity.is_checkpoint_of(self.path, self.checkpoint and self.checkpoint.path):
            resume, own_paths = self.options.resume, inputs.own_paths
            call_on_rank0(self.world, lambda: record.check_unused(self.path, resume, self.identity, own_paths))
            self.control.files.own(self.path)
        allow_changes = self.options.allow_changed_options
        self.changes = identity.check_checkpoints(inputs, self.checkpoint, self.identity, allow_changes=allow_changes)
        if self._starts_with_origin(inputs):
            self.checkpointer.verify_origin(self.origin)
        call_on_rank0(self.world, lambda: remove_leftovers(self.path / EXPORTS_DIR))

    def load_start(self, model: PackedModel, inputs: RunInputs) -> None:
        """Fills the weights of the checkpoint that the run continues from, unless a resume makes them useless."""
        if self._starts_with_origin(inputs):
            self.checkpointer.load_weights(self.origin, model, inputs.method)

    def _starts_with_origin(self, inputs: RunInputs) -> bool:
        return self.origin is not None and (self.checkpoint is None or inputs.compares_with_start)

    def restore(self, state: TrainState) -> None:
        """Fills weights and optimizer from the checkpoint, if any, and records this start in the directory.
        A run that continues another one has that one's weights already, by `load_start`."""
        if self.checkpoint is not None:
            self.checkpointer.load(self.checkpoint, state)
        elif self.origin is not None:
            self.checkpointer.load_optimizer(self.origin, state)
        facts = {
            "first_step": self.start.step,
            "resumed_from": self.checkpoint and str(self.checkpoint.path),
            "continued_from": self.origin and str(self.origin.path),
            "changed_options": self.changes,
            "auto_settings": self.auto_settings,  # the values chosen for auto options, and their measurements
        }
        call_on_rank0(
            self.world, lambda: identity.record_start(self.path, self.values, self.identity, facts, self.world)
        )

    def open_log(self, inputs: RunInputs, tracking: TrackingOptions, *, num_validations: int) -> TrainingLog:
        """Opens the sinks, and starts the callbacks, which ranks other than 0 can also have."""
        if self.world.rank == 0:
            self.log.sinks = self._open_files(inputs, tracking, num_validations=num_validations)
        if inputs.callbacks:
            from mini_trainer.run.callbacks import Callbacks
            from mini_trainer.run.hooks import StartedRun

            started = StartedRun(
                output_dir=self.path.absolute(),
                options=MappingProxyType(self.values),
                first_step=self.start.step,
                num_steps=inputs.num_steps,
                rank=self.world.rank,
                world_size=self.world.world_size,
            )
            self.callbacks = Callbacks(inputs.callbacks, self.control, started)
            self.log.sinks.append(self.callbacks)
        return self.log

    def _open_files(self, inputs: RunInputs, tracking: TrackingOptions, *, num_validations: int) -> list[Sink]:
        """The sinks of rank 0: metrics files, the console, trackers."""
        first_step = self.start.step
        time_left = TimeLeft(first_step=first_step, num_steps=inputs.num_steps)
        sinks: list[Sink] = [
            MetricsFile(self.path, first_step=first_step, num_validations=num_validations),
            open_console(time_left, shown=tuple(inputs.objective.metrics), max_epochs=inputs.values["max_epochs"]),
        ]
        if inputs.old_data is not None:
            from mini_trainer.run.keeping import show_drawn

            show_drawn(inputs)
        if inputs.samples is not None:
            from mini_trainer.run.samples import SamplesFile

            sinks.append(SamplesFile(self.path, first_step=first_step, num_validations=num_validations))
        if tracking.track:
            from mini_trainer.run.trackers import open_trackers

            sinks.append(open_trackers(tracking, self.path, hide_in(dict(self.values))))
        return sinks

    def profile(self, batches: Iterator[Batch], steps: str | None) -> Iterator[Batch]:
        """Yields `batches`, profiling the `steps` of --profile-steps."""
        if steps is None:
            return batches
        from mini_trainer.run.profiling import profile_steps

        return profile_steps(batches, steps, self.path / "profile", rank=self.world.rank)

    def start_loop(self) -> None:
        """Starts the clock of --checkpoint-every-minutes; from now on stop requests wait for the end of a step."""
        self.last_save = time.monotonic()
        self.control.start_loop(steps_done=self.start.step)

    def flags(self) -> int:
        """This rank's flags: stop requests, callbacks' answers, a checkpoint being written or due by the clock."""
        flags = self.control.flags() | (0 if self.callbacks is None else self.callbacks.take_flags())
        flags |= Flag.CHECKPOINT_UNDER_WAY if self.checkpointer.is_writing else 0
        minutes = self.options.checkpoint_every_minutes
        is_late = minutes is not None and time.monotonic() - self.last_save > 60 * minutes
        return flags | (Flag.CHECKPOINT_DUE if is_late and self.world.rank == 0 else 0)

    def finish_write(self, flags: int) -> None:
        """Commits an asynchronous checkpoint once every rank has written its part."""
        if not flags & Flag.CHECKPOINT_UNDER_WAY:
            self.checkpointer.finish()

    def save(self, state: TrainState, position: RunPosition, *, validation: dict[str, Any] | None) -> None:
        """Writes the checkpoint of `position`; `validation` is the validations' progress so far."""
        call_on_rank0(self.world, self.control.check_directory)
        self.log.flush_to_disk()
        content = {
            "position": asdict(position),
            "num_steps_before": state.num_steps_before,
            "identity": self.identity,
            "options": hide_in(dict(self.values)),
            "changed": self.changes,
            "auto_settings": self.auto_settings,
            "validation": validation,
        }
        with self.control.slow(f"the checkpoint after step {position.step}"):
            self.checkpointer.save(state, step=position.step, state=content)
        self.last_save = time.monotonic()

    def rescue(self, validation: Callable[[], dict[str, Any] | None], state: TrainState, position: RunPosition) -> str:
        """Saves a checkpoint after an export that failed, unless there is one of this step; says how the run continues.
        `validation`: returns what `save` takes."""
        checkpoint = self.checkpointer.directory / f"step_{position.step}"
        if not call_on_rank0(self.world, checkpoint.exists):
            try:
                self.save(state, position, validation=validation())
                self.checkpointer.finish()
            except RunError as error:
                return f"; nor can the run be saved: {error}"
        change = "" if self.options.resume in ("auto", "strict") else " with --resume auto"
        return f"; {checkpoint} is complete: the same command{change} continues there"

    def close(self, exports: Exports, *, stop: tuple[ExitCode, str] | None) -> tuple[ExitCode, str] | None:
        """Waits for the last checkpoint; records that the run is done, unless there was a stop.
        Returns the stop, explained by the callbacks behind it."""
        is_done = stop is None
        if is_done and (missing := exports.describe_missing_average()) is not None:
            log.warning(f"warning: {missing}")
        with self.control.slow("the last checkpoint"):
            self.checkpointer.close()
        with self.control.slow("the end of trackers and uploads", least=LONGEST):
            self.log.write_end(None if stop is None else stop[1])
            self.log.close()
            for uploads in exports.uploads:
                uploads.close(is_done=is_done)
        if is_done:
            call_on_rank0(self.world, self.control.check_directory)
            call_on_rank0(self.world, lambda: record.record_end(self.path))
        return stop if self.callbacks is None else self.callbacks.explain(stop, self.world)


def open_console(time_left: TimeLeft, *, shown: Sequence[str], max_epochs: int | None = None) -> Sink:
    """The live line on a terminal, otherwise a log line per step; `--logging-level WARNING` suppresses both."""
    if shows_progress() and log.isEnabledFor(logging.INFO):
        return LiveLine(time_left, shown=shown)
    return Console(time_left, shown=shown, max_epochs=max_epochs)


def read_origin(path: Path, output_dir: Path) -> Checkpoint:
    """Opens the checkpoint of --continue-from, like `read_checkpoint`; ValueError if it is a run's own."""
    if identity.is_checkpoint_of(output_dir, path):
        raise ValueError(
            f"--continue-from {path}: is a checkpoint of --output-dir {output_dir}, from which the same command"
            " resumes without --continue-from: choose a new --output-dir to start another run"
        )
    try:
        return read_checkpoint(path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--continue-from {path}: is not a valid checkpoint (a run's directory checkpoints/step_N): {error}"
        ) from None
