"""The live line: one line on a terminal that always shows the run's progress."""

import logging
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from lifecycle.training_log import Console, Sink, describe_validation
from ranks.ending import log
from ranks.terminal import shows_progress


class LiveLine:
    """A progress bar with loss, validation loss, tokens/s and time left (see `lifecycle.training_log.Sink`)."""

    def __init__(self, *, first_step: int, num_steps: int | None, shown: Sequence[str]):
        ends = num_steps is not None
        shape = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt}" if ends else "{n_fmt}"
        time_left = "  left {remaining}" if ends else ""
        self.bar = tqdm(
            initial=first_step,
            total=num_steps,
            bar_format=f"step {shape}{{postfix}}{time_left}",
            dynamic_ncols=True,
        )
        self.shown = shown  # names of a validation's metrics for its line
        self.parts: dict[str, str] = {}  # of the live line, by name, in their order

    def write(self, metrics: dict[str, Any]) -> None:
        self.show("loss", f"loss {metrics['loss']:.4f}")
        self.show("speed", f"{metrics['tokens_per_second']:,.0f} tokens/s")
        self.bar.update()

    def write_validation(self, metrics: dict[str, Any]) -> None:
        self.show("validation", f"validation {metrics['loss']:.4f}")
        log.info(describe_validation(metrics, self.shown))

    def show(self, name: str, text: str) -> None:
        self.parts[name] = text
        self.bar.set_postfix_str("  ".join(self.parts.values()), refresh=False)

    def flush_to_disk(self) -> None:
        pass

    def close(self) -> None:
        """Leaves the line on the screen after the last step."""
        self.bar.refresh()
        self.bar.close()


def open_console(*, first_step: int, num_steps: int | None, shown: Sequence[str]) -> Sink:
    """The live line on a terminal, otherwise a log line per step; `--logging-level WARNING` suppresses both."""
    if shows_progress() and log.isEnabledFor(logging.INFO):
        return LiveLine(first_step=first_step, num_steps=num_steps, shown=shown)
    return Console(first_step=first_step, num_steps=num_steps, shown=shown)
