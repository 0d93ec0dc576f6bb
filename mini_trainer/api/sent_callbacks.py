"""Callbacks that the run's processes cannot import: objects, and classes of a script, a notebook's cell or a function.

Each becomes a module of its own for --callbacks, in a folder that lives as long as the run. It holds the source of the
class and of what that uses from the same script, and an object's attributes, pickled.
"""

import __future__

import ast
import base64
import builtins
import dis
import inspect
import linecache
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mini_trainer.api.errors import BadInputError, make_bad_input
from mini_trainer.api.trainer_callbacks import BASES, INSIDE_STEPS, TrainerCallback, is_trainer_callback
from mini_trainer.run.hooks import Callback, check_callback

NO_PICKLE = (pickle.PicklingError, AttributeError, TypeError, RecursionError)
HEAD = """from __future__ import annotations
import base64, pickle
from mini_trainer.api.trainer_callbacks import AsCallback, restore
"""
# The class of --callbacks, under the same name; its objects are like the one that was given.
RESTORED = """
class_that_was_given = {name}


class {name}({base}):
    def __init__(self):
        restored = restore(class_that_was_given, {state!r})
        {taken}
"""


@dataclass(frozen=True)
class SentCallback:
    """A callback's import path; and its module's source, unless the run's processes can import it directly."""

    path: str
    source: str | None = None


def send_callbacks(given: list[Any]) -> list[SentCallback]:
    """Callbacks, in their order; BadInputError for one that cannot be sent."""
    return [send_callback(callback, number) for number, callback in enumerate(given)]


def send_callback(callback: Any, number: int) -> SentCallback:
    if isinstance(callback, str):
        return SentCallback(callback)
    kind = callback if isinstance(callback, type) else type(callback)
    check(callback, kind)
    is_theirs, name, parts = is_trainer_callback(kind), kind.__name__, {}
    if kind is callback and not is_theirs and is_importable(kind):
        return SentCallback(f"{kind.__module__}:{kind.__qualname__}")
    add_part(kind, name, parts)
    if is_theirs or kind is not callback:
        own = {} if kind is callback else vars(callback)
        state = None if kind is callback else pickle_all(own, lambda used: f"{name}: its attribute {used}")
        base = "AsCallback" if is_theirs else name
        taken = "super().__init__(restored)" if is_theirs else "vars(self).update(vars(restored))"
        parts["restored"] = RESTORED.format(name=name, base=base, taken=taken, state=state)
    return SentCallback(f"sent_callback_{number}:{name}", HEAD + "\n".join(parts.values()))


def write_modules(sent: list[SentCallback], folder: Path) -> Path | None:
    """Writes the modules, which only this user may read or change, into `folder`; returns it, None without any."""
    sources = {one.path.partition(":")[0]: one.source for one in sent if one.source is not None}
    for name, source in sources.items():
        path = folder / f"{name}.py"
        path.touch(mode=0o600)
        path.write_text(source, encoding="utf-8")
    return folder if sources else None


def check(callback: Any, kind: type) -> None:
    """BadInputError for something else than a callback, unknown hooks, and those that are called inside of a step."""
    if is_trainer_callback(kind):
        own = {name for base in kind.__mro__ if (base.__module__, base.__name__) not in BASES for name in vars(base)}
        unknown = [name for name in own if name.startswith("on_") and not hasattr(TrainerCallback, name)]
        if unknown:
            raise refuse(kind.__name__, f"{', '.join(sorted(unknown))} is not a hook of TrainerCallback")
        if own & set(INSIDE_STEPS):
            raise refuse(
                kind.__name__, f"{' and '.join(INSIDE_STEPS)} are inside of a step, hooks are called between steps"
            )
        return
    checked = callback
    if kind is not callback and issubclass(kind, Callback):  # restored without its constructor
        checked = type(kind.__name__, (kind,), {"__init__": lambda self: None})
    try:
        check_callback(checked, f"callbacks: {callback!r}")
    except ValueError as error:
        raise make_bad_input(str(error)) from None


def refuse(name: str, reason: str) -> BadInputError:
    return make_bad_input(f"callbacks: {name}: {reason}")


def is_importable(value: Any) -> bool:
    """Whether another process finds a class or function by its module and name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    is_named = isinstance(module, str) and isinstance(name, str) and module != "__main__"
    return is_named and getattr(sys.modules.get(module), name, None) is value


def pickle_all(values: dict[str, Any], describe: Callable[[str], str]) -> str:
    """Values by name, as text; BadInputError with the name of one that the run's processes cannot load."""
    for name, value in values.items():
        try:
            problem = "is of a class that only this script has" if b"__main__" in pickle.dumps(value) else None
        except NO_PICKLE as error:
            problem = f"cannot be pickled ({error})"
        if problem is not None:
            raise make_bad_input(f"callbacks: {describe(name)} {problem}: make it in a hook, or move it to a module")
    return base64.b64encode(pickle.dumps(values)).decode("ascii")


def add_part(value: Any, name: str, parts: dict[str, str]) -> None:
    """Adds lines that define a class or function, after those for the names that its source uses."""
    if is_importable(value):
        parts[name] = f"from {value.__module__} import {value.__qualname__} as {name}"
        return
    source = find_source(value, name)
    parts[name] = ""  # a name may be used by what it uses
    module = vars(sys.modules.get(value.__module__, builtins))
    for used in sorted(list_globals(source)):
        if used in parts:
            continue
        if used not in module:
            raise refuse(name, f"it uses {used}, which the run's processes do not have: define it in its methods")
        add_name(module[used], used, parts, of=name)
    del parts[name]
    parts[name] = source if name == value.__name__ else f"{source}\n{name} = {value.__name__}"


def add_name(value: Any, name: str, parts: dict[str, str], *, of: str) -> None:
    """Adds a line that defines a global name: imports it, or has its source or its value."""
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif is_importable(value) or isinstance(value, type | FunctionType):
        add_part(value, name, parts)
    else:
        pickled = pickle_all({name: value}, lambda used: f"{of}: {used}, which it uses,")
        parts[name] = f"{name} = pickle.loads(base64.b64decode({pickled!r}))[{name!r}]"


def find_source(value: Any, name: str) -> str:
    """The source of a class or function of a script, of a notebook's cell, or inside of a function."""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):  # a class of a cell, whose module has no file
        files = [one.__code__.co_filename for one in vars(value).values() if isinstance(one, FunctionType)]
    for source in map("".join, map(linecache.getlines, files)):
        for node in reversed(ast.parse(source).body):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min((one.lineno for one in node.decorator_list), default=node.lineno)
                return "".join(source.splitlines(keepends=True)[first - 1 : node.end_lineno])
    raise refuse(name, "its source cannot be read: move it to its own module, such as hooks.py, and import it")


def list_globals(source: str) -> set[str]:
    """Names that code looks up outside of itself, without builtins. Annotations are not evaluated."""
    code = compile(source, "<callback>", "exec", flags=__future__.annotations.compiler_flag)
    instructions = [one for part in list_code(code) for one in dis.get_instructions(part)]
    loaded = {one.argval for one in instructions if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    stored = {one.argval for one in instructions if one.opname in ("STORE_GLOBAL", "STORE_NAME")}
    return loaded - stored - vars(builtins).keys()


def list_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from list_code(constant)
