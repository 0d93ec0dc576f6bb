"""The directory of a run: locked, owned, resumed from, written to."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from disk import read_json, remove_directory, remove_leftovers
from lifecycle.checkpoint_files import has_checkpoints
from lifecycle.checkpointing import Checkpoint, Checkpointer
from lifecycle.due import what_is_due
from lifecycle.export import ExportParts, export_model
from lifecycle.export_check import check_export
from lifecycle.hub import BEST, MAIN, Uploads
from lifecycle.live_line import open_console
from lifecycle.model_card import make_card
from lifecycle.profiling import profile_steps
from lifecycle.record import (
    check_output_dir,
    check_same_run,
    check_unused,
    describe_start,
    is_checkpoint_of,
    record_end,
    record_start,
)
from lifecycle.start import RunInputs
from lifecycle.step import TrainState
from lifecycle.tracker_packages import open_trackers
from lifecycle.training_log import MetricsFile, TrainingLog
from lifecycle.validation import Progress, start_progress
from lifecycle.validation import validate as measure_validation
from options import TrainOptions, flatten_options
from ranks.ending import log
from ranks.monitor import Flag, RunControl
from ranks.world import World, call_on_rank0
from sampler import Batch, RunPosition

PROFILE_DIR = "profile"
POSITION_FILE = "position.json"  # in an export by --export-name: how far the run was
BEST_FILE = "validation.json"  # in the export of the best model: its line of validation_metrics_0.jsonl


class RunDirectory:
    """This start's hold on `--output-dir`. All ranks call every method.

    Invariant: it is locked from the beginning; nothing of it is changed before `claim` has found it to be this run's,
    but for what a killed run left unfinished and for damaged checkpoints, which get another name.
    """

    def __init__(self, options: TrainOptions, world: World, control: RunControl):
        """Locks the directory and chooses the checkpoint to go on from; RunError or ValueError if it cannot be had."""
        self.options, self.world, self.control = options, world, control
        self.path = Path(options.output_dir)
        self.exports_dir = self.path / "hf_format"
        call_on_rank0(world, lambda: control.lock(self.path))
        call_on_rank0(world, lambda: check_output_dir(self.path))
        self.checkpointer = Checkpointer(
            self.path / "checkpoints",
            world=world,
            num_kept=options.checkpoints.keep_checkpoints,
            is_async=options.checkpoints.async_checkpoint,
        )
        if call_on_rank0(world, lambda: has_checkpoints(self.checkpointer.directory)):
            control.own(self.path)
        self.checkpoint: Checkpoint | None = self.checkpointer.choose(options.checkpoints.resume)
        self.start = RunPosition(**self.checkpoint.state["position"]) if self.checkpoint else RunPosition()
        self.identity: dict[str, Any] = {}
        self.changes: list[str] = []
        self.auto_settings: dict[str, Any] | None = None
        if self.checkpoint is not None:
            self.auto_settings = self.checkpoint.state.get("auto_settings")
        self.validated: Progress | None = None  # where there is validation data
        self.last_save = time.monotonic()
        self.uploads: Uploads | None = None  # of rank 0, where exports are uploaded
        if self.checkpoint is None:
            log.info(f"starting from step 0 in {self.path}")
        else:
            log.info(f"resuming from {self.checkpoint.path}: {self.start}")

    def claim(self, inputs: RunInputs) -> None:
        """Finds that directory and checkpoint are of the run that `inputs` make; ValueError if they are another's."""
        options = self.options.checkpoints
        self.identity = call_on_rank0(self.world, lambda: inputs.identify(self.options))
        if not is_checkpoint_of(self.path, self.checkpoint and self.checkpoint.path):
            call_on_rank0(self.world, lambda: check_unused(self.path, self.identity, resume=options.resume))
            self.control.own(self.path)
        if self.checkpoint is not None:
            self.changes = check_same_run(
                self.checkpoint.path,
                self.checkpoint.state,
                self.identity,
                allow_changes=options.allow_changed_options,
                needs_model=not inputs.method.saves_frozen,
            )
        call_on_rank0(self.world, lambda: remove_leftovers(self.exports_dir))
        if inputs.validation_data is not None:
            self.validated = call_on_rank0(
                self.world,
                lambda: start_progress(
                    inputs.validation_data, self.describe_validations(), metric=self.options.validation.best_metric
                ),
            )

    def restore(self, state: TrainState) -> None:
        """Fills weights and optimizer from the checkpoint, if there is one, and notes this start in the directory."""
        if self.checkpoint is not None:
            self.checkpointer.load(self.checkpoint, state)
        start = describe_start(
            self.world,
            first_step=self.start.step,
            resumed_from=self.checkpoint and self.checkpoint.path,
            changes=self.changes,
            auto_settings=self.auto_settings,
        )
        call_on_rank0(self.world, lambda: record_start(self.path, self.options, self.identity, start))

    def open_log(self, *, num_steps: int | None) -> TrainingLog:
        """The sinks that are told of every step; none on the ranks other than 0."""
        if self.world.rank > 0:
            return TrainingLog([])
        if self.options.hub.push_to_hub is not None:
            self.uploads = Uploads(self.options.hub)
        first_step, num_validations = self.start.step, (self.describe_validations() or {}).get("num_validations", 0)
        return TrainingLog(
            [
                MetricsFile(self.path, first_step=first_step, num_validations=num_validations),
                open_console(first_step=first_step, num_steps=num_steps),
                *open_trackers(self.options, self.path),
            ]
        )

    @property
    def has_learnt_enough(self) -> bool:
        """Whether --early-stopping-patience ends the run where it is."""
        return self.validated is not None and self.validated.has_enough(self.options.validation.early_stopping_patience)

    @property
    def is_validation_missing(self) -> bool:
        """Whether the model has to be measured before the first step."""
        return self.validated is not None and self.validated.last_step is None

    def describe_validations(self) -> dict[str, Any] | None:
        """What is known of the run's validations, also where this start makes none; JSON."""
        if self.validated is not None:
            return asdict(self.validated)
        return self.checkpoint and self.checkpoint.state.get("validation")

    def describe_end(self, position: RunPosition) -> str:
        """How a run that is done has ended."""
        if not self.has_learnt_enough:
            return "done"
        return (
            f"done after step {position.step}, by --early-stopping-patience: {self.validated.num_worse} validations"
            f" in a row were not better than the {self.validated.metric} of {self.validated.best_value} after step"
            f" {self.validated.best_step}"
        )

    def validate(
        self, state: TrainState, position: RunPosition, inputs: RunInputs, log: TrainingLog, *, attention_cost: float
    ) -> bool:
        """Measures the model at `position`, and exports it if it is the best so far; says whether it learnt enough."""
        where = {
            "step": position.step,
            "epoch": position.num_samples / len(inputs.data.kept),
            "total_samples_accumulated": position.num_samples,
        }
        metrics = where | measure_validation(
            state,
            inputs.validation_data,
            inputs.objective,
            cap=self.options.data.max_tokens_per_gpu,
            attention_cost=attention_cost,
            predictions_file=self.predictions_file(position) if self.options.validation.write_predictions else None,
            progress=self.control.progress,
        )
        metric = self.options.validation.best_metric
        self.validated = self.validated.after(
            metrics[metric], step=position.step, more_is_better=inputs.objective.metrics[metric]
        )
        metrics["is_best"] = is_best = self.validated.best_step == position.step
        log.write_validation(metrics)
        if is_best and self.options.validation.export_best:
            self.export(state, position, inputs, best=metrics)
        return self.has_learnt_enough

    def profile(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """`batches`, with the steps of --profile-steps recorded."""
        steps = self.options.profiling.profile_steps
        if steps is None:
            return batches
        return profile_steps(batches, steps, self.path / PROFILE_DIR, rank=self.world.rank)

    def start_loop(self) -> None:
        """From here on the clock of --checkpoint-every-minutes runs, and a request to stop waits for a step's end."""
        self.last_save = time.monotonic()
        self.control.start_loop(steps_done=self.start.step)

    def flags(self) -> int:
        """What this rank knows: requests to stop, that a checkpoint is being written, that one is due by the clock."""
        flags = self.control.flags() | (Flag.CHECKPOINT_UNDER_WAY if self.checkpointer.is_writing else 0)
        minutes = self.options.checkpoints.checkpoint_every_minutes
        is_late = minutes is not None and time.monotonic() - self.last_save > 60 * minutes
        return flags | (Flag.CHECKPOINT_DUE if is_late and self.world.rank == 0 else 0)

    def finish_write(self, flags: int) -> None:
        """Makes what a thread has written a checkpoint, once it has on every rank."""
        if not flags & Flag.CHECKPOINT_UNDER_WAY:
            self.checkpointer.finish()

    def save(self, state: TrainState, position: RunPosition, log: TrainingLog) -> None:
        """Writes the checkpoint of `position`."""
        call_on_rank0(self.world, self.control.check_directory)
        log.flush_to_disk()
        content = {
            "position": asdict(position),
            "identity": self.identity,
            "options": flatten_options(self.options),
            "changed": self.changes,
            "auto_settings": self.auto_settings,
            "validation": self.describe_validations(),
        }
        with self.control.slow(f"the checkpoint after step {position.step}"):
            self.checkpointer.save(state, step=position.step, state=content)
        self.last_save = time.monotonic()

    def is_export_missing(self, *, epoch_length: int, num_steps: int | None) -> bool:
        """Whether the run was ended between the checkpoint that it goes on from and an export that was due there."""
        if self.checkpoint is None:
            return False
        due = what_is_due(self.start, self.options, epoch_length=epoch_length, num_steps=num_steps)
        return due.export and not call_on_rank0(self.world, lambda: self.has_export(self.start))

    def export_dir(self, position: RunPosition) -> Path:
        return self.exports_dir / (self.options.exports.export_name or f"samples_{position.num_samples}")

    def has_export(self, position: RunPosition) -> bool:
        """Whether the export that is there under its name is that of `position`."""
        export_dir = self.export_dir(position)
        if self.options.exports.export_name is None or not export_dir.exists():
            return export_dir.exists()
        return (export_dir / POSITION_FILE).is_file() and read_json(export_dir / POSITION_FILE) == asdict(position)

    def predictions_file(self, position: RunPosition) -> Path:
        return self.path / f"predictions_samples_{position.num_samples}.jsonl"

    def export(
        self, state: TrainState, position: RunPosition, inputs: RunInputs, *, best: dict[str, Any] | None = None
    ) -> None:
        """Writes the model as it is at `position`; with the metrics that make it the `best`, as that one."""
        call_on_rank0(self.world, self.control.check_directory)
        notes = {} if best is None else {BEST_FILE: json.dumps(best, indent=2) + "\n"}
        if best is None and self.options.exports.export_name is not None:
            notes[POSITION_FILE] = json.dumps(asdict(position)) + "\n"
        notes |= call_on_rank0(self.world, lambda: make_card(self.path, self.options, inputs, position))
        export_dir = self.export_dir(position) if best is None else self.exports_dir / "best"
        parts = ExportParts(
            inputs.objective.family,
            state.method,
            inputs.generation_config,
            inputs.tokenizer,
            getattr(torch, self.options.exports.export_dtype),
            inputs.source(self.options.model),
            notes,
        )
        with self.control.slow(f"the export after step {position.step}"):
            export_model(state.model, export_dir, parts, world=self.world)
            if self.options.exports.check_export:
                is_packed = self.options.lora.base_quantization != "none"
                check_export(
                    state.model,
                    export_dir,
                    parts,
                    objective=inputs.objective,
                    world=self.world,
                    is_packed=is_packed,
                )
            call_on_rank0(self.world, lambda: self.remove_old_exports(position))
        if self.uploads is not None:
            message = f"After step {position.step:,}, {position.num_samples:,} samples"
            self.uploads.add(export_dir, branch=MAIN if best is None else BEST, message=message)

    def remove_old_exports(self, position: RunPosition) -> None:
        """By --keep-exports; what is of a later position, from before a resume, stays."""
        num_kept = self.options.exports.keep_exports
        if num_kept is None:
            return
        names = [path.name.removeprefix("samples_") for path in self.exports_dir.glob("samples_*")]
        numbers = [int(name) for name in names if name.isdecimal()]
        for number in sorted(number for number in numbers if number <= position.num_samples)[:-num_kept]:
            remove_directory(self.exports_dir / f"samples_{number}")

    def close(self, log: TrainingLog, *, is_done: bool) -> None:
        """Waits for the last checkpoint; notes that the run is done, if it is."""
        with self.control.slow("the last checkpoint"):
            self.checkpointer.finish()
        with self.control.slow("the end of its trackers and uploads"):
            log.close()
            if self.uploads is not None:
                self.uploads.close(is_done=is_done)
        if is_done:
            call_on_rank0(self.world, self.control.check_directory)
            call_on_rank0(self.world, lambda: record_end(self.path))
