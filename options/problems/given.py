"""What the finders of problems ask of a group of options, and of this Python."""

import dataclasses
import importlib.util
from typing import Any

from options import RowOptions, flag_name


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


def list_row_sources(o: RowOptions) -> list[str]:
    """The flags by which rows are given."""
    return [flag_name(name) for name in ("input_file", "input_dataset", "mock_data") if getattr(o, name)]
