"""Converts arguments to command lines: InstructLab's names become options, and every option becomes its flag.

Arguments that no option can express are refused here, by the name that the user gave; the scripts check the rest.
Fields of Red Hat's mini_trainer, which training_hub gives, become an option, or a note that they have no effect
(docs/reference/training_hub.md has the table of all of them).
"""

import dataclasses
import math
import os
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

from mini_trainer.api import arguments
from mini_trainer.api.errors import make_bad_input
from mini_trainer.api.sent_callbacks import send_callbacks
from mini_trainer.api.tokenized import DATA_FILE, choose_tokenized, find_data_file, list_values, names_tokenized
from mini_trainer.options import OSFTOptions, TrainOptions, flag_name, foreign_names, iterate_fields, list_types
from mini_trainer.options.data import DEFAULT_BATCH_SIZE
from mini_trainer.options.fields import is_required
from mini_trainer.options.learning import DEFAULT_LEARNING_RATE
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.options.urls import is_url
from mini_trainer.run.hooks import FOLDERS

DATA_TYPES = list_types(ProcessDataOptions)
NUM_MOCK_SAMPLES = 10_000  # if mock_data is True

# InstructLab's tracker fields: the tracker that each enables, and the environment variable that it sets.
TRACKER_VARIABLES = {
    "mlflow_experiment_name": ("mlflow", "MLFLOW_EXPERIMENT_NAME"),
    "mlflow_run_name": ("mlflow", "MLFLOW_RUN_NAME"),
    "mlflow_tracking_uri": ("mlflow", "MLFLOW_TRACKING_URI"),
    "wandb_project": ("wandb", "WANDB_PROJECT"),
    "wandb_run_name": ("wandb", "WANDB_NAME"),
    "wandb_entity": ("wandb", "WANDB_ENTITY"),
}
# Options that are on by default and that None turns off; for all other fields, None means not given.
NONE_IS_A_VALUE = {
    option.name
    for options_class in (TrainOptions, ProcessDataOptions)
    for option, _ in iterate_fields(options_class)
    if type(None) in get_args(option.type) and option.default is not None
}
ENDS = ("max_steps", "max_epochs", "max_samples", "max_tokens")


class Values(dict):
    """Options by name; refuses an option given twice, under any of its names."""

    def __init__(self):
        super().__init__()
        self.given_as: dict[str, str] = {}

    def give(self, name: str, value: Any, *, by: str) -> None:
        if name in self:
            raise make_bad_input(f"{self.given_as[name]} and {by} both set {flag_name(name)}: give only one of them")
        self[name], self.given_as[name] = value, by


def make_torchrun_words(args: arguments.TorchrunArgs) -> list[str]:
    """Arguments of `mini-trainer train` that start processes."""
    if args.rdzv_endpoint and args.master_addr:
        raise make_bad_input("rdzv_endpoint and master_addr both set the rendezvous: give only one of them")
    words = [f"--nproc-per-node={args.nproc_per_node}"]
    if args.nnodes == 1 and args.rdzv_endpoint is None and args.master_addr is None:
        return words  # a single machine needs no rendezvous arguments
    given = {name: value for name, value in dataclasses.asdict(args).items() if value is not None}
    del given["nproc_per_node"]
    if args.rdzv_endpoint is not None:
        given["rdzv_backend"] = "c10d"
    return [*words, *(f"{flag_name(name)}={value}" for name, value in given.items())]


def make_train_words(args: arguments.TrainingArgs) -> list[str]:
    """Command-line arguments of train.py; BadInputError for options without a counterpart or given under two names."""
    return make_words(TrainOptions, make_train_values(args))


def make_train_values(args: arguments.TrainingArgs) -> Values:
    """Options of train.py, with the fields that they are from."""
    values, given = Values(), list_given(args)
    if given.get("save_samples", 1) <= 0:  # means "never" in InstructLab
        del given["save_samples"]
    convert_fields(values, given)
    if given.get("mock_data") is False:
        del given["mock_data"]
    if given.get("mock_data"):
        given["mock_data"] = NUM_MOCK_SAMPLES if given["mock_data"] is True else given["mock_data"]
        given.pop("data_path", None)  # which InstructLab requires, and does not read then
    if tokenizes_first(args):
        given.pop("data_path", None)
        values.give("data_path", (str(find_data_file(args)),), by="process_data")
    elif args.data_output_dir is not None and not gives_rows(args):
        given["data_path"] = choose_tokenized(args)
    give_blocks(values, args, given)
    if "adamw_betas" in given:
        for name, beta in zip(("adam_beta1", "adam_beta2"), given.pop("adamw_betas"), strict=True):
            values.give(name, beta, by="adamw_betas")
    give_methods(values, given)
    give_sharding(values, args)
    give_validation(values, args)
    give_trackers(values, given)
    callbacks = tuple(sent.path for sent in send_callbacks(list_values(given.pop("callbacks", None))))
    if callbacks:
        given["callbacks"] = callbacks
    own = {option.name for option, _ in iterate_fields(TrainOptions)}
    for name, value in given.items():
        if name in own:
            values.give(name, value, by=name)
    if not any(end in values for end in ENDS) and args.training_mode != arguments.TrainingMode.INFINITE:
        values.give("max_epochs", 1, by="the default of InstructLab")
    values.setdefault("learning_rate", DEFAULT_LEARNING_RATE)
    if "batch_tokens" not in values:
        values.setdefault("batch_size", DEFAULT_BATCH_SIZE)
    return values


def tokenizes_first(args: arguments.TrainingArgs) -> bool:
    """Whether `data_path` names chats to tokenize: not if train.py itself gets rows, or mock data."""
    return args.process_data and not gives_rows(args) and not names_tokenized(args)


def gives_rows(args: arguments.TrainingArgs) -> bool:
    given = (args.input_file, args.input_dataset, args.mock_data)
    return any(value not in (arguments.NOTHING, None, False) for value in given)


def make_data_values(args: arguments.DataProcessArgs) -> Values:
    values, given = Values(), list_given(args)
    for name, value in given.items():
        if name == "data_output_path" and not Path(value).suffix:
            value = value if is_url(str(value)) else Path(value) / DATA_FILE
        if name == "chat_tmpl_path" and Path(value).suffix == ".py":
            raise make_bad_input(
                f"chat_tmpl_path {value}: InstructLab's templates are Python files, which are not executed here; give a"
                " Jinja file with the text of its CHAT_TEMPLATE, and its special tokens with add_special_tokens"
            )
        ours = foreign_names.find_option(name, DATA_TYPES) if name in foreign_names.DATA_NAMES else name
        values.give(ours, value, by=name)
    return values


def make_data_args(args: arguments.TrainingArgs) -> arguments.DataProcessArgs:
    """Arguments for the tokenization that `run_training` does before training."""
    if args.data_path in (arguments.NOTHING, None):
        raise make_bad_input("data_path is missing: give chats to train on, or tokenized data with process_data=False")
    model = args.model_path if args.model_name_or_path in (arguments.NOTHING, None) else args.model_name_or_path
    return arguments.DataProcessArgs(
        data_path=args.data_path,
        output_file=str(find_data_file(args)),
        model_path=model,
        model_revision=args.model_revision,
        trust_remote_code=args.trust_remote_code,
        max_seq_len=arguments.NOTHING
        if args.max_seq_len is None or args.pretraining_config is not None
        else args.max_seq_len,
        chat_tmpl_path=args.chat_tmpl_path,
        num_cpu_procs=arguments.NOTHING if args.data_process_num_cpu_procs is None else args.data_process_num_cpu_procs,
        validation_share=args.validation_split or arguments.NOTHING,
        preview=0,
        **make_document_args(args.pretraining_config),
    )


def make_document_args(config: arguments.PretrainingConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    columns = (f"text={config.document_column_name}",)
    return dict(format="document", columns=columns, block_size=config.block_size)


def list_given(args: Any) -> dict[str, Any]:
    """The fields of `args` that have a value; None counts as one only for options that it turns off."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    return {
        name: value
        for name, value in given.items()
        if value is not arguments.NOTHING and (value is not None or name in NONE_IS_A_VALUE)
    }


def give_blocks(values: Values, args: arguments.TrainingArgs, given: dict[str, Any]) -> None:
    """Converts `pretraining_config`, of which training_hub also gives the block size by itself."""
    config = args.pretraining_config
    if gives_rows(args):
        for name, value in make_document_args(config).items():
            values.give(name, value, by="pretraining_config")
    elif "block_size" in given and (config is None or given.pop("block_size") != config.block_size):
        raise make_bad_input("block_size cuts documents: give pretraining_config=PretrainingConfig(block_size=...)")


def give_methods(values: Values, given: dict[str, Any]) -> None:
    """Expands `lora` and `osft` objects into options."""
    lora, osft = given.get("lora"), given.get("osft")
    if isinstance(lora, arguments.LoraOptions):
        del given["lora"]
        values.give("lora", True, by="lora")
        for name in ("rank", "alpha", "dropout"):
            values.give(f"lora_{name}", getattr(lora, name), by="lora")
        if lora.target_modules:
            values.give("lora_target_modules", tuple(lora.target_modules), by="lora")
        if (quantization := to_plain(lora.quantize_data_type)) is not None:
            values.give("base_quantization", quantization, by="lora")
    if isinstance(osft, OSFTOptions):
        del given["osft"]
        defaults = {field.name: field.default for field in dataclasses.fields(osft)}
        chosen = {name: getattr(osft, name) for name in defaults if getattr(osft, name) != defaults[name]}
        for name, value in (chosen | {"osft": True}).items():
            values.give(name, value, by="osft")


def give_sharding(values: Values, args: arguments.TrainingArgs) -> None:
    """Converts the options of FSDP and DeepSpeed."""
    backend = to_plain(args.distributed_backend)
    if backend != "fsdp":
        raise make_bad_input(f"distributed_backend {backend!r} has no counterpart here: training uses FSDP2, 'fsdp'")
    fsdp, deepspeed = args.fsdp_options, args.deepspeed_options
    if fsdp is not None:
        strategy = to_plain(fsdp.sharding_strategy)
        if strategy not in foreign_names.SHARDING:
            raise make_bad_input(f"sharding_strategy {strategy!r}: must be one of {', '.join(foreign_names.SHARDING)}")
        for name, value in foreign_names.SHARDING[strategy].items():
            values.give(name, value, by="fsdp_options")
        if fsdp.cpu_offload_params:
            values.give("cpu_offload", True, by="fsdp_options")
    if deepspeed is not None:
        given = dataclasses.asdict(deepspeed)
        del given["cpu_offload_optimizer"]
        defaults = dataclasses.asdict(arguments.DeepSpeedOptions())
        refused = [name for name, value in given.items() if value != defaults[name]]
        if refused:
            raise make_bad_input(f"deepspeed_options: {', '.join(refused)} has no counterpart here")
        if deepspeed.cpu_offload_optimizer:
            values.give("cpu_offload", True, by="deepspeed_options")


def give_validation(values: Values, args: arguments.TrainingArgs) -> None:
    """Converts the validation split."""
    if args.validation_split and gives_rows(args):
        values.give("validation_share", args.validation_split, by="validation_split")
    elif args.validation_split and tokenizes_first(args):  # that of tokenized data: `api.tokenized`
        file = find_data_file(args)
        validation_file = file.with_name(f"{file.stem}.validation{file.suffix}")
        values.give("validation_data_path", (str(validation_file),), by="validation_split")


def give_trackers(values: Values, given: dict[str, Any]) -> None:
    """Converts InstructLab's tracker fields, each of which enables its tracker."""
    if given.get("tensorboard_log_dir") is not None:
        raise make_bad_input(
            "tensorboard_log_dir has no counterpart here: track='tensorboard' writes to ckpt_output_dir/tensorboard"
        )
    asked = list(given.pop("track", None) or ())
    for name, (tracker, _) in TRACKER_VARIABLES.items():
        if (value := given.pop(name, None)) is None:
            continue
        asked += [] if tracker in asked else [tracker]
        if "{" in value:
            raise make_bad_input(f"{name} {value!r}: placeholders are not supported: give the name itself")
    if asked:
        values.give("track", tuple(asked), by="the trackers' fields")


def make_environment(args: arguments.TrainingArgs, sent_to: Path | None = None) -> dict[str, str]:
    """Environment variables for the fields of trackers, and for where callbacks are that are no import paths: they may
    import all that this process can. `sent_to`: the folder of the modules of those that are sent."""
    pairs = ((variable, getattr(args, name)) for name, (_, variable) in TRACKER_VARIABLES.items())
    values = {variable: value for variable, value in pairs if value is not None}
    if all(isinstance(callback, str) for callback in list_values(args.callbacks)):
        return values
    sent = [] if sent_to is None else [str(sent_to)]
    return values | {FOLDERS: os.pathsep.join([*sent, *filter(None, sys.path)])}


def name_arguments(message: str, args: arguments.TrainingArgs | arguments.DataProcessArgs, values: Values) -> str:
    """A script's message with arguments, as they were given, in place of flags, and without advice on --help."""
    fields = {field.name for field in dataclasses.fields(args)}

    def name_field(found: re.Match) -> str:
        name = found[0].removeprefix("--").replace("-", "_")
        given = values.given_as.get(name, name)
        if given in fields or name in fields:
            return given if given in fields else name
        positive = name.removeprefix("no_")
        return f"{positive}=False" if positive in fields else found[0]

    lines = [line for line in message.splitlines() if "--help" not in line]
    return re.sub(r"--[a-z][a-z0-9-]*[a-z0-9]", name_field, "\n".join(lines))


def to_plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def make_words(options_class: type, values: dict[str, Any]) -> list[str]:
    """Flags for all given options, in the order of --help; BadInputError if a required option is missing."""
    words, rest, missing = [], [], []
    for option, _ in iterate_fields(options_class):
        if option.name not in values:
            missing += [option.name] if is_required(option) else []
            continue
        value, flag = to_plain(values[option.name]), flag_name(option.name)
        if get_origin(option.type) is tuple:
            items = value if isinstance(value, (tuple, list)) else (value,)
            rest += [flag, *map(str, items)]
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words.append(f"{flag}={value}")
    if missing:
        raise make_bad_input(f"missing: {', '.join(missing)}")
    return [*words, *rest]


VALIDATION_DATA = ("validation_data_path", "validation_split", "validation_share")
END_OF_MODE = {"epoch": "max_epochs", "step": "max_steps", "token": "max_tokens", "infinite": None}


def convert_fields(values: Values, given: dict[str, Any]) -> None:
    """Converts Red Hat's fields, which it takes out of `given`. BadInputError for values that have no meaning here."""
    if given.get("save_best_val_loss") is False and not any(given.get(name) for name in VALIDATION_DATA):
        del given["save_best_val_loss"]  # their default; an option without effect would be refused
    dtype = given.pop("osft_upcast_dtype", None)
    name = to_name(dtype)
    if dtype is not None and foreign_names.DTYPES.get(name, name) not in ("float32", "float64"):
        raise make_bad_input(f"osft_upcast_dtype {dtype}: OSFT decomposes in float64 and computes in float32, always")
    if threshold := given.pop("val_loss_improvement_threshold", None):
        values.give("best_metric", f"loss:{threshold}", by="val_loss_improvement_threshold")
    if (samples := given.pop("min_samples_per_validation", None)) is not None:
        values.give("validate_every_steps", count_steps(samples, given), by="min_samples_per_validation")
    choose_end(given)
    for name in [name for name in foreign_names.TRAIN_NAMES if name in given]:
        for option, value in convert_name(name, given.pop(name)).items():
            values.give(option, value, by=name)
    for option, value in convert_schedule_fields(given).items():
        values.give(option, value, by="lr_scheduler_kwargs")


def convert_name(name: str, value: Any) -> dict[str, Any]:
    """Our options for a field, by the table of foreign names; none, if it has no effect."""
    row = foreign_names.find_row(name)
    if not row.options:
        if row.decides and value:
            raise make_bad_input(f"{name} has no counterpart here: {row.reason}")
        return {}
    value = to_name(value) if isinstance(value, Enum) or str(value).startswith("torch.") else value
    try:
        return row.convert(value, name=name)
    except KeyError:
        raise make_bad_input(f"{name} {value!r}: must be one of {', '.join(map(str, row.values))}") from None


def to_name(value: Any) -> str:
    return str(to_plain(value)).removeprefix("torch.")


def count_steps(samples: int, given: dict[str, Any]) -> int:
    """Steps that train on at least `samples`."""
    batch_size = given.get("batch_size") or given.get("effective_batch_size")
    if batch_size is None or samples < 1:
        raise make_bad_input(
            f"min_samples_per_validation {samples}: must be at least 1, and needs batch_size, the samples of a step"
        )
    return math.ceil(samples / batch_size)


def choose_end(given: dict[str, Any]) -> None:
    """Leaves only the end that counts with `training_mode`, and the default schedule that comes with it."""
    if (mode := given.pop("training_mode", None)) is None:
        return
    mode = read_mode(mode)
    end = END_OF_MODE[mode]
    if "num_epochs" in given:
        given["max_epochs"] = given.pop("num_epochs")
    for name in list_other_ends(mode, given):
        del given[name]
    if end is None:
        return
    if end != "max_epochs" and not given.get(end):
        raise make_bad_input(f"training_mode {mode!r} needs {end}, of at least 1")
    given.setdefault("lr_scheduler", "cosine")


def read_mode(mode: Any) -> str:
    """The mode's name; BadInputError for an unknown one."""
    name = mode.value if isinstance(mode, arguments.TrainingMode) else mode
    if name not in END_OF_MODE:
        raise make_bad_input(f"training_mode {name!r}: must be one of {', '.join(END_OF_MODE)}")
    return name


def list_other_ends(mode: str, given: dict[str, Any]) -> list[str]:
    return [name for name in END_OF_MODE.values() if name in given and name != END_OF_MODE[mode]]


def convert_schedule_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Converts transformers' names and arguments of schedules, `lr_scheduler` and `lr_scheduler_kwargs`."""
    scheduler, values = str(given.get("lr_scheduler", "")), given.pop("lr_scheduler_kwargs", None) or {}
    if scheduler in foreign_names.SCHEDULES:
        converted = foreign_names.find_row("lr_scheduler").convert(scheduler, name="lr_scheduler")
        given["lr_scheduler"] = converted["lr_scheduler"]
    found, unknown = foreign_names.convert_schedule(
        scheduler, values, given.get("learning_rate", DEFAULT_LEARNING_RATE)
    )
    if unknown:
        allowed = ", ".join(foreign_names.SCHEDULE_ARGUMENTS.get(scheduler, ())) or "none"
        raise make_bad_input(
            f"lr_scheduler_kwargs: {', '.join(unknown)}: allowed with {scheduler or 'the default'}: {allowed}"
        )
    return found


def list_notes(args: arguments.TrainingArgs) -> list[str]:
    """Fields that have no effect, and defaults of Red Hat's that apply, or do not."""
    given = {name: value for name, value in vars(args).items() if value is not arguments.NOTHING and value is not None}
    rows = {name: foreign_names.find_row(name) for name in foreign_names.TRAIN_NAMES if name in given}
    notes = [f"{name} has no effect: {row.reason}" for name, row in rows.items() if not row.options]
    if "osft_upcast_dtype" in given:
        notes.append("osft_upcast_dtype has no effect: OSFT decomposes in float64 and computes in float32")
    if given.get("mock_data") and "data_path" in given:
        notes.append("data_path has no effect: mock_data is trained on")
    elif names_tokenized(args):
        unused = [name for name in ("max_seq_len", "chat_tmpl_path") if name in given]
        notes += [f"{name} has no effect: data_path is tokenized already" for name in unused]
    elif "pretraining_config" in given and "max_seq_len" in given:
        notes.append("max_seq_len has no effect: pretraining_config sets the length of samples")
    if "training_mode" in given:
        mode = read_mode(given["training_mode"])
        others = [name for name in list_other_ends(mode, given) if given[name]]
        notes += [f"{name} has no effect with training_mode {mode!r}" for name in others]
        if "lr_scheduler" not in given and END_OF_MODE[mode] is not None:
            notes.append("lr_scheduler is cosine, the default where training_mode comes from")
        if not {"save_dtype", "export_dtype"} & given.keys():
            notes.append("save_dtype is bfloat16; the default where training_mode comes from is the model's own")
    return notes
