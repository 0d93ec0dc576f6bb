"""Packages that options need and that are not installed: the only problems that depend on the machine."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from options import ProcessDataOptions, TrainOptions
from options.objectives import OBJECTIVES
from options.urls import PACKAGES, hide_credentials, split_scheme

TRACKERS = {
    "wandb": ("wandb",), "tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy"), "trackio": ("trackio",)
}  # fmt: skip
MODULES = {"scikit-learn": "sklearn"}  # of packages whose module has another name


def find_missing_packages(options: Any) -> list[str]:
    """One line for each option that needs packages which are not installed."""
    problems = []
    for given, packages in list_needed(options):
        missing = [package for package in packages if not is_installed(MODULES.get(package, package))]
        if missing:
            noun, verb = ("package", "is") if len(missing) == 1 else ("packages", "are")
            problems.append(
                f"{given} needs the {noun} {' and '.join(missing)}, which {verb} not installed:"
                f" pip install {' '.join(missing)}"
            )
    return problems


def list_needed(options: Any) -> Iterator[tuple[str, Sequence[str]]]:
    """What is given and the packages that it needs, beside those of every installation."""
    if isinstance(options, ProcessDataOptions):
        yield f"--output-file {hide_credentials(options.output_file)}", list_readers(options.output_file)
    if not isinstance(options, TrainOptions):
        return
    for name in dict.fromkeys(options.tracking.track):
        yield f"--track {name}", TRACKERS[name]
    if options.exports.upload_to is not None:
        yield f"--upload-to {hide_credentials(options.exports.upload_to)}", list_readers(options.exports.upload_to)
    if options.validation.is_asked or options.rows.validation_share:
        objective = options.classification.objective
        yield f"validation with --objective {objective}", OBJECTIVES[objective].validation_packages
    if options.lora.lora:
        yield "--lora", ("peft",)
    if options.lora.base_quantization == "nf4":
        yield "--base-quantization nf4", ("bitsandbytes",)


def list_readers(path: str) -> list[str]:
    """The package that reads and writes a URL; none for a local path or an unknown scheme."""
    scheme = split_scheme(path)[0]
    return [PACKAGES[scheme]] if scheme in PACKAGES else []


def is_installed(module: str) -> bool:
    """Whether a package of this name is installed; a mere directory of that name, as wandb creates, does not count."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None
