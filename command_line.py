"""Options from flags and a YAML file, checked together, and one message for whatever is wrong with them.

Imports nothing heavy, so that `--help` and a mistyped flag answer at once.
"""

import dataclasses
import difflib
import importlib.util
import itertools
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, get_origin

from options import (
    PRESETS,
    SCHEDULES_WITH_END,
    EngineOptions,
    EvaluateOptions,
    GenerateOptions,
    HubOptions,
    ImportConfigOptions,
    MergeModelsOptions,
    Options,
    OSFTOptions,
    PlotOptions,
    ProcessDataOptions,
    RowOptions,
    SamplingOptions,
    TrackingOptions,
    TrainOptions,
    VisionOptions,
    flag_name,
    flatten_options,
    iterate_fields,
    parse_duration,
    parse_steps,
    parse_subset,
)
from ranks.ending import exit_with_message

# What an adapter to go on from says, and no option beside it.
LORA_ADAPTER_SAYS = ("rank", "alpha", "dropout", "target_modules", "use_rslora", "use_dora", "modules_to_save")

# The least that options of rows can be; a block is cut one token short where the next would begin with an end-of-text
# token, and two make a target.
ROW_MINIMA = {"max_sample_num_tokens": 1, "block_size": 3, "num_proc": 1, "mock_data": 1, "mock_length": 2}

# Whose one required option is given as words without a flag.
WITHOUT_FLAG = (PlotOptions, ImportConfigOptions)
PICTURES = (".png", ".svg", ".pdf")
# What a tracker is imported by.
TRACKER_MODULES = {
    "wandb": ("wandb",), "tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy"), "trackio": ("trackio",)
}  # fmt: skip


def parse_options(options_class: type[Options], argv: list[str] | None = None) -> Options:
    """Reads flags (`argv`, by default the command line) over the YAML files named by `--config`.

    Prints one message and exits with `ExitCode.BAD_INPUT` on anything unknown, mistyped, missing or contradictory.
    """
    import tyro

    argv = sys.argv[1:] if argv is None else argv
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # what is said once per node
    markers = [tyro.conf.OmitArgPrefixes]  # an option's group is a heading of --help, and no part of its flag
    if options_class in WITHOUT_FLAG:
        markers.append(tyro.conf.PositionalRequiredArgs)
    try:
        refuse_repeated_flags(argv, options_class)
        words = read_configs_as_flags(find_configs(argv, options_class), options_class) + argv
        options = tyro.cli(
            options_class,
            config=markers,
            args=find_preset_words(words, options_class) + words,
            console_outputs=is_first,
        )
        problems = find_problems(options)
        if problems:
            raise ValueError("these options cannot be used as they are:\n  " + "\n  ".join(problems))
    except ValueError as error:
        exit_with_message(str(error))
    if isinstance(options, TrainOptions) and options.plan.print_config:
        if is_first:
            values = flatten_options(options)
            del values["config"], values["print_config"]
            print(describe_options(TrainOptions, values), end="")
        sys.exit()
    return options


def find_preset_words(words: list[str], options_class: type) -> list[str]:
    """The command line of the preset that `words` name; whatever they say themselves comes later, and wins."""
    if options_class is not TrainOptions:
        return []
    names = [after for word, after in zip(words, [*words[1:], ""], strict=True) if word == "--preset"]
    names += [word.removeprefix("--preset=") for word in words if word.startswith("--preset=")]
    values = PRESETS.get(names[-1], {}) if names else {}  # tyro refuses a name that is none
    types = {option.name: option.type for option, _ in iterate_fields(TrainOptions)}
    return [word for name, value in values.items() for word in flag_for(name, value, field_type=types[name])]


def describe_options(options_class: type, values: dict[str, Any]) -> str:
    """Options by name as YAML that `--config` takes, in the order and the groups of --help."""
    import yaml

    lines, last = [], None
    for option, group in iterate_fields(options_class):
        if option.name not in values:
            continue
        if group != last:
            lines.append(f"\n# {group}\n")
        value, last = values[option.name], group
        lines.append(yaml.safe_dump({option.name: list(value) if isinstance(value, tuple) else value}, width=math.inf))
    return "".join(lines).lstrip("\n")


def refuse_repeated_flags(argv: list[str], options_class: type) -> None:
    """Of two values for one option, one would be dropped without a word."""
    names = [word.split("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")]
    names = [name.removeprefix("no_") for name in names]
    repeated = {option.name for option, _ in iterate_fields(options_class) if names.count(option.name) > 1}
    if repeated:
        raise ValueError(f"given more than once: {', '.join(map(flag_name, sorted(repeated)))}")


def find_configs(argv: list[str], options_class: type) -> list[Path]:
    """The values of `--config F G` or `--config=F`; none for options without such files."""
    if all(option.name != "config" for option, _ in iterate_fields(options_class)):
        return []
    for i, flag in enumerate(argv):
        if flag == "--config":
            return [Path(word) for word in itertools.takewhile(lambda word: not word.startswith("--"), argv[i + 1 :])]
        if flag.startswith("--config="):
            return [Path(flag.removeprefix("--config="))]
    return []


def read_configs_as_flags(paths: list[Path], options_class: type) -> list[str]:
    """YAML files as command-line flags, so that all are converted and checked by the same code; the later ones win."""
    flags: dict[str, list[str]] = {}
    for path in paths:
        flags |= read_config(path, options_class)
    return [word for words in flags.values() for word in words]


def read_config(path: Path, options_class: type) -> dict[str, list[str]]:
    """By option, what a YAML file says of it, as command-line words."""
    config = read_yaml(path, named=f"--config {path}")
    fields = {option.name: option.type for option, _ in iterate_fields(options_class)}
    flags, problems = {}, []
    for key, value in config.items():
        name = str(key).replace("-", "_")
        try:
            if name not in fields or name == "config":
                close = difflib.get_close_matches(name, fields, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(fields)}"
                raise ValueError(f"unknown option {key!r}{hint}")
            flags[name] = flag_for(name, fill_in_environment(name, value), field_type=fields[name])
        except ValueError as error:
            problems.append(f"--config {path}: {error}")
    if problems:
        raise ValueError("\n  ".join(problems))
    return flags


def read_yaml(path: Path, *, named: str) -> dict[Any, Any]:
    """The keys and values of a YAML file; ValueError, which calls the file `named`, for anything else."""
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            if len(set(keys)) < len(keys):
                raise yaml.YAMLError(f"a key is there twice among {', '.join(keys)}")
            return super().construct_mapping(node, deep)

    # YAML 1.1 reads 1:30:00 as the number 5400
    times = ("tag:yaml.org,2002:str", re.compile(r"\d+(:\d+)+"))
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers
    UniqueKeyLoader.yaml_implicit_resolvers = resolvers | {d: [times, *resolvers[d]] for d in "0123456789"}
    try:
        content = yaml.load(path.read_text(), Loader=UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{named}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{named}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{named}: expected 'option: value' lines, got {type(content).__name__}")
    return content


def fill_in_environment(name: str, value: Any) -> Any:
    """The `value` of option `name`, and of a list's elements, with the environment in place of `${NAME}`."""
    if isinstance(value, list):
        return [fill_in_environment(name, item) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def look_up(match: re.Match) -> str:
        if match[1] not in os.environ:
            raise ValueError(f"{name}: {value!r}: the environment has no variable {match[1]}")
        return os.environ[match[1]]

    filled = re.sub(r"\$\{(\w+)\}", look_up, value)
    return {"true": True, "false": False}.get(filled, filled)


def flag_for(name: str, value: Any, *, field_type: Any) -> list[str]:
    """`name: value` of the YAML file as command-line words."""
    flag, is_bool = "--" + name.replace("_", "-"), field_type is bool
    if is_bool != isinstance(value, bool):
        allowed = "true or false" if is_bool else "a value that is not true or false"
        raise ValueError(f"{name}: given {value!r}, allowed: {allowed}")
    if is_bool:
        return [flag if value else flag.replace("--", "--no-", 1)]
    if get_origin(field_type) is tuple:
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, (dict, list)) for item in values):
            raise ValueError(f"{name}: given {value!r}, allowed: one value, or a list of values")
        return [flag, *map(str, values)]
    if isinstance(value, (dict, list)):
        raise ValueError(f"{name}: given {value!r}, allowed: one value")
    return [f"{flag}={value}"]


def find_problems(options: Any) -> list[str]:
    """Everything wrong with the options that needs no file to see, each as one line."""
    finders = {
        TrainOptions: find_train_problems,
        ProcessDataOptions: find_data_problems,
        PlotOptions: find_plot_problems,
        GenerateOptions: find_generate_problems,
        EvaluateOptions: find_evaluate_problems,
        MergeModelsOptions: find_mixing_problems,
    }
    return finders[type(options)](options) if type(options) in finders else []


def find_train_problems(options: TrainOptions) -> list[str]:
    """Values out of range, options without effect, and options that contradict each other."""
    return [
        *find_numbers_out_of_range(flatten_options(options)),
        *find_training_data_problems(options),
        *find_validation_problems(options),
        *find_classifier_problems(options),
        *find_optimization_problems(options),
        *find_compute_problems(options),
        *find_osft_problems(options.osft),
        *find_lora_problems(options),
        *find_vision_problems(options),
        *find_ending_problems(options),
        *find_tracking_problems(options.tracking),
        *find_hub_problems(options.hub),
    ]


def find_numbers_out_of_range(values: dict[str, Any]) -> list[str]:
    """Of single options, by name."""
    problems = []

    def require(condition: bool, name: str, allowed: str) -> None:
        if not condition:
            problems.append(f"{flag_name(name)} {values[name]}: {allowed}")

    for name in ("batch_size", "max_tokens_per_gpu", "max_image_tokens_per_gpu",
                 "max_steps", "max_epochs", "max_samples", "max_tokens",
                 "min_samples_per_checkpoint", "num_decay_steps", "checkpoint_every_steps", "keep_checkpoints",
                 "hang_timeout", "plan_world_size", "prefetch_blocks", "validate_every_steps",
                 "early_stopping_patience", "num_cycles", "keep_exports"):  # fmt: skip
        require(values[name] in (None, "auto") or values[name] >= 1, name, "must be at least 1")
    sharing = values["context_parallel"]
    require(sharing is None or sharing >= 2, "context_parallel", "must be at least 2; None turns it off")
    for name in ("learning_rate", "weight_decay", "num_warmup_steps", "seed"):
        require(0 <= values[name] < math.inf, name, "must be 0 or more, and finite")
    for name in ("adam_beta1", "adam_beta2"):
        require(0 <= values[name] < 1, name, "must be at least 0 and below 1")
    require(values["adam_eps"] > 0, "adam_eps", "must be above 0")
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


def find_training_data_problems(options: TrainOptions) -> list[str]:
    """Of what is trained on: none, too much, or of several data sets."""
    o, rows, weights = options.data, list_row_sources(options.rows), options.data.data_weights
    problems = find_row_problems(options.rows)
    if not o.data_path and not rows:
        problems.append("no data is given: name data sets by --data-path, or rows by --input-file or --input-dataset")
    if o.data_path and rows:
        problems.append(f"--data-path and {rows[0]} both say what is trained on: give one of them")
    if not rows and (given := list_changed(options.rows)):
        problems.append(f"{', '.join(map(flag_name, given))}: no effect without rows to tokenize (--input-file)")
    if options.rows.format == "classification" and options.classification.objective == "causal-lm":
        problems.append("--format classification has no effect on --objective causal-lm: say what kind of classifier")
    if rows and options.classification.objective != "causal-lm":
        needs = f"--objective {options.classification.objective} needs rows of --format classification"
        if options.rows.mock_data is not None:
            problems.append(f"{needs}, with labels: --mock-data has none")
        elif options.rows.format != "classification":
            problems.append(needs)
    if weights and o.data_path and len(weights) != len(o.data_path):
        problems.append(f"--data-weights: {len(weights)} numbers for the {len(o.data_path)} data sets of --data-path")
    if not all(0 < weight < math.inf for weight in weights):
        problems.append(f"--data-weights {' '.join(map(str, weights))}: must be above 0, and finite")
    if weights and len(o.data_path) <= 1:
        problems.append("--data-weights has no effect on one data set: name several with --data-path")
    if not weights and o.data_weights_by != "samples":
        problems.append("--data-weights-by has no effect without --data-weights")
    if o.subset is not None:
        try:
            parse_subset(o.subset)
        except ValueError as error:
            problems.append(f"--subset {error}")
    return problems


def find_validation_problems(options: TrainOptions) -> list[str]:
    """Options without effect."""
    o = options.validation
    if not (o.is_asked or options.rows.validation_share):
        given = list_given(o)
        return [f"{', '.join(given)}: no effect without --validation-data-path"] if given else []
    if o.validation_data_path and options.rows.validation_share:
        return ["--validation-share and --validation-data-path both say what is measured on: give one of them"]
    if o.early_stopping_patience is not None and o.validate_every_steps is None and not o.validate_at_epoch:
        return ["--early-stopping-patience needs validations on the way: add --validate-every-steps or"
                " --validate-at-epoch"]  # fmt: skip
    return []


def find_classifier_problems(options: TrainOptions) -> list[str]:
    """What only classifiers have, and what they do not."""
    problems, o = [], options.classification
    if not 0 <= o.label_smoothing < 1:
        problems.append(f"--label-smoothing {o.label_smoothing}: must be at least 0 and below 1")
    if o.objective == "causal-lm":
        given = list_given(dataclasses.replace(o, label_smoothing=0.0))
        if options.validation.write_predictions:
            given.append("--write-predictions")
        return [*problems, f"{', '.join(given)}: no effect on --objective causal-lm"] if given else problems
    if options.optimization.router_aux_loss:
        problems.append(f"--router-aux-loss {options.optimization.router_aux_loss}: classifiers have no such loss here")
    if (options.validation.is_asked or options.rows.validation_share) and not is_installed("sklearn"):
        problems.append(
            "a validation measures classifiers by scikit-learn, which is not installed: pip install"
            " 'mini-trainer[classification]'"
        )
    return problems


def find_optimization_problems(options: TrainOptions) -> list[str]:
    """Of the schedule and the optimizer."""
    problems, o = [], options.optimization
    decays = o.lr_scheduler in SCHEDULES_WITH_END
    if o.warmup_ratio is not None and not 0 <= o.warmup_ratio < 1:
        problems.append(f"--warmup-ratio {o.warmup_ratio}: must be at least 0 and below 1")
    if o.warmup_ratio is not None and not options.end.is_given:
        problems.append(
            "--warmup-ratio is a share of the run's steps, and no end is given: add --max-steps, --max-epochs,"
            " --max-samples or --max-tokens"
        )
    if o.warmup_ratio is not None and o.num_warmup_steps:
        problems.append("--warmup-ratio and --num-warmup-steps both say how long warm-up is: give one of them")
    if decays and not options.end.is_given:
        problems.append(
            f"--lr-scheduler {o.lr_scheduler} decays towards the run's end, and none is given:"
            " add --max-steps, --max-epochs, --max-samples or --max-tokens"
        )
    if o.min_lr_ratio is not None and not decays:
        problems.append(
            f"--min-lr-ratio has no effect with --lr-scheduler {o.lr_scheduler}, which falls towards no end"
        )
    for name, scheduler in (("num_cycles", "cosine_with_restarts"), ("lr_power", "polynomial")):
        if getattr(o, name) is not None and o.lr_scheduler != scheduler:
            flag = flag_name(name)
            problems.append(f"{flag} has no effect with --lr-scheduler {o.lr_scheduler}: it belongs to {scheduler}")
    if o.lr_scheduler == "cosine_with_restarts" and o.num_cycles is None:
        problems.append("--lr-scheduler cosine_with_restarts needs --num-cycles: how often it falls from the peak")
    if o.num_decay_steps is not None and o.lr_scheduler != "wsd":
        problems.append(f"--num-decay-steps has no effect with --lr-scheduler {o.lr_scheduler}: it belongs to wsd")
    if (o.num_warmup_steps or o.warmup_ratio) and o.lr_scheduler == "constant":
        flag = "--num-warmup-steps" if o.num_warmup_steps else "--warmup-ratio"
        problems.append(f"{flag} has no effect with --lr-scheduler constant: use constant_with_warmup")
    if options.osft.osft and o.master_weights != "float32":
        problems.append(
            f"--master-weights {o.master_weights}: --osft keeps directions exactly, which rounding would not;"
            " use float32"
        )
    return problems


def find_compute_problems(options: TrainOptions) -> list[str]:
    """Of what a rank computes, how that is sharded, and what is auto."""
    problems, compute, sharding, osft = [], options.compute, options.sharding, options.osft.osft
    if sharding.shard_size is not None and sharding.sharding != "hybrid":
        problems.append(f"--shard-size has no effect with --sharding {sharding.sharding}: it belongs to hybrid")
    problems += find_sharing_problems(options)
    if sharding.cpu_offload and osft:
        problems.append("--cpu-offload cannot be used with --osft, whose projections run where the weights are")
    if compute.float8 and osft:
        problems.append("--float8: --osft's layers are products of their own, which are not in fp8")
    if compute.float8 and compute.compute_dtype == "float32":
        problems.append("--float8 needs bfloat16 for all that is not in fp8, given --compute-dtype float32")
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
    if compute.tiled_mlp and compute.compile:
        problems.append("--tiled-mlp cannot be used with --compile, which makes one piece of a block: give one of them")
    if compute.offload_activations and compute.activation_checkpointing != "full":
        problems.append(
            "--offload-activations moves what --activation-checkpointing full keeps, this is"
            f" {compute.activation_checkpointing}: use full, or leave it out"
        )
    if compute.compile and compute.activation_checkpointing == "auto":
        problems.append(
            "--activation-checkpointing auto cannot be used with --compile, which has to know before: give none,"
            " selective or full"
        )
    return problems


def find_sharing_problems(options: TrainOptions) -> list[str]:
    """What ranks that share packed rows cannot do."""
    num_sharing, objective = options.sharding.context_parallel, options.classification.objective
    if num_sharing is None:
        return []
    reasons = []
    if objective != "causal-lm":
        reasons.append(f"not for --objective {objective}, whose classes are of whole sequences")
    if options.optimization.neftune_alpha is not None:
        reasons.append("not with --neftune-alpha, whose noise is drawn for whole sequences")
    if options.compute.compile:
        reasons.append("not with --compile, where it has not been tried")
    return [f"--context-parallel {num_sharing}: {reason}: leave one of them out" for reason in reasons]


def find_ending_problems(options: TrainOptions) -> list[str]:
    """Of what a run goes on from, leaves behind, and only plans."""
    problems, exports, plan = [], options.exports, options.plan
    if options.checkpoints.allow_changed_options and options.checkpoints.resume == "none":
        problems.append("--allow-changed-options has no effect with --resume none: nothing is resumed")
    given = [flag_name(name) for name in ("plan_world_size", "plan_device") if getattr(plan, name) is not None]
    if given and not plan.dry_run:
        problems.append(f"{', '.join(given)}: no effect without --dry-run")
    name = exports.export_name
    if name is not None and (name in ("", "best") or name.startswith((".", "samples_")) or "/" in name):
        problems.append(
            f"--export-name {name!r}: must be the name of a directory, other than best, samples_N and .NAME"
        )
    if name is not None and exports.keep_exports is not None:
        problems.append("--keep-exports has no effect with --export-name, of which there is one")
    if not exports.on_the_way and not options.end.is_given:
        problems.append(
            "the trained model would never be written: add --min-samples-per-checkpoint or --checkpoint-at-epoch,"
            " or an end (--max-steps, ...) together with --save-final-checkpoint"
        )
    return problems


def find_osft_problems(o: OSFTOptions) -> list[str]:
    """OSFT's options: without effect, missing, or out of range."""
    given = list_given(o)
    if not o.osft:
        return [f"{', '.join(given)}: no effect without --osft"] if given else []
    problems = []
    ratio, energy = o.osft_unfreeze_rank_ratio, o.osft_keep_energy
    uses_activations = o.osft_basis == "activations"
    needs_statistics = uses_activations or o.osft_rank_allocation == "importance"
    has_statistics = o.osft_calibration_data is not None or o.osft_statistics is not None
    if ratio is None and (energy is None or not uses_activations):
        problems.append("--osft needs --osft-unfreeze-rank-ratio: the share of directions to train, from 0 to 1")
    if ratio is not None and not 0 <= ratio <= 1:
        problems.append(f"--osft-unfreeze-rank-ratio {ratio}: must be from 0 to 1")
    if ratio == 0 and not o.osft_train_others:
        problems.append(f"--osft-unfreeze-rank-ratio {ratio} without --osft-train-others trains nothing")
    if energy is not None and not 0 < energy <= 1:
        problems.append(f"--osft-keep-energy {energy}: must be above 0 and at most 1")
    if energy is not None and not uses_activations:
        problems.append("--osft-keep-energy has no effect with --osft-basis weights: it belongs to activations")
    if energy is not None and ratio is not None:
        problems.append("--osft-keep-energy and --osft-unfreeze-rank-ratio both say how much to keep: give one")
    if energy is not None and o.osft_rank_allocation == "importance":
        problems.append("--osft-rank-allocation importance has no effect with --osft-keep-energy")
    if needs_statistics and not has_statistics:
        problems.append(
            "--osft-basis activations and --osft-rank-allocation importance need --osft-calibration-data,"
            " --osft-statistics, or both"
        )
    if has_statistics and not needs_statistics:
        problems.append(
            "--osft-calibration-data and --osft-statistics have no effect with --osft-basis weights and"
            " --osft-rank-allocation uniform"
        )
    return problems


def find_lora_problems(options: TrainOptions) -> list[str]:
    """LoRA's options: without effect, out of range, or with what they cannot be used with."""
    problems, o = [], options.lora
    given = list_given(o)
    if not o.lora:
        return [f"{', '.join(given)}: no effect without --lora"] if given else []
    if o.lora_rank is not None and o.lora_rank < 1:
        problems.append(f"--lora-rank {o.lora_rank}: must be at least 1")
    if o.lora_alpha is not None and not 0 < o.lora_alpha < math.inf:
        problems.append(f"--lora-alpha {o.lora_alpha}: must be above 0, and finite")
    if not 0 <= o.lora_dropout < 1:
        problems.append(f"--lora-dropout {o.lora_dropout}: must be at least 0 and below 1")
    said = sorted(set(given) & {flag_name(f"lora_{name}") for name in LORA_ADAPTER_SAYS})
    if o.lora_adapter is not None and said:
        problems.append(f"{', '.join(said)}: no effect with --lora-adapter, which says it")
    if options.osft.osft:
        problems.append("--lora and --osft both say what trains: give one")
    if options.optimization.master_weights != "float32":
        problems.append(
            f"--master-weights {options.optimization.master_weights} has no effect with --lora: adapters are float32,"
            " and what does not train is held in --compute-dtype"
        )
    if options.compute.float8:
        problems.append("--float8 cannot be used with --lora: peft has no adapters for layers in fp8")
    if o.base_quantization != "none" and o.lora_use_dora:
        problems.append(f"--lora-use-dora needs the whole weights, given --base-quantization {o.base_quantization}")
    return problems


def find_vision_problems(options: TrainOptions) -> list[str]:
    """What --freeze cannot say beside LoRA and OSFT."""
    if options.vision == VisionOptions():
        return []
    frozen = options.vision.freeze
    if "nothing" in frozen and len(frozen) > 1:
        return [f"--freeze {' '.join(frozen)}: give nothing alone"]
    flag, lora, osft = f"--freeze {' '.join(frozen)}", options.lora, options.osft
    if lora.lora and not lora.lora_target_modules and lora.lora_adapter is None:
        return [f"{flag}: with --lora it says where --lora-target-modules looks, and none are given"]
    if osft.osft and "language" in frozen:
        return [f"{flag}: --osft trains the language model"]
    if osft.osft and not osft.osft_train_others:
        return [f"{flag}: no effect with --osft, beside which only --osft-train-others lets anything train"]
    return []


def find_tracking_problems(o: TrackingOptions) -> list[str]:
    """Of trackers: without effect, given twice, or not installed."""
    given = list_given(o)
    if not o.track:
        return [f"{', '.join(given)}: no effect without --track"] if given else []
    problems = [f"--track {name}: given twice" for name in dict.fromkeys(o.track) if o.track.count(name) > 1]
    for name in dict.fromkeys(o.track):
        missing = [module for module in TRACKER_MODULES[name] if not is_installed(module)]
        if missing:
            problems.append(
                f"--track {name}: {', '.join(missing)} is not installed: pip install 'mini-trainer[{name}]'"
            )
    return problems


def find_hub_problems(o: HubOptions) -> list[str]:
    """Of uploads: without effect, or to what cannot be a repository."""
    if o.push_to_hub is None:
        return [f"{', '.join(list_given(o))}: no effect without --push-to-hub"] if list_given(o) else []
    part = r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*[A-Za-z0-9_])?"
    if len(o.push_to_hub) > 96 or not re.fullmatch(rf"(?:{part}/)?{part}", o.push_to_hub):
        return [f"--push-to-hub {o.push_to_hub}: must be NAME or OWNER/NAME, of letters, digits, and -, _ or . inside"]
    return []


def is_installed(module: str) -> bool:
    """Whether there is a package of this name; a directory of that name that wandb, say, has left here is none."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def list_given(group: Any) -> list[str]:
    """The flags of a group's options that are not at their defaults, but for the group's switch."""
    switch = dataclasses.fields(group)[0].name
    return [flag_name(name) for name in list_changed(group) if name != switch]


def list_changed(group: Any) -> list[str]:
    """The names of a group's options that are not at their defaults."""
    return [option.name for option in dataclasses.fields(group) if getattr(group, option.name) != option.default]


def find_data_problems(o: ProcessDataOptions) -> list[str]:
    """Values out of range, endings that name no format, options without effect."""
    problems = []
    if Path(o.output_file).suffix not in (".arrow", ".parquet", ".jsonl"):
        problems.append(f"--output-file {o.output_file}: must end in .arrow, .parquet or .jsonl")
    if not list_row_sources(o.rows):
        problems.append("no rows are given: name them by --input-file or --input-dataset")
    problems += find_row_problems(o.rows)
    if o.preview < 0:
        problems.append(f"--preview {o.preview}: must be at least 0")
    if o.string_for_printing_masks is not None and o.preview == 0:
        problems.append("--string-for-printing-masks has no effect with --preview 0")
    if o.string_for_printing_masks is not None and o.rows.format == "classification":
        problems.append("--string-for-printing-masks: no effect with --format classification")
    return problems


def list_row_sources(o: RowOptions) -> list[str]:
    """The flags by which rows are given."""
    return [flag_name(name) for name in ("input_file", "input_dataset", "mock_data") if getattr(o, name)]


def find_row_problems(o: RowOptions) -> list[str]:
    """Of rows: values out of range, options without effect, and two that say the same."""
    problems, given = [], list_row_sources(o)
    if len(given) > 1:
        problems.append(f"{' and '.join(given)} both say where rows are: give one of them")
    for name, least in ROW_MINIMA.items():
        value = getattr(o, name)
        if value is not None and value < least:
            problems.append(f"{flag_name(name)} {value}: must be at least {least}")
    useless = [flag_name(name) for name in ("split", "revision") if getattr(o, name) is not None]
    if useless and o.input_dataset is None:
        problems.append(f"{', '.join(useless)}: no effect without --input-dataset")
    if o.mock_length is not None and o.mock_data is None:
        problems.append("--mock-length has no effect without --mock-data")
    if o.mock_data is not None:
        kept = ("mock_data", "mock_length", "num_proc")
        given = [name for name in list_changed(o) if name not in (*kept, "input_file", "input_dataset")]
        if given:
            problems.append(f"{', '.join(map(flag_name, given))}: no effect with --mock-data, which reads no rows")
    if o.block_size is not None and o.max_sample_num_tokens is not None:
        problems.append("--max-sample-num-tokens has no effect with --block-size, which says how long samples are")
    if o.block_size is not None and o.format not in (None, "messages", "document"):
        problems.append(f"--block-size has no effect with --format {o.format}: it cuts documents")
    if o.validation_share is not None and not 0 < o.validation_share < 1:
        problems.append(f"--validation-share {o.validation_share}: must be above 0 and below 1, such as 0.02")
    if o.allow_downloads and not o.images:
        problems.append("--allow-downloads has no effect without --images")
    if o.images and o.format == "classification":
        problems.append("--images: classifiers see none, so it has no effect with --format classification")
    if o.images and o.input_dataset is not None:
        problems.append("--images: paths of images are from the rows' own files: give these by --input-file")
    return [*problems, *find_field_problems(o), *find_classification_problems(o)]


def find_field_problems(o: RowOptions) -> list[str]:
    """Of the names of columns: of several formats, or of another than --format."""
    formats = {
        "messages_field": ("messages", "sharegpt"),
        "prompt_field": ("completion",),
        "completion_field": ("completion",),
        "text_field": ("document", "classification"),
    }
    given = [name for name in formats if getattr(o, name) is not None]
    if len({formats[name] for name in given}) > 1:
        return [f"{', '.join(map(flag_name, given))}: belong to several formats; rows have one"]
    return [
        f"{flag_name(name)} has no effect with --format {o.format}: it belongs to {' and '.join(formats[name])}"
        for name in given
        if o.format is not None and o.format not in formats[name]
    ]


def find_classification_problems(o: RowOptions) -> list[str]:
    """Options that are for classifiers only, or for all others only; labels that are said twice."""
    only_classification = (
        *("truncate", "text_pair_field", "label_field", "label_separator"),
        *("label_type", "label_names", "labels_from"),
    )
    is_classification = o.format == "classification"
    useless = ("allow_missing_stop_token",) if is_classification else only_classification
    given = [flag_name(name) for name in useless if getattr(o, name)]
    problems = []
    if given:
        word = "with" if is_classification else "without"
        problems.append(f"{', '.join(given)}: no effect {word} --format classification")
    if o.truncate and o.max_sample_num_tokens is None:
        problems.append("--truncate needs --max-sample-num-tokens, which says to how many tokens")
    if o.label_names and o.labels_from is not None:
        problems.append("--label-names and --labels-from both say which labels there are: give one")
    if len(set(o.label_names)) < len(o.label_names) or not all(name.strip() == name != "" for name in o.label_names):
        problems.append(f"--label-names {' '.join(o.label_names)}: has a name twice, or one that is blank")
    if o.label_separator is not None and o.label_type == "single":
        problems.append("--label-separator has no effect with --label-type single: each row has one label")
    if o.label_names and o.label_type == "regression":
        problems.append("--label-names has no effect with --label-type regression")
    return problems


def find_plot_problems(o: PlotOptions) -> list[str]:
    """Nothing to draw, nowhere to draw it, values out of range, options without effect."""
    problems, endings = [], (".html", *PICTURES)
    if not o.runs:
        problems.append("no run is given: name the --output-dir of one or more runs")
    if o.output is None and not o.follow:
        problems.append("nothing says where the curves go: give --output page.html, --output plot.png, or --follow")
    if o.output is not None and o.follow:
        problems.append("--output has no effect with --follow, which serves the page and writes no file: give one")
    if o.output is not None and Path(o.output).suffix.lower() not in endings:
        problems.append(f"--output {o.output}: must end in {', '.join(endings[:-1])} or {endings[-1]}")
    if o.port is not None and not o.follow:
        problems.append("--port has no effect without --follow")
    if o.port is not None and not 1 <= o.port <= 65535:
        problems.append(f"--port {o.port}: must be from 1 to 65535")
    if o.smoothing is not None and o.smoothing < 1:
        problems.append(f"--smoothing {o.smoothing}: must be at least 1, which is none")
    return problems


def find_generate_problems(o: GenerateOptions) -> list[str]:
    """Nowhere to write answers, values out of range, options without effect."""
    problems = [*find_engine_problems(o.engines), *find_sampling_problems(o.sampling)]
    if o.prompts and o.output is None:
        problems.append("--prompts needs --output, the file to write the answers to")
    if o.output is not None and not o.prompts:
        problems.append("--output has no effect without --prompts: a chat in the terminal is not written")
    if o.output is not None and Path(o.output).suffix != ".jsonl":
        problems.append(f"--output {o.output}: must end in .jsonl")
    if o.format is not None and not o.prompts:
        problems.append("--format has no effect without --prompts")
    if not o.prompts and o.sampling.num_samples != 1:
        problems.append("--num-samples has no effect in a chat")
    if o.engines.engine == "openai" and (o.adapter is not None or o.model_revision is not None or o.trust_remote_code):
        problems.append("--adapter, --model-revision, --trust-remote-code: no effect with --engine openai")
    return problems


def find_engine_problems(o: EngineOptions) -> list[str]:
    """Options of another engine than the one that is chosen, values out of range."""
    problems = []
    of_engine = {"batch_size": ("hf",), "dtype": ("hf", "vllm"), "base_url": ("openai",), "api_key_env": ("openai",),
                 "concurrency": ("openai",)}  # fmt: skip
    for option in dataclasses.fields(o):
        engines = of_engine.get(option.name, (o.engine,))
        if o.engine not in engines and getattr(o, option.name) != option.default:
            problems.append(f"{flag_name(option.name)} has no effect with --engine {o.engine}")
    for name in ("batch_size", "concurrency"):
        if getattr(o, name) < 1:
            problems.append(f"{flag_name(name)} {getattr(o, name)}: must be at least 1")
    if o.engine == "openai" and o.base_url is None:
        problems.append("--engine openai needs --base-url, such as http://localhost:8000/v1")
    return problems


def find_sampling_problems(o: SamplingOptions) -> list[str]:
    """Values out of range, and what has no effect on greedy answers."""
    problems = []
    for name in ("max_new_tokens", "num_samples"):
        if getattr(o, name) < 1:
            problems.append(f"{flag_name(name)} {getattr(o, name)}: must be at least 1")
    if not 0 <= o.temperature < math.inf:
        problems.append(f"--temperature {o.temperature}: must be 0, for the likeliest token, or above")
    if o.top_p is not None and not 0 < o.top_p <= 1:
        problems.append(f"--top-p {o.top_p}: must be above 0 and at most 1")
    if o.top_k is not None and o.top_k < 1:
        problems.append(f"--top-k {o.top_k}: must be at least 1")
    if o.temperature == 0 and (o.top_p is not None or o.top_k is not None or o.num_samples > 1 or o.seed != 0):
        problems.append(
            "--top-p, --top-k, --seed and --num-samples have no effect at --temperature 0, which is always the"
            " likeliest token"
        )
    return problems


def find_evaluate_problems(o: EvaluateOptions) -> list[str]:
    """Nothing to measure, nothing to measure it by, values out of range, options without effect."""
    problems = [*find_engine_problems(o.engines), *find_sampling_problems(o.sampling)]
    if not o.model and o.run is None:
        problems.append("no model is given: name models by --model, or a run by --run")
    if not (o.data or o.task or o.lm_eval):
        problems.append("nothing to measure: give --data, --task or --lm-eval")
    if len(set(o.model)) < len(o.model):
        problems.append("--model: one is named twice")
    if o.metrics and not o.task:
        problems.append("--metrics has no effect without --task")
    if o.format is not None and not o.task:
        problems.append("--format has no effect without --task")
    if o.sampling.num_samples != 1:
        problems.append("--num-samples: one answer to each prompt is measured; leave it out")
    if o.engines.engine != "hf" and (o.data or o.lm_eval):
        problems.append(f"--data and --lm-eval need --engine hf, given {o.engines.engine}")
    for name, least in {"max_tokens_per_gpu": 1, "num_resamples": 100}.items():
        if getattr(o, name) < least:
            problems.append(f"{flag_name(name)} {getattr(o, name)}: must be at least {least}")
    return problems


def find_mixing_problems(o: MergeModelsOptions) -> list[str]:
    """Too few models, weights that do not belong to them."""
    problems = []
    if len(o.model) < (2 if o.base is None else 1):
        problems.append("--model: name two models or more, or one or more and --base")
    if o.weights and len(o.weights) != len(o.model):
        problems.append(f"--weights: given {len(o.weights)} for {len(o.model)} models")
    if any(not math.isfinite(weight) for weight in o.weights):
        problems.append(f"--weights {' '.join(map(str, o.weights))}: must be numbers")
    elif o.weights and o.base is None and abs(sum(o.weights) - 1) > 1e-6:
        problems.append(f"--weights: sum to {sum(o.weights):g}, and without --base have to sum to 1")
    if o.base is not None and not o.weights:
        problems.append("--base needs --weights: how much of each model's difference from it is added")
    return problems
