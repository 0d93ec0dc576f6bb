"""The training log: each step's metrics go to every sink, including a file of JSON lines and the console."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from lifecycle.file_names import METRICS_FILE, VALIDATION_FILE
from lifecycle.time_left import TimeLeft
from ranks.devices import describe_duration
from ranks.ending import log

SECONDS_BETWEEN_LINES = 2.0  # on the console


class Sink:
    """Receives what happens in a run; by default, ignores it. All but callbacks are on rank 0 alone."""

    def write(self, metrics: dict[str, Any]) -> None:
        """Receives the metrics of one step, by name, all JSON-serializable."""

    def write_validation(self, metrics: dict[str, Any]) -> None:
        """Receives the metrics of one validation, after its `step`, or before the first."""

    def write_checkpoint(self, path: Path) -> None:
        """Receives the directory of a complete checkpoint."""

    def write_export(self, path: Path) -> None:
        """Receives the directory of a complete export."""

    def write_end(self, reason: str | None) -> None:
        """Receives why the run was stopped, after its last checkpoint and export; None: it is done."""

    def flush_to_disk(self) -> None:
        """Makes everything written durable before a checkpoint of the same steps."""

    def close(self) -> None:
        """Called once all sinks have received the end."""


class TrainingLog(Sink):
    """Passes everything to all sinks."""

    def __init__(self, sinks: list[Sink]):
        self.sinks = sinks

    def write(self, metrics: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(metrics)

    def write_validation(self, metrics: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write_validation(metrics)

    def write_checkpoint(self, path: Path) -> None:
        for sink in self.sinks:
            sink.write_checkpoint(path)

    def write_export(self, path: Path) -> None:
        for sink in self.sinks:
            sink.write_export(path)

    def write_end(self, reason: str | None) -> None:
        for sink in self.sinks:
            sink.write_end(reason)

    def flush_to_disk(self) -> None:
        for sink in self.sinks:
            sink.flush_to_disk()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class MetricsFile(Sink):
    """A JSON line per step, and in a separate file one per validation.

    A run that resumes after `first_step` steps and `num_validations` keeps their lines and removes later ones.
    """

    def __init__(self, output_dir: Path, *, first_step: int, num_validations: int):
        path = output_dir / METRICS_FILE
        num_kept = keep_steps(path, first_step)
        if num_kept < first_step:
            log.warning(f"warning: {path}: the lines of steps {num_kept + 1} to {first_step} are missing")
        self.file = path.open("a", encoding="utf-8")
        self.validation_file, self.validation_path = None, output_dir / VALIDATION_FILE
        keep_lines(self.validation_path, num_validations)

    def write(self, metrics: dict[str, Any]) -> None:
        """OSError naming the file if it cannot be written."""
        write_line(metrics, self.file)

    def write_validation(self, metrics: dict[str, Any]) -> None:
        if self.validation_file is None:
            self.validation_file = self.validation_path.open("a", encoding="utf-8")
        write_line(metrics, self.validation_file)

    def flush_to_disk(self) -> None:
        for file in self.files:
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self.files:
            file.close()

    @property
    def files(self) -> list[TextIO]:
        return [file for file in (self.file, self.validation_file) if file is not None]


class Console(Sink):
    """Prints every validation, the first and last steps, and in between one every `SECONDS_BETWEEN_LINES`.

    `shown`: names of a validation's metrics for its line.
    """

    def __init__(self, time_left: TimeLeft, *, shown: Sequence[str]):
        self.time_left, self.shown = time_left, shown
        self.last_shown = time.monotonic()
        self.validation: dict[str, Any] = {}  # loss of the newest validation, and the step after which it was

    def write(self, metrics: dict[str, Any]) -> None:
        now, step = time.monotonic(), metrics["step"]
        first_step, num_steps, left = (
            self.time_left.first_step,
            self.time_left.num_steps,
            self.time_left.after(step, now),
        )
        if step in (first_step + 1, num_steps) or now - self.last_shown >= SECONDS_BETWEEN_LINES:
            self.last_shown = now
            log.info(describe_step(metrics | self.validation, num_steps=num_steps, seconds_left=left))

    def write_validation(self, metrics: dict[str, Any]) -> None:
        self.time_left.validation_done(metrics["seconds"])
        if metrics["step"] > 0:  # the untrained model's has its own line
            self.validation = {"validation_loss": metrics["loss"], "validation_step": metrics["step"]}
        log.info(describe_validation(metrics, self.shown))


def write_line(metrics: dict[str, Any], file: TextIO) -> None:
    """OSError naming the file if it cannot be written."""
    try:
        print(json.dumps(metrics), file=file, flush=True)
    except OSError as error:
        raise OSError(f"cannot write {file.name}: {error}") from None


def keep_lines(path: Path, count: int) -> None:
    """Truncates a file after its first `count` lines, if it exists."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(sum(len(line) for line, _ in zip(file, range(count), strict=False)))


def keep_steps(path: Path, num_steps: int) -> int:
    """Truncates a metrics file after the line of step `num_steps`, or the last before it; returns that line's step.

    Later lines are from after the checkpoint, or incomplete.
    """
    end, last_step = 0, 0
    if path.exists():
        with path.open("rb+") as file:
            for line in file:
                try:
                    step = json.loads(line)["step"] if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError, RecursionError):
                    step = None
                if step != last_step + 1 or step > num_steps:
                    break
                end, last_step = end + len(line), step
            file.truncate(end)
    return last_step


def describe_step(metrics: dict[str, Any], *, num_steps: int | None, seconds_left: float | None) -> str:
    """The console's line for a step, with the time left if that is known."""
    shown = {name: metrics[name] for name in ("step", "epoch", "loss", "lr", "grad_norm")}
    line = "step {step}{end}  epoch {epoch:.2f}  loss {loss:.4f}  lr {lr:.2e}  grad_norm {grad_norm:.3f}".format(
        **shown, end="" if num_steps is None else f"/{num_steps}"
    )
    line += f"  {metrics['tokens_per_second']:,.0f} tokens/s"
    if "validation_loss" in metrics:
        line += f"  validation {metrics['validation_loss']:.4f} (step {metrics['validation_step']})"
    if metrics["mfu"] is not None:
        line += f"  mfu {metrics['mfu']:.1%}"
    if seconds_left is not None:
        line += f"  left {describe_duration(seconds_left)}"
    return line


def format_metric(name: str, value: float) -> str:
    """A validation's number as text: shares in percent."""
    if name.endswith(("accuracy", "accuracies")):
        return f"{value:.2%}"
    return f"{value:.3f}" if name == "perplexity" else f"{value:.4f}"


def describe_validation(metrics: dict[str, Any], shown: Sequence[str]) -> str:
    """The console's line for a validation, with the `shown` metrics; each set's loss if there are several."""
    numbers = {name: metrics[name] for name in shown if metrics.get(name) is not None}
    line = f"validation after step {metrics['step']}: "
    line += "  ".join(f"{name.replace('_', ' ')} {format_metric(name, value)}" for name, value in numbers.items())
    if metrics["is_best"]:
        line += "  best so far"
    if len(metrics["sets"]) > 1:
        line += "".join(f"\n  {name}: loss {scores['loss']:.4f}" for name, scores in metrics["sets"].items())
    return line
