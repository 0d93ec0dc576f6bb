"""Callbacks: the base class for --callbacks, and the answers of their hooks (docs/reference/callbacks.md)."""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

FOLDERS = "MINI_TRAINER_CALLBACK_FOLDERS"  # environment variable, by `run_training`: where its callbacks' modules are
# Hooks of InstructLab's trainer, Red Hat's mini_trainer and training_hub -> ours; the others have no counterpart.
NAMES_ELSEWHERE = {
    "on_train_begin": "on_start",
    "on_step_end": "on_step",
    "on_log": "on_step",
    "on_evaluate": "on_validation",
    "on_save": "on_export, or on_checkpoint for the state to resume from",
    "on_epoch_end": "on_step, whose metrics have the epoch",
    "on_train_end": "on_end",
}


class Answer(IntFlag):
    """Requests of a hook, combined with `|`. All ranks act on them together, at the end of the next step."""

    CONTINUE = 0
    SAVE = 1  # write a checkpoint
    EXPORT = 2  # export the model
    STOP = 4  # write a checkpoint and end the run, as a stop file does


@dataclass(frozen=True)
class StartedRun:
    """The run, as `Callback.on_start` receives it."""

    output_dir: Path
    options: Mapping[str, Any]  # every option by name
    first_step: int  # steps completed before this start; 0 unless it resumes
    num_steps: int | None  # of the whole run; None: no end
    rank: int
    world_size: int


class Callback:
    """Base class of callbacks: override the hooks that you need.

    A subclass is given by its import path (`--callbacks package.module:Class`), and its constructor takes no arguments.
    Hooks are called on rank 0, between steps: training waits. They receive copies, which cannot change the run, and
    return an `Answer`, or None to continue. Paths are those of complete directories.
    """

    on_all_ranks: bool = False
    """Whether every rank has an object of this class, and calls its hooks; an answer of any rank counts."""

    def on_start(self, run: StartedRun) -> Answer | None:
        """Called before the first step of each start, once the model is built; `run.first_step` shows a resume."""

    def on_step(self, metrics: Mapping[str, Any]) -> Answer | None:
        """Called after each step, with its line of training_metrics_0.jsonl (docs/reference/metrics.md).
        Other ranks receive the same numbers, except for times and what is computed from them, which are their own."""

    def on_validation(self, metrics: Mapping[str, Any]) -> Answer | None:
        """Called after each validation, with its line of validation_metrics_0.jsonl (docs/reference/validation.md)."""

    def on_checkpoint(self, path: Path) -> Answer | None:
        """Called when a checkpoint is complete; with --async-checkpoint, some steps after its own."""

    def on_export(self, path: Path) -> Answer | None:
        """Called when an export is complete: hf_format/samples_N, average_samples_N or best."""

    def on_end(self, reason: str | None) -> None:
        """Called at the end, after the last checkpoint and export; not if the run ends with an error.
        `reason` says why the run was stopped; None: it is done."""


HOOKS = tuple(name for name in vars(Callback) if inspect.isfunction(getattr(Callback, name)))


def check_callback(given: Any, name: str) -> None:
    """ValueError that begins with `name` unless `given` is a class whose hooks a run can call."""
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, Callback):
        raise ValueError(
            f"{name}: is not derived from mini_trainer.Callback (docs/tasks/coming_from.md has the names of other"
            " trainers' hooks)"
        )
    if given is not kind:
        raise ValueError(f"{name}: is an object: give its class, {kind.__name__}, of which each rank makes its own")
    if unknown := sorted(hook for hook in dir(given) if hook.startswith("on_") and hook not in dir(Callback)):
        raise ValueError(f"{name}: {'; '.join(map(describe_unknown_hook, unknown))}; hooks are {', '.join(HOOKS)}")
    if all(getattr(given, hook) is getattr(Callback, hook) for hook in HOOKS):
        raise ValueError(f"{name}: overrides no hook; hooks are {', '.join(HOOKS)}")
    try:
        inspect.signature(given).bind()
    except TypeError as error:
        raise ValueError(
            f"{name}: its constructor needs arguments ({error}): derive a class whose constructor takes none, or read"
            " the environment or a file in it"
        ) from None


def describe_unknown_hook(hook: str) -> str:
    """Message for a name that is not a hook's, with the closest one."""
    close = difflib.get_close_matches(hook, HOOKS, n=1)
    if hook in NAMES_ELSEWHERE:
        return f"{hook} is {NAMES_ELSEWHERE[hook]} here"
    return f"{hook} is not a hook{f', did you mean {close[0]}?' if close else ''}"
