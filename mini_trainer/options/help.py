"""--help: what a first run needs on one screen, and the rest by group, by option, or by a word."""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, NoReturn, get_args, get_origin

from mini_trainer.distributed.command import name_command
from mini_trainer.distributed.ending import exit_with_message
from mini_trainer.distributed.messages import has_colours, print_as_is
from mini_trainer.options.answers import describe_unknown
from mini_trainer.options.fields import flag_name, is_required, iterate_fields, list_groups, list_parts, list_types

ALONE = "general"  # options of no group, as a topic
MOST_WIDTH, INDENT = 100, " " * 6


def show_help(options_class: type, topic: str, *, is_shown: bool) -> NoReturn:
    """Prints the help on a topic, and exits."""
    try:
        text = describe_help(options_class, topic, command=name_command())
    except ValueError as error:
        exit_with_message(str(error))
    if is_shown:
        print_as_is(f"{text}\n", sys.stdout)
    sys.exit()


def describe_help(options_class: type, topic: str, *, command: str) -> str:
    """The help on a topic: nothing, `all`, a group, an option, or a word in their texts. ValueError if there is none.
    `command`: the program as it was started."""
    groups = list_groups(options_class)
    of_groups = {option.name: group for option, group in iterate_fields(options_class)}
    if topic == "" and hasattr(options_class, "first"):
        return describe_first(options_class, command=command)
    if topic in ("", "all"):
        parts = [describe_start(options_class, command=command), *describe_options(options_class, of_groups)]
        return "\n\n".join(parts)
    if topic in groups or (groups and topic == ALONE):
        own = None if topic == ALONE else topic
        names = [name for name, group in of_groups.items() if group == own]
        return "\n\n".join(describe_options(options_class, names))
    texts = read_helps(options_class)
    word = topic.replace("_", " ")
    found = {topic} & of_groups.keys() or {
        name for name, text in texts.items() if topic in name or word.lower() in text.lower()
    }
    if not found:
        answer = describe_unknown(topic, [*of_groups, *groups], spell=lambda name: name.replace("_", "-"))
        raise ValueError(
            f"--help {topic.replace('_', '-')}: no option, group or text has this word{answer}"
            + (f"; groups: {', '.join(groups)}" if groups else "")
        )
    return "\n\n".join(describe_options(options_class, found))


def describe_first(options_class: type, *, command: str) -> str:
    """What a first run needs, and the groups of all other options."""
    known = {option.name: option for option, _ in iterate_fields(options_class)}
    heads = {name: describe_head(options_class, known[name], is_short=True) for name in options_class.first}
    column, texts = 4 + max(map(len, heads.values())), read_helps(options_class)
    shown = "\n".join(
        fill(f"{one_sentence(texts[name])}.", " " * column).replace(" " * column, f"  {head:{column - 2}}", 1)
        for name, head in heads.items()
    )
    groups = list_groups(options_class)
    described = [(name, len(dataclasses.fields(group)), group.__doc__) for name, group in groups.items()]
    described.insert(0, (ALONE, len(dataclasses.fields(options_class)) - len(groups), "Options of no group."))
    width = 2 + max(len(name) for name, *_ in described)
    lines = [f"  {name:{width}}{count:3}  {one_sentence(text)}" for name, count, text in described]
    return "\n\n".join(
        [
            describe_start(options_class, command=command),
            f"For a first run ({len(options_class.first)} of {len(known)} options):\n\n{shown}",
            "\n".join(["All others, by group:", "", *lines]),
            fill(f"More: {command} --help GROUP, --help OPTION, --help WORD (a search) or --help all.", ""),
        ]
    )


def describe_start(options_class: type, *, command: str) -> str:
    first = getattr(options_class, "first_word", None)
    shown = [option for option, _ in iterate_fields(options_class) if is_required(option) or option.name == first]
    words = [describe_head(options_class, option).partition(",")[0] for option in shown]
    return "\n\n".join([fill(f"usage: {' '.join([command, *words])} [OPTIONS]", ""), fill(options_class.__doc__, "")])


def describe_options(options_class: type, names: Collection[str]) -> Iterator[str]:
    """A part for each group that has some of the options."""
    by_group: dict[str | None, list[dataclasses.Field]] = {}
    for option, group in iterate_fields(options_class):
        if option.name in names:
            by_group.setdefault(group, []).append(option)
    types, texts = list_groups(options_class), read_helps(options_class)
    for group, own in by_group.items():
        lines = [] if group is None else [fill(f"{bold(group)}: {types[group].__doc__}", ""), ""]
        for option in own:
            lines.append(f"  {bold(describe_head(options_class, option))}")
            lines.append(fill(texts[option.name] + describe_default(option), INDENT))
        yield "\n".join(lines)


def describe_head(options_class: type, option: dataclasses.Field, *, is_short: bool = False) -> str:
    """The flag and its values; before it, a word where none is needed."""
    head = f"{flag_name(option.name)} {name_values(option, is_short=is_short)}".rstrip()
    if option.name == getattr(options_class, "first_word", None):
        return f"{option.name.partition('_')[0].upper()}{' ...' * (get_origin(option.type) is tuple)}, {head}"
    return head


def describe_default(option: dataclasses.Field) -> str:
    if is_required(option):
        return " Required."
    default = option.default
    if default is None or default is False or default == ():
        return ""
    if default is True:
        return f" Default: on; {flag_name(option.name).replace('--', '--no-', 1)} turns it off."
    return f" Default: {' '.join(map(str, default)) if isinstance(default, tuple) else default}."


def name_values(option: dataclasses.Field, *, is_short: bool = False) -> str:
    """Placeholder after the flag: choices, or a word for the type of value."""
    parts = list(dict.fromkeys(list_kinds(option.type)))
    if is_short and len(parts) > 4:
        parts = ["CHOICE"]
    words = "|".join(parts)
    return f"{words} ..." if get_origin(option.type) is tuple else words


def list_kinds(kind: Any) -> Iterator[str]:
    for part in list_parts(kind):
        if get_origin(part) is Literal:
            yield from map(str, get_args(part))
        elif part is not bool:
            yield {int: "N", float: "X"}.get(part, "TEXT")


def one_sentence(text: str) -> str:
    """The first sentence, without its link to a page."""
    return re.sub(r" \(docs/\S+\)", "", " ".join(text.split()).split(". ")[0]).rstrip(".")


def fill(text: str, indent: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        min(MOST_WIDTH, shutil.get_terminal_size().columns),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if has_colours() else text


@functools.cache
def read_helps(options_class: type) -> dict[str, str]:
    """The help of every option by name: the text that follows its declaration."""
    owners = {options_class, *list_groups(options_class).values()}
    found: dict[str, str] = {}
    for module in {inspect.getmodule(base) for owner in owners for base in owner.__mro__[:-1]}:
        classes = {base.__name__ for owner in owners for base in owner.__mro__[:-1]}
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found |= read_class_helps(node.body)
    return {name: found[name] for name in list_types(options_class)}


def read_class_helps(body: Iterable[ast.stmt]) -> dict[str, str]:
    """Texts of a class by the fields that they follow."""
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
