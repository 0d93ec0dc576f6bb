"""The training log: each step's metrics go to every sink, a file of JSON lines and the console among them."""

import json
import os
import time
from pathlib import Path
from typing import Any, Protocol

from ranks.devices import describe_duration
from ranks.ending import log

METRICS_FILE = "training_metrics_0.jsonl"
SECONDS_BETWEEN_LINES = 2.0  # on the console


class Sink(Protocol):
    """Somebody who is told of every step, on rank 0."""

    def write(self, metrics: dict[str, Any]) -> None:
        """The metrics of one step, by name, all of them JSON."""
        ...

    def flush_to_disk(self) -> None:
        """For a checkpoint: what has been written of its steps has to be there when it is."""
        ...

    def close(self) -> None: ...


class TrainingLog:
    """Hands each step's metrics to all sinks; without any, as on the ranks other than 0, it does nothing."""

    def __init__(self, sinks: list[Sink]):
        self.sinks = sinks

    def write(self, metrics: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(metrics)

    def flush_to_disk(self) -> None:
        for sink in self.sinks:
            sink.flush_to_disk()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class MetricsFile:
    """A JSON line a step. A run that goes on after `first_step` steps keeps their lines, and takes later ones again."""

    def __init__(self, output_dir: Path, *, first_step: int):
        path = output_dir / METRICS_FILE
        keep_steps(path, first_step)
        self.file = path.open("a", encoding="utf-8")

    def write(self, metrics: dict[str, Any]) -> None:
        """OSError naming the file if it cannot be written."""
        try:
            print(json.dumps(metrics), file=self.file, flush=True)
        except OSError as error:
            raise OSError(f"cannot write {self.file.name}: {error}") from None

    def flush_to_disk(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class Console:
    """Shows the first and last step, and between them one every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, *, first_step: int, num_steps: int | None):
        self.first_step, self.num_steps = first_step, num_steps
        self.first_step_end = self.last_shown = time.monotonic()

    def write(self, metrics: dict[str, Any]) -> None:
        now, step = time.monotonic(), metrics["step"]
        is_first = step == self.first_step + 1
        if is_first:
            self.first_step_end = now
        if is_first or step == self.num_steps or now - self.last_shown >= SECONDS_BETWEEN_LINES:
            self.last_shown = now
            seconds_per_step = (now - self.first_step_end) / max(1, step - self.first_step - 1)
            log.info(describe_step(metrics, num_steps=self.num_steps, seconds_per_step=seconds_per_step))

    def flush_to_disk(self) -> None:
        pass

    def close(self) -> None:
        pass


def keep_steps(path: Path, num_steps: int) -> None:
    """Cuts a metrics file after the line of step `num_steps`: what follows was trained after the checkpoint, or torn.

    Warns of lines that are missing before it.
    """
    end, next_step = 0, 1
    if path.exists():
        with path.open("rb+") as file:
            for line in file:
                try:
                    step = json.loads(line)["step"] if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    step = None
                if step != next_step or step > num_steps:
                    break
                end, next_step = end + len(line), step + 1
            file.truncate(end)
    if next_step <= num_steps:
        log.warning(f"warning: {path}: no lines of steps {next_step} to {num_steps}, which the run took before")


def describe_step(metrics: dict[str, Any], *, num_steps: int | None, seconds_per_step: float) -> str:
    """The console's line for a step, with the time left where there is an end.

    `seconds_per_step` is 0 after the first step, which compiles, so it neither counts for the time left nor names one.
    """
    shown = {name: metrics[name] for name in ("step", "epoch", "loss", "lr", "grad_norm")}
    line = "step {step}{end}  epoch {epoch:.2f}  loss {loss:.4f}  lr {lr:.2e}  grad_norm {grad_norm:.3f}".format(
        **shown, end="" if num_steps is None else f"/{num_steps}"
    )
    line += f"  {metrics['tokens_per_second']:,.0f} tokens/s"
    if metrics["mfu"] is not None:
        line += f"  mfu {metrics['mfu']:.1%}"
    if num_steps is not None and seconds_per_step > 0:
        line += f"  left {describe_duration(seconds_per_step * (num_steps - metrics['step']))}"
    return line
