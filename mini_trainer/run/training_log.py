"""The training log: each step's metrics go to every sink: a file of JSON lines, the console, a terminal's live line."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from tqdm import tqdm

from mini_trainer.data.stores.disk import sync_file, written_aside
from mini_trainer.distributed.devices import describe_duration
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import describe_numbers
from mini_trainer.options.reading import open_own, read_metrics
from mini_trainer.run.file_names import METRICS_FILE, VALIDATION_FILE

NUM_WARM_UP_STEPS = 3  # may compile, and fill caches and the allocator's memory
NUM_STEPS_MEASURED, SECONDS_MEASURED = 5, 30.0  # either is enough for an estimate


class TimeLeft:
    """Estimates the time to a run's end from its steps after the warm-up, with validations, checkpoints and exports."""

    def __init__(self, *, first_step: int, num_steps: int | None):
        self.first_step, self.num_steps = first_step, num_steps
        self.measured_from: float | None = None  # the end of the warm-up

    def after(self, step: int, now: float) -> float | None:
        """Seconds to the end of the run at the end of `step`; None for a run without an end, and until enough is known.
        `now`: seconds on a clock that never goes back. Every step has to be reported."""
        num_measured = step - self.first_step - NUM_WARM_UP_STEPS
        if self.num_steps is None or num_measured < 0:
            return None
        if self.measured_from is None:
            self.measured_from = now
        seconds = now - self.measured_from
        if num_measured == 0 or (num_measured < NUM_STEPS_MEASURED and seconds < SECONDS_MEASURED):
            return None
        return (self.num_steps - step) * seconds / num_measured


SECONDS_BETWEEN_LINES = 2.0  # on the console


class Sink:
    """Receives what happens in a run; by default, ignores it. All but callbacks are on rank 0 alone."""

    def write(self, metrics: dict[str, Any]) -> None:
        """Receives the metrics of one step, by name, all JSON-serializable."""

    def write_validation(self, metrics: dict[str, Any]) -> None:
        """Receives the metrics of one validation, after its `step`, or before the first."""

    def write_samples(self, rows: list[dict[str, Any]]) -> None:
        """Receives the answers to --sample-prompts at a validation, after its metrics."""

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


def to_all(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook of the log that passes on to every sink what it receives."""

    def pass_on(log: "TrainingLog", *received: Any) -> None:
        for sink in log.sinks:
            getattr(sink, hook.__name__)(*received)

    return pass_on


class TrainingLog(Sink):
    """Passes everything to all sinks."""

    def __init__(self, sinks: list[Sink]):
        self.sinks = sinks
        self.has_warned = False  # of a batch without targets

    def write(self, metrics: dict[str, Any]) -> None:
        if metrics["num_loss_counted_tokens"] == 0 and not self.has_warned:
            self.has_warned = True
            log.warning(
                f"warning: in the {metrics['num_samples']} samples of step {metrics['step']} nothing is trained: its"
                " loss and gradient are 0 (only the first such step is reported)"
            )
        for sink in self.sinks:
            sink.write(metrics)

    write_validation, write_samples = to_all(Sink.write_validation), to_all(Sink.write_samples)
    write_checkpoint, write_export = to_all(Sink.write_checkpoint), to_all(Sink.write_export)
    write_end, flush_to_disk, close = to_all(Sink.write_end), to_all(Sink.flush_to_disk), to_all(Sink.close)


class MetricsFile(Sink):
    """A JSON line per step, and in a separate file one per validation.
    A run that resumes after `first_step` steps and `num_validations` keeps their lines and removes later ones."""

    def __init__(self, output_dir: Path, *, first_step: int, num_validations: int):
        path = output_dir / METRICS_FILE
        missing = sorted(set(range(1, first_step + 1)).difference(keep_rows(path, last_step=first_step)))
        if missing:  # the checkpoint has their updates
            log.warning(f"warning: {path}: the lines of {describe_numbers('step', missing)} are missing")
        self.file = open_own(path, "a")
        self.validation_file: IO[Any] | None = None
        self.validation_path = output_dir / VALIDATION_FILE
        num_kept = len(keep_rows(self.validation_path, last_step=first_step, most=num_validations))
        if num_kept < num_validations:
            log.warning(
                f"warning: {self.validation_path}: {num_validations - num_kept} of {num_validations} validations before"
                f" step {first_step + 1} are missing"
            )

    def write(self, metrics: dict[str, Any]) -> None:
        """OSError naming the file if it cannot be written."""
        write_line(metrics, self.file)

    def write_validation(self, metrics: dict[str, Any]) -> None:
        if self.validation_file is None:
            self.validation_file = open_own(self.validation_path, "a")
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
    """Prints every validation, the first and last steps, and in between one every `SECONDS_BETWEEN_LINES`. `shown`:
    names of a validation's metrics for its line. `max_epochs`: the highest epoch to show, since the last batch is
    filled up from the next epoch; the metrics files have the exact number."""

    def __init__(self, time_left: TimeLeft, *, shown: Sequence[str], max_epochs: int | None = None):
        self.time_left, self.shown = time_left, shown
        self.max_epochs = math.inf if max_epochs is None else max_epochs
        self.last_shown = time.monotonic()
        self.validation: dict[str, Any] = {}  # loss of the newest validation, and the step after which it was

    def write(self, metrics: dict[str, Any]) -> None:
        now, step = time.monotonic(), metrics["step"]
        first_step, num_steps = self.time_left.first_step, self.time_left.num_steps
        left = self.time_left.after(step, now)
        if step in (first_step + 1, num_steps) or now - self.last_shown >= SECONDS_BETWEEN_LINES:
            self.last_shown = now
            shown = metrics | self.validation | {"epoch": min(metrics["epoch"], self.max_epochs)}
            log.info(describe_step(shown, num_steps=num_steps, seconds_left=left))

    def write_validation(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] > 0:  # the untrained model's has its own line
            self.validation = {"validation_loss": metrics["loss"], "validation_step": metrics["step"]}
        log.info(describe_validation(metrics, self.shown))


def write_line(metrics: dict[str, Any], file: TextIO) -> None:
    """OSError naming the file if it cannot be written."""
    try:
        print(json.dumps(metrics), file=file, flush=True)
    except OSError as error:
        raise OSError(f"cannot write {file.name}: {error}") from None


def keep_rows(path: Path, *, last_step: int, most: int | None = None) -> list[int]:
    """Removes from a metrics file the lines after `last_step`, or after `most` lines, written after the checkpoint, and
    damaged ones, with a warning. Returns the steps of the others."""
    steps, damaged, late = [-1], [], []  # the steps kept, and the numbers of the other lines
    size, is_prefix = 0, True  # bytes of the lines kept, and whether these are the first ones
    for number, line, row in read_metrics(path):
        if len(steps) - 1 + len(damaged) == most or (row is not None and row["step"] > last_step):
            late.append(number)
        elif row is None or row["step"] <= steps[-1]:
            damaged.append(number)
        else:
            steps.append(row["step"])
            size, is_prefix = size + len(line), not (damaged or late)
    if damaged:
        said = "is damaged, or repeats an earlier step" if len(damaged) == 1 else "are damaged, or repeat earlier steps"
        log.warning(f"warning: {path}: {describe_numbers('line', damaged)} {said}: removed")
    if not is_prefix:
        removed = {*damaged, *late}
        with written_aside(path) as (aside,):
            with open_own(aside, "wb") as file:
                file.writelines(line for number, line, _ in read_metrics(path) if number not in removed)
            sync_file(aside)
    elif path.exists():
        os.truncate(path, size)  # also of an incomplete line
    return steps[1:]


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


class LiveLine(Sink):
    """A progress bar with loss, validation loss, tokens/s and time left."""

    def __init__(self, time_left: TimeLeft, *, shown: Sequence[str]):
        ends = time_left.num_steps is not None
        shape = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt}" if ends else "{n_fmt}"
        self.bar = tqdm(
            initial=time_left.first_step,
            total=time_left.num_steps,
            bar_format=f"step {shape}{{postfix}}",
            dynamic_ncols=True,
        )
        self.time_left, self.shown = time_left, shown  # `shown`: names of a validation's metrics for its line
        self.parts: dict[str, str] = {}  # of the live line, by name, in their order

    def write(self, metrics: dict[str, Any]) -> None:
        self.show("loss", f"loss {metrics['loss']:.4f}")
        self.show("speed", f"{metrics['tokens_per_second']:,.0f} tokens/s")
        if (left := self.time_left.after(metrics["step"], time.monotonic())) is not None:
            self.show("left", f"left {describe_duration(left)}")
        self.bar.update()

    def write_validation(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] > 0:  # the untrained model's has its own line
            self.show("validation", f"validation {metrics['loss']:.4f} (step {metrics['step']})")
        log.info(describe_validation(metrics, self.shown))

    def show(self, name: str, text: str) -> None:
        self.parts[name] = text
        in_order = sorted(self.parts, key=lambda name: name == "left")  # last, whenever it is first known
        self.bar.set_postfix_str("  ".join(self.parts[name] for name in in_order), refresh=False)

    def close(self) -> None:
        """Leaves the line on the screen after the last step."""
        self.bar.refresh()
        self.bar.close()
