"""Problems with the options of learning: objective, preferences, teacher, optimizer and learning rate."""

from mini_trainer.options import SCHEDULES_WITH_END, TeacherOptions, TrainOptions, flag_name, flatten_options
from mini_trainer.options.doors import FROM_LOGITS, FROM_TOP
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.problems.finding import list_all_changed, list_changed


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
    return problems


def find_optimization_problems(options: TrainOptions) -> list[str]:
    """Problems with the learning-rate schedule and the optimizer."""
    o = options.optimization
    need_end = {
        f"--num-warmup-steps {o.num_warmup_steps} is a share of the run's steps": 0 < o.num_warmup_steps < 1,
        f"--lr-scheduler {o.lr_scheduler} decays towards the run's end": o.lr_scheduler in SCHEDULES_WITH_END,
        "--weight-average tail ends with the run": o.weight_average == "tail",
    }
    problems = [
        f"{what}, but no end is given: add --max-steps, --max-epochs, --max-samples or --max-tokens"
        for what, is_asked in need_end.items()
        if is_asked and not options.end.is_given
    ]
    problems += find_schedule_problems(options)
    if o.lr_scheduler == "cosine_with_restarts" and not float(o.lr_shape or 0.5).is_integer():
        problems.append("--lr-scheduler cosine_with_restarts needs --lr-shape, its whole number of cycles")
    if o.num_warmup_steps and o.lr_scheduler == "constant":
        problems.append("--num-warmup-steps has no effect with --lr-scheduler constant: use constant_with_warmup")
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
    if o.weight_average == "ema" and o.ema_half_life is None:
        problems.append("--weight-average ema needs --ema-half-life, in samples")
    if o.weight_average == "tail" and o.tail_steps is None:
        problems.append("--weight-average tail needs --tail-steps, the number of steps up to the run's end")
    if o.weight_average != "none" and o.master_weights != "float32":
        problems.append(
            f"--weight-average is kept in fp32, and cannot be used with --master-weights {o.master_weights}"
        )
    return problems


def find_rate_problems(options: TrainOptions) -> list[str]:
    """Problems with Muon, and with learning rates of parts of the model."""
    o, problems = options.optimization, []
    if o.optimizer == "muon":
        reasons = {
            "--osft": options.osft.osft and "whose directions an orthogonal update would leave",
            "--lora": options.lora.lora and "whose factors are not matrices between hidden states",
            "--cpu-offload": options.sharding.cpu_offload and "since its products are too many for a CPU",
            f"--master-weights {o.master_weights}": o.master_weights != "float32" and "which it does not round",
        }
        problems += [f"--optimizer muon cannot be used with {flag}, {why}" for flag, why in reasons.items() if why]
    if o.learning_rate == 0 and o.learning_rate_for:
        problems.append("--learning-rate-for shares the schedule of --learning-rate, which must be above 0")
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
        is_decaying = o.lr_scheduler in SCHEDULES_WITH_END
        needs = f"--lr-scheduler {o.lr_scheduler}" if is_decaying else f"--num-warmup-steps {o.num_warmup_steps}"
        return [f"--continue-from with {needs} needs --schedule-steps, the number of steps of all its runs together"]
    return []


def find_preference_problems(options: TrainOptions) -> list[str]:
    """Options that are only for some preference losses."""
    o, problems = options.preference, []
    if "preference_loss" not in OBJECTIVES[options.classification.objective].options:
        return problems
    loss = f"--preference-loss {o.preference_loss}"
    if o.preference_gamma is not None and o.preference_loss != "simpo":
        problems.append(f"--preference-gamma has no effect with {loss}")
    smoothing = options.classification.label_smoothing
    if smoothing and o.preference_loss != "dpo":
        problems.append(f"--label-smoothing has no effect with {loss}")
    elif smoothing >= 0.5:
        problems.append(
            f"--label-smoothing {smoothing}: must be below 0.5 with {loss}, for half of all pairs is no data"
        )
    if o.preference_loss in ("simpo", "orpo") and o.reference_model is not None:
        problems.append(f"--reference-model: no effect with {loss}, which has no reference")
    return problems


def find_teacher_problems(options: TrainOptions) -> list[str]:
    """Options that teachers and token weights cannot be used with."""
    o, objective = options.teacher, options.classification
    problems, weighting = [], objective.loss_weighting
    if weighting is not None and objective.label_smoothing:
        problems.append(
            f"--loss-weighting {weighting}: weighs only the target's loss, and cannot be used with --label-smoothing"
        )
    if not o.teacher_weight:
        return problems
    if not all(0 <= weight <= 1 for weight in o.teacher_weight):
        problems.append(f"--teacher-weight {' '.join(map(str, o.teacher_weight))}: must be from 0 to 1")
    num_sets = max(1, len(options.data.data_path))
    if len(o.teacher_weight) not in (1, num_sets):
        sets = "a single data set" if num_sets == 1 else f"the {num_sets} data sets of --data-path"
        problems.append(
            f"--teacher-weight: {len(o.teacher_weight)} numbers for {sets}: give one for all of them, or one for each"
        )
    for name, value in (("label_smoothing", objective.label_smoothing), ("loss_weighting", weighting)):
        if value:
            problems.append(f"{flag_name(name)}: cannot be used with --teacher-weight, which determines the loss")
    problems += find_unpaired(o.teacher_data, num_sets)
    if o.teacher_model == "self" and options.sharding.reshard_after_backward == "never":
        problems.append(
            "--reshard-after-backward never has no effect with --teacher-model self, whose weights replace the"
            " gathered ones before every micro-batch: leave it out"
        )
    if o.teacher_data and options.sharding.context_parallel is not None:
        problems.append(
            "--teacher-data cannot be used with --context-parallel: score the data with score-data --teacher-data"
        )
    return problems + find_teacher_source_problems(o)


def find_unpaired(teacher_data: tuple[str, ...], num_sets: int) -> list[str]:
    if not teacher_data or len(teacher_data) == num_sets:
        return []
    return [f"--teacher-data: {len(teacher_data)} for {num_sets} data sets of --data-path"]


def find_teacher_source_problems(o: TeacherOptions) -> list[str]:
    """Divergences that this kind of teacher does not have."""
    problems = []
    if o.teacher_model is None:
        if o.teacher_divergence not in FROM_TOP:
            problems.append(
                f"--teacher-divergence {o.teacher_divergence} needs the teacher's probability of each token that the"
                " model prefers, which files do not have: give --teacher-model"
            )
        if o.teacher_data:
            problems.append(
                "--teacher-data needs --teacher-model: give one, or score the data with score-data --teacher-data"
            )
        return problems
    if o.teacher_divergence not in FROM_LOGITS:
        problems.append(
            f"--teacher-divergence {o.teacher_divergence}: --teacher-model computes the whole distribution: give"
            " forward-kl"
        )
    if "teacher_scores" in list_changed(o):
        problems.append("--teacher-scores and --teacher-model both choose the teacher: give only one of them")
    return problems
