"""All problems with options that can be found without reading files: those that follow from the facts of single
options, and packages that options need and that are not installed, the only problems that depend on the machine.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from mini_trainer.options import RowOptions, TrainOptions, flag_name, flatten_options, iterate_fields, list_facts
from mini_trainer.options.doors import TRACKER_PACKAGES, Doors
from mini_trainer.options.fields import Facts, list_groups
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.urls import PACKAGES, is_url, split_scheme


def find_single_problems(options: Any, *, name_option: Callable[[str], str] = flag_name) -> list[str]:
    """Values out of range, texts that cannot be read, and options without effect beside another one's value."""
    values, facts, problems, useless = flatten_options(options), list_facts(type(options)), [], set()
    groups = [getattr(options, name) for name in list_groups(type(options))]
    for group in (one for one in groups if getattr(one, "has_switch", False)):
        switch, names = dataclasses.fields(group)[0].name, list_changed(group)
        if names and switch not in names:
            problems.append(f"{', '.join(map(flag_name, names))}: no effect without {flag_name(switch)}")
            useless.update(names)
    for option, _ in iterate_fields(type(options)):
        if values[option.name] != option.default and option.name not in useless:
            problems += check_value(option, values, facts[option.name], name_option=name_option)
    return problems


def check_value(
    option: dataclasses.Field, values: dict[str, Any], facts: Facts, *, name_option: Callable[[str], str]
) -> Iterator[str]:
    """The problems of one option that is not at its default."""
    flag, value = name_option(option.name), values[option.name]
    if not facts.allows(value):
        turns_off = option.default is not None and type(None) in get_args(option.type)
        yield f"{flag} {value}: {facts.describe_range(is_float=isinstance(value, float), turns_off=turns_off)}"
    for given in () if facts.parse is None or value is None else value if isinstance(value, tuple | list) else (value,):
        try:
            facts.parse(given)
        except ValueError as error:
            yield f"{flag} {error}"
    if facts.needs is not None and not values[facts.needs]:
        yield f"{flag} has no effect without {name_option(facts.needs)}"
    if facts.only_with is not None:
        other, fitting = facts.only_with
        if values[other] not in fitting:
            yield f"{flag} has no effect with {name_option(other)} {values[other]}, only with {', '.join(fitting)}"


def list_given(group: Any) -> list[str]:
    """Flags of a group's options that differ from their defaults, except the group's switch."""
    switch = dataclasses.fields(group)[0].name
    return [flag_name(name) for name in list_changed(group) if name != switch]


def list_changed(group: Any) -> list[str]:
    """Names of a group's options that differ from their defaults."""
    return [option.name for option in dataclasses.fields(group) if getattr(group, option.name) != option.default]


def list_row_sources(o: RowOptions) -> list[str]:
    """Flags that specify rows."""
    return [flag_name(name) for name in ("input_file", "input_dataset", "mock_data") if getattr(o, name)]


def complete_rows(rows: RowOptions, objective: str) -> RowOptions:
    """The options with the row format that the objective needs, unless one is given; None: any format of texts."""
    wanted = OBJECTIVES[objective].row_format
    if rows.format is not None or wanted is None:
        return rows
    return dataclasses.replace(rows, format="preference" if rows.feedback_from_pairs else wanted)


# Functions that find problems across options, by the class of the options.
TOGETHER = Doors(
    {
        "TrainOptions": "mini_trainer.options.problems.training:find_train_problems",
        "ProcessDataOptions": "mini_trainer.options.problems.tools:find_data_problems",
        "PlotOptions": "mini_trainer.options.problems.tools:find_plot_problems",
        "BoardOptions": "mini_trainer.options.problems.tools:find_board_problems",
        "GenerateOptions": "mini_trainer.options.problems.tools:find_generate_problems",
        "EvaluateOptions": "mini_trainer.options.problems.tools:find_evaluate_problems",
        "ScoreDataOptions": "mini_trainer.options.problems.tools:find_score_problems",
        "ContinualOptions": "mini_trainer.options.problems.tools:find_continual_problems",
    }
)


def find_problems(options: Any) -> list[str]:
    """Lists all problems with the options that can be found without reading files, one line each.
    Packages that are not installed are named once nothing else is wrong."""
    if problems := find_wrong_options(options):
        return problems
    return [line for given, modules in list_needed(options) for line in describe_missing(given, modules)]


def find_wrong_options(options: Any) -> list[str]:
    """The problems that are the same on every machine."""
    name = type(options).__name__
    return [*find_single_problems(options), *(TOGETHER[name](options) if name in TOGETHER else [])]


NAMES = {"sklearn": "scikit-learn", "flash_attn": "flash-attn"}  # of packages whose module has another name


def describe_missing(given: str, modules: Sequence[str]) -> list[str]:
    """A line about what is given, which needs these modules, if the packages of some are not installed."""
    missing = [NAMES.get(module, module) for module in modules if not is_installed(module)]
    if not missing:
        return []
    noun, verb = ("package", "is") if len(missing) == 1 else ("packages", "are")
    names, words = " and ".join(missing), " ".join(missing)
    return [f"{given} needs the {noun} {names}, which {verb} not installed: pip install {words}"]


def require(module: str, *, flag: str) -> None:
    """Raises a ValueError that names the package to install if `module` cannot be imported."""
    for problem in describe_missing(flag, [module]):
        raise ValueError(problem)


def list_needed(options: Any) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields options as given, each with the modules that it needs beside those of every installation."""
    if not isinstance(options, TrainOptions):
        return
    for name in dict.fromkeys(options.tracking.track):
        yield f"--track {name}", TRACKER_PACKAGES.get(name, (name,))
    if (url := options.exports.upload_to) is not None:
        yield f"--upload-to {url}", [PACKAGES[split_scheme(url)[0]]] if is_url(url) else []
    if options.validation.validation_data_path or options.rows.validation_share:
        objective = options.classification.objective
        yield f"validation with --objective {objective}", OBJECTIVES[objective].validation_modules
    if options.lora.lora:
        yield "--lora", ("peft",)
    is_here = options.plan.plan_for is None
    if options.compute.attention == "flash_attn" and is_here:
        yield "--attention flash_attn", ("flash_attn",)
    if options.compute.float8 and is_here:
        yield "--float8", ("torchao",)
    if options.lora.base_quantization == "nf4":
        yield "--base-quantization nf4", ("bitsandbytes",)


def is_installed(module: str) -> bool:
    """Whether a package of this name is installed; a mere directory of that name, as wandb creates, does not count."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None
