"""Queries about a group of options and installed packages, for finding problems."""

import dataclasses
import importlib.util
from typing import Any

from options import RowOptions, flag_name, flatten_options, iterate_fields
from options.urls import PACKAGES, find_target_faults, split_scheme


def is_installed(module: str) -> bool:
    """Whether a package of this name is installed; a mere directory of that name, as wandb creates, does not count."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def find_target_problems(url: str, *, flag: str) -> list[str]:
    """Problems with a URL to write to: what it is, and the package that it needs."""
    if faults := find_target_faults(url, flag=flag):
        return faults
    package = PACKAGES[split_scheme(url)[0]]
    return [] if is_installed(package) else [f"{flag} {url}: needs the package {package}: pip install {package}"]


def list_given(group: Any) -> list[str]:
    """Flags of a group's options that differ from their defaults, except the group's switch."""
    switch = dataclasses.fields(group)[0].name
    return [flag_name(name) for name in list_changed(group) if name != switch]


def list_changed(group: Any) -> list[str]:
    """Names of a group's options that differ from their defaults."""
    return [option.name for option in dataclasses.fields(group) if getattr(group, option.name) != option.default]


def list_all_changed(options: Any) -> list[str]:
    """Names of the options, of all groups, that differ from their defaults."""
    values = flatten_options(options)
    return [option.name for option, _ in iterate_fields(type(options)) if values[option.name] != option.default]


def list_row_sources(o: RowOptions) -> list[str]:
    """Flags that specify rows."""
    return [flag_name(name) for name in ("input_file", "input_dataset", "mock_data") if getattr(o, name)]
