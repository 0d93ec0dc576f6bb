"""Packages that options need and that are not installed: the only problems that depend on the machine."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from mini_trainer.options import TrainOptions
from mini_trainer.options.doors import TRACKER_PACKAGES
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.urls import PACKAGES, is_url, split_scheme

NAMES = {"sklearn": "scikit-learn"}  # of packages whose module has another name


def find_missing_packages(options: Any) -> list[str]:
    """One line for each option that needs packages which are not installed; the options have no other problem."""
    return [line for given, modules in list_needed(options) for line in describe_missing(given, modules)]


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
    if options.exports.upload_to is not None:
        yield f"--upload-to {options.exports.upload_to}", list_readers(options.exports.upload_to)
    if options.validation.validation_data_path or options.rows.validation_share:
        objective = options.classification.objective
        yield f"validation with --objective {objective}", OBJECTIVES[objective].validation_modules
    if options.lora.lora:
        yield "--lora", ("peft",)
    if options.lora.base_quantization == "nf4":
        yield "--base-quantization nf4", ("bitsandbytes",)


def list_readers(path: str) -> list[str]:
    """The module that reads and writes a URL; none for a local path."""
    return [PACKAGES[split_scheme(path)[0]]] if is_url(path) else []


def is_installed(module: str) -> bool:
    """Whether a package of this name is installed; a mere directory of that name, as wandb creates, does not count."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None
