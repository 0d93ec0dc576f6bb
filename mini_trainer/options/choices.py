"""Options with a fixed set of values."""

from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from mini_trainer.options.fields import flag_name, flatten_options, list_types

# What to use instead of values that are gone, by the option and the value.
REMOVED = {
    ("preference_loss", "robust"): "dpo with --label-smoothing, which also allows for swapped pairs",
    ("preference_loss", "hinge"): "dpo, or ipo, which also stops at a margin",
    ("preference_loss", "apo-down"): "apo-zero or dpo",
}


def list_choices(options_class: type) -> dict[str, tuple[str, ...]]:
    """Allowed values of each option that has a fixed set of them."""
    found = {name: tuple(iterate_literals(kind)) for name, kind in list_types(options_class).items()}
    return {name: values for name, values in found.items() if values}


def iterate_literals(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif get_origin(kind) in (Union, UnionType, tuple):
        for part in get_args(kind):
            yield from iterate_literals(part)


def check_choices(options: Any) -> None:
    """ValueError for a value that is not allowed: the command line refuses it, and Python can pass it."""
    values = flatten_options(options)
    for name, allowed in list_choices(type(options)).items():
        given = values[name] if isinstance(values[name], tuple) else (values[name],)
        unknown = [value for value in given if isinstance(value, str) and value not in allowed]
        if unknown:
            hint = explain_removed(name, unknown[0])
            raise ValueError(f"{flag_name(name)} {unknown[0]}: allowed: {', '.join(allowed)}{hint}")


def explain_removed(name: str, value: str) -> str:
    """What to use instead of a value that is gone; empty for others."""
    instead = REMOVED.get((name, value))
    return "" if instead is None else f"; {value} was removed: use {instead}"
