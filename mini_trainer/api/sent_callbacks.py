"""Callbacks that the run's processes cannot import: objects, and classes of a script, a notebook's cell or a function.

Each becomes a module of its own for --callbacks, in a folder that lives as long as the run. It holds the class or the
object as dill pickles it: with what that uses of the same script.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_trainer.api.errors import BadInputError, make_bad_input
from mini_trainer.api.trainer_callbacks import BASES, INSIDE_STEPS, TrainerCallback, is_trainer_callback
from mini_trainer.run.hooks import Callback, check_callback

# The class of --callbacks, under the name of the one that was given; its objects are like the one that was given.
MODULE = """import dill
from mini_trainer.api.trainer_callbacks import AsCallback

given = dill.loads({pickled!r}, ignore=True)


class {name}({base}):
    def __init__(self):
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
    is_class = isinstance(callback, type)
    kind = callback if is_class else type(callback)
    check(callback, kind)
    is_theirs, name = is_trainer_callback(kind), kind.__name__
    # Whether another process finds the class by its module and name.
    is_importable = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
    if is_class and not is_theirs and kind.__module__ != "__main__" and is_importable:
        return SentCallback(f"{kind.__module__}:{kind.__qualname__}")
    if is_theirs:
        base, taken = "AsCallback", f"super().__init__({'given()' if is_class else 'given'})"
    elif is_class:
        base, taken = "given", "super().__init__()"
    else:
        base, taken = "type(given)", "vars(self).update(vars(given))"
    source = MODULE.format(pickled=pickle(callback, name), name=name, base=base, taken=taken)
    return SentCallback(f"sent_callback_{number}:{name}", source)


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


def pickle(callback: Any, name: str) -> bytes:
    """The class or object; BadInputError if it has, or uses, what the run's processes cannot load."""
    import dill

    try:
        return dill.dumps(callback, recurse=True)
    except Exception as error:  # each type's own code pickles it
        reason = f"cannot be pickled ({type(error).__name__}: {error})"
        raise refuse(name, f"{reason}: make such a value in a hook, or move it to a module") from None
