"""Problems with the options of preferences and teachers."""

from mini_trainer.options import TeacherOptions, TrainOptions, flag_name
from mini_trainer.options.doors import FROM_LOGITS, FROM_TOP
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.problems.facts import list_changed


def find_signal_problems(options: TrainOptions) -> list[str]:
    """Problems with the training signal."""
    return [*find_preference_problems(options), *find_teacher_problems(options)]


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
