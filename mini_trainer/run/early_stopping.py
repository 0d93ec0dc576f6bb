"""A run's validations: measuring, logging, tracking the best, and early stopping."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mini_trainer.distributed.monitor import RunControl
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.options import TrainOptions, ValidationOptions
from mini_trainer.run.exports import Exports
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.step import TrainState
from mini_trainer.run.training_log import TrainingLog
from mini_trainer.run.validation import Progress, start_progress, validate
from mini_trainer.sampler import RunPosition


class Validations:
    """Results of the run's validations so far, starting from the checkpoint's, `previous`. All ranks call `measure`."""

    def __init__(
        self,
        options: ValidationOptions,
        inputs: RunInputs,
        world: World,
        control: RunControl,
        *,
        previous: dict[str, Any] | None,
    ):
        self.options, self.inputs, self.control, self.previous = options, inputs, control, previous
        self.progress: Progress | None = None  # None without validation data
        if inputs.validation_data is not None:
            self.progress = call_on_rank0(
                world, lambda: start_progress(inputs.validation_data, previous, metric=options.best_metric)
            )

    @property
    def has_learnt_enough(self) -> bool:
        """Whether --early-stopping-patience ends the run now."""
        return self.progress is not None and self.progress.has_enough(self.options.early_stopping_patience)

    @property
    def is_first_missing(self) -> bool:
        """Whether the model still has to be validated before the first step."""
        return self.progress is not None and self.progress.last_step is None

    @property
    def num_done(self) -> int:
        """Number of validations of the whole run, including those before this start."""
        return (self.describe() or {}).get("num_validations", 0)

    @property
    def best_step(self) -> int | None:
        return None if self.progress is None else self.progress.best_step

    def describe(self) -> dict[str, Any] | None:
        """JSON for the checkpoint: the progress, or the previous one if this start has no validation data."""
        return self.previous if self.progress is None else asdict(self.progress)

    def describe_end(self, position: RunPosition) -> str:
        """Describes how a finished run ended."""
        if not self.has_learnt_enough:
            return "done"
        return (
            f"done after step {position.step}, by --early-stopping-patience: {self.progress.num_worse} validations"
            f" in a row did not improve on the {self.progress.metric} of {self.progress.best_value:.4f} after step"
            f" {self.progress.best_step}"
        )

    def measure(
        self, state: TrainState, position: RunPosition, options: TrainOptions, log: TrainingLog, exports: Exports
    ) -> bool:
        """Validates the model at `position`, and exports it if it is the best so far; returns whether to stop early."""
        inputs, metric = self.inputs, self.options.best_metric
        where = {
            "step": position.step,
            "epoch": position.num_samples / len(inputs.data.kept),
            "total_samples_accumulated": position.num_samples,
        }
        predictions_file = Path(options.output_dir) / f"predictions_samples_{position.num_samples}.jsonl"
        run = functools.partial(
            validate,
            state,
            inputs.validation_data,
            inputs.objective,
            cap=options.data.max_tokens_per_gpu,
            progress=self.control.progress,
        )
        metrics = where | run(predictions_file=predictions_file if self.options.write_predictions else None)
        if self.options.validate_average:
            with state.average.in_place():
                of_average = run()
            metrics |= {f"average_{name}": of_average[name] for name in inputs.objective.metrics}
        self.progress = self.progress.after(
            metrics[metric], step=position.step, more_is_better=inputs.objective.metrics[metric]
        )
        metrics["is_best"] = is_best = self.progress.best_step == position.step
        log.write_validation(metrics)
        if is_best and self.options.export_best:
            exports.write(state, position, best=metrics)
        return self.has_learnt_enough
