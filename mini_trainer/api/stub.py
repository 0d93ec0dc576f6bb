"""Makes arguments.pyi, which shows editors and type checkers the fields that `arguments` makes at run time.

    python -m mini_trainer.api.stub

Each field has the type of its option, widened by what `api.commands` accepts beside it, and the option's help.
"""

import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from mini_trainer.api import arguments
from mini_trainer.options import TrainOptions
from mini_trainer.options.foreign_names import find_option, find_row
from mini_trainer.options.help import read_class_helps, read_helps
from mini_trainer.options.tools import ProcessDataOptions

STUB = Path(arguments.__file__).with_suffix(".pyi")
GENERATED = {arguments.TrainingArgs: TrainOptions, arguments.DataProcessArgs: ProcessDataOptions}
WIDTH = 112  # of help texts
HEADER = '''"""Made by `python -m mini_trainer.api.stub`: types of arguments.py for editors and type checkers."""

import dataclasses
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal

from mini_trainer.options import OSFTOptions'''


def make_stub() -> str:
    """The text of arguments.pyi: that of arguments.py, with all fields in the classes that have the options'."""
    source = inspect.getsource(arguments)
    parts = [HEADER]
    for node in ast.parse(source).body[1:]:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
            continue
        args = getattr(arguments, node.name) if isinstance(node, ast.ClassDef) else None
        if args in GENERATED:
            parts.append(render_class(node, args, GENERATED[args]))
        else:
            first = min((one.lineno for one in getattr(node, "decorator_list", [])), default=node.lineno)
            parts.append("\n".join(source.splitlines()[first - 1 : node.end_lineno]))
    return "\n\n".join(parts) + "\n"


def render_class(node: ast.ClassDef, args: type, options_class: type) -> str:
    helps = read_helps(options_class)
    own = read_class_helps(node.body)
    lines = ["@dataclass(kw_only=True)", f"class {node.name}:", quote(ast.get_docstring(node))]
    for field in dataclasses.fields(args):
        told = own.get(field.name) or helps.get(field.name) or describe_foreign(field.name, helps)
        kind = " | ".join(dict.fromkeys(list_alternatives(field.type)))
        lines += [f"    {field.name}: {kind} = ...", quote(told)]
    return "\n".join(lines)


def describe_foreign(name: str, helps: dict[str, str]) -> str:
    option = find_option(name, helps)
    return f"No effect, or refused: {find_row(name).reason}." if option is None else f"`{option}`: {helps[option]}"


def list_alternatives(kind: Any) -> list[str]:
    """The type's parts as source. Options of text take paths, and those of several values take one, or a list."""
    if get_origin(kind) in (Union, UnionType):
        return [name for part in get_args(kind) for name in list_alternatives(part)]
    if get_origin(kind) is tuple:
        parts = [part for part in get_args(kind) if part is not ...]
        items = [name for part in parts for name in list_alternatives(part)]
        item = " | ".join(dict.fromkeys(items))
        rest = [f"tuple[{item}, ...]", f"list[{item}]"]
        return [*items, *rest] if get_args(kind)[-1] is ... else rest
    if get_origin(kind) is type:
        return [f"type[{get_args(kind)[0].__name__}]"]
    if kind is str:
        return ["str", "Path"]
    if kind is type(None):
        return ["None"]
    return [kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")]


def quote(text: str) -> str:
    """A docstring of a class or field, folded and indented."""
    paragraphs = [textwrap.fill(part, WIDTH) for part in text.split("\n\n")]
    return textwrap.indent('"""' + "\n\n".join(paragraphs) + '"""', "    ")


if __name__ == "__main__":
    STUB.write_text(make_stub(), encoding="utf-8")
