"""Callbacks (--callbacks) as a sink: importing the classes, calling their hooks, and their answers as the step's flags.

A callback is named by its import path, package.module:Class (docs/reference/callbacks.md).
"""

import copy
import importlib
import importlib.util
import itertools
import os
import pkgutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mini_trainer.distributed.ending import FLAG_NAMES, ExitCode, Flag, RunError, log
from mini_trainer.distributed.messages import describe_error
from mini_trainer.distributed.watch import RunControl
from mini_trainer.distributed.world import World, call_on_rank0, gather_on_rank0
from mini_trainer.options.command_line import suggest
from mini_trainer.run.hooks import FOLDERS, Answer, Callback, StartedRun, check_callback
from mini_trainer.run.training_log import Sink

FLAGS = {"SAVE": Flag.CHECKPOINT_DUE, "EXPORT": Flag.EXPORT_DUE, "STOP": Flag.CALLBACK_STOP}  # by the answer's name

Classes = Mapping[str, type[Callback]]  # by import path
Stop = tuple[ExitCode, str]


def load_callbacks(paths: Sequence[str]) -> Classes:
    """Imports the classes; ValueError with all problems. Modules are also looked for in the current directory."""
    folders = [os.getcwd(), *filter(None, os.environ.get(FOLDERS, "").split(os.pathsep))]
    sys.path += [folder for folder in folders if folder not in sys.path]
    classes, problems = {}, []
    for path in paths:
        try:
            classes[path] = find_class(path)
            check_callback(classes[path], f"--callbacks {path}")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n  ".join(problems))
    return classes


def find_class(path: str) -> Any:
    """Imports the module of `path` and looks up the class; ValueError if that fails."""
    name, _, parts = path.partition(":")
    try:
        found = module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            hint = suggest(error.name, (module.name for module in pkgutil.iter_modules([os.getcwd()])))
            raise ValueError(
                f"--callbacks {path}: there is no module {error.name} in the current directory, on PYTHONPATH or among"
                f" the installed packages{hint}"
            ) from None
        raise ValueError(f"--callbacks {path}: {name} cannot be imported: {describe_raised(error)}") from None
    for part in parts.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"--callbacks {path}: {getattr(module, '__file__', name)} has no {parts}{suggest(part, vars(found))}"
            )
        found = getattr(found, part)
    return found


def describe_raised(error: BaseException) -> str:
    """The exception, and the line that raised it; a syntax error says that by itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({frame.filename}, line {frame.lineno})"
    return f"{describe_error(error)}{place}"


class Callbacks(Sink):
    """Calls the hooks of this rank's callbacks, and collects their answers and errors.
    A callback that has raised is not called again, and `take_flags` ends the run."""

    def __init__(self, classes: Classes, control: RunControl, run: StartedRun):
        """Makes the objects and calls `on_start`; ValueError or RunError if that fails."""
        self.control, self.step = control, run.first_step
        self.callbacks: dict[str, Callback] = {}
        self.pending: list[tuple[str, Answer]] = []  # since the last step's reduction: callbacks and their requests
        self.asked: list[str] = []  # callbacks that asked for a stop
        self.failed: list[str] = []  # callbacks that raised
        for path, made in classes.items():
            if run.rank == 0 or made.on_all_ranks:
                try:
                    self.callbacks[path] = made()
                except (Exception, SystemExit) as error:
                    raise ValueError(f"--callbacks {path}: its constructor raised {describe_raised(error)}") from None
        self._call("on_start", run)
        if self.failed:
            raise RunError(ExitCode.FAILED, f"{FLAG_NAMES[Flag.CALLBACK_FAILED]} ({self.failed[0]}); no step was taken")

    def write(self, metrics: dict[str, Any]) -> None:
        self.step = metrics["step"]
        self._call("on_step", metrics)

    def write_validation(self, metrics: dict[str, Any]) -> None:
        self._call("on_validation", metrics)

    def write_checkpoint(self, path: Path) -> None:
        self._call("on_checkpoint", path)

    def write_export(self, path: Path) -> None:
        self._call("on_export", path)

    def write_end(self, reason: str | None) -> None:
        self._call("on_end", reason)
        missed = {"EXPORT"} if reason is not None else {"EXPORT", "SAVE"}  # a run that is stopped is saved
        late = [f"{who} asked for {answer.name}" for who, answer in self.pending if answer.name in missed]
        if late:
            log.warning(f"warning: too late, since answers need another step: {'; '.join(late)}")

    def take_flags(self) -> int:
        """This rank's flags for the step's reduction: the answers and errors since the last one."""
        flags = Flag(0)
        for who, answer in self.pending:
            flags |= FLAGS[answer.name]
            self.asked += [who] if answer.name == "STOP" else []
        self.pending = []
        return flags | (Flag.CALLBACK_FAILED if self.failed else 0)

    def explain(self, stop: Stop | None, world: World) -> Stop | None:
        """Adds to a stop which callbacks are behind it. RunError if the run is done and one has raised. Collective."""
        prefix = f"rank {world.rank}: " if world.rank else ""
        failed = gather_on_rank0(world, [f"{prefix}{who}" for who in self.failed])
        asked = gather_on_rank0(world, [f"{prefix}{who}" for who in self.asked])
        return call_on_rank0(world, lambda: explain_stop(stop, [*itertools.chain(*failed)], [*itertools.chain(*asked)]))

    def _call(self, hook: str, argument: Any) -> None:
        for path, callback in list(self.callbacks.items()):
            received = MappingProxyType(copy.deepcopy(argument)) if isinstance(argument, dict) else argument
            who = f"{path}, {hook} after step {self.step}"
            with self.control.slow(f"{hook} of the callback {path}"):
                try:
                    answer = getattr(callback, hook)(received)
                    if answer is not None and not isinstance(answer, Answer):
                        raise TypeError(f"a hook returned {answer!r}: must be None or a mini_trainer.Answer")
                    self.pending += [(who, one) for one in answer or ()]
                except (Exception, SystemExit) as error:  # of which the log gets the whole traceback, on any rank
                    trace = "".join(traceback.format_exception(error)).rstrip()
                    log.error(f"the callback {who} raised; the run ends after the next step\n{trace}")
                    self.failed.append(f"{who}: {describe_raised(error)}")
                    del self.callbacks[path]


def explain_stop(stop: Stop | None, failed: list[str], asked: list[str]) -> Stop | None:
    """The stop with the names of callbacks; one that has raised makes it a failure."""
    failure = FLAG_NAMES[Flag.CALLBACK_FAILED]
    if stop is None:
        if failed:
            raise RunError(ExitCode.FAILED, f"the run is done, but there was {failure} ({'; '.join(failed)})")
        return None
    code, reason = stop
    if failed and code != ExitCode.FAILED:  # it raised after the last step's reduction
        code, reason = ExitCode.FAILED, f"{reason} and {failure}"
    names = failed or asked
    return code, f"{reason} ({'; '.join(names)})" if names else reason
