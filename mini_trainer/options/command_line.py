"""Options from flags over YAML files (options/option_files.py), checked together, with one message for all errors.

Imports nothing heavy, so that `--help` and a mistyped flag answer at once.
"""

import contextlib
import difflib
import io
import itertools
import logging
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_origin

from mini_trainer.distributed.command import describe_version, name_command
from mini_trainer.distributed.ending import describe_error, exit_with_message, shorten_interrupts
from mini_trainer.distributed.messages import print_as_is, say, say_note
from mini_trainer.options import (
    Options,
    TrainOptions,
    flag_name,
    flatten_options,
    list_preset_values,
    list_types,
    replace_options,
)
from mini_trainer.options.fields import flag_for, list_choices, list_parts
from mini_trainer.options.places import choose_places
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.reading import check_unicode

HELP = ("--help", "-h")
# Flags that other programs of this kind have, in our words.
SPELLINGS = {"--use-liger-kernels": ("--kernels", "fused"), "--no-use-liger-kernels": ("--kernels", "eager")}


def parse_options(options_class: type[Options], argv: list[str] | None = None) -> Options:
    """Reads flags (`argv`, by default the command line) over the YAML files named by `--config`.
    Prints one message and exits with `ExitCode.BAD_INPUT` on anything unknown, mistyped, missing or contradictory."""
    refuse_hub_kernels()
    if argv is None:
        shorten_interrupts()
        argv = sys.argv[1:]
    if "--version" in argv:
        say(describe_version())
        sys.exit()
    if hasattr(options_class, "first_word"):
        from mini_trainer.options.tools import name_first_word

        argv = name_first_word(argv, options_class)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # what is said once per node
    if (asked := next((argv[i + 1 : i + 2] for i, word in enumerate(argv) if word in HELP), None)) is not None:
        from mini_trainer.options.help import show_help

        topic = "".join(asked).lstrip("-").replace("-", "_")  # empty if no word follows --help
        show_help(options_class, topic, is_shown=is_first)
    try:
        import tyro
    except ModuleNotFoundError as error:
        exit_with_message(
            f"the package {error.name}, which reads the options, is not installed: install the dependencies in"
            " pyproject.toml (pip install -e . in a checkout; from wheels where there is no network)"
        )
    if "kernels" in list_types(options_class):
        argv = [part for word in argv for part in SPELLINGS.get(word, (word,))]
    try:
        if (moved := choose_places()) is not None and is_first:
            say_note(f"warning: {moved}")
        refuse_useless_flags(argv, options_class)
        if any("," in word for word in argv):
            from mini_trainer.options.option_files import refuse_joined_values

            refuse_joined_values(iterate_flags(argv), options_class)
        check_unicode([os.getcwd(), *argv])
        words = argv
        given = [value for name, values in iterate_flags(argv) if name == "config" for value in values]
        if given and "config" in list_types(options_class):
            from mini_trainer.options.option_files import read_configs_as_flags

            words = [*read_configs_as_flags(list(map(find_config, given)), options_class), *argv]
        check_unicode(words)
        refuse_unknown_words(words, options_class)
        words = find_preset_words(words, options_class) + words
        with reading_flags(options_class):
            options = tyro.cli(options_class, prog=name_command(), config=[tyro.conf.OmitArgPrefixes], args=words)
        problems = find_problems(options)
        if problems:
            raise ValueError("these options cannot be used as they are:\n  " + "\n  ".join(problems))
    except (ValueError, OSError) as error:
        code, message, _ = describe_error(error)
        exit_with_message(f"{message}\n{name_command()} --help all lists all options", code=code)
    if isinstance(options, TrainOptions) and options.plan.print_config:
        if is_first:
            from mini_trainer.options.option_files import describe_options

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
    if not named or "callbacks" in dict(iterate_flags(argv)):
        return options
    if is_first:
        say(f"dry run: callbacks of --config are not imported: {', '.join(named)}; --callbacks NAME imports them")
    return replace_options(options, callbacks=())


@contextlib.contextmanager
def reading_flags(options_class: type) -> Iterator[None]:
    """Converts tyro's boxed message to a ValueError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as end:
        if not end.code:
            raise
        lines = [line.strip("│").rstrip() for line in said.getvalue().splitlines() if line[:1] not in "╭╰"]
        message = itertools.takewhile(lambda line: "──" not in line, lines)  # below the first rule is help
        from mini_trainer.options.option_files import describe_misread

        raise ValueError(describe_misread(textwrap.dedent("\n".join(message)), options_class)) from None


def refuse_hub_kernels() -> None:
    """Keeps libraries from downloading and running compiled code where the package kernels is installed.
    transformers does so for layers with a state, bitsandbytes on import, on some processors."""
    os.environ["USE_HUB_KERNELS"] = "0"  # transformers, also in processes that this one starts
    if "kernels" not in sys.modules:
        sys.modules["kernels"] = None  # an import of it fails
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it advises to install that package


def iterate_flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the names of the words' flags, with no_ for --no-, and their values."""
    for i, word in enumerate(words):
        if word.startswith("--"):
            flag, equals, first = word.partition("=")
            others = itertools.takewhile(lambda after: not after.startswith("--"), words[i + 1 :])
            yield flag.removeprefix("--").replace("-", "_"), [*([first] if equals else []), *others]


def find_preset_words(words: list[str], options_class: type) -> list[str]:
    """The command line of the preset that `words` name, without options that they have themselves."""
    if options_class is not TrainOptions:
        return []
    given = dict(iterate_flags(words))
    preset = (given.get("preset") or [None])[-1]  # tyro refuses a name that is none
    types = list_types(TrainOptions)
    values = list_preset_values(preset, given)
    return [word for name, value in values.items() for word in flag_for(name, value, field_type=types[name])]


def refuse_useless_flags(argv: list[str], options_class: type) -> None:
    """ValueError for two values of one option, of which one would be dropped silently, and for a flag that takes
    several values and has none, which would have no effect."""
    types, names = list_types(options_class), [name.removeprefix("no_") for name, _ in iterate_flags(argv)]
    repeated = sorted(name for name in types if names.count(name) > 1)
    if repeated:
        raise ValueError(f"given more than once: {', '.join(map(flag_name, repeated))}")
    for name, values in iterate_flags(argv):
        if values in ([], [""]) and get_origin(types.get(name)) is tuple:
            raise ValueError(f"{flag_name(name)}: given without a value; give one or more, or leave it out")


def refuse_unknown_words(words: list[str], options_class: type) -> None:
    """ValueError for flags that do not exist, and for values that are no choice of a flag, with the closest ones."""
    types, problems = list_types(options_class), []
    choices = {  # not those of options that also take other values, as `int | Literal["auto"]` does
        name: values
        for name, values in list_choices(options_class).items()
        if all(get_origin(part) is Literal for part in list_parts(types[name]))
    }
    known = [*types, *(f"no_{name}" for name, kind in types.items() if kind is bool)]
    for name, values in iterate_flags(words):
        allowed = choices.get(name)
        if name not in known:
            from mini_trainer.options.answers import describe_unknown

            problems.append(f"unknown option {flag_name(name)}{describe_unknown(name, known, spell=flag_name)}")
        elif allowed and values and values[0] not in (*allowed, "None"):
            from mini_trainer.options.answers import describe_value

            hint = describe_value(name, values[0]) or suggest(values[0], allowed)
            problems.append(f"{flag_name(name)} {values[0]}: allowed: {', '.join(allowed)}{hint}")
    if problems:
        raise ValueError("\n  ".join(problems))


def suggest(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """A question whether the closest of the `known` words was meant; empty if none is close."""
    close = difflib.get_close_matches(word, known, n=most)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def find_config(given: str) -> Path:
    """The file that --config names: a path, or a recipe's name; ValueError for what looks like a name and is none."""
    path = Path(given)
    if path.suffix or path.exists():
        return path
    from mini_trainer.options.option_files import list_recipes

    recipes = list_recipes()
    if given not in recipes:
        raise ValueError(f"--config {given}: is neither a file nor a recipe; recipes: {', '.join(recipes)}")
    return recipes[given]
