"""Access to options by name, in any group; their choices; and parsing of values given as text."""

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

Options = TypeVar("Options")

# Values of rows whose columns can have other names.
COLUMN_NAMES = ("messages", "prompt", "completion", "text", "system", "chosen", "rejected", "text_pair", "label")


@dataclass(frozen=True)
class Facts:
    """What the program knows of an option beside its type and its help, for code that serves all of them."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    parse: Callable[[Any], Any] | None = None  # ValueError for a text or number that the option does not take
    only_with: tuple[str, tuple[str, ...]] | None = None  # another option, and the values of it that this one is for
    needs: str | None = None  # another option, without which this one has no effect
    # What it decides. numbers: those of a run, which stay the same when it is resumed; state: also the content of
    # checkpoints, which a run that continues another one takes over; method: so much of it that nothing can change it.
    decides: Literal["nothing", "numbers", "state", "method"] | None = None  # None: what its group decides
    is_path: bool = False  # the content there decides, and where it lies can differ between ranks
    may_differ: bool = False  # between ranks, as only rank 0 reads it, or it decides nothing
    names_data: bool = False  # tokenized data sets

    def describe_range(self, *, is_float: bool, turns_off: bool) -> str:
        """The numbers that it takes, in words. `turns_off`: None does."""
        low = f"at least {self.at_least:g}" if self.at_least is not None else f"above {self.above:g}"
        high = f"at most {self.at_most:g}" if self.at_most is not None else ""
        high = f"below {self.below:g}" if self.below is not None else high
        words = f"{low} and {high}" if high else low + (", and finite" if is_float else "")
        if None not in (self.at_least, self.at_most):
            words = f"from {self.at_least:g} to {self.at_most:g}"
        return f"must be {words}" + ("; None turns it off" if turns_off else "")

    def allows(self, value: Any) -> bool:
        """Whether a value is in the range, or no number, or there is no range."""
        if self.at_least is self.above is None or not isinstance(value, int | float):
            return True
        return (
            -math.inf < value < math.inf
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


def option(default: Any = dataclasses.MISSING, **facts: Any) -> Any:
    """The field of an option with `Facts`."""
    return field(default=default, metadata={"facts": Facts(**facts)})


def list_facts(options_class: type) -> dict[str, Facts]:
    """The facts of all options by name; `decides` is never None."""
    found, groups = {}, list_groups(options_class)
    for each, group in iterate_fields(options_class):
        facts = each.metadata.get("facts", Facts())
        decides = facts.decides or getattr(groups.get(group, options_class), "decides", "nothing")
        found[each.name] = dataclasses.replace(facts, decides=decides)
    return found


def list_groups(options_class: type) -> dict[str, type]:
    """The classes of the groups of options by name."""
    return {each.name: each.type for each in dataclasses.fields(options_class) if dataclasses.is_dataclass(each.type)}


def list_fields(options_class: type) -> list[dataclasses.Field]:
    """The fields of a class: its own options, those that it inherits, as other programs have them too, and groups."""
    own = inspect.get_annotations(options_class)
    return sorted(
        dataclasses.fields(options_class), key=lambda each: (dataclasses.is_dataclass(each.type), each.name not in own)
    )


def iterate_fields(options_class: type) -> Iterator[tuple[dataclasses.Field, str | None]]:
    """Yields every option's field, in the order of --help, with the name of its group, if any."""
    for entry in list_fields(options_class):
        if dataclasses.is_dataclass(entry.type):
            yield from ((option, entry.name) for option in list_fields(entry.type))
        else:
            yield entry, None


def is_required(option: dataclasses.Field) -> bool:
    return option.default is option.default_factory is dataclasses.MISSING


def list_types(options_class: type) -> dict[str, Any]:
    """Types of all options by name."""
    return {option.name: option.type for option, _ in iterate_fields(options_class)}


def flatten_options(options: Any) -> dict[str, Any]:
    """Values of all options by name."""
    return {
        option.name: getattr(options if group is None else getattr(options, group), option.name)
        for option, group in iterate_fields(type(options))
    }


def group_options(options_class: type[Options], **values: Any) -> Options:
    """Makes options from values by name, with defaults for the others. TypeError for an unknown name.
    For an option that takes several values, a single value is wrapped in a tuple."""
    groups: dict[str, dict[str, Any]] = {}
    for option, group in iterate_fields(options_class):
        if option.name in values:
            value = values.pop(option.name)
            is_alone = get_origin(option.type) is tuple and not isinstance(value, (tuple, list))
            groups.setdefault(group, {})[option.name] = (value,) if is_alone else value
    if values:
        raise TypeError(f"unknown options: {', '.join(values)}")
    types = list_groups(options_class)
    grouped = {group: types[group](**chosen) for group, chosen in groups.items() if group is not None}
    return options_class(**groups.get(None, {}), **grouped)


def replace_options(options: Options, **changes: Any) -> Options:
    """Returns the options with some values changed, by name."""
    return group_options(type(options), **(flatten_options(options) | changes))


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def parse_duration(text: str | None) -> float | None:
    """Seconds in '90' or '0.5' (minutes) or '1:30:00' (hours, minutes, seconds); None if `text` is None."""
    if text is None:
        return None
    try:
        if clock := re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text):
            hours, minutes, rest = map(int, clock.groups())
            seconds = 3600.0 * hours + 60 * minutes + rest
        else:
            seconds = 60 * float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text}: must be a positive number of minutes (90), or hours, minutes and seconds (1:30:00)")
    return seconds


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step, counted from 1, in '10:13' or '10'; ValueError if it is neither."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"{text}: must be a step (10), or a first and last step (10:13), counted from 1")
    return first, last


def parse_steps_or_share(value: float) -> None:
    """ValueError for a number of steps that is neither whole nor a share below 1."""
    if value >= 1 and value % 1 != 0:
        raise ValueError(f"{value}: must be a whole number of steps (100), or a share of the run's below 1 (0.03)")


def parse_column(text: str) -> tuple[str, str]:
    """Name and column in 'messages=chat.turns'; ValueError if it is something else."""
    name, _, column = text.partition("=")
    if name not in COLUMN_NAMES or not column:
        raise ValueError(f"{text}: must be NAME=COLUMN, with one of the names {', '.join(COLUMN_NAMES)}")
    return name, column


def parse_machine(text: str) -> tuple[int, str | None]:
    """Number of processes, and the name of their GPUs, if any, in '8xH100' or '8'; ValueError if it is neither."""
    match = re.fullmatch(r"([1-9]\d*)(?:x(\S.*))?", text)
    if match is None:
        raise ValueError(f"{text}: must be a number of processes (8), or of GPUs with their name (8xH100)")
    return int(match[1]), match[2]


def parse_shard(text: str) -> tuple[int, int]:
    """The number of a part, from 1, and the number of parts, in '3/8'; ValueError if it is something else."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= index <= count:
        raise ValueError(f"{text}: must be the number of a part, from 1, and the number of parts: 3/8")
    return index, count


def parse_rate(text: str) -> tuple[str, float | None, float | None]:
    """Pattern, learning rate and weight decay in 'lm_head*=1e-6:0.1', of whose two numbers one may be left out.
    ValueError if it is something else."""
    pattern, _, values = text.rpartition("=")
    rate, colon, decay = values.partition(":")
    try:
        found = [float(value) if value else None for value in (rate, decay)]
    except ValueError:
        found = []
    is_sound = all(value is None or 0 <= value < math.inf for value in found) and any(v is not None for v in found)
    is_sound = is_sound and (found[0] or 0) <= 1
    if not pattern or not is_sound or (colon and not decay):
        raise ValueError(
            f"{text}: must be a pattern of names with a learning rate (lm_head*=1e-6), a weight decay"
            " (lm_head*=:0.1), or both (lm_head*=1e-6:0.1)"
        )
    return pattern, *found


def parse_subset(text: str) -> int | float:
    """The number of samples in '10', or the share of samples in '1%'; ValueError if it is neither."""
    try:
        if not text.endswith("%"):
            if (count := int(text)) >= 1:
                return count
        elif 0 < (share := float(text[:-1]) / 100) <= 1:
            return share
    except ValueError:
        pass
    raise ValueError(f"{text}: must be a number of samples (10), or a share of samples above 0 and up to 100% (1%)")


def parse_named_values(given: Iterable[str]) -> dict[str, Any]:
    """Values by name from NAME=VALUE; a value is JSON or, if it is not, a text. ValueError otherwise."""
    parsed: dict[str, Any] = {}
    for argument in given:
        name, equals, value = argument.partition("=")
        if not equals or not name.isidentifier() or name in parsed:
            raise ValueError(f"given {argument!r}, allowed: NAME=VALUE, each name once")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed


def name_type(kind: Any) -> str:
    """The values that an option of this type takes, as messages say it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(map(str, args))
    if origin in (Union, UnionType):
        return " or ".join(map(name_type, args))
    if origin is tuple:
        return f"a list of {name_type(args[0])}"
    return "null" if kind is type(None) else kind.__name__


def flag_for(name: str, value: Any, *, field_type: Any) -> list[str]:
    """`name: value` of the YAML file as command-line words, of which only the first is a flag."""
    flag, is_bool = flag_name(name), field_type is bool
    if is_bool != isinstance(value, bool):
        allowed = "true or false" if is_bool else "a value that is not true or false; put a text in quotes"
        raise ValueError(f"{name}: given {value!r}, allowed: {allowed}")
    if is_bool:
        return [flag if value else flag.replace("--", "--no-", 1)]
    if get_origin(field_type) is tuple:
        return [flag, *list_words(name, value)]
    if isinstance(value, (dict, list)):
        raise ValueError(f"{name}: given {value!r}, allowed: one value")
    if value is None and type(None) not in get_args(field_type):
        raise ValueError(f"{name}: given null, allowed: a value; leave the line out for the default, if it has one")
    return [f"{flag}={value}"]


def list_words(name: str, value: Any) -> list[str]:
    """The words of an option that takes several values, none of which can be taken for a flag."""
    values = value if isinstance(value, list) else [value]
    for item in values:
        if item is None or isinstance(item, (dict, list, bool)) or str(item).startswith("--") or item == "-h":
            raise ValueError(
                f"{name}: given {item!r}, allowed: texts and numbers that are no flags, one or a list of them; [] for"
                " none; 'null', 'yes' or 'no' in quotes"
            )
    return list(map(str, values))


def list_choices(options_class: type) -> dict[str, tuple[str, ...]]:
    """Allowed values of each option that has a fixed set of them."""
    found: dict[str, tuple[str, ...]] = {}
    for name, kind in list_types(options_class).items():
        for part in list_parts(kind):
            if get_origin(part) is Literal:
                found[name] = (*found.get(name, ()), *get_args(part))
    return found


def list_parts(kind: Any) -> list[Any]:
    """The types, without None, of an option's one value, or of each of several."""
    if get_origin(kind) in (Union, UnionType, tuple):
        return [part for each in get_args(kind) for part in list_parts(each)]
    return [] if kind in (type(None), ...) else [kind]


def check_choices(options: Any) -> None:
    """ValueError for a value that is not allowed: the command line refuses it, and Python can pass it."""
    values = flatten_options(options)
    for name, allowed in list_choices(type(options)).items():
        given = values[name] if isinstance(values[name], tuple) else (values[name],)
        unknown = [value for value in given if isinstance(value, str) and value not in allowed]
        if unknown:
            raise ValueError(f"{flag_name(name)} {unknown[0]}: allowed: {', '.join(allowed)}")
