"""Reads the YAML file of `mini-trainer continual`, and checks it before anything runs.

Options of the programs are checked by the programs' own rules, except for values that are only known later.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_origin

from mini_trainer.continual.settings import (
    ContinualSettings,
    Replay,
    SelfDistillation,
    SetSettings,
    Task,
    Values,
    complete_options,
    splits_off,
)
from mini_trainer.options import TrainOptions, group_options, list_types
from mini_trainer.options.option_files import parse_value, parse_values, read_option_file
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.tools import (
    MOST_TOP_K,
    EvaluateOptions,
    GenerateOptions,
    MergeModelsOptions,
    ProcessDataOptions,
    ScoreDataOptions,
)
from mini_trainer.options.urls import hide_credentials, is_url
from mini_trainer.use.evaluation.metrics import MEASURES, SARI

Group = TypeVar("Group")
PROGRAMS = {
    "process-data": ProcessDataOptions,
    "train": TrainOptions,
    "evaluate": EvaluateOptions,
    "generate": GenerateOptions,
    "score-data": ScoreDataOptions,
    "merge-models": MergeModelsOptions,
}

# Options that the experiment sets itself, by the key of the program in the file.
OWN_CODE = ("model_revision", "trust_remote_code")  # of hub models with own code, which are not supported
RESERVED = {
    "train": {
        *OWN_CODE,
        *("config", "model_name_or_path", "output_dir", "data_path", "data_weights", "data_weights_by", "seed"),
        *("resume", "continue_from", "schedule_steps", "export_name", "lora_adapter", "lora_export"),
        *(
            "osft_statistics",
            "osft_bases",
            "validation_data_path",
            "input_file",
            "input_dataset",
            "mock_data",
            "dry_run",
        ),
        *("print_config", "preset", "push_to_hub", "upload_to", "allow_changed_options", "keep_exports"),
        "save_final_checkpoint",
    },
    "process_data": {
        *OWN_CODE,
        *("config", "input_file", "output_file", "model_name_or_path", "preview_html", "shard", "join"),
    },
    "evaluate": {*OWN_CODE, "config", "output_dir", "model", "run", "data", "task", "lm_eval", "metrics"},
    "generate": {*OWN_CODE, "config", "model", "adapter", "prompts", "output", "seed", "num_samples"},
    "score_data": {*OWN_CODE, "config", "model_name_or_path", "data_path", "teacher_data", "name"},
}

# Stand-ins for these options, to check the others.
LATER = {
    "process_data": {"input_file": ("rows.jsonl",), "output_file": "data.arrow", "model_name_or_path": "M"},
    "evaluate": {"model": ("M",), "output_dir": "D", "task": ("test.jsonl",)},
    "generate": {"model": "M", "prompts": ("rows.jsonl",), "output": "answers.jsonl"},
    "score_data": {"model_name_or_path": "M", "data_path": ("data.arrow",)},
}
OF_TEACHER = ("teacher_weight", "teacher_model", "teacher_data", "teacher_scores")  # who the teacher of train is
CHOICE_METRICS = ("choice", "choice_normalised")  # of tests with choices
NAME = re.compile(r"[A-Za-z0-9][\w-]*")
NESTED = {"replay": Replay, "self_distillation": SelfDistillation}


def read_settings(
    path: Path, *, output_dir: str | None = None, allowed: Collection[str] = ()
) -> list[ContinualSettings]:
    """Reads and checks a YAML file: the settings of one experiment, or of one for each of its `methods`.

    `output_dir` replaces the file's own; `allowed`: environment variables to fill in. ValueError names the file and the
    key.
    """
    given = read_option_file(path, named=str(path), allowed=allowed)
    given |= {} if output_dir is None else {"output_dir": output_dir}
    methods = given.pop("methods", None)
    try:
        shared = read_group(ContinualSettings, given, where="")
        if methods is None:
            return [check_settings(shared)]
        given["output_dir"] = shared.output_dir  # a text, also of a number
        return [read_method(name, values, given) for name, values in check_methods(methods).items()]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


SHARED_FOLDERS = ("data", "start")

# What a method may set: how tasks are learnt, and neither data nor measurements, which all methods share.
OF_METHODS = ("train", "replay", "self_distillation", "adapters", "keep_osft_bases", "export", "generate", "score_data")


def check_methods(methods: Any) -> dict[str, Values]:
    """The methods' settings by name; ValueError unless there are several, each with keys of `OF_METHODS`."""
    if not isinstance(methods, dict) or len(methods) < 2:
        raise ValueError(f"methods: given {methods!r}, allowed: two or more names, each with its settings")
    found = {str(name): {} if values is None else values for name, values in methods.items()}
    check_names(list(found), where="methods:")
    for name, values in found.items():
        if name in SHARED_FOLDERS:
            raise ValueError(f"methods: {name}: is a folder that all methods share; choose another name")
        unknown = [key for key in values if key not in OF_METHODS] if isinstance(values, dict) else values
        if unknown or not isinstance(values, dict):
            raise ValueError(f"methods: {name}: given {unknown!r}, allowed: {', '.join(OF_METHODS)}")
        for key in RESERVED.keys() & values:
            if not isinstance(values[key], dict):
                raise ValueError(f"methods: {name}: {key}: given {values[key]!r}, allowed: 'option: value' lines")
    return found


def read_method(name: str, values: Values, given: Values) -> ContinualSettings:
    """The settings of one method: its options of a program are added to those of all methods."""
    own = {key: given.get(key, {}) | value if key in RESERVED else value for key, value in values.items()}
    root = Path(given["output_dir"]) / name
    try:
        return check_settings(
            read_group(ContinualSettings, given | own | {"output_dir": str(root), "name": name}, where="")
        )
    except ValueError as error:
        raise ValueError(f"methods: {name}: {error}") from None


def read_group(group: type[Group], given: Any, *, where: str) -> Group:
    """Makes a group of settings from a mapping; ValueError for unknown keys, missing ones, and values of other types.
    `where` is the group's place in the file, with a colon."""
    fields = {one.name: one for one in dataclasses.fields(group)}
    if not isinstance(given, dict):
        raise ValueError(f"{where} given {given!r}, allowed: 'key: value' lines of {', '.join(fields)}".strip())
    for key in given:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(fields)}"
            raise ValueError(f"{where} unknown key {key!r}; {hint}".strip())
    needed = [name for name, one in fields.items() if is_required(one) and name not in given]
    if needed:
        raise ValueError(f"{where} {', '.join(needed)}: required".strip())
    return group(**{key: read_entry(group, key, value, where=where) for key, value in given.items()})


def is_required(entry: dataclasses.Field) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING


def read_entry(group: type, key: str, value: Any, *, where: str) -> Any:
    """Converts one value of a group."""
    kind, place = list_types(group)[key], f"{where} {key}".strip()
    if key in NESTED:
        return read_group(NESTED[key], value, where=f"{place}:")
    if key in ("tasks", "probes"):
        if not isinstance(value, list):
            raise ValueError(f"{key}: given {value!r}, allowed: a list")
        made = Task if key == "tasks" else SetSettings
        return tuple(read_group(made, one, where=f"{key}[{i}]:") for i, one in enumerate(value))
    if kind == Values:
        if not isinstance(value, dict):
            raise ValueError(f"{place}: given {value!r}, allowed: 'option: value' lines")
        return check_options(key, value, where=f"{place}:")
    try:
        return parse_value(key, list(value) if get_origin(kind) is tuple and isinstance(value, list) else value, group)
    except ValueError as error:
        raise ValueError(f"{where} {error}".strip()) from None


def check_options(program: str, given: Mapping[str, Any], *, where: str) -> Values:
    """Converts options of a program by its own rules; ValueError for unknown ones, and for those set here."""
    reserved = dict.fromkeys(RESERVED[program], "is set for each task by the experiment itself; leave it out")
    values = parse_values(given, PROGRAMS[program.replace("_", "-")], where=where, reserved=reserved)
    for name, value in values.items():  # the option files of the programs hold them
        if isinstance(value, str) and (shown := hide_credentials(value)) != value:
            raise ValueError(
                f"{where} {name}: given {shown}, with a password or key, which files would hold; remove it"
            )
    return values


def check_settings(settings: ContinualSettings) -> ContinualSettings:
    """Returns the settings; ValueError if they contradict each other or say too little."""
    if not settings.tasks:
        raise ValueError("tasks: none is given; give a list of tasks, each with a name and rows")
    check_names([one.name for one in settings.tasks] + [one.name for one in settings.probes], where="tasks, probes:")
    if settings.num_processes < 1:
        raise ValueError(f"num_processes: given {settings.num_processes}, allowed: at least 1")
    most = math.factorial(len(settings.tasks))
    if not 1 <= settings.orders <= most:
        raise ValueError(f"orders: given {settings.orders}, allowed: 1 to {most}, the orders of the tasks")
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise ValueError(f"seeds: given {list(settings.seeds)}, allowed: one or more different numbers")
    for task in settings.tasks:
        check_task(task, settings)
    for probe in settings.probes:
        check_set(probe, where="probes:")
        check_program("evaluate", settings.evaluate | probe.evaluate, where=f"probes: {probe.name}: ")
    check_replay(settings)
    check_rounds(settings)
    uses_lora = [bool(settings.train_options(task).get("lora")) for task in settings.tasks]
    if settings.adapters != "merged" and not all(uses_lora):
        raise ValueError(f"adapters: {settings.adapters}: has no effect without train: {{lora: true}} for every task")
    return settings


def check_program(key: str, values: Values, *, where: str = "") -> None:
    """ValueError for options of a program that it would refuse."""
    problems = find_problems(group_options(PROGRAMS[key.replace("_", "-")], **LATER[key] | values))
    if problems:
        raise ValueError(f"{where}{key}: " + "\n  ".join(problems))


def check_names(names: list[str], *, where: str) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(f"{where} name {name!r}: allowed: letters, digits, _ and -, since folders have it")
        if name.endswith("_held_out"):
            raise ValueError(f"{where} name {name!r}: allowed: names without the ending _held_out")
        if names.count(name) > 1:
            raise ValueError(f"{where} name {name!r}: is given twice")


def check_set(one: SetSettings, *, where: str) -> None:
    if one.test is not None and one.lm_eval is not None:
        raise ValueError(f"{where} {one.name}: has test and lm_eval; give one of them")
    if one.test is None and one.lm_eval is None and one.held_out is None:
        raise ValueError(f"{where} {one.name}: nothing to measure by; give test, lm_eval or held_out")
    if one.metric is not None and one.test is None and one.lm_eval is None:
        raise ValueError(f"{where} {one.name}: metric has no effect without test or lm_eval")
    if one.metric is not None and one.test is not None and one.metric not in (*MEASURES, SARI, *CHOICE_METRICS):
        allowed = ", ".join((*MEASURES, SARI))
        raise ValueError(f"{where} {one.name}: metric: given {one.metric!r}, allowed: {allowed}")


def check_task(task: Task, settings: ContinualSettings) -> None:
    check_set_of_task = task if not splits_off(task, settings) else dataclasses.replace(task, held_out="split off")
    check_set(check_set_of_task, where="tasks:")
    where = f"tasks: {task.name}:"
    if bool(task.input_file) == (task.data_path is not None):
        raise ValueError(f"{where} give input_file (rows) or data_path (a data set of process-data), and only one")
    if task.data_path is not None and is_url(task.data_path):
        raise ValueError(f"{where} data_path {task.data_path}: must be local: copy the data set, with its .meta.json")
    if task.data_path is not None and task.process_data:
        raise ValueError(f"{where} process_data has no effect on data_path, which is tokenized already")
    if splits_off(task, settings) and task.held_out is not None:
        raise ValueError(f"{where} held_out is given, and validation_share splits off another; give one of them")
    check_program("process_data", settings.process_data | task.process_data, where=f"{where} ")
    check_program("evaluate", settings.evaluate | task.evaluate, where=f"{where} ")
    values = settings.train_options(task)
    if not {"max_epochs", "max_steps", "max_samples", "max_tokens"} & {k for k, v in values.items() if v is not None}:
        raise ValueError(f"{where} train: no end is given; give max_epochs, max_steps, max_samples or max_tokens")
    complete = complete_options(settings, task)
    problems = dict.fromkeys(line for own in complete for line in find_problems(group_options(TrainOptions, **own)))
    if problems:
        raise ValueError(f"{where} train: " + "\n  ".join(problems))
    if settings.export == "best" and task.validation is None:
        raise ValueError(f"{where} export: best needs validation data for every task")


def check_replay(settings: ContinualSettings) -> None:
    replay = settings.replay
    if replay is None:
        return
    if len(settings.tasks) < 2:
        raise ValueError("replay: has no effect with one task")
    if not 0 < replay.share < 1:
        raise ValueError(f"replay: share: given {replay.share}, allowed: above 0 and below 1")
    if replay.num_prompts is not None and replay.num_prompts < 1:
        raise ValueError(f"replay: num_prompts: given {replay.num_prompts}, allowed: at least 1")
    if replay.teacher_weight is not None and not 0 < replay.teacher_weight <= 1:
        raise ValueError(f"replay: teacher_weight: given {replay.teacher_weight}, allowed: above 0, at most 1")
    for name in OF_TEACHER:
        taught = [task.name for task in settings.tasks if name in settings.train_options(task)]
        if replay.teacher_weight is not None and taught:
            raise ValueError(f"replay: teacher_weight: train of {', '.join(taught)} has a {name}, too; give one")
    if replay.kind == "own-answers":
        check_program("generate", settings.generate)
        check_answerable(settings, settings.tasks[:-1], "replay: own-answers", needs_test=True)
    else:
        given = [name for name in ("num_prompts",) if getattr(replay, name) is not None]
        given += ["min_score"] if replay.min_score != Replay.min_score else []
        if given:
            raise ValueError(f"replay: {', '.join(given)}: no effect with kind: rows")


def check_answerable(settings: ContinualSettings, tasks: Iterable[Task], what: str, *, needs_test: bool) -> None:
    """Refuses tasks whose prompts a model cannot answer, or whose answers cannot be scored."""
    if settings.generate.get("engine") == "openai":
        raise ValueError(f"{what}: generate: engine: openai: a server has another model; use hf or vllm")
    for task in tasks:
        if not task.input_file:
            raise ValueError(f"{what}: {task.name} has data_path, but the prompts are read from rows: give input_file")
        if needs_test and task.metric not in MEASURES:
            raise ValueError(f"{what}: {task.name} needs a metric that scores answers, of {', '.join(MEASURES)}")


def check_rounds(settings: ContinualSettings) -> None:
    rounds = settings.self_distillation
    if rounds is None:
        return
    if settings.export == "best":
        raise ValueError("self_distillation: not together with export: best; leave it out")
    check_answerable(settings, settings.tasks, "self_distillation", needs_test=False)
    check_program("generate", {"temperature": 1.0} | settings.generate)
    check_program("score_data", settings.score_data)
    if rounds.rounds < 1:
        raise ValueError(f"self_distillation: rounds: given {rounds.rounds}, allowed: at least 1")
    if rounds.teacher != "average" and rounds.average_decay != SelfDistillation.average_decay:
        raise ValueError("self_distillation: average_decay: no effect without teacher: average")
    if rounds.is_online and rounds.top_k != SelfDistillation.top_k:
        raise ValueError(f"self_distillation: top_k: no effect with divergence: {rounds.divergence}")
    if not 1 <= rounds.top_k <= MOST_TOP_K:
        raise ValueError(f"self_distillation: top_k: given {rounds.top_k}, allowed: 1 to {MOST_TOP_K}")
    if not 0 < rounds.average_decay < 1:
        raise ValueError(f"self_distillation: average_decay: given {rounds.average_decay}, allowed: between 0 and 1")
    if "{prompt}" not in rounds.demonstration or "{demonstration}" not in rounds.demonstration:
        raise ValueError("self_distillation: demonstration: must contain {prompt} and {demonstration}")
    for task in settings.tasks:
        values = settings.train_options(task)
        if values.get("max_epochs") is None or any(values.get(f"max_{end}") for end in ("steps", "samples", "tokens")):
            raise ValueError(f"self_distillation: {task.name}: the end of train must be given by max_epochs alone")
        if values.get("batch_tokens") is not None:
            raise ValueError(
                f"self_distillation: {task.name}: not together with train: batch_tokens, as answers have no length"
                " before they are generated; give batch_size"
            )
        given = [*OF_TEACHER, *(["teacher_divergence"] if rounds.is_online else [])]
        given = [name for name in given if values.get(name) is not None]
        if given:
            raise ValueError(f"self_distillation: {task.name}: has its own teacher; leave out train: {given[0]}")
        temperatures = [values.get("teacher_temperature", 1.0), settings.score_data.get("temperature", 1.0)]
        if not rounds.is_online and temperatures[0] != temperatures[1]:
            raise ValueError(
                f"self_distillation: {task.name}: train: teacher_temperature is {temperatures[0]}, score_data:"
                f" temperature {temperatures[1]}; give the same"
            )
    if settings.replay is not None:
        raise ValueError("self_distillation: not together with replay; give one of them")
    if settings.adapters != "merged":
        raise ValueError(f"self_distillation: not together with adapters: {settings.adapters}; leave it out")


def check_statistics(settings: ContinualSettings, order: list[str]) -> None:
    """Refuses an order of the tasks in which OSFT by activations does not know the data of every earlier task."""
    tasks = [settings.find_task(name) for name in order]
    values = [settings.train_options(task) for task in tasks]
    by_activations = [bool(own.get("osft")) and own.get("osft_basis") == "activations" for own in values]
    if by_activations[0] and "osft_calibration_data" not in values[0]:
        raise ValueError(
            f"tasks: {tasks[0].name}: train: osft_basis: activations: the first task needs osft_calibration_data, data"
            " of what the model knows, or osft: false among its own options"
        )
    others = [task.name for task, uses in zip(tasks[1:], by_activations[1:], strict=True) if not uses]
    if any(by_activations) and others:
        raise ValueError(
            f"tasks: {', '.join(others)}: train: osft_basis: activations is used by other tasks; only the first task of"
            " an order can do without, because each later one adds the statistics of the task before it"
        )
