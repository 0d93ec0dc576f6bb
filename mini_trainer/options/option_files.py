"""Options from YAML files: read within limits, with the line in errors; turned into flags, and back."""

import contextlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from mini_trainer.options import environment, iterate_fields, list_types
from mini_trainer.options.fields import flag_for
from mini_trainer.options.misread import refuse_joined_values
from mini_trainer.options.reading import read_small

MOST_BYTES = 1 << 20  # of a YAML file
MOST_KEYS = 10_000
MOST_VALUES = 100_000  # of a YAML file, with its aliases expanded
MOST_LISTED = 40  # options that a message lists; --help all has those of train.py
MOST_PROBLEMS = 20  # of one file that a message lists
DATE, TEXT = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:str"


class Loader(yaml.SafeLoader):
    """Reads YAML within limits; refuses repeated keys, keys that are neither texts nor numbers, and recursive anchors.

    Dates and times stay texts: YAML 1.1 reads 1:30:00 as the number 5400.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own
        first: [
            *([(TEXT, re.compile(r"\d+(:\d+)+"))] if first in "0123456789" else []),
            *(rule for rule in rules if rule[0] != DATE),
        ]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.num_keys, self.num_values = 0, 0
        self.sizes: dict[str, int] = {}  # values that a complete anchor stands for

    def get_single_node(self) -> yaml.Node | None:
        try:
            return super().get_single_node()
        except RecursionError:
            reason = "brackets or lists are nested too deeply"
            raise yaml.MarkedYAMLError(None, None, reason, self.get_mark()) from None

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event, before = self.peek_event(), self.num_values
        self.num_values += 1
        self.num_keys += parent is not None and index is None
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.sizes:
                refuse_node("an anchor holds an alias of itself", event)
            self.num_values = before + self.sizes[event.anchor]
        elif event.anchor is not None:
            self.sizes[event.anchor] = self.num_values - before
        if self.num_keys > MOST_KEYS:
            refuse_node(f"it has more than {MOST_KEYS:,} keys", event)
        if self.num_values > MOST_VALUES:
            refuse_node(f"with its aliases expanded, it has more than {MOST_VALUES:,} values", event)
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        mapping, found = super().compose_mapping_node(anchor), set()
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                refuse_node(f"a key is a {'list' if isinstance(key, yaml.SequenceNode) else 'mapping'}", key)
            if key.value in found:
                refuse_node(f"a key is repeated: {key.value}", key)
            found.add(key.value)
        return mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # such as a number of more digits than Python converts
            refuse_node(f"{node.value!r:.80}: {error}", node)


class OptionLoader(Loader):
    """Keeps numbers that Python would write differently as texts: YAML 1.1 reads 010 as 8, and the name 1.10 as 1.1."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        value = super().construct_object(node, deep)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return node.value if is_number and str(value) != node.value else value


def refuse_node(reason: str, node: yaml.Node | yaml.Event) -> NoReturn:
    raise yaml.MarkedYAMLError(None, None, reason, node.start_mark)


def read_yaml(path: Path, *, named: str, loader: type[Loader] = Loader) -> dict[Any, Any]:
    """The keys and values of a YAML file; ValueError, in which the file is called `named`, for anything else."""
    try:
        content = yaml.load(read_small(path, MOST_BYTES), Loader=loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{named}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ": ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{named}: {f'line {mark.line + 1}: ' if mark else ''}not valid YAML: {what}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{named}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise ValueError(f"{named}: expected 'key: value' lines, got {found}")
    return content


def read_option_file(path: Path, *, named: str, allowed: Collection[str] = ()) -> dict[Any, Any]:
    """The keys and values of a YAML file of options, with the environment in place of `${NAME}`.

    `allowed`: variables to fill in, as well as those that always are. ValueError, in which the file is called `named`.
    """
    given = read_yaml(path, named=named, loader=OptionLoader)
    with naming_place(named):
        return convert_each(given, lambda key, value: environment.fill_in(str(key), value, allowed))


def read_configs_as_flags(paths: list[Path], options_class: type, *, allowed: Collection[str] = ()) -> list[str]:
    """YAML files as command-line flags, so that all are converted and checked by the same code; the later ones win.

    `allowed`: see `read_option_file`.
    """
    types, flags = list_types(options_class), {}
    del types["config"]
    for path in paths:
        given = read_option_file(path, named=f"--config {path}", allowed=allowed)
        groups = [str(key) for key, value in given.items() if isinstance(value, dict)]
        with naming_place(f"--config {path}"):
            if groups:
                raise ValueError(f"{', '.join(groups)}: the file has no groups: write the options below it without it")
            read = convert_known(given, types, lambda name, value: flag_for(name, value, field_type=types[name]))
            refuse_joined_values(((name, words[1:]) for name, words in read.items()), options_class)
            flags |= read
    return [word for words in flags.values() for word in words]


def convert_known(given: Any, known: Collection[str], convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Results of `convert` for the options of a YAML file's mapping, by name; one ValueError for all problems."""

    def convert_one(name: str, value: Any) -> Any:
        if name in known:
            return convert(name, value)
        from mini_trainer.options.answers import describe_unknown

        answer = describe_unknown(name, known, spell=repr)
        if not answer and len(known) <= MOST_LISTED:
            answer = f"; allowed: {', '.join(known)}"
        raise ValueError(f"unknown option {name!r}{answer}")

    return convert_each(name_values(given), convert_one)


def convert_each(given: Mapping[Any, Any], convert: Callable[[Any, Any], Any]) -> dict[Any, Any]:
    """Results of `convert` by key; one ValueError, with a line for each key that it refuses."""
    found, problems = {}, []
    for key, value in given.items():
        try:
            found[key] = convert(key, value)
        except ValueError as error:
            problems.append(str(error))
        if len(problems) == MOST_PROBLEMS:
            problems.append("the rest of the file was not checked")
            break
    refuse(problems)
    return found


def refuse(problems: Iterable[str]) -> None:
    """ValueError, with a line for each of the problems, unless there are none."""
    if text := "\n  ".join(problems):
        raise ValueError(text)


def name_values(given: Any) -> dict[str, Any]:
    """Values of a YAML file's mapping by the options' names, whose words may be joined by - as well."""
    if not isinstance(given, dict):
        raise ValueError(f"given {given!r}, allowed: 'key: value' lines")
    named: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in named:
            raise ValueError(f"{name}: is given twice, with - and with _")
        named[name] = value
    return named


@contextlib.contextmanager
def naming_place(place: str) -> Iterator[None]:
    """Puts a place in front of every line of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}".replace("\n  ", f"\n  {place}: ")) from None


def describe_options(options_class: type, values: dict[str, Any]) -> str:
    """Options by name as YAML that `--config` takes, in the order and the groups of --help."""
    lines, last = [], None
    for option, group in iterate_fields(options_class):
        if option.name not in values:
            continue
        if group != last:
            lines.append(f"\n# {group}\n")
        value, last = values[option.name], group
        lines.append(yaml.safe_dump({option.name: environment.escape(value)}, width=math.inf))
    return "".join(lines).lstrip("\n")
