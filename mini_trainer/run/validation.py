"""A run's validations: scoring the model on held-out data, logging, tracking the best, and early stopping."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.watch import RunControl
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.fingerprints import fingerprint_data
from mini_trainer.model.scoring.data_scores import DataScores, score_data
from mini_trainer.objectives.objective import Objective
from mini_trainer.options import ValidationOptions
from mini_trainer.run.exports import Exports
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.step import TrainState
from mini_trainer.run.training_log import TrainingLog
from mini_trainer.sampler import RunPosition


@dataclass(frozen=True)
class Progress:
    """Results of a run's validations so far, as JSON for checkpoints."""

    data: str  # digest of the sets: losses on different data cannot be compared
    num_validations: int = 0  # in the whole run, on any data
    last_step: int | None = None
    metric: str = "loss"  # selects the best model
    best_value: float | None = None  # best value after at least one step
    best_step: int | None = None
    num_worse: int = 0  # validations since the best

    def after(self, value: float | None, *, step: int, more_is_better: bool, least: float = 0.0) -> "Progress":
        """The progress after another validation: the best if better by more than `least`, and never at step 0."""
        seen = replace(self, last_step=step, num_validations=self.num_validations + 1)
        if step == 0:
            return seen
        is_number, best = value is not None and math.isfinite(value), self.best_value
        if is_number and (best is None or (value - best if more_is_better else best - value) > least):
            return replace(seen, best_value=value, best_step=step, num_worse=0)
        return replace(seen, num_worse=self.num_worse + 1)


def start_progress(data: Mixture, previous: dict[str, Any] | None, *, metric: str) -> Progress:
    """The progress at a start: the checkpoint's, `previous`, if it is for the same data and metric."""
    known = None if previous is None else Progress(**previous)
    fresh = Progress(data=hash_json(list(map(fingerprint_data, data.sources))), metric=metric)
    if known is None or (known.data, known.metric) == (fresh.data, fresh.metric):
        return known or fresh
    changed = "validation data" if known.data != fresh.data else "--best-metric"
    log.warning(
        f"warning: the {changed} has changed since the last start: the best {known.metric} so far"
        f" ({known.best_value}, after step {known.best_step}) is not comparable and is discarded"
    )
    return replace(fresh, num_validations=known.num_validations)


def validate(
    state: TrainState,
    data: Mixture,
    objective: Objective,
    *,
    cap: int,
    progress: Callable[[str], None] = lambda where: None,
) -> dict[str, Any]:
    """Scores all sets together, and each separately; also returns the seconds taken. All ranks call this. Scores are
    weighted by tokens: the same on any number of ranks, and for any `cap` (tokens per rank and micro-batch)."""
    start, say_where = time.monotonic(), lambda where: progress(f"validation, {where}")
    found = score_data(state.model, data, objective, cap=cap, world=state.world, progress=say_where)
    scores = call_on_rank0(state.world, lambda: summarize_sets(data, objective, found))
    return scores["all"] | {"seconds": time.monotonic() - start, "sets": scores["sets"]}


def summarize_sets(data: Mixture, objective: Objective, found: DataScores) -> dict[str, dict[str, Any]]:
    """The objective's metrics for all sets together, and for each by name."""
    sums, predictions = found.sums, found.predictions
    of_all, of_sets = None, [None] * len(sums)
    if predictions is not None:
        sources = data.numbers.source_of(predictions[:, 0].astype(int))
        of_all, of_sets = predictions[:, 2:], [predictions[sources == i, 2:] for i in range(len(sums))]
    return {
        "all": objective.summarize(sums.sum(0), of_all),
        "sets": {
            name: objective.summarize(row, of_set) for name, row, of_set in zip(data.names, sums, of_sets, strict=True)
        },
    }


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
                world, lambda: start_progress(inputs.validation_data, previous, metric=options.deciding[0])
            )

    @property
    def has_learnt_enough(self) -> bool:
        """Whether --early-stopping-patience ends the run now."""
        patience = self.options.early_stopping_patience
        return self.progress is not None and patience is not None and self.progress.num_worse >= patience

    def is_missing_at(self, start: RunPosition) -> bool:
        """Whether the model still has to be validated, or asked, before the first step."""
        return start.step == 0 if self.progress is None else self.progress.last_step is None

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
        self, state: TrainState, position: RunPosition, log: TrainingLog, exports: Exports, *, cap: int
    ) -> bool:
        """Validates the model at `position`, and exports it if it is the best so far; writes its answers to the run's
        prompts. Returns whether to stop early. `cap`: tokens per rank and micro-batch."""
        start, inputs = time.monotonic(), self.inputs
        metrics = None if self.progress is None else self.score(state, position, cap=cap)
        samples = inputs.samples and inputs.samples.answer(state, position.step, progress=self.control.progress)
        if metrics is not None:
            metrics["seconds"] = time.monotonic() - start
            log.write_validation(metrics)
        if samples is not None:
            log.write_samples(samples)
        if metrics is not None and metrics["is_best"] and self.options.export_best:
            exports.write(state, position, best=metrics)
        return self.has_learnt_enough

    def score(self, state: TrainState, position: RunPosition, *, cap: int) -> dict[str, Any]:
        """The metrics of a validation, which counts from now on."""
        inputs, (metric, least) = self.inputs, self.options.deciding
        where = {
            "step": position.step,
            "epoch": position.num_samples / len(inputs.data.kept),
            "total_samples_accumulated": position.num_samples,
        }
        run = functools.partial(
            validate, state, inputs.validation_data, inputs.objective, cap=cap, progress=self.control.progress
        )
        metrics = where | run()
        if state.average is not None and state.average.half_life is not None:
            with state.average.in_place():
                of_average = run()
            metrics |= {f"average_{name}": of_average[name] for name in inputs.objective.metrics}
        self.progress = self.progress.after(
            metrics[metric], step=position.step, more_is_better=inputs.objective.metrics[metric], least=least
        )
        return metrics | {"is_best": self.progress.best_step == position.step}
