"""A run's exports: finding, writing, checking, removing old ones, and uploading.

With --check-export each is loaded back, as a user would, and compared with the trained model.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from mini_trainer.data.stores.disk import check_room, link_beside, remove_directory, remove_quietly
from mini_trainer.data.stores.model_files import CARD_FILE
from mini_trainer.distributed.devices import DTYPES
from mini_trainer.distributed.ending import RunError, log
from mini_trainer.distributed.watch import RunControl
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.options import ExportOptions, HubOptions
from mini_trainer.run.due import Calendar
from mini_trainer.run.export import ExportParts, export_model
from mini_trainer.run.export_check import CHECK_FILE, ask, compare, record_answers
from mini_trainer.run.file_names import AVERAGE, BEST, EXPORTS_DIR, LATEST, REGULAR
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.model_card import make_card
from mini_trainer.run.step import TrainState
from mini_trainer.run.training_log import TrainingLog
from mini_trainer.sampler import RunPosition

if TYPE_CHECKING:
    from mini_trainer.run.uploads import Uploads

AVERAGE_PREFIX = "average_"  # before the name of an export: of --weight-average
BEST_FILE = "validation.json"  # in the best model's export: its line of validation_metrics_0.jsonl


class Exports:
    """The exports in `--output-dir`, and, on rank 0, their uploads. All ranks call every public method."""

    def __init__(
        self,
        options: ExportOptions,
        hub: HubOptions,
        inputs: RunInputs,
        world: World,
        control: RunControl,
        log: TrainingLog,
        *,
        rescue: Callable[[TrainState, RunPosition], str] = lambda state, position: "",
    ):
        """`rescue`: saves the run's state after a failed export, and returns what to add to the error's message."""
        self.options, self.inputs, self.world, self.control, self.log = options, inputs, world, control, log
        self.rescue = rescue
        self.output_dir = Path(inputs.values["output_dir"])
        self.directory = self.output_dir / EXPORTS_DIR
        self.begun: set[Path] = set()  # see `make_aside`
        self.first_averaged: int | None = None  # step before those of the average that the last export does not have
        self.uploads: Sequence[Uploads] = ()
        if world.rank == 0 and (hub.push_to_hub, options.upload_to) != (None, None):
            from mini_trainer.run.uploads import open_uploads

            self.uploads = open_uploads(hub, upload_to=options.upload_to)

    def check_room(self) -> None:
        """OSError if the disk has no room for a first adapter; `preflight` checks it for a model."""
        if (self.options.save_final_checkpoint or self.options.on_the_way) and not (self.directory / LATEST).exists():
            needed, what = self.inputs.method.count_export_bytes(0), f"an adapter in --output-dir {self.output_dir}"
            call_on_rank0(self.world, lambda: check_room(self.directory, needed, what))

    def is_missing(self, position: RunPosition, calendar: Calendar, *, num_steps: int | None) -> bool:
        """Whether an export was due at `position` but was not written before the run ended."""
        return calendar.find_due(position, num_steps=num_steps).export and not call_on_rank0(
            self.world, lambda: self.find(position)
        )

    def find(self, position: RunPosition) -> bool:
        """Whether the export for `position` is there; if so it is the latest, also after a kill before its link."""
        export_dir = self.path_of(position)
        if has_export := export_dir.exists():
            self.link(export_dir)
        return has_export

    def link(self, export_dir: Path) -> None:
        """Makes `latest` a link to an export; a note where the file system has no links."""
        try:
            link_beside(export_dir, LATEST)
        except OSError as error:
            log.warning(f"note: {self.directory / LATEST} does not lead to {export_dir.name}: {error}")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.options.export_dtype]

    def path_of(self, position: RunPosition) -> Path:
        return self.directory / f"samples_{position.num_samples}"

    def write(
        self, state: TrainState, position: RunPosition, *, best: dict[str, Any] | None = None, is_last: bool = True
    ) -> None:
        """Exports the model at `position`; as the best model if `best`, its validation metrics, is given. What it
        answers is recorded for the best and the last one, and for any to be checked."""
        call_on_rank0(self.world, self.control.check_directory)
        inputs = self.inputs
        notes = {} if best is None else {BEST_FILE: json.dumps(best, indent=2) + "\n"}
        notes[CARD_FILE] = call_on_rank0(self.world, lambda: make_card(inputs, position))
        export_dir = self.path_of(position) if best is None else self.directory / "best"
        num_steps, average = state.num_steps_before + position.step, state.average
        average_dir = export_dir.with_name(AVERAGE_PREFIX + export_dir.name)
        has_begun = average is not None and average.has_begun(num_steps)
        has_average = best is None and has_begun
        self.first_averaged = None if average is None or has_begun else average.first_step - state.num_steps_before
        parts = ExportParts(
            inputs.objective.family,
            state.method,
            inputs.generation_config,
            inputs.export_tokenizer,
            self.dtype,
            inputs.source,
            notes,
            self.begun,
        )
        records = is_last or best is not None or self.options.check_export
        with self.control.slow(f"the export after step {position.step}"):
            try:
                if has_average:  # first, since the export next to it marks both as complete
                    with average.in_place():
                        self._write(state, average_dir, parts, records=records)
                self._write(state, export_dir, parts, records=records)
            except RunError as error:
                raise RunError(error.code, f"{error}{'' if best else self.rescue(state, position)}") from None
            if best is None:
                call_on_rank0(self.world, lambda: self.link(export_dir))
            call_on_rank0(self.world, lambda: self.remove_old(position))
        message = f"After step {position.step:,}, {position.num_samples:,} samples"
        for uploads in self.uploads:
            if has_average:
                uploads.add(average_dir, kind=AVERAGE, message=message)
            uploads.add(export_dir, kind=REGULAR if best is None else BEST, message=message)

    def _write(self, state: TrainState, export_dir: Path, parts: ExportParts, *, records: bool) -> None:
        recorded = record_answers(state.model, parts, world=self.world) if records else {}
        notes = {CHECK_FILE: json.dumps(recorded) + "\n"} if records else {}
        export_model(state.model, export_dir, replace(parts, notes=parts.notes | notes), world=self.world)
        if self.options.check_export:
            call_on_rank0(self.world, lambda: check_or_reject(export_dir, parts, recorded))
        self.log.write_export(export_dir)

    def remove_old(self, position: RunPosition) -> None:
        """Applies --keep-exports; keeps exports of later positions, from before a resume."""
        if (num_kept := self.options.keep_exports) is None:
            return
        numbers = list_numbers(self.directory)
        for number in [number for number in numbers if number <= position.num_samples][:-num_kept]:
            for export in (f"{AVERAGE_PREFIX}samples_{number}", f"samples_{number}"):
                if (self.directory / export).exists():  # not every export has an average
                    remove_directory(self.directory / export)

    def describe_missing_average(self) -> str | None:
        """Why the run exported no average although it should have; otherwise None."""
        if self.first_averaged is None:
            return None
        num_steps = self.inputs.values["average_over"]
        return (
            f"--weight-average tail: no average is exported, only the weights themselves: the run ended before the"
            f" last {num_steps:,} steps of its full length, which begin after step"
            f" {self.first_averaged:,}. With --early-stopping-patience, use --weight-average ema"
        )


def list_numbers(directory: Path) -> list[int]:
    """The numbers of samples in the names of a directory's exports, ascending."""
    names = (path.name.removeprefix("samples_") for path in directory.glob("samples_*"))
    return sorted(int(name) for name in names if name.isdecimal())


def check_or_reject(export_dir: Path, parts: ExportParts, recorded: dict[str, Any]) -> None:
    """`check_export`, after whose error the export has another, hidden name, so that a next start writes it again."""
    try:
        check_export(export_dir, parts, recorded)
    except ValueError as error:
        rejected = export_dir.with_name(f".rejected_{export_dir.name}")
        remove_quietly(rejected)
        export_dir.rename(rejected)
        raise ValueError(f"{error}: it is {rejected.name} now") from None


def check_export(export_dir: Path, parts: ExportParts, recorded: dict[str, Any]) -> None:
    """Loads the export on the CPU, as a user would; ValueError if that fails, or if it answers otherwise than the
    trained model did. Rank 0."""
    try:
        model = parts.method.load_export(export_dir, parts.source, parts.family)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:  # from transformers and peft
        raise ValueError(f"--check-export: {export_dir} cannot be loaded back: {error}") from None
    if problems := compare(recorded, ask(model.eval(), recorded, stops=recorded["stops"])):
        raise ValueError(f"--check-export: {export_dir}, loaded back: {'; '.join(problems)}; do not use it")
    log.info(f"export {export_dir.name}: loaded back, it answers as the trained model does")
