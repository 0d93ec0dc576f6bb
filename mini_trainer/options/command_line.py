"""Options from flags and a YAML file, checked together, with one message for all errors.

Imports nothing heavy, so that `--help` and a mistyped flag answer at once.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import logging
import math
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin

from mini_trainer.distributed.command import describe_version, name_command
from mini_trainer.distributed.ending import exit_with_message, shorten_interrupts
from mini_trainer.distributed.messages import leave_unread, print_as_is, say
from mini_trainer.options import (
    BoardOptions,
    ContinualOptions,
    ImportConfigOptions,
    Options,
    PlotOptions,
    SweepOptions,
    TrainOptions,
    VerifyOptions,
    environment,
    flag_name,
    flatten_options,
    iterate_fields,
    list_preset_values,
    list_types,
    replace_options,
)
from mini_trainer.options.choices import list_choices
from mini_trainer.options.names_elsewhere import NAMES_ELSEWHERE
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.reading import read_small

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 1 << 20  # of a YAML file
MOST_KEYS = 10_000
MOST_NODES = 100_000  # values of a YAML file, with its aliases expanded
MOST_PROBLEMS = 20  # of one file that a message lists

# Whose one required option is given as words without a flag.
WITHOUT_FLAG = (PlotOptions, BoardOptions, ImportConfigOptions, ContinualOptions, SweepOptions, VerifyOptions)


def parse_options(options_class: type[Options], argv: list[str] | None = None) -> Options:
    """Reads flags (`argv`, by default the command line) over the YAML files named by `--config`.

    Prints one message and exits with `ExitCode.BAD_INPUT` on anything unknown, mistyped, missing or contradictory.
    """
    try:
        import tyro
    except ModuleNotFoundError as error:
        exit_with_message(
            f"the package {error.name}, which reads the options, is not installed: install the dependencies in"
            " pyproject.toml (pip install -e . in a checkout; from wheels where there is no network)"
        )
    refuse_hub_kernels()
    if argv is None:
        shorten_interrupts()
        argv = sys.argv[1:]
    if "--version" in argv:
        say(describe_version())
        sys.exit()
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # what is said once per node
    markers = [tyro.conf.OmitArgPrefixes]  # an option's group is a heading of --help, and no part of its flag
    if options_class in WITHOUT_FLAG:
        markers.append(tyro.conf.PositionalRequiredArgs)
    try:
        argv, allowed = take_allowed(argv, options_class)
        refuse_repeated_flags(argv, options_class)
        refuse_empty_flags(argv, options_class)
        check_unicode([os.getcwd(), *argv])
        words = read_configs_as_flags(find_configs(argv, options_class), options_class, allowed=allowed) + argv
        check_unicode(words)
        refuse_unknown_words(words, options_class)
        words = find_preset_words(words, options_class) + words
        with reading_flags(options_class, has_help=is_first):
            options = tyro.cli(options_class, prog=name_command(), config=markers, args=words)
        problems = find_problems(options)
        if problems:
            raise ValueError("these options cannot be used as they are:\n  " + "\n  ".join(problems))
    except ValueError as error:
        exit_with_message(f"{error}\n{name_command()} --help lists all options")
    if isinstance(options, TrainOptions) and options.plan.print_config:
        if is_first:
            values = flatten_options(options)
            del values["config"], values["print_config"]
            print_as_is(describe_options(TrainOptions, values), sys.stdout)
        sys.exit()
    if isinstance(options, TrainOptions) and options.plan.dry_run:
        return leave_out_callbacks(options, argv, is_first=is_first)
    return options


def leave_out_callbacks(options: TrainOptions, argv: list[str], *, is_first: bool) -> TrainOptions:
    """The options of a dry run, which imports only the callbacks that the command line itself names."""
    named = options.callbacks.callbacks
    if not named or any(word.partition("=")[0] == "--callbacks" for word in argv):
        return options
    if is_first:
        say(f"dry run: callbacks of --config are not imported: {', '.join(named)}; --callbacks NAME imports them")
    return replace_options(options, callbacks=())


def take_allowed(argv: list[str], options_class: type) -> tuple[list[str], list[str]]:
    """Splits `--allow-env NAME` off the command line of a program that reads option files; also returns the names.

    They are an option, once, of programs whose file is no `--config`.
    """
    names = list_types(options_class)
    if "config" not in names and "allow_env" not in names:
        return argv, []
    argv, allowed = environment.take_allowed(argv)
    if not allowed:
        return argv, []
    if "allow_env" in names:
        return [*argv, environment.FLAG, *allowed], allowed
    if not find_configs(argv, options_class):
        raise ValueError(f"{environment.FLAG} {allowed[0]}: no effect without --config")
    return argv, allowed


@contextlib.contextmanager
def reading_flags(options_class: type, *, has_help: bool) -> Iterator[None]:
    """Makes a ValueError of what tyro says in a box; --help is printed only with `has_help`."""
    said, shown = io.StringIO(), sys.stdout if has_help else io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
            yield
    except BrokenPipeError:  # --help | head
        leave_unread(sys.stdout)
        sys.exit()
    except SystemExit as end:
        if not end.code:
            raise
        lines = [line.strip("│").rstrip() for line in said.getvalue().splitlines() if line[:1] not in "╭╰"]
        message = itertools.takewhile(lambda line: "──" not in line, lines)  # below the first rule is help
        raise ValueError(describe_misread(textwrap.dedent("\n".join(message)), options_class)) from None


def describe_misread(message: str, options_class: type) -> str:
    """tyro's message in one line, if it is about a value of another type; otherwise as it is."""
    misread = re.match(r"Error parsing (--[\w-]+): .*?(\[.*?\]|'.*?')", message, re.DOTALL)
    if misread is None:
        return message
    flag, given = misread.groups()
    kind = list_types(options_class)[name_option(flag)]
    return f"{flag}: given {given.strip('[]')}, allowed: {name_type(kind).removesuffix(' or null')}"


def check_unicode(words: list[str]) -> None:
    """ValueError for words that are not UTF-8: reports, JSON files and trackers cannot name such paths."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode("utf-8", "backslashreplace").decode()
            raise ValueError(f"{shown}: not UTF-8 text; rename that file or directory") from None


def refuse_hub_kernels() -> None:
    """Keeps libraries from downloading and running compiled code where the package kernels is installed.

    transformers does so for layers with a state, bitsandbytes on import, on some processors.
    """
    os.environ["USE_HUB_KERNELS"] = "0"  # transformers, also in processes that this one starts
    if "kernels" not in sys.modules:
        sys.modules["kernels"] = None  # an import of it fails
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it advises to install that package


def find_preset_words(words: list[str], options_class: type) -> list[str]:
    """The command line of the preset that `words` name, without options that they have themselves."""
    if options_class is not TrainOptions:
        return []
    names = [after for word, after in itertools.pairwise([*words, ""]) if word == "--preset"]
    names += [word.removeprefix("--preset=") for word in words if word.startswith("--preset=")]
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    values = list_preset_values(names[-1] if names else None, given)  # tyro refuses a name that is none
    types = list_types(TrainOptions)
    return [word for name, value in values.items() for word in flag_for(name, value, field_type=types[name])]


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


def refuse_repeated_flags(argv: list[str], options_class: type) -> None:
    """Refuses two values for one option, of which one would be dropped silently."""
    names = [word.split("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")]
    names = [name.removeprefix("no_") for name in names]
    repeated = {option.name for option, _ in iterate_fields(options_class) if names.count(option.name) > 1}
    if repeated:
        raise ValueError(f"given more than once: {', '.join(map(flag_name, sorted(repeated)))}")


def refuse_empty_flags(argv: list[str], options_class: type) -> None:
    """ValueError for a flag that takes several values and has none, which would have no effect."""
    names = [name for name, field_type in list_types(options_class).items() if get_origin(field_type) is tuple]
    for word, after in itertools.pairwise([*argv, "--"]):
        name, equals, value = word.partition("=")
        is_empty = not value if equals else after.startswith("--")
        if is_empty and name.startswith("--") and name.removeprefix("--").replace("-", "_") in names:
            raise ValueError(f"{name}: given without a value; give one or more, or leave it out")


def refuse_unknown_words(words: list[str], options_class: type) -> None:
    """ValueError for flags that do not exist, and for values that are none of a flag's choices, with what is close."""
    types, problems = list_types(options_class), []
    choices = {name: values for name, values in list_choices(options_class).items() if takes_choices_only(types[name])}
    flags = {flag_name(name): name for name in types}
    flags |= {flag.replace("--", "--no-", 1): name for flag, name in flags.items() if types[name] is bool}
    for word, after in itertools.pairwise([*words, "--"]):
        flag, equals, value = word.partition("=")
        flag, value = flag.replace("_", "-"), value if equals else after
        if not flag.startswith("--") or flag == "--help":
            continue
        if flag not in flags:
            close = find_closest(name_option(flag), [name_option(known) for known in flags])
            problems.append(f"unknown option {flag}{'' if close is None else f'; did you mean {flag_name(close)}?'}")
        elif flags[flag] in choices and not value.startswith("--") and value not in (*choices[flags[flag]], "None"):
            allowed = choices[flags[flag]]
            problems.append(f"{flag} {value}: allowed: {', '.join(allowed)}{suggest(value, allowed)}")
    if problems:
        raise ValueError("\n  ".join(problems))


def name_option(flag: str) -> str:
    """The name of a flag's option, with no_ for --no-."""
    return flag.removeprefix("--").replace("-", "_")


def takes_choices_only(kind: Any) -> bool:
    """Whether the type has no value beside its choices but None, as `int | Literal["auto"]` has."""
    if get_origin(kind) in (Union, UnionType):
        return all(part is type(None) or takes_choices_only(part) for part in get_args(kind))
    return get_origin(kind) is Literal or (get_origin(kind) is tuple and takes_choices_only(get_args(kind)[0]))


def suggest(word: str, known: Iterable[str]) -> str:
    """A question whether the closest of the `known` words was meant; empty if none is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def find_closest(name: str, known: Collection[str]) -> str | None:
    """The `known` option that an unknown `name` may stand for: the one that other trainers call so, or the closest."""
    if name in NAMES_ELSEWHERE:
        return next((option for option in NAMES_ELSEWHERE[name] if option in known), None)
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def find_configs(argv: list[str], options_class: type) -> list[Path]:
    """The values of `--config F G` or `--config=F G`; none for options without such files."""
    if all(option.name != "config" for option, _ in iterate_fields(options_class)):
        return []
    for i, flag in enumerate(argv):
        name, equals, first = flag.partition("=")
        if name == "--config":
            others = itertools.takewhile(lambda word: not word.startswith("--"), argv[i + 1 :])
            return [Path(word) for word in [*([first] if equals else []), *others]]
    return []


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
    """What a YAML file's `value` is as the option `name`; ValueError if it can be none."""
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
    """What `parse` makes of the options in a YAML file's mapping `where`, by name; one ValueError for all that are
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


def name_type(kind: Any) -> str:
    """What values of the type an option takes, as messages say it."""
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
    if value is None:
        raise ValueError(f"{name}: given null, allowed: one value, or a list of values; [] for none")
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, (dict, list)):
            raise ValueError(f"{name}: given {value!r}, allowed: one value, or a list of values")
        if item is None or isinstance(item, bool):
            shown = "null" if item is None else str(item).lower()
            raise ValueError(f"{name}: given {shown} in a list; put a text such as 'null', 'yes' or 'no' in quotes")
        if str(item).startswith("--") or str(item) == "-h":
            raise ValueError(f"{name}: given {item!r}, allowed: values that cannot be taken for flags")
    return list(map(str, values))
