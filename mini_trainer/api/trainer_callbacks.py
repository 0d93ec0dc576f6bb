"""Red Hat's and InstructLab's callbacks: their base class, the context that their hooks get, and how ours call them.

`AsCallback` is the callback of a run that holds one of theirs. Hooks are called between steps, on every rank.
"""

import asyncio
import base64
import inspect
import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from mini_trainer.distributed.ending import log
from mini_trainer.run.hooks import Callback, StartedRun

BASES = {
    ("mini_trainer.api.trainer_callbacks", "TrainerCallback"),
    ("instructlab.training.callbacks", "TrainerCallback"),
}
INSIDE_STEPS = ("on_before_forward", "on_after_backward")


@dataclass
class TrainingContext:
    """A snapshot of the run; losses and rates are of the last step."""

    hook_name: str = ""
    step: int = 0
    epoch: int = 0  # that the step belongs to, from 0
    total_samples: int = 0
    total_tokens: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    batch_metrics: dict[str, Any] = field(default_factory=dict)
    val_metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint_path: str | None = None  # in `on_save`: the export
    output_dir: str = ""
    model_name_or_path: str = ""
    training_mode: str = ""
    max_epochs: int = 0
    max_steps: int = 0
    max_tokens: int = 0
    world_size: int = 1
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


class TrainerCallback:
    """Base class: override the hooks that you need; each gets a `TrainingContext` and returns nothing, or awaits."""

    def on_train_begin(self, context: TrainingContext) -> None: ...
    def on_epoch_begin(self, context: TrainingContext) -> None: ...
    def on_step_begin(self, context: TrainingContext) -> None: ...
    def on_before_forward(self, context: TrainingContext) -> None: ...
    def on_after_backward(self, context: TrainingContext) -> None: ...
    def on_pre_optimizer_step(self, context: TrainingContext) -> None: ...
    def on_optimizer_step(self, context: TrainingContext) -> None: ...
    def on_log(self, context: TrainingContext) -> None: ...
    def on_evaluate(self, context: TrainingContext) -> None: ...
    def on_save(self, context: TrainingContext) -> None: ...
    def on_step_end(self, context: TrainingContext) -> None: ...
    def on_epoch_end(self, context: TrainingContext) -> None: ...
    def on_train_end(self, context: TrainingContext) -> None: ...


def is_trainer_callback(kind: type) -> bool:
    """Whether a class is derived from this base class or InstructLab's, which is not imported to find out."""
    return any((base.__module__, base.__name__) in BASES for base in kind.__mro__[1:])


def serialize_callback(callback: TrainerCallback) -> str:
    """The source of its class, in base64."""
    return base64.b64encode(textwrap.dedent(inspect.getsource(type(callback))).encode()).decode("ascii")


def deserialize_callback(encoded: str) -> TrainerCallback:
    """Makes an object of the one class in a text of `serialize_callback`, which is executed."""
    names: dict[str, Any] = {"TrainerCallback": TrainerCallback, "TrainingContext": TrainingContext}
    text = base64.b64decode(encoded).decode()
    exec(text, names)
    found = [kind for kind in names.values() if isinstance(kind, type) and is_trainer_callback(kind)]
    if len(found) != 1:
        raise ValueError(f"expected the source of one class derived from TrainerCallback, found {len(found)}:\n{text}")
    return found[0]()


class AsCallback(Callback):
    """Calls the hooks of `callback`. Their exceptions are logged, and end nothing."""

    on_all_ranks: ClassVar[bool] = True

    def __init__(self, callback: TrainerCallback):
        self.callback, self.context = callback, TrainingContext()
        self.num_steps: int | None = None
        self.num_epochs: int | None = None  # completed so far; None until the first step after a start

    def on_start(self, run: StartedRun) -> None:
        ends = {name: run.options[name] or 0 for name in ("max_epochs", "max_steps", "max_tokens")}
        modes = [name.removeprefix("max_").removesuffix("s") for name, end in ends.items() if end]
        self.num_steps = run.num_steps
        self.context = TrainingContext(
            step=run.first_step,
            output_dir=str(run.output_dir),
            model_name_or_path=run.options["model_name_or_path"],
            training_mode=next(iter(modes), "infinite"),
            world_size=run.world_size,
            is_local_process_zero=os.environ.get("LOCAL_RANK", "0") == "0",
            is_world_process_zero=run.rank == 0,
            **ends,
        )
        self._call("on_train_begin", *(() if run.first_step else ("on_epoch_begin",)), "on_step_begin")

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        before = max(0, math.ceil(metrics["epoch"]) - 1) if self.num_epochs is None else self.num_epochs
        self.num_epochs = math.floor(metrics["epoch"])
        self.context = replace(
            self.context,
            step=metrics["step"],
            epoch=before,
            total_samples=metrics["total_samples_accumulated"],
            total_tokens=metrics["total_tokens_accumulated"],
            loss=metrics["loss"],
            learning_rate=metrics["lr"],
            grad_norm=metrics["grad_norm"],
            batch_metrics=dict(metrics),
        )
        self._call("on_pre_optimizer_step", "on_optimizer_step", "on_log", "on_step_end")
        begins = () if metrics["step"] == self.num_steps else ("on_step_begin",)
        if self.num_epochs > before:
            self._call("on_epoch_end")
            begins = ("on_epoch_begin", *begins) if begins else ()
        self.context = replace(self.context, epoch=self.num_epochs if begins else before)
        self._call(*begins)

    def on_validation(self, metrics: Mapping[str, Any]) -> None:
        self.context = replace(self.context, val_metrics={**metrics, "val_loss": metrics.get("loss")})
        self._call("on_evaluate")

    def on_export(self, path: Path) -> None:
        self.context = replace(self.context, checkpoint_path=str(path))
        self._call("on_save")

    def on_end(self, reason: str | None) -> None:
        self._call("on_train_end")

    def _call(self, *hooks: str) -> None:
        for hook in hooks:
            try:
                returned = getattr(self.callback, hook)(replace(self.context, hook_name=hook))
                if inspect.iscoroutine(returned):
                    asyncio.run(returned)
            except Exception:
                log.exception(f"{type(self.callback).__name__}.{hook} raised after step {self.context.step}; ignored")
