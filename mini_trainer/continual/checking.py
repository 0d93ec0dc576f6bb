"""Checks an experiment before its first task: with train's own plan, the prepared data, and the start model in place of
models that do not exist yet; and by reading tests as evaluate does."""

from collections.abc import Sequence
from pathlib import Path

from mini_trainer.continual.data import HeldOut, PreparedFiles, read_questions
from mini_trainer.continual.measuring import group_tests
from mini_trainer.continual.replay import describe_held_out, mix
from mini_trainer.continual.settings import SECTIONS, ContinualSettings, SetSettings, Task, Values, complete_options
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.tools import EvaluateOptions
from mini_trainer.use.evaluation.tasks import open_task

UNSTARTED = "unstarted"  # stands for the output directory of a run; nothing is written there


def check_experiments(
    several: list[ContinualSettings], prepared: dict[str, PreparedFiles], held_out: HeldOut, known: list[Path | None]
) -> None:
    """ValueError with all problems that runs of train, and their data, would have."""
    problems = find_test_problems(several[0], prepared)  # which all methods share
    for settings, own in zip(several, known, strict=True):
        where = f"methods: {settings.label}: " if len(several) > 1 else ""
        if own is not None and (num_held_out := held_out.count_rows(own)):
            problems.append(f"{where}{describe_held_out(num_held_out, settings.replay.known)}")
        for task in settings.tasks:
            found = find_data_problems(settings, task, prepared, held_out)
            found += find_train_problems(settings, task, prepared, own)
            problems += [f"{where}tasks: {task.name}: {problem}" for problem in found]
    if problems:
        raise ValueError("\n  ".join(dict.fromkeys(problems)))


def find_test_problems(settings: ContinualSettings, prepared: dict[str, PreparedFiles]) -> list[str]:
    """Problems with the tests, which evaluate reads after every task."""
    problems = find_harness_problems([*settings.probes, *settings.tasks])
    for own in group_tests([*settings.probes, *settings.tasks], settings):
        metrics = tuple(sorted({one.metric for one in own} - {None}))
        values = (
            SECTIONS["evaluate"].later | settings.evaluate | own[0].evaluate | ({"metrics": metrics} if metrics else {})
        )
        options = group_options(EvaluateOptions, **values)
        for one in own:
            try:
                test = open_task(str(prepared[one.name].test), one.name, options)
                if one.metric is not None and one.metric not in test.measures:
                    problems.append(f"{one.name}: metric: {one.metric}: {one.test} has {', '.join(test.measures)}")
            except (ValueError, OSError) as error:
                problems.append(f"{one.name}: test: {error}")
    return problems


def find_harness_problems(sets: Sequence[SetSettings]) -> list[str]:
    """Problems with tasks of EleutherAI's harness."""
    tasks = tuple(one.lm_eval for one in sets if one.lm_eval is not None)
    if not tasks:
        return []
    from mini_trainer.use.evaluation.harness import check_harness  # with torch: seconds to import

    try:
        check_harness(tasks)
    except ValueError as error:
        return [str(error).replace("--lm-eval ", "lm_eval: ", 1)]
    return []


def find_data_problems(
    settings: ContinualSettings, task: Task, prepared: dict[str, PreparedFiles], held_out: HeldOut
) -> list[str]:
    """Problems with a task's rows, as replay reads them."""
    replay, data = settings.replay, prepared[task.name].train
    if replay is None:
        return []
    if replay.kind == "rows" and not task.input_file and held_out.count_rows(data):
        advice = f", or give input_file for task {task.name}, whose rows can be left out"
        return [describe_held_out(held_out.count_rows(data), data) + advice]
    try:
        for _ in read_questions(task, settings) if replay.kind == "own-answers" else ():
            pass
    except ValueError as error:
        return [str(error)]
    return []


def find_train_problems(
    settings: ContinualSettings, task: Task, prepared: dict[str, PreparedFiles], known: Path | None
) -> list[str]:
    """Problems that train finds before it loads weights: data, tokenizer, model, layers, memory options."""
    from mini_trainer.run.plan.memory import Findings  # with torch: seconds to import
    from mini_trainer.run.plan.planner import choose_step_options, find_target, look_at_run

    findings = Findings()
    options = group_options(TrainOptions, **choose_options(settings, task, prepared, known))
    step_options = choose_step_options(options)
    target = find_target(None, step_options, settings.num_processes, findings, is_here=False)
    look_at_run(options, target, findings)
    return [f"train: {problem}" for problem in findings.problems]


def choose_options(
    settings: ContinualSettings, task: Task, prepared: dict[str, PreparedFiles], known: Path | None
) -> Values:
    """The task's options of train with the start model and, where rows are replayed, all other tasks' data."""
    own, values = prepared[task.name], complete_options(settings, task)[0]
    others = [prepared[other.name].train for other in settings.tasks if other is not task]
    values |= {"model_name_or_path": settings.model, "output_dir": str(settings.root / UNSTARTED)}
    if own.validation is not None:
        values["validation_data_path"] = (str(own.validation),)
    if values.get("osft_basis") == "activations":  # of the task before it, whose statistics do not exist yet
        values.pop("osft_statistics")
        values.setdefault("osft_calibration_data", str(own.train))
    for name in ("teacher_weight", "teacher_model", "teacher_data"):
        if settings.replay is not None:
            values.pop(name, None)
    replayed = others if settings.replay is not None and settings.replay.kind == "rows" else []
    return mix(values, own.train, [*filter(None, [known]), *replayed], settings.replay)
