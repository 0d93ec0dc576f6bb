"""Converts a configuration: each key by options/foreign_names.py, what follows from several, and the data sets."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin

from mini_trainer.options import LoRAOptions, RowOptions, TrainOptions, flag_name, group_options, list_facts, list_types
from mini_trainer.options.doors import TRAINERS
from mini_trainer.options.foreign_names import DECIDING, DIFFERENCES, convert_schedule, find_row
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.option_files import parse_value
from mini_trainer.options.problems.choices import LORA_ADAPTER_SAYS
from mini_trainer.options.problems.finding import find_wrong_options
from mini_trainer.options.tools import ProcessDataOptions

TYPES = {options_class: list_types(options_class) for options_class in (TrainOptions, ProcessDataOptions)}
ROWS, LORA = list_types(RowOptions), list_types(LoRAOptions)
NAMES = re.compile(r"[\w.]+(\s*,\s*[\w.]+)*")  # names in one text, as LLaMA-Factory writes lists
CADENCES = {
    *("save_steps", "save_strategy", "saves_per_epoch", "eval_strategy", "evaluation_strategy", "evals_per_epoch"),
    *("eval_steps", "early_stopping_patience"),
}
GOOD_WEIGHTS = ("desirable_weight", "kto_desirable_weight", "kto_chosen_weight")
BAD_WEIGHTS = ("undesirable_weight", "kto_undesirable_weight", "kto_rejected_weight")
COMPUTED = CADENCES | {
    *("gradient_accumulation_steps", "max_steps", "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs"),
    *("use_rslora", "peft_use_rslora", *GOOD_WEIGHTS, *BAD_WEIGHTS),
}
# Options that a file of another trainer cannot set: what it names is of another kind, or on this machine.
NOT_FROM_FILES = {
    *("data_path", "input_file", "input_dataset", "validation_data_path", "output_file", "resume", "attention"),
    *("export_best", "best_metric", "logging_level", "callbacks", "max_sample_num_tokens"),
}
STAND_INS = {"model_name_or_path": "model"}  # for what the user has to give
IDLE = "no effect on this training"
IMAGES = "rows with images are not translated: --images reads them, and --freeze chooses what trains"
# Keys of a message, with the format that has them, and the column that it reads.
MESSAGE_KEYS = {("role", "content"): ("messages", "messages"), ("from", "value"): ("sharegpt", "conversations")}


@dataclass(frozen=True)
class Trainer:
    """What is known of another trainer beside the table of names: its defaults, and the keys that count a step."""

    batch: tuple[str, int]  # the key of the rows of one GPU's micro-batch, and its default
    length: tuple[str, int]  # of the tokens of a row
    epochs: tuple[str, int]
    packing: tuple[str, ...]  # keys that make a row a pack of samples
    data_keys: tuple[str, ...]
    read_data: "Callable[[Conversion], None]"
    prepare: "Callable[[Conversion], None]"  # settles keys that depend on others
    defaults: Mapping[str, Any]  # by our names, where they differ from ours
    objective: str = "causal-lm"


@dataclass
class Conversion:
    """The other trainer's keys, the resulting options, and what became of each key."""

    given: dict[str, Any]
    name: str
    num_gpus: int
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # options of process_data.py that all data sets share
    sources: list[dict[str, Any]] = field(default_factory=list)  # one entry per run of process_data.py
    files: dict[str, str] = field(default_factory=dict)  # other files to write, by name
    told: dict[str, str] = field(default_factory=dict)  # the outcome of every key
    noted: set[str] = field(default_factory=set)  # the keys without a counterpart, or with a difference

    @property
    def trainer(self) -> Trainer:
        return TRAINERS[self.name]

    @property
    def objective(self) -> str:
        return self.train.get("objective", "causal-lm")

    @property
    def row_format(self) -> str | None:
        """--format of the rows that the objective needs; None: any format of texts."""
        return OBJECTIVES[self.objective].row_format

    def get(self, *names: str, default: Any = None) -> Any:
        """Value of the first of these keys that the file has."""
        return next((self.given[name] for name in names if self.given.get(name) is not None), default)

    def get_number(self, *names: str, default: int) -> int | float:
        """Value, as a number, of the first of these keys that the file has."""
        found = (read_number(name, self.given[name]) for name in names if self.given.get(name) is not None)
        return next(found, default)

    def tell(self, key: str, text: str) -> None:
        self.told[key] = f"{self.told[key]}; {text}" if key in self.told else text

    def note(self, key: str, text: str) -> None:
        self.tell(key, text)
        self.noted.add(key)

    def set(self, key: str, **values: Any) -> None:
        """Sets options for a key. ValueError for a value that one cannot have."""
        for name, value in values.items():
            if value is ...:  # another key has it
                continue
            types = [options_class for options_class, known in TYPES.items() if name in known]
            parsed = check_option(name, value, types[0])
            if TrainOptions in types and name not in ROWS:
                self.train[name] = parsed
            if ProcessDataOptions in types:
                self.data[name] = parsed
            self.tell(key, f"{name}: {describe(parsed)}")

    def list_outputs(self, kind: str = "") -> list[str]:
        """Names of the tokenized data sets: data.arrow, or data_1.arrow and so on."""
        number = max(1, len(self.sources))
        return [f"data.{kind}arrow"] if number == 1 else [f"data_{i + 1}.{kind}arrow" for i in range(number)]


def read_number(key: str, value: Any) -> int | float:
    """Reads a key's value as a number, even if YAML 1.1 reads it as text (1e-4); ValueError if it is not one."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{key} must be a number, given {value!r}")
    return int(number) if number.is_integer() else number


def read_names(key: str, value: Any) -> list[str]:
    """Reads names from a list or a comma-separated string."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be a list of names, given {value!r}")
    return names


def describe(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def check_option(name: str, value: Any, options_class: type) -> Any:
    """The value in the option's own type; ValueError if it cannot have it."""
    if value is None:
        return None
    is_list = get_origin(TYPES[options_class][name]) is tuple
    if is_list and isinstance(value, str) and NAMES.fullmatch(value):
        value = read_names(name, value)
    value = list(value) if isinstance(value, tuple) else value
    parsed = () if value == [] and is_list else parse_value(name, value, options_class)
    facts = list_facts(options_class)[name]
    if not facts.allows(parsed):
        raise ValueError(f"{name} {facts.describe_range(is_float=isinstance(parsed, float), turns_off=False)}")
    return parsed


def convert(given: Mapping[str, Any], name: str, *, num_gpus: int) -> Conversion:
    """Options for every key. ValueError with all reasons if the file asks for something that cannot be trained here."""
    to = Conversion({key: value for key, value in given.items() if value is not None}, name, num_gpus)
    if to.trainer.objective != "causal-lm":
        to.train["objective"] = to.trainer.objective
    refused: list[str] = []
    attempt(refused, to, to.trainer.prepare)
    computed = COMPUTED | {to.trainer.batch[0], to.trainer.length[0], to.trainer.epochs[0], *to.trainer.data_keys}
    for key, value in sorted(to.given.items(), key=lambda each: each[0] not in ("rl", "stage", "reward_model")):
        if key not in computed:
            attempt(refused, to, lambda to, key=key, value=value: follow_row(to, key, value), key)
    rules = set_defaults, convert_lengths, count_batch, convert_end
    for rule in (*rules, convert_rates, convert_warmup, convert_ratios, convert_cadences):
        attempt(refused, to, rule)
    attempt(refused, to, to.trainer.read_data, to.trainer.data_keys[0])
    if refused:
        raise ValueError("; ".join(refused))
    drop_idle(to)
    finish_options(to)
    return to


def attempt(refused: list[str], to: Conversion, step: Callable[[Conversion], None], key: str | None = None) -> None:
    """Takes a step, and adds its error, with the key, to what is refused."""
    try:
        step(to)
    except ValueError as error:
        refused.append(f"{key}: {error}" if key else str(error))
    except (AttributeError, TypeError, KeyError):  # a list, a mapping or a text in the place of something else
        refused.append(f"{key or 'the file'}: has another form than that trainer reads")


def follow_row(to: Conversion, key: str, value: Any) -> None:
    """Sets a key's options by the table. A value that an option cannot have becomes a comment; ValueError if the key
    decides what is learned, or would without a counterpart."""
    row, is_set = find_row(key, to.name), value not in (False, 0, "", [], {})
    if row is None:
        elsewhere = find_row(key)
        if is_set and elsewhere is not None and elsewhere.decides:
            raise ValueError(f"a key of {elsewhere.of.split()[0]}'s files, not of {to.name}'s: --trainer names another")
        if is_set and elsewhere is None and DECIDING.search(key):
            raise ValueError("decides what is learned, and is not known here")
        if is_set:
            to.note(key, "no counterpart" if elsewhere is None else elsewhere.reason or "no counterpart")
        return
    if row.of_texts and to.row_format is not None:
        return to.note(key, IDLE) if is_set else None
    if not is_set and not row.values and (not row.options or (value is not False and value != 0)):
        return
    options = row.list_options(key)
    try:
        ours = row.convert(value, name=key)
    except KeyError:
        if row.decides:
            raise ValueError(f"{value!r}: {row.reason}" if options or row.values else row.reason) from None
        to.note(key, row.reason)
        return
    if (elsewhere := [flag_name(name) for name in ours if name in NOT_FROM_FILES]) and is_set:
        to.note(key, f"not taken from a file: {elsewhere[0]}")
    if "track" in ours:
        names = [ours["track"]] if isinstance(ours["track"], str) else ours["track"]
        ours["track"] = sorted({*to.train.get("track", ()), *names})
    try:
        to.set(key, **({} if elsewhere else ours))
    except (ValueError, TypeError) as error:
        if row.decides:
            raise ValueError(str(error)) from None
        if is_set:
            to.note(key, str(error))
    if options and row.reason and not row.decides and ours:
        to.note(key, row.reason)
    if isinstance(value, str) and value.endswith("4bit"):
        to.note(key, DIFFERENCES[value])


def set_defaults(to: Conversion) -> None:
    """The other trainer's values for what the file leaves out, where ours differ."""
    compares = to.row_format is not None and to.objective != "reward"
    defaults = to.trainer.defaults | ({"preference_beta": 0.1} if compares else {})
    if to.train.get("preference_loss") == "simpo":
        has_likelihood = to.name != "llama-factory" and "cpo_alpha" not in to.given
        defaults |= {"preference_gamma": 0.5} | ({"preference_nll_weight": 1.0} if has_likelihood else {})
    for name, value in defaults.items():
        if name not in to.train:
            to.set(f"default of {name}", **{name: value})
    if "default of lora_target_modules" in to.told and to.train.get("lora"):
        to.note("default of lora_target_modules", "peft chooses by the architecture, for most of them these")
    if to.train.get("preference_nll_weight") == 0:
        del to.train["preference_nll_weight"]
    if to.row_format is not None:
        to.set("objective", format=to.row_format)
    is_without = to.name.startswith("trl-") and to.get("disable_dropout", default=True)
    if is_without or (to.name == "llama-factory" and compares):
        to.train.pop("lora_dropout", None)


def convert_lengths(to: Conversion) -> None:
    """The longest sample, or a document's block, and the tokens of one GPU's micro-batch. A sample of a pair has two
    sequences; KTO's are the answer, and an unrelated one to the same prompt."""
    (key, default), (batch_key, rows) = to.trainer.length, to.trainer.batch
    length = to.get_number(key, default=default)
    is_pair, drops = to.row_format is not None, to.name in ("axolotl", "trl-reward")
    longest = 2 * length if is_pair else length
    to.set(key, max_tokens_per_gpu=longest * to.get_number(batch_key, default=rows))
    if to.get("pretraining_dataset") or to.data.get("format") == "document":
        to.set(key, block_size=length)
        return
    to.set(key, max_sample_num_tokens=longest)
    if is_pair:
        there = f"if one is longer than {length}" if drops else f"each is cut to {length}"
        to.note(key, f"dropped if its two sequences are longer together, there {there}")
    elif not drops:
        to.note(key, "longer ones are dropped, there cut")


def count_batch(to: Conversion) -> None:
    """Sets `batch_size` to the rows of a step: devices x micro-batch x accumulation. If rows are packs of samples, sets
    `batch_tokens` to as many tokens as these hold."""
    batch_key, default = to.trainer.batch
    a_gpu = to.get_number(batch_key, default=default)
    total = to.get_number("batch_size", default=0) if to.name == "axolotl" else 0
    accumulated = to.get_number("gradient_accumulation_steps", default=int(total // max(1, a_gpu)) or 1)
    shared = to.get_number("context_parallel_size", default=1) * to.get_number("tensor_parallel_size", default=1)
    num_gpus = max(1, to.num_gpus // int(max(1, shared if to.name == "axolotl" else 1)))
    rows, product = int(a_gpu * accumulated * num_gpus), f"{a_gpu} x {accumulated} x {num_gpus} GPUs"
    for key in {batch_key, "gradient_accumulation_steps", "batch_size"} & to.given.keys():
        to.tell(key, "included in the batch")
    is_packed = any(map(to.get, to.trainer.packing)) and to.row_format is None
    if not is_packed or "block_size" in to.data:
        to.set("batch_size", batch_size=rows)
        to.tell("batch_size", product)
        return
    length = to.get_number(to.trainer.length[0], default=to.trainer.length[1])
    to.set("batch_tokens", batch_tokens=rows * length)
    to.note("batch_tokens", f"as many tokens as {rows} full packs of {length:,} tokens have ({product})")


def convert_end(to: Conversion) -> None:
    """The run's end: steps, or epochs."""
    key, default = to.trainer.epochs
    epochs = to.get_number(key, default=default)
    if (steps := to.get_number("max_steps", default=-1)) > 0:
        to.set("max_steps", max_steps=steps)
        return
    to.set(key, max_epochs=math.ceil(epochs))
    if epochs != int(epochs):
        to.note(key, f"given {epochs}: max_samples ends within an epoch")


def convert_rates(to: Conversion) -> None:
    """The arguments of the schedule."""
    scheduler, key = str(to.get("lr_scheduler_type", "lr_scheduler")), "lr_scheduler_kwargs"
    values = {name: read_number(name, value) for name, value in to.get(key, default={}).items()}
    found, unknown = convert_schedule(scheduler, values, to.train["learning_rate"]) if values else ({}, [])
    to.set(key, **found)
    if unknown:
        to.note(key, f"no counterpart: {', '.join(unknown)}")


def convert_warmup(to: Conversion) -> None:
    """Warm-up in steps, or as a share of the steps, which steps below 1 are in transformers; steps override it."""
    steps, share = to.get_number("warmup_steps", default=0), to.get_number("warmup_ratio", default=0)
    keys = [key for key in ("warmup_steps", "warmup_ratio") if key in to.given]
    if to.train.get("lr_scheduler") == "constant":
        for key in keys:
            to.tell(key, "none: the constant schedule has no warm-up")
    elif steps >= 1:
        to.set("warmup_steps", num_warmup_steps=steps)
    elif share or steps:
        to.set(keys[-1], num_warmup_steps=share or steps)
    elif to.name == "axolotl" and not keys:  # there min(3 % of the steps, 100), and never a single one
        if max_steps := to.train.get("max_steps"):
            to.set("default of warmup", num_warmup_steps={1: 2}.get(part := int(0.03 * min(max_steps, 3350)), part))
        else:
            to.set("default of warmup", num_warmup_steps=0.03)
            to.note("warmup", "3 % of the steps, there at most 100 steps")


def convert_ratios(to: Conversion) -> None:
    """The alpha of a rank-stabilized adapter, scaled by alpha / sqrt(rank), and the ratio of KTO's two weights."""
    if (key := next((name for name in ("use_rslora", "peft_use_rslora") if to.given.get(name)), None)) is not None:
        rank = to.train.get("lora_rank", LoRAOptions().lora_rank)
        to.set(key, lora_alpha=to.train.get("lora_alpha", 2 * rank) * math.sqrt(rank))
    keys = [key for key in (*GOOD_WEIGHTS, *BAD_WEIGHTS) if key in to.given]
    good, bad = (to.get_number(*names, default=1) for names in (GOOD_WEIGHTS, BAD_WEIGHTS))
    if keys and good != bad:
        if bad <= 0:
            raise ValueError(f"{keys[-1]}: must be above 0: --kto-weight-ratio is a ratio")
        to.set(keys[0], kto_weight_ratio=good / bad)


def convert_cadences(to: Conversion) -> None:
    """When checkpoints are saved, and, if rows are held out, the run is validated: by steps or by epoch."""
    strategy = to.get("save_strategy", default="steps")
    if strategy == "epoch" or to.get("saves_per_epoch") == 1:
        to.set("save_strategy" if strategy == "epoch" else "saves_per_epoch", checkpoint_at_epoch=True)
    elif strategy == "steps" and to.get_number("save_steps", default=0) >= 1:
        to.set("save_steps", checkpoint_every_steps=to.get("save_steps"))
    strategy, holds_out = to.get("eval_strategy", "evaluation_strategy"), "validation_share" in to.data
    if holds_out and "early_stopping_patience" in to.given:
        to.set("early_stopping_patience", early_stopping_patience=to.given["early_stopping_patience"])
    if holds_out and (strategy == "epoch" or to.get("evals_per_epoch") == 1):
        to.set("eval_strategy" if strategy == "epoch" else "evals_per_epoch", validate_at_epoch=True)
    elif holds_out and to.get_number("eval_steps", default=0) >= 1:
        to.set("eval_steps", validate_every_steps=to.get("eval_steps"))
    for key in CADENCES & to.given.keys() - to.told.keys():
        if to.given[key] not in (False, 0, "no", "none"):
            row = find_row(key)
            to.note(key, row.reason or f"no effect here: {flag_name(row.list_options(key)[0])}")


def drop_idle(to: Conversion) -> None:
    """Leaves out options that have no effect on this objective, with this loss or without adapters."""
    idle = {name for facts in OBJECTIVES.values() for name in facts.options} - {*OBJECTIVES[to.objective].options}
    if not to.train.get("lora"):
        idle |= LORA.keys()
    elif "lora_adapter" in to.train:
        idle |= {f"lora_{name}" for name in LORA_ADAPTER_SAYS}
    loss = to.train.get("preference_loss")
    needed = {name: facts.only_with for name, facts in list_facts(TrainOptions).items() if facts.only_with is not None}
    idle |= {name for name, (other, losses) in needed.items() if other == "preference_loss" and loss not in losses}
    for name in ("objective", "preference_loss"):
        if to.train.get(name) in DIFFERENCES and name not in idle:
            to.note(name, DIFFERENCES[to.train[name]])
    for name in idle & to.train.keys():
        value = f"{name}: {describe(to.train.pop(name))}"
        for key in [key for key, told in to.told.items() if value in told]:
            del to.told[key]
            if not key.startswith("default of "):
                to.note(key, IDLE)


def finish_options(to: Conversion) -> None:
    """Adds the tokenized files, and the options of each run of process_data.py. ValueError if options contradict."""
    sources = [to.data | source for source in to.sources or [{}]]
    for output, source in zip(to.list_outputs(), sources, strict=True):
        source["output_file"] = output
        source |= {name: check_option(name, value, ProcessDataOptions) for name, value in source.items()}
    to.sources = [{name: value for name, value in source.items() if value is not None} for source in sources]
    to.train.setdefault("data_path", tuple(to.list_outputs()))
    if "validation_share" in to.data:
        to.train["validation_data_path"] = tuple(to.list_outputs("validation."))
    options = [group_options(TrainOptions, **(STAND_INS | {"output_dir": "run"} | to.train))]
    for source in to.sources:
        place = {} if {"input_file", "input_dataset"} & source.keys() else {"input_file": ("rows.jsonl",)}
        options.append(group_options(ProcessDataOptions, **(STAND_INS | place | source)))
    if problems := [problem for each in options for problem in find_wrong_options(each)]:
        raise ValueError(f"its options cannot be used together: {'; '.join(problems)}")


def name_hub_rows(name: str, config: str | None, *, split: str | None = None) -> dict[str, Any]:
    """Options for a data set of the hub."""
    source = {"input_dataset": name if config is None else f"{name}:{config}"}
    return source if split in (None, "train") else source | {"split": split}


def name_columns(**names: tuple[str, Sequence[str]]) -> dict[str, list[str]]:
    """The option for columns whose names are not among those that rows are looked through for."""
    columns = [f"{value}={column}" for value, (column, known) in names.items() if column not in known]
    return {"columns": columns} if columns else {}


def find_message_format(role: str, content: str) -> tuple[str, str]:
    """The format of messages with these keys, and the column that it reads."""
    if (role, content) not in MESSAGE_KEYS:
        raise ValueError(f"messages have role and content, or from and value, given {role} and {content}")
    return MESSAGE_KEYS[role, content]


def add_sources(to: Conversion, key: str, sources: list[dict[str, Any]]) -> None:
    """Adds data sets: files with the same options share a run, all others get separate runs."""
    for source in sources:
        to.tell(key, ", ".join(f"{name}: {describe(value)}" for name, value in source.items()))
        files = source.get("input_file")
        for earlier in to.sources:
            if files and earlier | {"input_file": files} == source:
                earlier["input_file"] = [*earlier["input_file"], *files]
                break
        else:
            to.sources.append(dict(source))


def set_template(to: Conversion, key: str) -> None:
    """Sets the chat template of a key, given as a file, or as text, which is written to a file."""
    if (value := to.get(key)) is None:
        return
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a file or a text, given {value!r}")
    if "{" in value:
        to.files["chat_template.jinja"], value = value, "chat_template.jinja"
    to.set(key, chat_template=value)
