"""Problems with train.py's options: data, objective, optimization, computation, and the end of a run."""

import math
import re
from collections.abc import Iterator

from mini_trainer.options import TrainOptions, flag_name, flatten_options, learning, list_data_sets
from mini_trainer.options.doors import open_door
from mini_trainer.options.fields import iterate_fields
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.problems.finding import complete_rows, list_changed, list_given, list_row_sources
from mini_trainer.options.urls import find_url_faults, hide_credentials, is_url

# Functions that find problems in these groups, once one of their options is given.
BY_GROUPS = {
    ("classification", "preference"): "mini_trainer.options.problems.choices:find_preference_problems",
    ("classification", "teacher"): "mini_trainer.options.problems.choices:find_teacher_problems",
    ("rows",): "mini_trainer.options.problems.choices:find_format_problems",
    ("compute", "sharding"): "mini_trainer.options.problems.choices:find_compute_problems",
    ("osft",): "mini_trainer.options.problems.choices:find_osft_problems",
    ("lora",): "mini_trainer.options.problems.choices:find_lora_problems",
    ("vision",): "mini_trainer.options.problems.choices:find_vision_problems",
    ("tracking", "callbacks", "hub", "exports"): "mini_trainer.options.problems.choices:find_reporting_problems",
}


def find_train_problems(options: TrainOptions) -> Iterator[str]:
    """Options without effect beside others, and options that contradict each other."""
    yield from find_url_problems(options)
    yield from find_training_data_problems(options)
    yield from find_validation_problems(options)
    yield from find_objective_problems(options)
    yield from find_optimization_problems(options)
    yield from find_ending_problems(options)
    for names, place in BY_GROUPS.items():
        if any(list_changed(getattr(options, name)) for name in names):
            yield from open_door(place)(options)


def find_url_problems(options: TrainOptions) -> Iterator[str]:
    """Problems with URLs: of data to read, and in place of local directories."""
    for name, paths in list_data_sets(options).items():
        for path in filter(is_url, paths):
            yield from find_url_faults(path, flag=flag_name(name))
    if is_url(options.output_dir):
        yield (
            f"--output-dir {hide_credentials(options.output_dir)}: must be a local directory, for checkpoints stay"
            " local; give --upload-to a URL to copy exports to"
        )
    if is_url(options.data_cache_dir):
        yield f"--data-cache-dir {hide_credentials(options.data_cache_dir)}: must be a local directory"


def find_training_data_problems(options: TrainOptions) -> Iterator[str]:
    """Problems with training data: none, several sources, or weights that do not match the data sets."""
    o, rows, weights = options.data, list_row_sources(options.rows), options.data.data_weights
    if list_changed(options.rows):
        from mini_trainer.options.problems.tools import find_row_problems

        yield from find_row_problems(complete_rows(options.rows, options.classification.objective))
    if not o.data_path and not rows:
        yield "no data is given: give --data-path, or rows with --input-file or --input-dataset"
    if o.data_path and rows:
        yield f"--data-path and {rows[0]} both specify training data: give only one of them"
    if not rows and (given := list_changed(options.rows)):
        yield f"{', '.join(map(flag_name, given))}: no effect without rows to tokenize (--input-file)"
    if o.max_tokens_per_gpu == "auto" and o.drop_overlong:
        yield (
            "--drop-overlong has no effect with --max-tokens-per-gpu auto, which never goes below the longest sample:"
            " drop long samples with process_data.py --max-sample-num-tokens, or give a number"
        )
    if weights and o.data_path and len(weights) != len(o.data_path):
        yield f"--data-weights: {len(weights)} numbers for the {len(o.data_path)} data sets of --data-path"
    if not all(0 < weight < math.inf for weight in weights):
        yield f"--data-weights {' '.join(map(str, weights))}: must be above 0, and finite"
    if weights and len(o.data_path) <= 1:
        yield "--data-weights has no effect on a single data set: give several with --data-path"
    if o.batch_size is not None and o.batch_tokens is not None:
        yield (
            f"--batch-size {o.batch_size} and --batch-tokens {o.batch_tokens} both set the size of a step: give only"
            " one of them; --batch-size None overrides a file's"
        )


def find_validation_problems(options: TrainOptions) -> list[str]:
    o = options.validation
    if not (o.validation_data_path or options.rows.validation_share):
        given = list_given(o)
        return [f"{', '.join(given)}: no effect without --validation-data-path"] if given else []
    if o.validation_data_path and options.rows.validation_share:
        return ["--validation-share and --validation-data-path both specify validation data: give only one of them"]
    if not re.fullmatch(r"[^:]+(:\d+(\.\d*)?(e-?\d+)?)?", o.best_metric):
        return [f"--best-metric {o.best_metric}: must be METRIC, or METRIC:D with a number D, such as loss:0.01"]
    if o.early_stopping_patience is not None and o.validate_every_steps is None and not o.validate_at_epoch:
        return ["--early-stopping-patience needs validations during the run: add --validate-every-steps or"
                " --validate-at-epoch"]  # fmt: skip
    return []


def find_ending_problems(options: TrainOptions) -> Iterator[str]:
    """Problems with checkpoints, exports and dry runs."""
    exports = options.exports
    if options.checkpoints.allow_changed_options and options.checkpoints.resume == "none":
        yield "--allow-changed-options has no effect with --resume none: nothing is resumed"
    resume = options.checkpoints.resume
    if options.checkpoints.continue_from is not None and resume not in ("auto", "strict", "none"):
        yield (
            f"--continue-from and --resume {resume} both name a checkpoint to start from: --resume continues the same"
            " run, --continue-from starts a new one: give only one of them"
        )
    if not exports.on_the_way and not options.end.is_given and not options.chooses_end:
        yield (
            "the run has no end, so the trained model would never be written: add --max-epochs, --max-steps,"
            " --max-samples or --max-tokens; or, for a run that is stopped by hand, --min-samples-per-checkpoint or"
            " --checkpoint-at-epoch"
        )


def find_objective_problems(options: TrainOptions) -> Iterator[str]:
    """Options that the objective does not use or cannot be used with."""
    objective, values = options.classification.objective, flatten_options(options)
    facts = OBJECTIVES[objective]
    unused = {name for other in OBJECTIVES.values() for name in other.options} - {*facts.options}
    changed = [option.name for option, _ in iterate_fields(type(options)) if values[option.name] != option.default]
    given = [flag_name(name) for name in changed if name in unused]
    if given:
        yield f"{', '.join(given)}: no effect on --objective {objective}"
    for name, reason in facts.excluded.items():
        if values[name] and name in changed:
            yield f"{flag_name(name)} {values[name]}: cannot be used with --objective {objective}, {reason}"


def find_optimization_problems(options: TrainOptions) -> Iterator[str]:
    """Problems with the learning-rate schedule and the optimizer."""
    o = options.optimization
    need_end = {
        f"--num-warmup-steps {o.num_warmup_steps} is a share of the run's steps": 0 < o.num_warmup_steps < 1,
        f"--lr-scheduler {o.lr_scheduler} decays towards the run's end": o.lr_scheduler in learning.SCHEDULES_WITH_END,
        "--weight-average tail ends with the run": o.weight_average == "tail",
    }
    for what, is_asked in need_end.items():
        if is_asked and not options.end.is_given and not options.chooses_end:
            yield f"{what}, but no end is given: add --max-steps, --max-epochs, --max-samples or --max-tokens"
    yield from find_schedule_problems(options)
    counts = {"cosine_with_restarts": "cycles", "wsd": "steps of the final decay"}
    if o.lr_scheduler in counts and (o.lr_shape or 1) % 1 != 0:
        of = counts[o.lr_scheduler]
        yield f"--lr-shape {o.lr_shape}: must be a whole number with --lr-scheduler {o.lr_scheduler}, its {of}"
    if o.num_warmup_steps and o.lr_scheduler == "constant":
        yield "--num-warmup-steps has no effect with --lr-scheduler constant: use constant_with_warmup"
    yield from find_rate_problems(options)
    spans = {"ema": "its half-life in samples", "tail": "the number of steps up to the run's end"}
    if o.weight_average in spans and o.average_over is None:
        yield f"--weight-average {o.weight_average} needs --average-over, {spans[o.weight_average]}"
    if o.weight_average != "none" and o.master_weights != "float32":
        yield f"--weight-average is kept in fp32, and cannot be used with --master-weights {o.master_weights}"
    if options.osft.osft and o.master_weights != "float32":
        yield (
            f"--master-weights {o.master_weights}: --osft keeps directions exactly, which rounding would break;"
            " use float32"
        )


def find_rate_problems(options: TrainOptions) -> Iterator[str]:
    """Problems with Muon, and with learning rates of parts of the model."""
    o = options.optimization
    if o.optimizer == "muon":
        reasons = {
            "--osft": options.osft.osft and "whose directions an orthogonal update would leave",
            "--lora": options.lora.lora and "whose factors are not matrices between hidden states",
            "--cpu-offload": options.sharding.cpu_offload and "since its products are too many for a CPU",
            f"--master-weights {o.master_weights}": o.master_weights != "float32" and "which it does not round",
        }
        yield from (f"--optimizer muon cannot be used with {flag}, {why}" for flag, why in reasons.items() if why)
    if o.learning_rate == 0 and o.learning_rate_for:
        yield "--learning-rate-for shares the schedule of --learning-rate, which must be above 0"


def find_schedule_problems(options: TrainOptions) -> Iterator[str]:
    """Problems with a schedule that several runs share."""
    o, origin = options.optimization, options.checkpoints.continue_from
    if o.schedule_steps is not None and not o.needs_end:
        yield (
            f"--schedule-steps has no effect with --lr-scheduler {o.lr_scheduler}, which does not depend on the number"
            " of steps: leave it out"
        )
    if origin is not None and o.needs_end and o.schedule_steps is None:
        is_decaying = o.lr_scheduler in learning.SCHEDULES_WITH_END
        needs = f"--lr-scheduler {o.lr_scheduler}" if is_decaying else f"--num-warmup-steps {o.num_warmup_steps}"
        yield f"--continue-from with {needs} needs --schedule-steps, the number of steps of all its runs together"
