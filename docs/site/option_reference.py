"""Reference pages of all options of all commands, generated from the options' declarations."""

import dataclasses
import re
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from mini_trainer.__main__ import PROGRAMS
from mini_trainer.options import flag_name, iterate_fields, list_facts
from mini_trainer.options.fields import list_groups, name_type
from mini_trainer.options.help import read_helps

# `chat` has the options of `generate`.
COMMANDS = {command: program.read_options() for command, program in PROGRAMS.items() if command != "chat"}


def make_pages() -> dict[str, str]:
    """The text of each page, by its file name."""
    pages = {f"{command}.md": describe_command(command) for command in COMMANDS}
    return {"index.md": describe_all()} | pages


def describe_all() -> str:
    """The list of commands, and of all options in alphabetical order."""
    lines = ["# Reference", "", "| `mini-trainer` | |", "| --- | --- |"]
    for command, options_class in COMMANDS.items():
        lines.append(f"| [`{command}`]({command}.md) | {mark_up(options_class.__doc__)} |")
    also = "[exit codes](exit_codes.md), [metrics](metrics.md), [Python](python.md)"
    lines += ["", f"Also: {also}.", "", "## All options", ""]
    places: dict[str, list[str]] = {}
    for command, options_class in COMMANDS.items():
        for option, _ in iterate_fields(options_class):
            places.setdefault(option.name, []).append(command)
    for name, commands in sorted(places.items()):
        links = ", ".join(f"[{command}]({command}.md#{anchor(name)})" for command in commands)
        lines.append(f"- `{flag_name(name)}`: {links}")
    return "\n".join([*lines, ""])


def describe_command(command: str) -> str:
    """The page of one command: every option in its group."""
    options_class = COMMANDS[command]
    lines = [f"# {command}", "", mark_up(options_class.__doc__), ""]
    if any(option.name == "config" for option, _ in iterate_fields(options_class)):
        lines += ["Each option is also a key of the YAML file of `--config`, without dashes in front.", ""]
    last: str | None = "none yet"
    for option, group in iterate_fields(options_class):
        if group != last:
            last = group
            lines += [f"## {(group or 'general').replace('_', ' ')}", ""]
            lines += [mark_up(list_groups(options_class)[group].__doc__), ""] if group else []
        lines += describe_option(options_class, option, group)
    return "\n".join(lines)


def describe_option(options_class: type, option: dataclasses.Field, group: str | None) -> list[str]:
    lines = [f"### `{flag_name(option.name)}` {{ #{anchor(option.name)} }}", ""]
    lines += [f"{describe_values(option.type)}; {describe_default(option)}", "{ .values }", ""]
    lines += [mark_up(read_helps(options_class)[option.name]), ""]
    need = find_needs(options_class, option.name, group)
    lines += [f"{need}\n"] if need else []
    return lines


def describe_values(kind: Any) -> str:
    """The values that an option takes, in words."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = {str: "text", int: "integer", float: "number", bool: "on or off"}
    shown = []
    for one in (one for one in kinds if one is not type(None)):
        if get_origin(one) is tuple:
            shown.append(f"one or more: {describe_values(get_args(one)[0])}")
        elif get_origin(one) is Literal:
            shown.append(", ".join(f"`{value}`" for value in get_args(one)))
        else:
            shown.append(words[one] if one in words else name_type(one))
    return " or ".join(shown)


def describe_default(option: dataclasses.Field) -> str:
    if option.default is dataclasses.MISSING:
        return "required"
    if option.default is None or option.default == ():
        return "default: not set"
    if isinstance(option.default, bool):
        return f"default: {'on' if option.default else 'off'}"
    values = option.default if isinstance(option.default, tuple) else (option.default,)
    return f"default: `{' '.join(map(str, values))}`"


def find_needs(options_class: type, name: str, group: str | None) -> str:
    """What an option needs, by its facts and its group's switch; "" if nothing."""
    facts, needs = list_facts(options_class)[name], []
    if facts.needs is not None:
        needs.append(f"`{flag_name(facts.needs)}`")
    if facts.only_with is not None:
        other, values = facts.only_with
        needs.append(" or ".join(f"`{flag_name(other)} {value}`" for value in values))
    members = list_groups(options_class).get(group)
    if getattr(members, "has_switch", False) and (switch := dataclasses.fields(members)[0].name) != name:
        needs.append(f"`{flag_name(switch)}`")
    return f"**Needs** {' and '.join(needs)}" if needs else ""


def anchor(name: str) -> str:
    return name.replace("_", "-")


def mark_up(text: str) -> str:
    """Help as Markdown: flags and files in code, links to pages, everything else literal."""
    text = re.sub(r"([*_<>\[\]|])", r"\\\1", " ".join(text.split()))
    text = re.sub(r"(?<![\w-])--[a-z][\w-]*(?:\\_[\w]+)*", lambda match: f"`{match[0]}`".replace("\\", ""), text)
    text = re.sub(r"(?<![\w/])((?:\w+/)?\w+(?:\\_\w+)*\.py)\b", lambda match: f"`{match[0]}`".replace("\\", ""), text)
    return re.sub(r"docs/([\w/]+)\.md", r"[\1](../\1.md)", text.replace("\\_", "_") if "docs/" in text else text)
