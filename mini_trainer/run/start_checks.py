"""Checks of a run's inputs against each other: errors, and warnings about likely mistakes."""

from mini_trainer.data.columns.data_kinds import describe_task
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.objectives.objective import Objective
from mini_trainer.options import TrainOptions, ValidationOptions
from mini_trainer.run.inputs import RunInputs

FEW_UPDATES = 30  # optimizer updates below which a run gets a warning, unless --max-steps asks for so few


def check_validation(inputs: RunInputs, objective: Objective | None, options: ValidationOptions) -> None:
    """ValueError if the validation data is for a different task, or cannot measure --best-metric."""
    if inputs.validation_data is not None:
        advice = ": tokenize one of them again with --labels-from the other"
        check_task(inputs.data, inputs.validation_data, option="--validation-data-path", advice=advice)
    if objective is not None and options.best_metric not in objective.metrics:
        raise ValueError(
            f"--best-metric {options.best_metric}: validations of this objective and data have"
            f" {', '.join(objective.metrics)}"
        )


def check_task(data: Mixture, other: Mixture, *, option: str, advice: str = "") -> None:
    """ValueError if `other`, the data of `option`, is for a different task than `data`."""
    if other.task != data.task:
        raise ValueError(
            f"{option} is for {describe_task(other.task)}, --data-path for {describe_task(data.task)}{advice}"
        )


def check_placeholders(inputs: RunInputs, data: Mixture) -> None:
    """ValueError if the data has placeholder tokens that a multimodal model replaces with images, videos or audio."""
    config, placeholders = inputs.config, inputs.family.list_foreign(inputs.config)
    found = data.find_tokens(list(placeholders)) if placeholders else None
    if found is not None:
        row, token_id = found
        path, number = data.locate(row)
        raise ValueError(
            f"{path}: row {number} contains the token id {token_id}, a placeholder for something other than text"
            f" ({placeholders[token_id]} in config.json of model type {config.model_type!r}). Only text trains here:"
            " remove rows with images, videos or audio, and their placeholders in texts"
        )


def check_schedule(inputs: RunInputs, options: TrainOptions) -> None:
    """ValueError if the run does not fit into the schedule that it shares."""
    shared, before, own = options.optimization.schedule_steps, inputs.num_steps_before, inputs.num_steps
    if shared is not None and own is None:
        raise ValueError(f"--schedule-steps {shared}: the run has no end, and would go beyond: add --max-steps")
    if shared is not None and before + own > shared:
        after = f", after {before:,} of the runs that it continues, are {before + own:,}" if before else " are more"
        raise ValueError(
            f"--schedule-steps {shared:,}: the run's {own:,} steps{after}: raise it, or end the run earlier"
        )


def find_oddities(inputs: RunInputs, options: TrainOptions, *, num_rows: int) -> None:
    """Adds warnings about valid but unlikely settings. `num_rows`: rows packed at the same time."""
    num_warmup_steps, batching = options.optimization.num_warmup_steps, inputs.batching
    data, num_steps = inputs.data, inputs.num_steps
    if batching is not None and batching.mean_samples > len(data.kept):
        inputs.warnings.append(f"{batching.flag}: each step draws the {len(data.kept)} samples repeatedly")
    if batching is not None and num_steps is not None and options.end.max_steps is None:
        num_updates = inputs.num_steps_before + num_steps
        if num_updates < FEW_UPDATES:
            inputs.warnings.append(
                f"the run has only {num_updates} optimizer updates, in which a model learns little: lower"
                f" {batching.flag}, raise --max-epochs for {FEW_UPDATES} updates or more, or raise --learning-rate"
                f" {options.optimization.learning_rate:g}"
            )
    if data is not None and inputs.validation_data is not None and not options.validation.validate_training_data:
        trained = {source.path.resolve() for source in data.sources}
        for source in inputs.validation_data.sources:
            if source.path.resolve() in trained:
                inputs.warnings.append(
                    f"--validation-data-path {source.path} is also trained on: its loss says nothing about other data"
                )
    if batching is not None and batching.mean_samples < num_rows:
        sharing = options.sharding.context_parallel
        ranks = "ranks" if sharing is None else f"groups of --context-parallel {sharing} ranks"
        inputs.warnings.append(
            f"{batching.flag}: fewer samples a step than the {num_rows} {ranks}: some of them will be idle"
        )
    if not options.exports.save_final_checkpoint and not options.exports.on_the_way:
        inputs.warnings.append("--no-save-final-checkpoint: the trained model will not be exported")
    end = None if num_steps is None else max(inputs.num_steps_before + num_steps, inputs.schedule_steps)
    if end is not None and num_warmup_steps >= end:
        inputs.warnings.append(
            f"--num-warmup-steps {num_warmup_steps}: the run of {end} steps ends before its peak learning rate"
        )
