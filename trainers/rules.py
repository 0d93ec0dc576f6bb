"""What becomes of a key of another trainer: a rule notes the options that say it here, and returns what it did."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpus.files import ENDINGS, data_ending

ALPACA_COLUMNS = {("prompt", "instruction"), ("query", "input"), ("response", "output")}  # which need not be named
NEEDLESS, MISSING = "needs no option", "no counterpart"


@dataclass
class Conversion:
    """What has become of another trainer's keys so far."""

    given: dict[str, Any]
    num_gpus: int
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)  # of every key, what became of it

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these keys that is given."""
        return next((self.given[name] for name in names if self.given.get(name) is not None), default)

    def get_number(self, *names: str, default: int) -> int | float:
        """The number that the first of these keys that is given has."""
        name = next((name for name in names if self.given.get(name) is not None), None)
        return default if name is None else read_number(name, self.given[name])


Rule = Callable[[Conversion, str, Any], str]  # notes the options of a key with a value; returns what became of it


def read_number(key: str, value: Any) -> int | float:
    """The number that a key's value is, as YAML 1.1 has it or in words, as it takes 1e-4; ValueError if it is none."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{key} is a number, given {value!r}")
    return int(number) if number.is_integer() else number


def say(name: str) -> Rule:
    """The key is train.py's option `name`."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.train[name] = value
        return f"{name}: {value}"

    return rule


def say_unless_zero(name: str) -> Rule:
    """The key is train.py's option `name`, and 0 turns it off there."""
    return lambda to, key, value: say(name)(to, key, value) if value else NEEDLESS


def say_data(name: str) -> Rule:
    """The key is process_data.py's option `name`."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.data[name] = value
        return f"{name}: {value} (of process_data.py)"

    return rule


def say_if_true(**values: Any) -> Rule:
    """A switch: the options `values` where it is on."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if not value:
            return NEEDLESS
        to.train.update(values)
        return ", ".join(f"{name}: {chosen}" for name, chosen in values.items())

    return rule


def needless(reason: str) -> Rule:
    return lambda to, key, value: f"{NEEDLESS}: {reason}"


def missing(reason: str) -> Rule:
    return lambda to, key, value: f"{MISSING}: {reason}" if value else NEEDLESS


def choose(name: str, choices: dict[Any, Any]) -> Rule:
    """The option `name`, by a table of the key's values; a value that is not there has no counterpart."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if value not in list(choices):
            return f"{MISSING}: {name} can be {', '.join(map(str, dict.fromkeys(choices.values())))}"
        to.train[name] = choices[value]
        return f"{name}: {choices[value]}"

    return rule


def say_model(to: Conversion, key: str, value: Any) -> str:
    to.train["model_name_or_path"] = to.data["model_name_or_path"] = value
    return f"model_name_or_path: {value}"


def say_batch(to: Conversion, key: str, value: Any) -> str:
    """One number in place of three: samples of a step over all GPUs."""
    a_gpu = to.get_number("micro_batch_size", "per_device_train_batch_size", default=8 if "per_device" in key else 1)
    accumulated = to.get_number("gradient_accumulation_steps", default=1)
    to.train["batch_size"] = a_gpu * accumulated * to.num_gpus
    return f"batch_size: {to.train['batch_size']} ({a_gpu} x {accumulated} x {to.num_gpus} GPUs)"


def say_length(to: Conversion, key: str, value: Any) -> str:
    """Longest sample, and what of such rows a GPU takes at a time."""
    a_gpu = to.get_number("micro_batch_size", "per_device_train_batch_size", default=1)
    value = read_number(key, value)
    to.data["max_sample_num_tokens"], to.train["max_tokens_per_gpu"] = value, value * a_gpu
    return (
        f"max_sample_num_tokens: {value} (of process_data.py: longer ones are dropped);"
        f" max_tokens_per_gpu: {value * a_gpu}"
    )


def say_warmup(to: Conversion, key: str, value: Any) -> str:
    """Steps; transformers also takes a share of the run there."""
    value = read_number(key, value)
    return say("warmup_ratio" if 0 < value < 1 else "num_warmup_steps")(to, key, value)


def say_schedule_details(to: Conversion, key: str, value: Any) -> str:
    """The end of a schedule's decay, as a share of the learning rate or as a rate."""
    if not isinstance(value, dict):
        return f"{MISSING}: not known here"
    given = dict(value)
    rate, lowest = given.pop("min_lr_rate", None), given.pop("min_lr", None)
    if rate is None and lowest is not None:
        peak = to.get_number("learning_rate", default=0)
        if peak <= 0:
            raise ValueError(f"min_lr is a share of the learning rate, which is {peak}")
        rate = read_number("min_lr", lowest) / peak
    if rate is not None:
        to.train["min_lr_ratio"] = rate
    said = [] if rate is None else [f"min_lr_ratio: {rate}"]
    return "; ".join([*said, *([f"{MISSING}: {', '.join(map(str, given))}"] if given else [])]) or NEEDLESS


def say_epochs(to: Conversion, key: str, value: Any) -> str:
    value = read_number(key, value)
    if to.get_number("max_steps", default=-1) > 0:
        return f"{NEEDLESS}: max_steps ends the run"
    to.train["max_epochs"] = math.ceil(value)
    return f"max_epochs: {to.train['max_epochs']}" + ("" if value == math.ceil(value) else f" (given {value})")


def say_steps(to: Conversion, key: str, value: Any) -> str:
    value = read_number(key, value)
    if value <= 0:
        return NEEDLESS
    to.train["max_steps"] = value
    return f"max_steps: {value}"


def say_saves(to: Conversion, key: str, value: Any) -> str:
    """How often the model is saved; what a run resumes from is saved by the clock anyway."""
    if value == "epoch" or (key == "saves_per_epoch" and value == 1):
        to.train["checkpoint_at_epoch"] = True
        return "checkpoint_at_epoch: true"
    is_by_steps = key == "save_steps" and to.get("save_strategy", default="steps") == "steps"
    if is_by_steps and (steps := read_number(key, value)) >= 1:
        to.train["checkpoint_every_steps"] = steps
        return f"checkpoint_every_steps: {steps} (to resume from; --min-samples-per-checkpoint exports models)"
    return f"{NEEDLESS}: a checkpoint is written every half hour, and the model at the end"


def say_evals(to: Conversion, key: str, value: Any) -> str:
    if value == "no":
        return NEEDLESS
    if not to.get("val_set_size", "val_size"):
        return f"{MISSING}: tokenize data for validation, and give validation_data_path"
    if value == "epoch" or (key == "evals_per_epoch" and value == 1):
        to.train["validate_at_epoch"] = True
        return "validate_at_epoch: true"
    if key == "eval_steps" and (steps := read_number(key, value)) >= 1:
        to.train["validate_every_steps"] = steps
        return f"validate_every_steps: {steps}"
    return (
        f"{NEEDLESS}: data for validation is measured before and after the run"
        if value in ("no", "steps")
        else (f"{MISSING}: validate_every_steps counts steps")
    )


def say_share(to: Conversion, key: str, value: Any) -> str:
    value = read_number(key, value)
    if value == 0:
        return NEEDLESS
    if not 0 < value < 1:
        return f"{MISSING}: validation_share is a share, given {value} rows"
    to.data["validation_share"] = value
    to.train["validation_data_path"] = "data.validation.arrow"
    return f"validation_share: {value} (of process_data.py)"


def say_lora(to: Conversion, key: str, value: Any) -> str:
    """LoRA or QLoRA, by the names that Axolotl and LLaMA-Factory have for them."""
    if value not in ("lora", "qlora"):
        return NEEDLESS if value in (None, "full") else f"{MISSING}: full, LoRA, QLoRA and OSFT train here"
    to.train["lora"] = True
    if value == "qlora":
        to.train["base_quantization"] = "nf4"
    return "lora: true" + (", base_quantization: nf4" if value == "qlora" else "")


def say_bits(to: Conversion, key: str, value: Any) -> str:
    if not value:
        return NEEDLESS
    if key == "load_in_8bit" or value == 8:
        return f"{MISSING}: base_quantization can be nf4"
    to.train["base_quantization"] = "nf4"
    return "base_quantization: nf4"


def say_targets(to: Conversion, key: str, value: Any) -> str:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not names or names in (["all"], ["all-linear"]) or value is True:
        return f"{NEEDLESS}: every linear layer of the blocks has an adapter"
    if not isinstance(names, list):
        raise ValueError(f"{key} is a list of names, given {value!r}")
    to.train["lora_target_modules"] = names
    return f"lora_target_modules: {names}"


def is_so_anyway(name: str, value: Any) -> bool:
    """Whether what Axolotl's data set says holds for every one here: the rows show their names and roles."""
    if name == "message_property_mappings":
        return value in ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
    if name == "roles_to_train":
        return set(value or ()) <= {"assistant", "gpt", "model"}
    return name in ("path", "type", "ds_type") or (name, value) == ("train_on_eos", "turn")


def say_datasets(to: Conversion, key: str, value: Any) -> str:
    """Axolotl's list of data sets: files of rows, or one of the hub; what a row is, process_data.py sees by itself."""
    listed = value if isinstance(value, list) else [value]
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in listed]
    paths = [entry.get("path") for entry in entries]
    if not paths or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"{key} is a list of data sets, each with its path, given {value!r}")
    others = {name for entry in entries for name, item in entry.items() if not is_so_anyway(name, item)}
    is_hub = len(entries) == 1 and data_ending(Path(paths[0])) not in ENDINGS
    said = {"field_messages": "messages_field"}
    if is_hub:
        said |= {"split": "split", "revision": "revision"}
        name = entries[0].get("name")
        others -= {"name"}
        to.data["input_dataset"] = paths[0] if name is None else f"{paths[0]}:{name}"
    else:
        to.data["input_file"] = paths
    for name, option in said.items():
        given = {entry.get(name) for entry in entries}
        if len(given) == 1 and None not in given:
            to.data[option] = given.pop()
            others -= {name}
    more = f"; of its own keys {', '.join(sorted(others))} have no counterpart" if others else ""
    return f"{'input_dataset' if is_hub else 'input_file'}: {', '.join(paths)} (of process_data.py){more}"


def say_hub_dataset(to: Conversion, key: str, value: Any) -> str:
    """TRL's data set of the hub, with its configuration."""
    if not isinstance(value, str):
        raise ValueError(f"{key} is a name, given {value!r}")
    config = to.given.get("dataset_config")
    to.data["input_dataset"] = value if config is None else f"{value}:{config}"
    return f"input_dataset: {to.data['input_dataset']} (of process_data.py)"


def say_listed_datasets(to: Conversion, key: str, value: Any) -> str:
    """LLaMA-Factory's names, by the list of data sets that is beside their files."""
    folder = Path(str(to.get("dataset_dir", default="data")))
    names = [name.strip() for name in str(value).split(",")]
    info = folder / "dataset_info.json"
    entries = read_data_sets(info, names)
    files = [entry.get("file_name") for entry in entries]
    if None in files:
        return f"{MISSING}: name its file as input_file in data.yaml (given {value!r}, not a file of {info})"
    to.data["input_file"] = [str(folder / file) for file in files]
    columns = {pair for entry in entries for pair in entry.get("columns", {}).items()} - ALPACA_COLUMNS
    messages = [column for what, column in columns if what == "messages"]
    if len(messages) == 1:
        to.data["messages_field"] = messages[0]
        columns.remove(("messages", messages[0]))
    others = ", ".join(sorted(f"{what}: {column}" for what, column in columns))
    more = f"; of its columns {others} have no counterpart" if others else ""
    return f"input_file: {', '.join(to.data['input_file'])} (of process_data.py){more}"


def read_data_sets(path: Path, names: list[str]) -> list[dict[str, Any]]:
    """What LLaMA-Factory's list says of these data sets, empty where it has none; ValueError if that is no data set."""
    try:
        listed = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    entries = [listed.get(name, {}) if isinstance(listed, dict) else None for name in names]
    for entry in entries:
        columns = entry.get("columns", {}) if isinstance(entry, dict) else None
        if not isinstance(columns, dict) or not all(
            isinstance(text, str | None) for text in (entry.get("file_name"), *columns.values())
        ):
            raise ValueError(f"{path}: not a mapping of names to data sets with a file_name and columns")
    return entries


def say_template(to: Conversion, key: str, value: Any) -> str:
    if value in (None, "tokenizer_default", "default", "jinja"):
        return f"{NEEDLESS}: the model's own template is used"
    if value in ("chatml", "llama3", "zephyr") or str(value).endswith(".jinja"):
        to.data["chat_template"] = value
        return f"chat_template: {to.data['chat_template']} (of process_data.py)"
    return f"{NEEDLESS}: the model's own template is used; if {value} is another, give its Jinja file as chat_template"


def say_trained(to: Conversion, key: str, value: Any) -> str:
    """Whether prompts are trained, too."""
    wants_all = value if key in ("train_on_inputs", "train_on_prompt") else not value
    return (
        f"{MISSING}: only the assistant's tokens are trained"
        if wants_all
        else (f"{NEEDLESS}: only the assistant's tokens are trained")
    )


def say_trackers(to: Conversion, key: str, value: Any) -> str:
    names = [str(name) for name in (value if isinstance(value, list) else [value] if value else [])]
    known = [name for name in names if name in ("wandb", "tensorboard", "mlflow", "trackio")]
    if known:
        to.train["track"] = known
    other = [name for name in names if name not in (*known, "none", "all")]
    return f"track: {known}" if known else f"{MISSING}: {', '.join(other)}" if other else NEEDLESS


def say_tracker(name: str, *, option: str | None = None) -> Rule:
    """A key that only matters to one tracker, which it thereby asks for."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if not value:
            return NEEDLESS
        to.train["track"] = sorted({*to.train.get("track", []), name})
        if option is not None:
            to.train[option] = value
        return f"track: {name}" + (f", {option}: {value}" if option else "")

    return rule


def offloads(value: Any) -> bool:
    """Whether a file's name says so, or an entry that is not off."""
    if not isinstance(value, dict):
        return "offload" in str(value).lower()
    for key, item in value.items():
        switch = item.get("device") if isinstance(item, dict) else item
        if offloads(item) or ("offload" in key and switch not in (False, None, "none", "false")):
            return True
    return False


def say_sharding(to: Conversion, key: str, value: Any) -> str:
    """DeepSpeed's and FSDP's files: everything is sharded by FSDP2 here."""
    if offloads(value):
        to.train["cpu_offload"] = True
        return "cpu_offload: true; else needs no option: FSDP2 shards everything"
    return f"{NEEDLESS}: FSDP2 shards weights, gradients and optimizer"
