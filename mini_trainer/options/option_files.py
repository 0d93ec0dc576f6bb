"""Options from YAML files: read within limits, with the line in errors; turned into flags, and back."""

import contextlib
import dataclasses
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mini_trainer.options import environment, iterate_fields, list_types
from mini_trainer.options.fields import flag_for, name_type
from mini_trainer.options.names_elsewhere import find_closest
from mini_trainer.options.reading import read_small

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 1 << 20  # of a YAML file
MOST_KEYS = 10_000
MOST_NODES = 100_000  # values of a YAML file, with its aliases expanded
MOST_PROBLEMS = 20  # of one file that a message lists


def read_configs_as_flags(paths: list[Path], options_class: type, *, allowed: Collection[str] = ()) -> list[str]:
    """YAML files as command-line flags, so that all are converted and checked by the same code; the later ones win.

    `allowed`: see `read_option_file`.
    """
    flags: dict[str, list[str]] = {}
    for path in paths:
        flags |= read_config(path, options_class, allowed)
    return [word for words in flags.values() for word in words]


def read_config(path: Path, options_class: type, allowed: Collection[str]) -> dict[str, list[str]]:
    """A YAML file's values as command-line words, by option."""
    config = read_option_file(path, named=f"--config {path}", allowed=allowed)
    types, flags, problems = list_types(options_class), {}, []
    for key, value in config.items():
        name = str(key).replace("-", "_")
        try:
            if name not in types or name == "config":
                close = find_closest(name, types)
                hint = f"; allowed: {', '.join(types)}" if close is None else f"; did you mean {close!r}?"
                if isinstance(value, dict):
                    hint = "; the file has no groups: write the options below it without it"
                raise ValueError(f"unknown option {key!r}{hint}")
            if name in flags:
                raise ValueError(f"{name}: given more than once, with - and with _")
            flags[name] = flag_for(name, value, field_type=types[name])
        except ValueError as error:
            problems.append(f"--config {path}: {error}")
        if len(problems) == MOST_PROBLEMS:
            problems.append("the rest of the file was not checked")
            break
    if problems:
        raise ValueError("\n  ".join(problems))
    return flags


def read_option_file(path: Path, *, named: str, allowed: Collection[str] = ()) -> dict[Any, Any]:
    """The keys and values of a YAML file of options, with the environment in place of `${NAME}`.

    `allowed`: variables to fill in, as well as those that always are. ValueError, in which the file is called `named`.
    """
    given, problems = read_yaml(path, named=named, numbers_as_written=True), []
    for key, value in given.items():
        try:
            given[key] = environment.fill_in(str(key), value, allowed)
        except ValueError as error:
            problems.append(f"{named}: {error}")
    if problems:
        raise ValueError("\n  ".join(problems))
    return given


def read_yaml(path: Path, *, named: str, numbers_as_written: bool = False) -> dict[Any, Any]:
    """The keys and values of a YAML file; ValueError, in which the file is called `named`, for anything else.

    Dates and times stay texts: YAML 1.1 reads 1:30:00 as the number 5400. With `numbers_as_written`, so do numbers that
    Python would write otherwise: YAML 1.1 reads 010 as 8, and the name 1.10 would become 1.1.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                value = super().construct_object(node, deep)
            except (ValueError, OverflowError) as error:  # such as a number of more digits than Python converts
                raise yaml.MarkedYAMLError(None, None, f"{node.value!r:.80}: {error}", node.start_mark) from None
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            return node.value if numbers_as_written and is_number and str(value) != node.value else value

    times = ("tag:yaml.org,2002:str", re.compile(r"\d+(:\d+)+"))
    dates = "tag:yaml.org,2002:timestamp"
    Loader.yaml_implicit_resolvers = {
        first: [*([times] if first in "0123456789" else []), *(rule for rule in rules if rule[0] != dates)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    with describing_yaml(named):
        loader = Loader(read_small(path, MOST_BYTES))
        with naming_depth(loader):
            node = compose(loader)
            if node is not None:
                check_node(node)
            content = None if node is None else loader.construct_document(node)
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise ValueError(f"{named}: expected 'option: value' lines, got {found}")
    return content


def check_yaml(path: Path, *, named: str) -> None:
    """ValueError if a YAML file for another program, with tags of its own, is invalid; `named` is its name there."""
    import yaml

    with describing_yaml(named):
        loader = yaml.SafeLoader(read_small(path, MOST_BYTES))
        with naming_depth(loader):
            node = compose(loader)
            if not isinstance(node, yaml.MappingNode):
                raise yaml.YAMLError("expected 'key: value' lines")
            check_node(node)


def compose(loader: "yaml.SafeLoader") -> "yaml.Node | None":
    """The root of a YAML file; MarkedYAMLError as soon as there are more than `MOST_KEYS` or `MOST_NODES`."""
    compose_node, counts = loader.compose_node, Counter()

    def count(parent: "yaml.Node | None", index: Any) -> "yaml.Node":
        counts.update(values=1, keys=parent is not None and index is None)
        for what, most in (("keys", MOST_KEYS), ("values", MOST_NODES)):
            if counts[what] > most:
                refuse_node(f"it has more than {most:,} {what}", loader.peek_event())
        return compose_node(parent, index)

    loader.compose_node = count
    return loader.get_single_node()


@contextlib.contextmanager
def naming_depth(loader: "yaml.SafeLoader") -> Iterator[None]:
    """Turns a RecursionError while parsing into a YAMLError that names the line."""
    import yaml

    try:
        yield
    except RecursionError:
        raise yaml.YAMLError(f"line {loader.line + 1}: brackets or lists are nested too deeply") from None


@contextlib.contextmanager
def describing_yaml(named: str) -> Iterator[None]:
    """Turns errors in a YAML file into one ValueError of one line."""
    import yaml

    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{named}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ": ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{named}: {f'line {mark.line + 1}: ' if mark else ''}not valid YAML: {what}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{named}: not valid YAML: {' '.join(str(error).split())}") from None


def check_node(root: "yaml.Node") -> None:
    """MarkedYAMLError for a bad key (see `check_keys`), for an anchor that holds its own alias, and for aliases that
    multiply beyond `MOST_NODES` values."""
    import yaml

    sizes: dict[int, int | None] = {}  # values that a node stands for, by its id; None while they are being counted

    def count(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in sizes:
            if sizes[id(node)] is None:
                refuse_node("an anchor holds an alias of itself", node)
            return sizes[id(node)]
        sizes[id(node)] = None
        children = node.value
        if isinstance(node, yaml.MappingNode):
            check_keys([key for key, _ in node.value])
            children = [value for _, value in node.value]
        sizes[id(node)] = size = 1 + sum(map(count, children))
        if size > MOST_NODES:
            refuse_node(f"its aliases stand for more than {MOST_NODES:,} values", node)
        return size

    count(root)


def check_keys(keys: list["yaml.Node"]) -> None:
    """MarkedYAMLError for a key that is a list or a mapping, or is repeated; the last of equal ones is named."""
    import yaml

    for key in keys:
        if not isinstance(key, yaml.ScalarNode):
            refuse_node(f"a key is a {'list' if isinstance(key, yaml.SequenceNode) else 'mapping'}", key)
    counts = Counter(key.value for key in keys)
    for key in reversed(keys):
        if counts[key.value] > 1:
            refuse_node(f"a key is repeated: {key.value}", key)


def refuse_node(reason: str, node: "yaml.Node | yaml.Event") -> NoReturn:
    import yaml

    raise yaml.MarkedYAMLError(None, None, reason, node.start_mark)


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


def parse_values(
    given: Mapping[Any, Any],
    options_class: type,
    *,
    where: str,
    reserved: Mapping[str, str],
    parse: Callable[[str, Any, type], Any] = parse_value,
) -> dict[str, Any]:
    """Results of `parse` for the options in a YAML file's mapping `where`, by name; one ValueError for all that are
    unknown, given twice, of another type, or `reserved`, with the reason."""
    types, found, problems = list_types(options_class), {}, []
    for key, value in given.items():
        name = str(key).replace("-", "_")
        try:
            if name not in types:
                close = find_closest(name, types)
                raise ValueError(f"unknown option {key!r}" + ("" if close is None else f"; did you mean {close!r}?"))
            if name in found:
                raise ValueError(f"{name}: is given twice, with - and with _")
            if name in reserved:
                raise ValueError(f"{key}: {reserved[name]}")
            found[name] = parse(name, value, options_class)
        except ValueError as error:
            problems.append(f"{where} {error}")
    if problems:
        raise ValueError("\n  ".join(problems))
    return found


def describe_options(options_class: type, values: dict[str, Any]) -> str:
    """Options by name as YAML that `--config` takes, in the order and the groups of --help."""
    import yaml

    lines, last = [], None
    for option, group in iterate_fields(options_class):
        if option.name not in values:
            continue
        if group != last:
            lines.append(f"\n# {group}\n")
        value, last = values[option.name], group
        lines.append(yaml.safe_dump({option.name: environment.escape(value)}, width=math.inf))
    return "".join(lines).lstrip("\n")
