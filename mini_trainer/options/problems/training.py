"""Problems with train.py's options: data, optimization, computation, and the end of a run."""

import math
from typing import Any

from mini_trainer.options import (
    SCHEDULES_WITH_END,
    TeacherOptions,
    TrainOptions,
    flag_name,
    flatten_options,
    list_data_sets,
    parse_duration,
    parse_rate,
    parse_steps,
    parse_subset,
)
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.problems.given import list_all_changed, list_changed, list_given, list_row_sources
from mini_trainer.options.problems.rows import RANDOM_FORMATS, find_row_problems
from mini_trainer.options.urls import find_url_faults, hide_credentials, is_url

MOST_SECONDS = 10 * 24 * 3600  # maximum timeout; torch's clocks overflow at far larger ones


def find_numbers_out_of_range(values: dict[str, Any]) -> list[str]:
    """Lists options with numbers out of range."""
    problems = []

    def require(condition: bool, name: str, allowed: str) -> None:
        if not condition:
            problems.append(f"{flag_name(name)} {values[name]}: {allowed}")

    for name in ("batch_size", "batch_tokens", "max_tokens_per_gpu", "max_image_tokens_per_gpu",
                 "max_steps", "max_epochs", "max_samples", "max_tokens",
                 "min_samples_per_checkpoint", "num_decay_steps", "checkpoint_every_steps", "keep_checkpoints",
                 "hang_timeout", "start_timeout", "plan_world_size", "prefetch_blocks", "validate_every_steps",
                 "early_stopping_patience", "num_cycles", "keep_exports", "schedule_steps",
                 "ema_half_life", "tail_steps"):  # fmt: skip
        require(values[name] in (None, "auto") or values[name] >= 1, name, "must be at least 1")
    for name in ("hang_timeout", "start_timeout"):
        require(values[name] <= MOST_SECONDS, name, f"must be at most {MOST_SECONDS} seconds (10 days)")
    sharing = values["context_parallel"]
    require(sharing is None or sharing >= 2, "context_parallel", "must be at least 2; None turns it off")
    for name in ("learning_rate", "weight_decay", "num_warmup_steps", "seed"):
        require(0 <= values[name] < math.inf, name, "must be 0 or more, and finite")
    for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
        require(0 <= values[name] < 1, name, "must be at least 0 and below 1")
    require(values["adam_eps"] > 0, "adam_eps", "must be above 0")
    ema = values["ema_decay"]
    require(ema is None or 0 <= ema < 1, "ema_decay", "must be at least 0 and below 1")
    rate, decay = values["adam_learning_rate"], values["layer_lr_decay"]
    require(rate is None or 0 <= rate < math.inf, "adam_learning_rate", "must be 0 or more, and finite")
    require(decay is None or 0 < decay <= 1, "layer_lr_decay", "must be above 0 and at most 1; None turns it off")
    for text in values["learning_rate_for"]:
        try:
            parse_rate(text)
        except ValueError as error:
            problems.append(f"--learning-rate-for {error}")
    router = values["router_aux_loss"]
    require(router is None or 0 <= router < math.inf, "router_aux_loss", "must be 0 or more, and finite")
    alpha = values["neftune_alpha"]
    require(alpha is None or 0 < alpha < math.inf, "neftune_alpha", "must be above 0, and finite")
    try:
        parse_steps(values["profile_steps"] or "1")
    except ValueError as error:
        problems.append(f"--profile-steps {error}")
    power = values["lr_power"]
    require(power is None or 0 < power < math.inf, "lr_power", "must be above 0, and finite")
    norm, ratio = values["max_grad_norm"], values["min_lr_ratio"]
    require(norm is None or norm > 0, "max_grad_norm", "must be above 0; None turns clipping off")
    require(ratio is None or 0 <= ratio <= 1, "min_lr_ratio", "must be from 0 to 1")
    minutes, budget = values["checkpoint_every_minutes"], values["memory_budget_gb"]
    require(minutes is None or 0 < minutes < math.inf, "checkpoint_every_minutes",
            "must be above 0; None turns it off")  # fmt: skip
    require(budget is None or 0 < budget < math.inf, "memory_budget_gb", "must be above 0, and finite")
    try:
        parse_duration(values["max_time"])
    except ValueError as error:
        problems.append(f"--max-time {error}")
    return problems


def find_url_problems(options: TrainOptions) -> list[str]:
    """Problems with URLs: of data to read, and in place of local directories."""
    problems = [
        fault
        for name, paths in list_data_sets(options).items()
        for path in filter(is_url, paths)
        for fault in find_url_faults(path, flag=flag_name(name))
    ]
    if is_url(options.output_dir):
        problems.append(
            f"--output-dir {hide_credentials(options.output_dir)}: must be a local directory, for checkpoints stay"
            " local; give --upload-to a URL to copy exports to"
        )
    if is_url(options.data_cache_dir):
        problems.append(f"--data-cache-dir {hide_credentials(options.data_cache_dir)}: must be a local directory")
    return problems


def find_training_data_problems(options: TrainOptions) -> list[str]:
    """Problems with training data: none, several sources, or weights that do not match the data sets."""
    o, rows, weights = options.data, list_row_sources(options.rows), options.data.data_weights
    problems = find_row_problems(options.rows)
    if not o.data_path and not rows:
        problems.append("no data is given: give --data-path, or rows with --input-file or --input-dataset")
    if o.data_path and rows:
        problems.append(f"--data-path and {rows[0]} both specify training data: give only one of them")
    if not rows and (given := list_changed(options.rows)):
        problems.append(f"{', '.join(map(flag_name, given))}: no effect without rows to tokenize (--input-file)")
    problems += find_format_problems(options, has_rows=bool(rows))
    if weights and o.data_path and len(weights) != len(o.data_path):
        problems.append(f"--data-weights: {len(weights)} numbers for the {len(o.data_path)} data sets of --data-path")
    if not all(0 < weight < math.inf for weight in weights):
        problems.append(f"--data-weights {' '.join(map(str, weights))}: must be above 0, and finite")
    if weights and len(o.data_path) <= 1:
        problems.append("--data-weights has no effect on a single data set: give several with --data-path")
    if not weights and o.data_weights_by != "samples":
        problems.append("--data-weights-by has no effect without --data-weights")
    if o.batch_size is not None and o.batch_tokens is not None:
        problems.append(
            f"--batch-size {o.batch_size} and --batch-tokens {o.batch_tokens} both set the size of a step: give only"
            " one of them; --batch-size None overrides a file's"
        )
    if o.subset is not None:
        try:
            parse_subset(o.subset)
        except ValueError as error:
            problems.append(f"--subset {error}")
    return problems


def find_validation_problems(options: TrainOptions) -> list[str]:
    """Problems with validation options."""
    o = options.validation
    if not (o.is_asked or options.rows.validation_share):
        given = list_given(o)
        return [f"{', '.join(given)}: no effect without --validation-data-path"] if given else []
    if o.validation_data_path and options.rows.validation_share:
        return ["--validation-share and --validation-data-path both specify validation data: give only one of them"]
    if o.early_stopping_patience is not None and o.validate_every_steps is None and not o.validate_at_epoch:
        return ["--early-stopping-patience needs validations during the run: add --validate-every-steps or"
                " --validate-at-epoch"]  # fmt: skip
    return []


def find_format_problems(options: TrainOptions, *, has_rows: bool) -> list[str]:
    """Problems with row formats that do not match the objective."""
    objective, rows = options.classification.objective, options.rows
    wanted = OBJECTIVES[objective].row_format
    if wanted is None:
        fitting = [f"--objective {name}" for name, facts in OBJECTIVES.items() if facts.row_format == rows.format]
        useless = f"--format {rows.format} has no effect on --objective {objective}: give {' or '.join(fitting)}"
        return [useless] if rows.format is not None and fitting else []
    or_pairs = ", or of --format preference with --feedback-from-pairs" if wanted == "feedback" else ""
    needs = f"--objective {objective} needs rows of --format {wanted}{or_pairs}"
    if has_rows and rows.mock_data is not None and wanted not in RANDOM_FORMATS:
        return [f"{needs}: --mock-data has none"]
    makes = "feedback" if rows.feedback_from_pairs else rows.format or name_random_format(options)
    return [needs] if has_rows and makes != wanted else []


def name_random_format(options: TrainOptions) -> str | None:
    """The format of --mock-data for the objective; None: texts, or rows that are not random."""
    return None if options.rows.mock_data is None else OBJECTIVES[options.classification.objective].row_format


def find_objective_problems(options: TrainOptions) -> list[str]:
    """Options that the objective does not use or cannot be used with."""
    objective, values = options.classification.objective, flatten_options(options)
    facts, problems = OBJECTIVES[objective], []
    unused = {name for other in OBJECTIVES.values() for name in other.options} - {*facts.options}
    changed = list_all_changed(options)
    given = [flag_name(name) for name in changed if name in unused]
    if given:
        problems.append(f"{', '.join(given)}: no effect on --objective {objective}")
    problems += [
        f"{flag_name(name)} {values[name]}: cannot be used with --objective {objective}, {reason}"
        for name, reason in facts.excluded.items()
        if values[name] and name in changed
    ]
    if not 0 <= values["label_smoothing"] < 1:
        problems.append(f"--label-smoothing {values['label_smoothing']}: must be at least 0 and below 1")
    return problems


def find_preference_problems(options: TrainOptions) -> list[str]:
    """Problems with options of preferences: out of range, or only for some preference losses."""
    o, problems = options.preference, []
    for name in ("reward_centering", "desirable_weight", "undesirable_weight"):
        if not 0 <= getattr(o, name) < math.inf:
            problems.append(f"{flag_name(name)} {getattr(o, name)}: must be at least 0")
    if o.preference_beta is not None and not 0 < o.preference_beta < math.inf:
        problems.append(f"--preference-beta {o.preference_beta}: must be above 0")
    if "preference_loss" not in OBJECTIVES[options.classification.objective].options:
        return problems
    loss = f"--preference-loss {o.preference_loss}"
    if o.preference_gamma is not None and o.preference_loss != "simpo":
        problems.append(f"--preference-gamma has no effect with {loss}")
    if o.preference_label_smoothing and o.preference_loss not in ("dpo", "robust"):
        problems.append(f"--preference-label-smoothing has no effect with {loss}")
    if not 0 <= o.preference_label_smoothing < 0.5:
        problems.append(
            f"--preference-label-smoothing {o.preference_label_smoothing}: must be at least 0 and below 0.5"
        )
    if o.preference_nll_weight is not None and not 0 <= o.preference_nll_weight < math.inf:
        problems.append(f"--preference-nll-weight {o.preference_nll_weight}: must be at least 0")
    if o.preference_loss in ("simpo", "orpo"):
        given = [name for name in ("reference_model", "reuse_reference_only") if name in list_changed(o)]
        problems += (
            [f"{', '.join(map(flag_name, given))}: no effect with {loss}, which has no reference"] if given else []
        )
    return problems


def find_teacher_problems(options: TrainOptions) -> list[str]:
    """Options of teachers without one, and what teachers and weights of tokens cannot be used with."""
    o, objective = options.teacher, options.classification
    problems, weighting = [], objective.loss_weighting
    if weighting is not None and objective.label_smoothing:
        problems.append(f"--loss-weighting {weighting}: weighs the target's loss alone: not with --label-smoothing")
    if not o.teacher_weight:
        given = list_given(o)
        return [*problems, f"{', '.join(given)}: no effect without --teacher-weight"] if given else problems
    if not all(0 <= weight <= 1 for weight in o.teacher_weight):
        problems.append(f"--teacher-weight {' '.join(map(str, o.teacher_weight))}: must be from 0 to 1")
    num_sets = max(1, len(options.data.data_path))
    if len(o.teacher_weight) not in (1, num_sets):
        sets = "a single data set" if num_sets == 1 else f"the {num_sets} data sets of --data-path"
        problems.append(
            f"--teacher-weight: {len(o.teacher_weight)} numbers for {sets}: give one for all of them, or one for each"
        )
    if not 0 < o.teacher_temperature < math.inf:
        problems.append(f"--teacher-temperature {o.teacher_temperature}: must be above 0, and finite")
    for name, value in (("label_smoothing", objective.label_smoothing), ("loss_weighting", weighting)):
        if value:
            problems.append(f"{flag_name(name)}: not with --teacher-weight, which says what the loss is")
    problems += find_unpaired(o.teacher_data, num_sets)
    if o.teacher_model == "self" and options.sharding.reshard_after_backward == "never":
        problems.append(
            "--reshard-after-backward never has no effect with --teacher-model self, whose weights are gathered before"
            " every micro-batch in the place of those that stayed: leave it out"
        )
    if o.teacher_data and options.sharding.context_parallel is not None:
        problems.append("--teacher-data: not with --context-parallel: score the data with score-data --teacher-data")
    return problems + find_teacher_source_problems(o)


def find_unpaired(teacher_data: tuple[str, ...], num_sets: int) -> list[str]:
    if not teacher_data or len(teacher_data) == num_sets:
        return []
    return [f"--teacher-data: {len(teacher_data)} for {num_sets} data sets of --data-path"]


def find_teacher_source_problems(o: TeacherOptions) -> list[str]:
    """Divergences that the teacher's kind does not have."""
    problems = []
    if o.teacher_model is None:
        if o.teacher_divergence in ("reverse-kl", "jsd"):
            problems.append(
                f"--teacher-divergence {o.teacher_divergence} needs the teacher's probability of each token that the"
                " model prefers, which files do not have: give --teacher-model"
            )
        if o.teacher_data:
            problems.append(
                "--teacher-data is read by --teacher-model: give it, or score the data with score-data --teacher-data"
            )
        return problems
    if o.teacher_divergence == "top-k-kl":
        problems.append("--teacher-divergence top-k-kl: --teacher-model computes the whole distribution: give"
                        " forward-kl")  # fmt: skip
    if "teacher_scores" in list_changed(o):
        problems.append("--teacher-scores and --teacher-model both say what the teacher is: give one of them")
    return problems


def find_optimization_problems(options: TrainOptions) -> list[str]:
    """Problems with the learning-rate schedule and the optimizer."""
    problems, o = [], options.optimization
    decays = o.lr_scheduler in SCHEDULES_WITH_END
    if o.warmup_ratio is not None and not 0 <= o.warmup_ratio < 1:
        problems.append(f"--warmup-ratio {o.warmup_ratio}: must be at least 0 and below 1")
    if o.warmup_ratio is not None and not options.end.is_given:
        problems.append(
            "--warmup-ratio is a share of the run's steps, but no end is given: add --max-steps, --max-epochs,"
            " --max-samples or --max-tokens"
        )
    if o.warmup_ratio is not None and o.num_warmup_steps:
        problems.append("--warmup-ratio and --num-warmup-steps both set the length of warm-up: give only one of them")
    if decays and not options.end.is_given:
        problems.append(
            f"--lr-scheduler {o.lr_scheduler} decays towards the run's end, but none is given:"
            " add --max-steps, --max-epochs, --max-samples or --max-tokens"
        )
    problems += find_schedule_problems(options)
    if o.min_lr_ratio is not None and not decays:
        problems.append(
            f"--min-lr-ratio has no effect with --lr-scheduler {o.lr_scheduler}, which does not decay towards the end"
        )
    for name, scheduler in (("num_cycles", "cosine_with_restarts"), ("lr_power", "polynomial")):
        if getattr(o, name) is not None and o.lr_scheduler != scheduler:
            flag = flag_name(name)
            problems.append(f"{flag} has no effect with --lr-scheduler {o.lr_scheduler}, only with {scheduler}")
    if o.lr_scheduler == "cosine_with_restarts" and o.num_cycles is None:
        problems.append("--lr-scheduler cosine_with_restarts needs --num-cycles, the number of decays from the peak")
    if o.num_decay_steps is not None and o.lr_scheduler != "wsd":
        problems.append(f"--num-decay-steps has no effect with --lr-scheduler {o.lr_scheduler}, only with wsd")
    if (o.num_warmup_steps or o.warmup_ratio) and o.lr_scheduler == "constant":
        flag = "--num-warmup-steps" if o.num_warmup_steps else "--warmup-ratio"
        problems.append(f"{flag} has no effect with --lr-scheduler constant: use constant_with_warmup")
    problems += find_rate_problems(options) + find_average_problems(options)
    if options.osft.osft and o.master_weights != "float32":
        problems.append(
            f"--master-weights {o.master_weights}: --osft keeps directions exactly, which rounding would break;"
            " use float32"
        )
    return problems


def find_average_problems(options: TrainOptions) -> list[str]:
    """Problems with --weight-average."""
    o, problems = options.optimization, []
    for name, kind in (("ema_decay", "ema"), ("ema_half_life", "ema"), ("tail_steps", "tail")):
        if getattr(o, name) is not None and o.weight_average != kind:
            problems.append(
                f"{flag_name(name)} has no effect with --weight-average {o.weight_average}, only with {kind}"
            )
    if o.weight_average == "ema" and (o.ema_decay is None) == (o.ema_half_life is None):
        problems.append("--weight-average ema needs either --ema-decay or --ema-half-life")
    if o.weight_average == "tail" and o.tail_steps is None:
        problems.append("--weight-average tail needs --tail-steps, the number of steps up to the run's end")
    if o.weight_average == "tail" and not options.end.is_given:
        problems.append(
            "--weight-average tail ends with the run, but no end is given: add --max-steps, --max-epochs,"
            " --max-samples or --max-tokens"
        )
    if o.weight_average != "none" and o.master_weights != "float32":
        problems.append(f"--weight-average is kept in fp32: not with --master-weights {o.master_weights}")
    if options.validation.validate_average and o.weight_average != "ema":
        problems.append(
            "--validate-average needs --weight-average ema"
            + (": the mean of the last steps begins only before the end" if o.weight_average == "tail" else "")
        )
    return problems


def find_rate_problems(options: TrainOptions) -> list[str]:
    """Problems with Muon, and with learning rates of parts of the model."""
    o, problems = options.optimization, []
    given = [name for name in list_changed(o) if name in ("adam_learning_rate", "muon_momentum", "muon_scale")]
    if o.optimizer != "muon":
        problems += [
            f"{flag_name(name)} has no effect with --optimizer {o.optimizer}, only with muon" for name in given
        ]
    else:
        reasons = {
            "--osft": options.osft.osft and "whose directions an orthogonal update would leave",
            "--lora": options.lora.lora and "whose factors are no matrices between hidden states",
            "--cpu-offload": options.sharding.cpu_offload and "since its products are too many for a CPU",
            f"--master-weights {o.master_weights}": o.master_weights != "float32" and "which it does not round",
        }
        problems += [f"--optimizer muon cannot be used with {flag}, {why}" for flag, why in reasons.items() if why]
    by_part = [name for name in ("adam_learning_rate", "learning_rate_for") if getattr(o, name)]
    if o.learning_rate == 0 and by_part:
        problems.append(f"{flag_name(by_part[0])} shares the schedule of --learning-rate, which must be above 0")
    return problems


def find_schedule_problems(options: TrainOptions) -> list[str]:
    """Problems with a schedule that several runs share."""
    o, origin = options.optimization, options.checkpoints.continue_from
    if o.schedule_steps is not None and not o.needs_end:
        return [
            f"--schedule-steps has no effect with --lr-scheduler {o.lr_scheduler}, which does not depend on the number"
            " of steps: leave it out"
        ]
    if origin is not None and o.needs_end and o.schedule_steps is None:
        needs = "--warmup-ratio" if o.warmup_ratio is not None else f"--lr-scheduler {o.lr_scheduler}"
        return [f"--continue-from with {needs} needs --schedule-steps, the number of steps of all its runs together"]
    return []


def find_compute_problems(options: TrainOptions) -> list[str]:
    """Problems with computation, sharding, and "auto" values."""
    problems, compute, sharding, osft = [], options.compute, options.sharding, options.osft.osft
    if sharding.shard_size is not None and sharding.sharding != "hybrid":
        problems.append(f"--shard-size has no effect with --sharding {sharding.sharding}, only with hybrid")
    problems += find_sharing_problems(options)
    if sharding.cpu_offload and osft:
        problems.append("--cpu-offload cannot be used with --osft, whose projections run where the weights are")
    if compute.compute_dtype == "float16":
        problems.append(
            "--compute-dtype float16: its smallest number is 6e-8, so gradients become zero unless the loss is scaled,"
            " which is not implemented here: use bfloat16, or float32 on a device without it"
        )
    if compute.float8 and osft:
        problems.append("--float8 cannot be used with --osft, whose layers do not support fp8")
    if compute.float8 and compute.compute_dtype == "float32":
        problems.append("--float8 needs bfloat16 for everything not in fp8, given --compute-dtype float32")
    is_auto = options.data.max_tokens_per_gpu == "auto"
    if is_auto and options.data.drop_overlong:
        problems.append(
            "--drop-overlong has no effect with --max-tokens-per-gpu auto, which never goes below the longest sample:"
            " drop long samples with process_data.py --max-sample-num-tokens, or give a number"
        )
    has_use = is_auto or compute.activation_checkpointing == "auto" or options.plan.dry_run
    if compute.memory_budget_gb is not None and not has_use:
        problems.append(
            "--memory-budget-gb has no effect without --max-tokens-per-gpu auto, --activation-checkpointing auto or"
            " --dry-run"
        )
    if compute.use_liger_kernels and compute.compile:
        problems.append(
            "--use-liger-kernels cannot be used with --compile, which writes kernels for the same operations: give only"
            " one of them"
        )
    if compute.tiled_mlp and compute.compile:
        problems.append("--tiled-mlp cannot be used with --compile, which compiles whole blocks: give only one of them")
    if compute.offload_activations and compute.activation_checkpointing != "full":
        problems.append(
            "--offload-activations moves the block inputs that --activation-checkpointing full keeps, given"
            f" {compute.activation_checkpointing}: use full, or remove the option"
        )
    if compute.compile and compute.activation_checkpointing == "auto":
        problems.append(
            "--activation-checkpointing auto cannot be used with --compile, which needs to know the mode in advance:"
            " give none, selective or full"
        )
    return problems


def find_sharing_problems(options: TrainOptions) -> list[str]:
    """Problems with options that do not work with --context-parallel."""
    num_sharing = options.sharding.context_parallel
    if num_sharing is None:
        return []
    reasons = []
    if options.optimization.neftune_alpha is not None:
        reasons.append("not with --neftune-alpha, whose noise is drawn for whole sequences")
    if options.compute.compile:
        reasons.append("not with --compile, with which it has not been tested")
    return [f"--context-parallel {num_sharing}: {reason}: give only one of them" for reason in reasons]


def find_ending_problems(options: TrainOptions) -> list[str]:
    """Problems with checkpoints, exports and dry runs."""
    problems, exports, plan = [], options.exports, options.plan
    if options.checkpoints.allow_changed_options and options.checkpoints.resume == "none":
        problems.append("--allow-changed-options has no effect with --resume none: nothing is resumed")
    resume = options.checkpoints.resume
    if options.checkpoints.continue_from is not None and resume not in ("auto", "strict", "none"):
        problems.append(
            f"--continue-from and --resume {resume} both name a checkpoint to start from: --resume continues the same"
            " run, --continue-from starts a new one: give only one of them"
        )
    given = [flag_name(name) for name in ("plan_world_size", "plan_device") if getattr(plan, name) is not None]
    if given and not plan.dry_run:
        problems.append(f"{', '.join(given)}: no effect without --dry-run")
    name = exports.export_name
    if name is not None and (name in ("", "best") or name.startswith((".", "samples_")) or "/" in name):
        problems.append(
            f"--export-name {name!r}: must be the name of a directory, other than best, samples_N and .NAME"
        )
    if name is not None and exports.keep_exports is not None:
        problems.append("--keep-exports has no effect with --export-name, which keeps only one export")
    if not exports.on_the_way and not options.end.is_given:
        problems.append(
            "the run has no end, so the trained model would never be written: add --max-epochs, --max-steps,"
            " --max-samples or --max-tokens; or, for a run that is stopped by hand, --min-samples-per-checkpoint or"
            " --checkpoint-at-epoch"
        )
    return problems
