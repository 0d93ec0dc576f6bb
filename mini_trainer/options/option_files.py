"""YAML files of options and settings: read within limits, with the line in errors, and written.

Options become flags, so that the command line checks them. Settings are dataclasses with groups of settings and
sections of options. `${NAME}` stands for one of the few environment variables whose values may be written into files
that others read, `$${` for the text `${`. Recipes are option files for known models and machines, in known_models/,
which --config takes by name; a recipe's first line is what it needs, as planned by benchmarks/plan_recipes.py.
"""

import contextlib
import dataclasses
import functools
import io
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import yaml

from mini_trainer.options import flag_name, iterate_fields, list_types
from mini_trainer.options.fields import flag_for, is_required, name_type
from mini_trainer.options.problems.finding import find_single_problems
from mini_trainer.options.reading import read_text
from mini_trainer.options.urls import is_secret

MOST_BYTES = 1 << 20  # of a YAML file
MOST_KEYS = 10_000
MOST_VALUES = 100_000  # of a YAML file, with its aliases expanded
MOST_LISTED = 40  # options that a message lists; --help all has those of train.py
MOST_PROBLEMS = 20  # of one file that a message lists
DATE, TEXT = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:str"
ALLOWED, PREFIX = ("HOME", "USER", "SCRATCH", "TMPDIR"), "SLURM_"
REFERENCE = re.compile(r"\$\$\{|\$\{(\w*)(\}?)")
UNJOINED = re.compile(r"[^\s,]+")
BRACKETS = ("()", "[]", "{}", "<>")  # where all are closed, a comma can follow
RECIPES = Path(__file__).resolve().parent / "known_models"
Settings = TypeVar("Settings")
Readers = Mapping[str, Callable[[Any], Any]]


class Loader(yaml.SafeLoader):
    """Reads YAML within limits; refuses repeated keys, keys that are neither texts nor numbers, and recursive anchors.
    Dates and times stay texts: YAML 1.1 reads 1:30:00 as the number 5400."""

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
        content = yaml.load(read_text(path, most=MOST_BYTES), Loader=loader)
    except (OSError, ValueError) as error:
        raise ValueError(f"{named}: cannot be read: {str(error).removeprefix(f'{path}: ')}") from None
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


def read_option_file(path: Path, *, named: str) -> dict[Any, Any]:
    """The keys and values of a YAML file of options, with the environment in place of `${NAME}`.
    ValueError, in which the file is called `named`."""
    given = read_yaml(path, named=named, loader=OptionLoader)
    with naming_place(named):
        return convert_each(given, lambda key, value: fill_in(str(key), value))


def read_configs_as_flags(paths: list[Path], options_class: type) -> list[str]:
    """YAML files as command-line flags, so that all are converted and checked by the same code; the later ones win."""
    types, flags = list_types(options_class), {}
    del types["config"]
    for path in paths:
        given = read_option_file(path, named=f"--config {path}")
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
        lines.append(yaml.safe_dump({option.name: escape(value)}, width=math.inf))
    return "".join(lines).lstrip("\n")


def fill_in(where: str, value: Any) -> Any:
    """Fills in `${NAME}` in the `value` of the key `where`, nested values included, from the environment.
    ValueError for variables other than those of `ALLOWED` and SLURM."""
    if isinstance(value, list):
        return [fill_in(where, item) for item in value]
    if isinstance(value, dict):
        return {key: fill_in(f"{where}: {key}", item) for key, item in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value

    def look_up(match: re.Match) -> str:
        name = match[1]
        if match[0] == "$${":
            return "${"
        if not name or not match[2]:
            raise ValueError(f"{where}: {value!r}: not the name of a variable; write $${{ for the text ${{")
        if is_secret(name) or not (name in ALLOWED or name.startswith(PREFIX)):
            advice = "a secret is never filled in" if is_secret(name) else "the shell fills in others, in flags"
            raise ValueError(
                f"{where}: {value!r}: the variable {name} is not filled in; allowed: {', '.join(ALLOWED)}, {PREFIX}*;"
                f" {advice} ($${{ stands for the text ${{)"
            )
        if name not in os.environ:
            raise ValueError(f"{where}: {value!r}: the environment has no variable {name}")
        return os.environ[name]

    filled = REFERENCE.sub(look_up, value)
    return {"true": True, "false": False}.get(filled, filled)


def escape(value: Any) -> Any:
    """Inverse of `fill_in` for a text or a list of texts."""
    if isinstance(value, (list, tuple)):
        return list(map(escape, value))
    return value.replace("${", "$${") if isinstance(value, str) else value


def describe_misread(message: str, options_class: type) -> str:
    """tyro's message: in one line, if it is about a value of the wrong type; missing options as --help names them."""
    if message.startswith("Missing from"):
        from mini_trainer.options.help import describe_head

        for option, _ in iterate_fields(options_class):
            head = f"    {describe_head(options_class, option)}"
            message = re.sub(rf"^ {{4}}{flag_name(option.name)}( .*)?$", head, message, flags=re.MULTILINE)
    misread = re.match(r"Error parsing (--[\w-]+): .*?(\[.*?\]|'.*?')", message, re.DOTALL)
    if misread is None:
        return message
    flag, given = misread.groups()
    kind = list_types(options_class)[flag.removeprefix("--").replace("-", "_")]
    return f"{flag}: given {given.strip('[]')}, allowed: {name_type(kind).removesuffix(' or null')}"


def refuse_joined_values(flags: Iterable[tuple[str, list[str]]], options_class: type) -> None:
    """ValueError for a list whose values are joined by commas, which would be read as a single value.
    `flags`: the options' names with their values. Commas of texts, patterns, URLs and files that exist stay."""
    types = list_types(options_class)
    for name, values in flags:
        parts = [part for value in values for part in split_joined(value)]
        is_text = name == "label_names" and len(values) > 1  # a comma in one of several belongs to it
        if get_origin(types.get(name)) is tuple and parts != values and not is_text:
            raise ValueError(
                f"{flag_name(name)} {' '.join(values)}: values of a list are separated by spaces:"
                f" {flag_name(name)} {' '.join(parts)} (in a file: [{', '.join(parts)}])"
            )


def split_joined(value: str) -> list[str]:
    """The values that commas join in one word; the word itself if they are part of it."""
    parts = [part.strip() for part in value.removesuffix(",").split(",")]
    are_alike = len({"://" in part for part in parts}) == 1  # a comma in a URL is followed by the rest of it
    are_balanced = all(part.count(start) == part.count(end) for part in parts for start, end in BRACKETS)
    are_whole = are_balanced and all(UNJOINED.fullmatch(part) and part.count('"') % 2 == 0 for part in parts)
    return parts if are_alike and are_whole and not os.path.exists(value) else [value]


def make_settings(given: Any, settings_class: type[Settings], readers: Readers) -> Settings:
    """Makes settings from a YAML file's mapping. ValueError, a line each, for unknown ones, wrong values, missing ones.
    `readers`: functions that convert settings with a format of their own, such as sections of options, by name."""
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
    required = [option.name for option, _ in iterate_fields(options_class) if is_required(option)]
    return [name for name in required if name not in given]


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
    One ValueError for all problems; also for `reserved` options, with the reason."""

    def read_option(name: str, value: Any) -> Any:
        if name in reserved:
            raise ValueError(f"{name}: {reserved[name]}")
        return parse(name, value, options_class)

    return convert_known(given, list_types(options_class), read_option)


def list_recipes() -> dict[str, Path]:
    """The files of all recipes by name, such as qwen3-8b/lora-1x80gb."""
    return {path.relative_to(RECIPES).with_suffix("").as_posix(): path for path in sorted(RECIPES.glob("*/*.yaml"))}
