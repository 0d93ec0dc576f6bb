"""Settings from YAML files: dataclasses with groups of settings, and sections of options of the programs."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_args, get_origin

from mini_trainer.options import iterate_fields, list_types
from mini_trainer.options.fields import flag_for, name_type
from mini_trainer.options.option_files import convert_each, convert_known, naming_place, refuse
from mini_trainer.options.problems.finding import find_single_problems

Settings = TypeVar("Settings")
Readers = Mapping[str, Callable[[Any], Any]]


def make_settings(given: Any, settings_class: type[Settings], readers: Readers) -> Settings:
    """Makes settings from a YAML file's mapping. ValueError, a line each, for unknown ones, wrong values, missing ones.

    `readers`: functions that convert settings with a format of their own, such as sections of options, by name.
    """
    values = read_values(given, settings_class, readers)
    missing = list_missing(settings_class, values)
    if missing:
        raise ValueError(f"{', '.join(missing)}: required")
    settings = settings_class(**values)
    refuse(find_single_problems(settings, name_option=str))
    return settings


def read_values(given: Any, settings_class: type, readers: Readers) -> dict[str, Any]:
    """Values of settings by name, as `make_settings` converts them; only those that are given."""
    types = list_types(settings_class)

    def read_value(name: str, value: Any) -> Any:
        group = next(filter(dataclasses.is_dataclass, get_args(types[name])), None)
        if name in readers:
            return read_at(name, value, readers[name])
        if group is None:
            return parse_value(name, value, settings_class)
        read_group = functools.partial(make_settings, settings_class=group, readers=readers)
        if get_origin(types[name]) is not tuple:
            return read_at(name, value, read_group)
        if not isinstance(value, list):
            raise ValueError(f"{name}: given {value!r}, allowed: a list")
        items = {f"{name}[{i}]": item for i, item in enumerate(value)}
        return tuple(convert_each(items, functools.partial(read_at, read=read_group)).values())

    return convert_known(given, types, read_value)


def read_at(place: str, value: Any, read: Callable[[Any], Any]) -> Any:
    with naming_place(place):
        return read(value)


def list_missing(options_class: type, given: Collection[str]) -> list[str]:
    """Names of the options that have no default and are not given."""
    return [
        option.name
        for option, _ in iterate_fields(options_class)
        if option.default is option.default_factory is dataclasses.MISSING and option.name not in given
    ]


def parse_value(name: str, value: Any, options_class: type) -> Any:
    """Converts a YAML file's `value` to the option `name`; ValueError if it cannot be one."""
    import tyro

    field_type = list_types(options_class)[name]
    words = flag_for(name, value, field_type=field_type)
    if field_type is bool:
        return value
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            parsed = tyro.cli(dataclasses.make_dataclass("Alone", [(name, field_type)]), args=words)
    except SystemExit:
        raise ValueError(f"{name} cannot be {value!r}, allowed: {name_type(field_type)}") from None
    return getattr(parsed, name)


def read_options(
    given: Any,
    options_class: type,
    reserved: Mapping[str, str],
    *,
    parse: Callable[[str, Any, type], Any] = parse_value,
) -> dict[str, Any]:
    """Options of a program from a section of a YAML file, each converted by `parse`, by name.

    One ValueError for all problems; also for `reserved` options, with the reason.
    """

    def read_option(name: str, value: Any) -> Any:
        if name in reserved:
            raise ValueError(f"{name}: {reserved[name]}")
        return parse(name, value, options_class)

    return convert_known(given, list_types(options_class), read_option)
