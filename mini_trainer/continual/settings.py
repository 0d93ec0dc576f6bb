"""Settings of a continual-learning experiment, read from YAML and checked before anything runs; and what follows from
them for a task, the options of train.

Options of the programs are checked by the programs' own rules, except for values that are only known later.
"""

import dataclasses
import functools
import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mini_trainer.options import TrainOptions, group_options, option_files
from mini_trainer.options.fields import option
from mini_trainer.options.problems.choices import LORA_ADAPTER_SAYS
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.tools import EvaluateOptions, GenerateOptions, ProcessDataOptions
from mini_trainer.options.urls import hide_credentials, is_url
from mini_trainer.use.evaluation.metrics import MEASURES

Values = dict[str, Any]  # options by name


@dataclass(frozen=True, kw_only=True)
class SetSettings:
    """A set that models are measured on."""

    name: str
    """Name in results, and of folders: letters, digits, _ and -."""
    test: str | None = None
    """File of prompts with references: generated answers are scored by `metric`."""
    metric: str | None = None
    """Metric of `test`, of evaluate --metrics; of `lm_eval`, one of the harness's task. Default: the first one."""
    lm_eval: str | None = None
    """Task of EleutherAI's harness, by name or YAML file."""
    held_out: str | None = None
    """Held-out data for the loss: a data set of process-data, or rows."""
    evaluate: Values = field(default_factory=dict)
    """Options of evaluate, such as max_new_tokens."""


@dataclass(frozen=True, kw_only=True)
class Task(SetSettings):
    """A task to learn."""

    input_file: tuple[str, ...] = ()
    """Files of rows for process-data."""
    data_path: str | None = None
    """Instead of rows: a data set of process-data."""
    validation: str | None = None
    """Data for train --validation-data-path: a data set of process-data, or rows."""
    process_data: Values = field(default_factory=dict)
    """Options of process-data."""
    train: Values = field(default_factory=dict)
    """Options of train."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Learning from earlier tasks again while a new one is learnt, or keeping what the model knows of them."""

    kind: Literal["rows", "own-answers", "drawn"]
    """rows: rows of the earlier tasks; own-answers: the model's own answers to their prompts, before the new task, if
    they pass the task's metric (arXiv 2605.29495); drawn: samples that the model draws before each task, with nothing
    asked (draw-samples), for which no data is needed."""
    keep: bool = False
    """Keep what the model says of these samples before the new task (train --keep), instead of learning them."""
    share: float = option(0.1, above=0, below=1)
    """Share of the samples drawn that are replayed, of all earlier tasks together. With keep: --keep-share, such
    samples for each one of the task."""
    share_of: Literal["samples", "tokens"] = "samples"
    """What the share counts: samples, or their tokens. With keep it follows from train's batch_size or batch_tokens."""
    num_prompts: int | None = option(None, at_least=1, only_with=("kind", ("own-answers", "drawn")))
    """own-answers: number of prompts of each earlier task to answer, drawn at random. Default: all. drawn: number of
    samples before each task. Default: that of draw-samples."""
    min_score: float = option(1.0, only_with=("kind", ("own-answers",)))
    """own-answers: least score of an answer by the task's metric."""
    known: str | None = None
    """Rows, or a data set of process-data, of what the start model knows, such as its own answers: replayed like an
    earlier task, also with the first one."""


@dataclass(frozen=True, kw_only=True)
class ContinualSettings:
    """An experiment: tasks in order, and how they are learnt and measured."""

    model: str
    """Model to start from: a directory or a name on the hub."""
    output_dir: str
    """Directory of the experiment."""
    name: str | None = None
    """Name in results. Default: that of the output directory."""
    num_processes: int = option(1, at_least=1)
    """Processes of each program, one for each GPU."""
    orders: int = 1
    """Number of orders of the tasks: the given one, then others drawn at random."""
    seeds: tuple[int, ...] = (42,)
    """Seeds of train; each order is trained with each."""
    measure: Literal["all", "seen"] = "all"
    """all: measure every task after each one; seen: only those that have been trained on."""
    export: Literal["last", "best"] = "last"
    """Export of each task to continue from: the last, or the best by validation."""
    adapters: Literal["merged", "continued"] = "merged"
    """LoRA. merged: each task trains a new adapter, merged into the model before the next; continued: one adapter,
    trained further by every task."""
    keep_osft_bases: bool = True
    """OSFT: keep every direction that earlier tasks kept, exactly (train --osft-bases)."""
    train: Values = field(default_factory=dict)
    process_data: Values = field(default_factory=dict)
    evaluate: Values = field(default_factory=dict)
    generate: Values = field(default_factory=dict)
    tasks: tuple[Task, ...] = ()
    probes: tuple[SetSettings, ...] = ()
    replay: Replay | None = None

    @property
    def root(self) -> Path:
        return Path(self.output_dir).absolute()

    @property
    def label(self) -> str:
        return self.name or self.root.name

    def train_options(self, task: Task) -> Values:
        """Options of train for a task; between tasks weights stay in full precision unless another type is given."""
        return {"export_dtype": "float32"} | self.train | task.train

    def find_task(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)


def complete_options(settings: ContinualSettings, task: Task) -> list[Values]:
    """The options of train for a task, with stand-ins for those that are known when it starts: of its first run, and of
    a later one, which learns from earlier tasks and continues an adapter."""
    values = settings.train_options(task)
    stand_ins: Values = {"model_name_or_path": "M", "output_dir": "D", "data_path": ("data.arrow",)}
    if task.validation is not None:
        stand_ins["validation_data_path"] = ("validation.arrow",)
    if values.get("osft_basis") == "activations":
        stand_ins["osft_statistics"] = "statistics"
    if values.get("osft") and settings.keep_osft_bases:
        stand_ins["osft_bases"] = "new"
    replay = settings.replay
    kept = {"keep": ("old.arrow",), "keep_share": replay.share} if replay is not None and replay.keep else {}
    first = choose_adapter_options(values, settings, None) | stand_ins | kept
    later = choose_adapter_options(values, settings, "adapter") | stand_ins | kept
    return [first, later] if len(settings.tasks) > 1 else [first]


def choose_adapter_options(options: Values, settings: ContinualSettings, adapter: str | None) -> Values:
    """The options with LoRA's: the adapter to continue, if any, and exports."""
    if not options.get("lora"):
        return options
    if settings.adapters == "merged":
        return options | {"lora_export": "merged"}
    if adapter is None:
        return options | {"lora_export": "adapter"}
    determined = {f"lora_{name}" for name in LORA_ADAPTER_SAYS}  # by the adapter that is trained further
    kept = {name: value for name, value in options.items() if name not in determined}
    return kept | {"lora_export": "adapter", "lora_adapter": adapter}


def splits_off(task: Task, settings: ContinualSettings) -> bool:
    """Whether process-data splits off held-out rows of the task."""
    return bool(task.input_file) and (settings.process_data | task.process_data).get("validation_share") is not None


def draw_orders(names: list[str], num_orders: int) -> list[list[str]]:
    """The given order of the tasks, then others, drawn at random without repetition."""
    rng, orders = random.Random(0), [list(names)]
    while len(orders) < num_orders:
        order = rng.sample(names, len(names))
        if order not in orders:
            orders.append(order)
    return orders


OWN_CODE = {"model_revision", "trust_remote_code"}  # of hub models with own code, which are not supported


@dataclass(frozen=True)
class Section:
    """A program's options in the file."""

    options: type
    reserved: set[str]  # options that the experiment sets itself
    later: Values = dataclasses.field(default_factory=dict)  # stand-ins for some of these, to check the others


SECTIONS = {
    "train": Section(
        TrainOptions,
        {
            *("config", "model_name_or_path", "output_dir", "data_path", "data_weights", "data_weights_by", "seed"),
            *("resume", "continue_from", "schedule_steps", "lora_adapter", "lora_export"),
            *("osft_statistics", "osft_bases", "validation_data_path", "input_file", "input_dataset", "mock_data"),
            *("dry_run", "print_config", "preset", "push_to_hub", "upload_to", "allow_changed_options"),
            *("keep_exports", "save_final_checkpoint"),
        },
    ),
    "process_data": Section(
        ProcessDataOptions,
        {"config", "input_file", "output_file", "model_name_or_path", "preview_html", "shard", "join"},
        {"input_file": ("rows.jsonl",), "output_file": "data.arrow", "model_name_or_path": "M"},
    ),
    "evaluate": Section(
        EvaluateOptions,
        {"config", "output_dir", "model", "run", "data", "task", "lm_eval", "metrics"},
        {"model": ("M",), "output_dir": "D", "task": ("test.jsonl",)},
    ),
    "generate": Section(
        GenerateOptions,
        {"config", "model", "adapter", "prompts", "output", "seed", "num_samples"},
        {"model": "M", "prompts": ("rows.jsonl",), "output": "answers.jsonl"},
    ),
}  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9][\w-]*")

SHARED_FOLDERS = ("data", "start")

# Settings that methods may have: how tasks are learnt, but neither data nor measurements, which all methods share.
OF_METHODS = ("train", "replay", "adapters", "keep_osft_bases", "export", "generate", "seeds")


def read_settings(path: Path, *, output_dir: str | None = None) -> list[ContinualSettings]:
    """Reads and checks a YAML file: the settings of one experiment, or of one for each of its `methods`. `output_dir`
    replaces the file's own. ValueError names the file and the key."""
    given = option_files.read_option_file(path, named=str(path))
    with option_files.naming_place(str(path)):
        given = option_files.name_values(given) | ({} if output_dir is None else {"output_dir": output_dir})
        methods = given.pop("methods", None)
        shared = option_files.make_settings(given, ContinualSettings, READERS)
        if methods is None:
            return [check_settings(shared)]
        with option_files.naming_place("methods"):
            return read_methods(methods, shared)


def read_methods(given: Any, shared: ContinualSettings) -> list[ContinualSettings]:
    """The settings of every method; ValueError for a single one, and for names that folders cannot have."""
    if not isinstance(given, dict) or len(given) < 2:
        raise ValueError(f"given {given!r}, allowed: two or more names, each with its settings")
    methods = {str(name): {} if values is None else values for name, values in given.items()}
    check_names(list(methods))
    for name in methods.keys() & SHARED_FOLDERS:
        raise ValueError(f"{name}: is a folder that all methods share; choose another name")
    return list(option_files.convert_each(methods, functools.partial(read_method, shared=shared)).values())


def read_method(name: str, given: Any, shared: ContinualSettings) -> ContinualSettings:
    """The settings of one method: its options of a program are added to those of all methods."""
    with option_files.naming_place(name):
        if unknown := [key for key in option_files.name_values(given) if key not in OF_METHODS]:
            raise ValueError(f"given {unknown}, allowed: {', '.join(OF_METHODS)}")
        own = option_files.read_values(given, ContinualSettings, READERS)
        own |= {key: vars(shared)[key] | own[key] for key in SECTIONS.keys() & own}
        root = str(Path(shared.output_dir) / name)
        return check_settings(dataclasses.replace(shared, **own, output_dir=root, name=name))


def read_section(given: Any, section: Section) -> Values:
    """Converts options of a program by its own rules; ValueError for unknown ones, and for those set here."""
    reason = "is set for each task by the experiment itself; leave it out"
    values = option_files.read_options(given, section.options, dict.fromkeys(section.reserved | OWN_CODE, reason))
    for name, value in values.items():  # the option files of the programs hold them
        if isinstance(value, str) and (shown := hide_credentials(value)) != value:
            raise ValueError(f"{name}: given {shown}, with a password or key, which files would hold; remove it")
    return values


READERS = {name: functools.partial(read_section, section=section) for name, section in SECTIONS.items()}


def check_settings(settings: ContinualSettings) -> ContinualSettings:
    """Returns the settings; ValueError if they contradict each other or say too little."""
    if not settings.tasks:
        raise ValueError("tasks: none is given; give a list of tasks, each with a name and rows")
    with option_files.naming_place("tasks, probes"):
        check_names([one.name for one in (*settings.tasks, *settings.probes)])
    most = math.factorial(len(settings.tasks))
    if not 1 <= settings.orders <= most:
        raise ValueError(f"orders: given {settings.orders}, allowed: 1 to {most}, the orders of the tasks")
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise ValueError(f"seeds: given {list(settings.seeds)}, allowed: one or more different numbers")
    for task in settings.tasks:
        with option_files.naming_place(f"tasks: {task.name}"):
            check_task(task, settings)
    for probe in settings.probes:
        with option_files.naming_place(f"probes: {probe.name}"):
            check_set(probe)
            check_program("evaluate", settings.evaluate | probe.evaluate)
    with option_files.naming_place("replay"):
        check_replay(settings)
    uses_lora = [bool(settings.train_options(task).get("lora")) for task in settings.tasks]
    if settings.adapters != "merged" and not all(uses_lora):
        raise ValueError(f"adapters: {settings.adapters}: has no effect without train: {{lora: true}} for every task")
    return settings


def check_program(name: str, values: Values) -> None:
    """ValueError for options of a program that it would refuse."""
    section = SECTIONS[name]
    with option_files.naming_place(name):
        option_files.refuse(find_problems(group_options(section.options, **section.later | values)))


def check_names(names: list[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(f"name {name!r}: allowed: letters, digits, _ and -, since folders have it")
        if name.endswith("_held_out"):
            raise ValueError(f"name {name!r}: allowed: names without the ending _held_out")
        if names.count(name) > 1:
            raise ValueError(f"name {name!r}: is given twice")


def check_set(one: SetSettings) -> None:
    if one.test is not None and one.lm_eval is not None:
        raise ValueError("has test and lm_eval; give one of them")
    if one.test is None and one.lm_eval is None and one.held_out is None:
        raise ValueError("nothing to measure by; give test, lm_eval or held_out")
    if one.metric is not None and one.test is None and one.lm_eval is None:
        raise ValueError("metric has no effect without test or lm_eval")
    if one.metric is not None and one.test is not None and one.metric not in MEASURES:
        raise ValueError(f"metric: given {one.metric!r}, allowed: {', '.join(MEASURES)}")


def check_task(task: Task, settings: ContinualSettings) -> None:
    splits = splits_off(task, settings)
    check_set(dataclasses.replace(task, held_out="split off") if splits else task)
    if bool(task.input_file) == (task.data_path is not None):
        raise ValueError("give input_file (rows) or data_path (a data set of process-data), and only one")
    if task.data_path is not None and is_url(task.data_path):
        raise ValueError(f"data_path {task.data_path}: must be local: copy the data set, with its .meta.json")
    if task.data_path is not None and task.process_data:
        raise ValueError("process_data has no effect on data_path, which is tokenized already")
    if splits and task.held_out is not None:
        raise ValueError("held_out is given, and validation_share splits off another; give one of them")
    check_program("process_data", settings.process_data | task.process_data)
    check_program("evaluate", settings.evaluate | task.evaluate)
    values = settings.train_options(task)
    if all(values.get(f"max_{end}") is None for end in ("epochs", "steps", "samples", "tokens")):
        raise ValueError("train: no end is given; give max_epochs, max_steps, max_samples or max_tokens")
    complete = [group_options(TrainOptions, **own) for own in complete_options(settings, task)]
    with option_files.naming_place("train"):
        option_files.refuse(dict.fromkeys(problem for own in complete for problem in find_problems(own)))
    if settings.export == "best" and task.validation is None:
        raise ValueError("export: best needs validation data for every task")


def check_replay(settings: ContinualSettings) -> None:
    if (replay := settings.replay) is None:
        return
    if replay.kind == "drawn" and not replay.keep:
        raise ValueError("kind: drawn: no row to learn from, but samples to keep: add keep: true")
    if replay.kind == "drawn" and settings.adapters == "continued":
        raise ValueError("kind: drawn: needs adapters: merged, since samples are drawn from a whole model")
    if replay.keep and replay.share_of != "samples":
        raise ValueError("share_of has no effect with keep: give train batch_tokens, of which the share then is")
    if given := [task.name for task in settings.tasks if replay.keep and settings.train_options(task).get("keep")]:
        raise ValueError(f"keep: train of {', '.join(given)} has keep, too: give one, and rows of your own as known")
    if len(settings.tasks) < 2 and replay.known is None and replay.kind != "drawn":
        raise ValueError("has no effect with one task; give known, rows of what the start model knows")
    if replay.known is not None and is_url(replay.known):
        raise ValueError(f"known: {replay.known}: must be local")
    if replay.kind == "own-answers":
        check_program("generate", settings.generate)
        if settings.generate.get("engine") == "openai":
            raise ValueError("generate: engine: openai: a server has another model; use hf or vllm")
        for task in settings.tasks[:-1]:
            if not task.input_file:
                raise ValueError(f"{task.name} has data_path, but the prompts are read from rows: give input_file")
        if unscored := [task.name for task in settings.tasks[:-1] if task.metric not in MEASURES]:
            allowed = ", ".join(MEASURES)
            raise ValueError(f"own-answers: {', '.join(unscored)}: needs a metric that scores answers, of {allowed}")


def check_statistics(settings: ContinualSettings, order: list[str]) -> None:
    """Refuses an order of the tasks in which OSFT by activations does not know the data of every earlier task."""
    tasks = [settings.find_task(name) for name in order]
    values = [settings.train_options(task) for task in tasks]
    by_activations = [bool(own.get("osft")) and own.get("osft_basis") == "activations" for own in values]
    if by_activations[0] and "osft_calibration_data" not in values[0]:
        raise ValueError(
            f"tasks: {tasks[0].name}: train: osft_basis: activations: the first task needs osft_calibration_data,"
            f" data that the model knows, or osft: false among its own options"
        )
    others = [task.name for task, uses in zip(tasks[1:], by_activations[1:], strict=True) if not uses]
    if any(by_activations) and others:
        raise ValueError(
            f"tasks: {', '.join(others)}: train: osft_basis: activations is used by other tasks; only the first task of"
            " an order can do without, because each later one adds the statistics of the task before it"
        )
