"""The live line of a run in a terminal."""

import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from mini_trainer.distributed.devices import describe_duration
from mini_trainer.distributed.ending import log
from mini_trainer.run.training_log import Sink, TimeLeft, describe_validation


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
        left = self.time_left.after(metrics["step"], time.monotonic())
        if left is not None:
            self.show("left", f"left {describe_duration(left)}")
        self.bar.update()

    def write_validation(self, metrics: dict[str, Any]) -> None:
        self.time_left.validation_done(metrics["seconds"])
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
