"""Settings of a continual-learning experiment, and the options of train that follow from them for a task.

continual/settings_file.py reads and checks them.
"""

import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mini_trainer.options import OptimizationOptions, TeacherOptions
from mini_trainer.options.fields import option
from mini_trainer.options.problems.choices import LORA_ADAPTER_SAYS
from mini_trainer.options.tools import MOST_TOP_K

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
    """Learning from earlier tasks again while a new one is learnt."""

    kind: Literal["rows", "own-answers"]
    """rows: rows of the earlier tasks; own-answers: the model's own answers to their prompts, before the new task, if
    they pass the task's metric (arXiv 2605.29495)."""
    share: float = option(0.1, above=0, below=1)
    """Share of the samples drawn that are replayed, of all earlier tasks together."""
    num_prompts: int | None = option(None, at_least=1, only_with=("kind", ("own-answers",)))
    """own-answers: number of prompts of each earlier task to answer, drawn at random. Default: all."""
    min_score: float = option(1.0, only_with=("kind", ("own-answers",)))
    """own-answers: least score of an answer by the task's metric."""
    known: str | None = None
    """Rows, or a data set of process-data, of what the start model knows, such as its own answers: replayed like an
    earlier task, also with the first one."""
    teacher_weight: float | None = option(None, above=0, at_most=1)
    """Weight of the divergence from the model before the new task, on replayed rows alone (train --teacher-weight)."""


@dataclass(frozen=True, kw_only=True)
class SelfDistillation:
    """Self-distillation in rounds (SDFT, arXiv 2601.19897), instead of training on the rows themselves."""

    rounds: int = option(4, at_least=1)
    """Number of rounds over a task. In each, the model answers a part of the prompts and learns from the answers."""
    teacher: Literal["start", "average"] = "start"
    """start: the model before the task; average: a moving average of the models after each round."""
    average_decay: float = option(0.5, above=0, below=1, only_with=("teacher", ("average",)))
    """average: share of the previous average that is kept at each round."""
    divergence: Literal["forward-kl", "reverse-kl", "jsd"] = "forward-kl"
    """forward-kl: KL(teacher || model), from files of the teacher's most probable tokens; reverse-kl (KL(model ||
    teacher)) and jsd: from a teacher that reads in every step of train, over all tokens."""
    top_k: int = option(32, at_least=1, at_most=MOST_TOP_K, only_with=("divergence", ("forward-kl",)))
    """forward-kl: number of the teacher's most probable tokens, as in score-data."""
    demonstration: str = "{prompt}\n\nOne good answer to this is:\n\n{demonstration}\n\nNow give your own answer."
    """The teacher's prompt: the last user message, from that of the row and its answer."""

    @property
    def is_online(self) -> bool:
        """Whether the teacher reads in train; else it scores the data before."""
        return self.divergence != "forward-kl"


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
    score_data: Values = field(default_factory=dict)
    tasks: tuple[Task, ...] = ()
    probes: tuple[SetSettings, ...] = ()
    replay: Replay | None = None
    self_distillation: SelfDistillation | None = None

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
    a later one, which learns from earlier tasks and continues an adapter or a round."""
    values, rounds, replay = settings.train_options(task), settings.self_distillation, settings.replay
    stand_ins: Values = {"model_name_or_path": "M", "output_dir": "D", "data_path": ("data.arrow",)}
    if task.validation is not None:
        stand_ins["validation_data_path"] = ("validation.arrow",)
    if values.get("osft_basis") == "activations":
        stand_ins["osft_statistics"] = "statistics"
    if values.get("osft") and settings.keep_osft_bases:
        stand_ins["osft_bases"] = "new"
    if rounds is not None:
        own = {key: value for key, value in values.items() if key != "max_epochs"}
        own |= {"max_steps": 1, "checkpoint_every_steps": 1, "teacher_weight": (1.0,)}
        own |= {"schedule_steps": 1} if needs_end(values) else {}
        if rounds.is_online:
            own |= {"teacher_model": "M", "teacher_data": ("data.arrow",), "teacher_divergence": rounds.divergence}
        first = choose_adapter_options(own, settings, None) | stand_ins
        return [first, first | {"continue_from": "checkpoint"}]
    taught: Values = {}
    if replay is not None and replay.teacher_weight is not None:
        taught = {"teacher_weight": (replay.teacher_weight,), "teacher_model": "self"}
    if replay is not None and replay.known is not None:
        first = choose_adapter_options(values, settings, None) | stand_ins | taught
    else:
        first = choose_adapter_options(leave_teacher_out(values, replay), settings, None) | stand_ins
    later = choose_adapter_options(values, settings, "adapter") | stand_ins | taught
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


def leave_teacher_out(options: Values, replay: Replay | None) -> Values:
    """The options of a run that replays nothing: without those of the teacher of replayed rows."""
    if replay is None or replay.teacher_weight is None:
        return options
    of_teacher = {entry.name for entry in dataclasses.fields(TeacherOptions)}
    return {name: value for name, value in options.items() if name not in of_teacher}


def needs_end(options: Values) -> bool:
    """Whether the learning rate depends on the number of steps."""
    names = [entry.name for entry in dataclasses.fields(OptimizationOptions)]
    return OptimizationOptions(**{name: options[name] for name in names if name in options}).needs_end


def splits_off(task: Task, settings: ContinualSettings) -> bool:
    """Whether process-data splits off held-out rows of the task."""
    share = (settings.process_data | task.process_data).get("validation_share")
    return bool(task.input_file) and share is not None


def draw_orders(names: list[str], num_orders: int) -> list[list[str]]:
    """The given order of the tasks, then others, drawn at random without repetition."""
    rng, orders = random.Random(0), [list(names)]
    while len(orders) < num_orders:
        order = rng.sample(names, len(names))
        if order not in orders:
            orders.append(order)
    return orders
