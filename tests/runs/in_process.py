"""train.py's run without the start of Python: in the process of the test, or in several that are forked."""

import contextlib
import io
import os
from pathlib import Path

import pytest
from forked import succeed
from processes import flags

from mini_trainer.distributed.ending import ExitCode
from mini_trainer.distributed.watch import RunControl
from mini_trainer.distributed.world import World
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.run.plan.planner import plan_run
from mini_trainer.train import train


def train_on(num_ranks: int, world: World, **options: object) -> None:
    """Trains on this many ranks: on one in this process, on more in forked ones, as under torchrun."""
    if num_ranks == 1:
        train_here(world, **{name: str(value) if isinstance(value, Path) else value for name, value in options.items()})
    else:
        train_forked(num_ranks, **options)


def train_once(tmp_path_factory: pytest.TempPathFactory, world: World, **options: object) -> Path:
    """The output directory of a run on one rank that the tests of a module share."""
    output_dir = tmp_path_factory.mktemp("runs") / "run"
    train_on(1, world, **options, output_dir=output_dir)
    return output_dir


def train_forked(num_ranks: int, **options: object) -> str:
    """Trains on this many ranks in processes of their own (0: one, without torchrun's environment); the console."""
    return succeed(num_ranks, "train.py", *flags(**options)).stderr


def train_here(world: World, **options: object) -> str:
    """Trains with `options`; leaves the output directory as a run that has ended leaves it. The run's last words."""
    return end_here(world, **options)[2]


def end_here(world: World, **options: object) -> tuple[ExitCode, str, str]:
    """Trains as `train_here` does; returns the exit code, why the run ended, and its last words."""
    control = Unwatched(hang_timeout=600, max_seconds=None)
    try:
        return train(group_options(TrainOptions, **options), world, control)
    finally:
        control.close()


class Unwatched(RunControl):
    """A run's control whose watch, which would take the signals, is not started; it can be closed."""

    def close(self) -> None:
        if self.files.lock is not None:
            self.files.lock.release()
        if self.files.descriptor is not None:
            os.close(self.files.descriptor)
        for end in (self.watch.signals, self.watch.signals_in, self.watch.loop):
            end.close()


def print_plan(values: dict) -> tuple[ExitCode, str]:
    options = group_options(TrainOptions, **values)
    assert find_problems(options) == []
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = plan_run(options)
    return code, text.getvalue()
