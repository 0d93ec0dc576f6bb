"""Problems that follow from the facts of single options, and queries about a group of options."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, get_args

from mini_trainer.options import RowOptions, flag_name, flatten_options, iterate_fields, list_facts
from mini_trainer.options.fields import Facts, list_groups


def find_single_problems(options: Any, *, name_option: Callable[[str], str] = flag_name) -> list[str]:
    """Values out of range, texts that cannot be read, and options without effect beside another one's value."""
    values, idle, facts, problems = flatten_options(options), find_idle(options), list_facts(type(options)), []
    for switch, names in idle.items():
        problems.append(f"{', '.join(map(flag_name, names))}: no effect without {flag_name(switch)}")
    useless = {name for names in idle.values() for name in names}
    for option, _ in iterate_fields(type(options)):
        if values[option.name] != option.default and option.name not in useless:
            problems += check_value(option, values, facts[option.name], name_option=name_option)
    return problems


def find_idle(options: Any) -> dict[str, list[str]]:
    """Given options of groups whose first option, the switch, is not given; by the switch."""
    groups = [getattr(options, name) for name in list_groups(type(options))]
    switched = [group for group in groups if getattr(group, "has_switch", False)]
    found = {dataclasses.fields(group)[0].name: list_changed(group) for group in switched}
    return {switch: names for switch, names in found.items() if names and switch not in names}


def check_value(
    option: dataclasses.Field, values: dict[str, Any], facts: Facts, *, name_option: Callable[[str], str]
) -> Iterator[str]:
    """The problems of one option that is not at its default."""
    flag, value = name_option(option.name), values[option.name]
    has_range = (facts.at_least, facts.above) != (None, None)
    if has_range and isinstance(value, int | float) and not facts.allows(value):
        turns_off = option.default is not None and type(None) in get_args(option.type)
        yield f"{flag} {value}: {facts.describe_range(is_float=isinstance(value, float), turns_off=turns_off)}"
    for given in () if facts.parse is None or value is None else value if isinstance(value, tuple) else (value,):
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


def list_all_changed(options: Any) -> list[str]:
    """Names of the options, of all groups, that differ from their defaults."""
    values = flatten_options(options)
    return [option.name for option, _ in iterate_fields(type(options)) if values[option.name] != option.default]


def list_row_sources(o: RowOptions) -> list[str]:
    """Flags that specify rows."""
    return [flag_name(name) for name in ("input_file", "input_dataset", "mock_data") if getattr(o, name)]
