"""Reference pages of all options of all commands, generated from the options' declarations and checks."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from mini_trainer.__main__ import PROGRAMS
from mini_trainer.options import flag_name, group_options, iterate_fields, list_types
from mini_trainer.options.fields import iterate_literals, list_groups, name_type
from mini_trainer.options.help import read_helps
from mini_trainer.options.problems.finding import find_wrong_options

ROOT = Path(__file__).resolve().parents[2]
# Values with which each command could start.
EXAMPLES: dict[str, dict[str, Any]] = {
    "train": dict(model_name_or_path="M", data_path="chats.arrow", output_dir="runs/a", max_steps=100),
    "process-data": dict(model_name_or_path="M", input_file="chats.jsonl", output_file="chats.arrow"),
    "generate": dict(model="M", prompts="questions.jsonl", output="answers.jsonl"),
    "evaluate": dict(model="M", data="chats.arrow", output_dir="compared"),
    "score-data": dict(model_name_or_path="M", data_path="chats.arrow"),
    "continual": dict(paths="tasks.yaml"),
    "sweep": dict(config_file="sweep.yaml"),
    "plot-metrics": dict(runs="runs/a", output="curves.html"),
    "verify": dict(path="chats.arrow"),
    "merge-adapter": dict(adapter="runs/a", output_dir="merged"),
    "export-gguf": dict(model_name_or_path="M", output="model.gguf"),
    "board": dict(folder="runs"),
    "import-config": dict(config_file="axolotl.yaml"),
    "serve": dict(model="M"),
    "export": dict(run="runs/a"),
}
COMMANDS: dict[str, type] = {command: PROGRAMS[command].read_options() for command in EXAMPLES}
# Values to try for an option of a type, until one is accepted alone.
TRIED: dict[type, tuple] = {
    int: (1, 2, 3, 8, 100),
    float: (0.5, 0.01, 1.0, 2.0),
    str: ("x", "x.arrow", "x.jsonl", "x.html", "10", "1:30:00", "http://localhost:8000/v1"),
}
# Sources of rows, of which a start has one: what is tried replaces what it would start with.
REPLACING, REPLACEABLE = {"input_file", "input_dataset", "mock_data"}, {"data_path", "input_file"}


def make_pages() -> dict[str, str]:
    """The text of each page, by its file name."""
    pages = {f"{command}.md": describe_command(command) for command in COMMANDS}
    return {"index.md": describe_all()} | pages


def describe_all() -> str:
    """The list of commands, and of all options in alphabetical order."""
    lines = ["# Reference", "", "| `mini-trainer` | |", "| --- | --- |"]
    for command, options_class in COMMANDS.items():
        lines.append(f"| [`{command}`]({command}.md) | {mark_up(options_class.__doc__)} |")
    also = "[exit codes](exit_codes.md), [files](files.md), [metrics](metrics.md), [Python](python.md)"
    lines += ["", f"Also: {also}, [versions](versions.md).", "", "## All options", ""]
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
        lines += describe_option(command, option)
    return "\n".join(lines)


def describe_option(command: str, option: dataclasses.Field) -> list[str]:
    options_class = COMMANDS[command]
    lines = [f"### `{flag_name(option.name)}` {{ #{anchor(option.name)} }}", ""]
    lines += [f"{describe_values(option.type)}; {describe_default(option)}", "{ .values }", ""]
    lines += [mark_up(read_helps(options_class)[option.name]), ""]
    lines += [f"{need}\n" for need in find_needs(command, option)]
    return lines


def describe_values(kind: Any) -> str:
    """The values that an option takes, in words."""
    kinds = [kind for kind in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,))]
    kinds = [kind for kind in kinds if kind is not type(None)]
    words = {str: "text", int: "integer", float: "number", bool: "on or off"}
    shown = []
    for one in kinds:
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


def find_needs(command: str, option: dataclasses.Field) -> list[str]:
    """What the option needs beside what every start of the command needs, found by trying its values.

    Of texts and numbers the value with the fewest objections stands for all; choices may differ.
    """
    if option.default is dataclasses.MISSING:
        return []
    values = [value for value in iterate_values(option.type) if value != option.default]
    refusals = {value: find_refusals(command, {option.name: value}) for value in values}
    if not any(True for _ in iterate_literals(option.type)):
        best = min(values, key=lambda value: len(refusals[value]))
        refusals = {best: refusals[best]}
    needs: dict[str, list[str]] = {}
    for value, problems in refusals.items():
        if problems:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            needs.setdefault(describe_need(command, {option.name: value}, problems), []).append(f"`{shown}`")
    if len(needs) == 1 and sum(map(len, needs.values())) == len(refusals):
        return list(needs)
    return [f"{need} (with {', '.join(shown)})" for need, shown in needs.items()]


def describe_need(command: str, given: dict[str, Any], problems: list[str]) -> str:
    """What makes `given` acceptable: what its problems name, else a choice that solves them, else their own words."""
    named = [match[1] for problem in problems if (match := re.search(r"(?:no effect without|needs) (.*)", problem))]
    if len(named) == len(problems):
        return f"**Needs** {' and '.join(map(mark_up, named))}"
    choices = {}
    for other, kind in list_types(COMMANDS[command]).items():
        tried = [value for value in iterate_literals(kind) if get_origin(kind) is not tuple and other not in given]
        if solving := [value for value in tried if not find_refusals(command, given | {other: value})]:
            choices[other] = " or ".join(f"`{flag_name(other)} {value}`" for value in solving)
    if choices:
        return f"**Needs** {' or '.join(choices.values())}"
    return f"**Alone it is refused:** {'; '.join(map(mark_up, problems))}"


def find_refusals(command: str, given: dict[str, Any]) -> list[str]:
    """Problems with `given` beside what the command needs, which it may also replace."""
    options_class, base = COMMANDS[command], EXAMPLES[command]
    fewer = {name: value for name, value in base.items() if name not in REPLACEABLE or not REPLACING & given.keys()}
    return find_wrong_options(group_options(options_class, **fewer | given))


def iterate_values(kind: Any) -> Iterator[Any]:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for part in args:
            yield from iterate_values(part)
    elif origin is tuple:
        for value in iterate_values(args[0]):
            yield from ((value,), (value, value))
    elif origin is Literal:
        yield from args
    elif kind is bool:
        yield True
        yield False
    elif kind is not type(None):
        yield from TRIED[kind]


def anchor(name: str) -> str:
    return name.replace("_", "-")


def mark_up(text: str) -> str:
    """Help as Markdown: flags and files in code, links to pages, everything else literal."""
    text = re.sub(r"([*_<>\[\]|])", r"\\\1", " ".join(text.split()))
    text = re.sub(r"(?<![\w-])--[a-z][\w-]*(?:\\_[\w]+)*", lambda match: f"`{match[0]}`".replace("\\", ""), text)
    text = re.sub(r"(?<![\w/])((?:\w+/)?\w+(?:\\_\w+)*\.py)\b", lambda match: f"`{match[0]}`".replace("\\", ""), text)
    return re.sub(r"docs/([\w/]+)\.md", r"[\1](../\1.md)", text.replace("\\_", "_") if "docs/" in text else text)
