"""Averages of the weights that train, over the steps of a run: sharded like the weights, in fp32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mini_trainer.distributed.devices import memory_kind
from mini_trainer.options import OptimizationOptions


class WeightAverage:
    """The average of a model's trained parameters, by their names. It starts as the weights of the model, which
    `start` repeats once a checkpoint's are in it.

    ema: average += (1 - 0.5^(samples / half-life)) (weight - average) after each step. tail: the mean of the weights
    after each step from `first_step` on; before, it stays behind. Started after `first_step`, it counts the weights of
    its start for each step that it has missed.
    """

    def __init__(self, model: nn.Module, *, half_life: int | None = None, first_step: int = 0):
        """`half_life`: of ema, in samples; None: tail. `first_step`: the first step, 0-based, that enters it."""
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        with memory_kind("optimizer"):
            self.values: dict[str, Tensor] = {name: param.detach().clone() for name, param in self.params.items()}
        self.half_life, self.first_step = half_life, first_step

    def has_begun(self, num_steps: int) -> bool:
        """Whether any of the first `num_steps` steps has entered it."""
        return num_steps > self.first_step

    @torch.no_grad()
    def start(self) -> None:
        """Makes it the weights that the model has now."""
        for name, param in self.params.items():
            self.values[name].to_local().copy_(param.to_local())

    @torch.no_grad()
    def update(self, step: int, *, num_samples: int) -> None:
        """Adds the weights after optimizer step `step` (0-based), which took `num_samples`."""
        if step < self.first_step:
            return
        is_tail = self.half_life is None
        share = 1 / (step - self.first_step + 1) if is_tail else 1 - 0.5 ** (num_samples / self.half_life)
        for name, param in self.params.items():
            weight, average = param.to_local(), self.values[name].to_local()
            if share == 1:
                average.copy_(weight)
            else:
                average.add_((weight - average).mul_(share))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average as its weights, which return afterwards."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        for name, param in self.params.items():
            weight, average = param.to_local(), self.values[name].to_local()
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)


def find_first_step(options: OptimizationOptions, *, end: int | None) -> int | None:
    """The first step, 0-based, that enters the average; None without one. `end`: the run's last step, for tail."""
    match options.weight_average:
        case "none":
            return None
        case "ema":
            return 0
        case "tail":
            return max(0, end - options.average_over)
        case name:
            raise ValueError(f"--weight-average {name}: is not implemented")


def make_average(model: nn.Module, options: OptimizationOptions, *, end: int | None) -> WeightAverage | None:
    """The average that the options ask for, or None. `end`: as in `find_first_step`."""
    first_step = find_first_step(options, end=end)
    if first_step is None:
        return None
    half_life = options.average_over if options.weight_average == "ema" else None
    return WeightAverage(model, half_life=half_life, first_step=first_step)
