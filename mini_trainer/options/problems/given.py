"""Queries about a group of options, for finding problems."""

import dataclasses
from typing import Any

from mini_trainer.options import RowOptions, flag_name, flatten_options, iterate_fields


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
