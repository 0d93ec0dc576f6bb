"""Small sweeps, whose trials are forked from the tests' server."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from forked import ForkedRanks
from small_runs import make_inputs
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE

from mini_trainer.tools.sweep.running import Pool, divide_devices
from mini_trainer.tools.sweep.settings import SweepSettings, check_trials, draw_trials, read_settings

TRAIN = dict(max_tokens_per_gpu=64, batch_size=8, max_steps=4, activation_checkpointing="none")


def make_settings(folder: Path) -> dict[str, Any]:
    """A model and data sets, as the settings of a sweep over the learning rate."""
    inputs = make_inputs(folder, "qwen3")
    held_out = write_samples(folder / "held_out.arrow", make_samples(6, vocab_size=VOCAB_SIZE, seed=1))
    return {
        "output_dir": str(folder / "sweep"),
        "train": inputs | TRAIN | {"validation_data_path": str(held_out)},
        "parameters": {"learning_rate": [1e-4, 1e-3, 1e-2, 3e-2]},
    }


def write_settings(given: dict[str, Any], folder: Path) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(given, sort_keys=False))
    return path


class ForkedPool(Pool):
    """Starts trials without Python's imports; everything else is theirs."""

    def launch(self, words: list[str], log_file: Path, environment: Mapping[str, str]) -> ForkedRanks:
        assert words[:2] == ["train", "--config"] and words[3:] == ["--nproc-per-node", "1"]
        log_file.touch()
        return ForkedRanks(0, ["train.py", *words[1:3]], log_file, log_file, env=dict(environment))


class Killed(BaseException):
    """The sweep is gone at this moment, with nothing of its own done any more."""


class KilledPool(ForkedPool):
    """Kills trials, or the sweep with all its trials, at a moment that `moment` names with a trial's number:

    "step": its first step is done; "alone": the same, but only the trial is killed; "start": its option file is
    written; "end": its process has ended, which is not recorded.
    """

    def __init__(self, root: Path, moment: str, number: int):
        super().__init__(root, [{}] * (2 if moment == "step" else 1), num_processes=1)
        self.moment, self.number, self.was_killed = moment, number, False

    def launch(self, words: list[str], log_file: Path, environment: Mapping[str, str]) -> ForkedRanks:
        is_meant = log_file.parent.name == f"trial_{self.number}" and not self.was_killed
        if is_meant and self.moment == "start":
            raise Killed
        before = count_steps(log_file)
        process = super().launch(words, log_file, environment)
        if is_meant and self.moment in ("step", "alone"):
            self.was_killed = True
            wait_for_step(log_file, process, before)
            process.kill()
            if self.moment == "step":
                raise Killed
        return process

    def run(self, waiting: list[int], make_stage: Callable, end: Callable) -> None:
        def end_or_die(number: int, code: int, last_words: str) -> bool:
            if self.moment == "end" and number == self.number:
                raise Killed
            return end(number, code, last_words)

        super().run(waiting, make_stage, end_or_die)

    def end_children(self, children: list, number: int) -> None:
        for child in children:
            child.process.kill()


def wait_for_step(log_file: Path, process: ForkedRanks, before: int) -> None:
    """Returns once the trial's log, which is only ever appended to, has more than `before` steps."""
    deadline = time.monotonic() + 120
    while count_steps(log_file) <= before:
        has_ended = process.poll() is not None
        assert not has_ended or count_steps(log_file) > before, log_file.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def count_steps(log_file: Path) -> int:
    return log_file.read_bytes().count(b"\nstep ") if log_file.exists() else 0


def run(given: dict[str, Any], folder: Path, pool: Pool | None = None, *, num_parallel: int = 1) -> Path:
    """Runs, or continues, the sweep; returns its directory."""
    from mini_trainer.tools.sweep.search import find_direction, run_sweep

    settings: SweepSettings = read_settings(write_settings(given, folder))
    drawn = draw_trials(settings)
    check_trials(settings, drawn)
    environments = divide_devices(settings, []) * num_parallel
    pool = pool or ForkedPool(settings.root, environments, num_processes=1)
    run_sweep(settings, drawn, pool, more_is_better=find_direction(settings.metric))
    return settings.root


def read_results(root: Path) -> list[dict[str, Any]]:
    """The table of trials, best first."""
    return json.loads((root / "results.json").read_text())["trials"]
