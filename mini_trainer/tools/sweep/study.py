"""Trials in optuna's storage: their values, results and ends, how their values are drawn, and their child processes, as
many at a time as the devices allow, each with its own devices.

All writes are single lines of optuna's journal: a kill leaves each trial in its old or its new state. Results are also
in the runs, so an older journal, or none, loses nothing but the failures.
"""

import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.trial import FrozenTrial, TrialState, create_trial

from mini_trainer.distributed.children import SECONDS_TO_SAVE, find_last_words, start_child
from mini_trainer.distributed.lock import SECONDS_PER_BEAT
from mini_trainer.run.stages import Stage, stop_at_sigterm, wait_for_lock
from mini_trainer.tools.sweep.settings import Parameter, SweepSettings, Values, list_grid, show_value

optuna.logging.set_verbosity(optuna.logging.WARNING)
REMOVE = "remove this file: results are then read from the runs, and failed trials run again"


class NoLock:
    """The journal's lock, where the sweep's own already keeps others out: a kill would leave a file of optuna's."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial as the storage has it."""

    number: int
    values: Values
    state: str  # waiting, complete or failed; one that is running, or was when the sweep was killed, waits
    result: float | None  # of a complete trial
    facts: Mapping[str, Any]  # step of the best validation; error

    @property
    def has_ended(self) -> bool:
        return self.state != "waiting"

    @property
    def name(self) -> str:
        return f"trial_{self.number}"

    def describe_result(self, metric: str) -> str:
        return f"{metric} {self.result:.4f} after step {self.facts['step']}"


STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "waiting",
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
}


def draw_trials(settings: SweepSettings) -> list[Values]:
    """The values of all trials: the grid, or different ones drawn at random.

    Draw k is a pure function of the sweep's seed and k, so that more trials only come after those there are.
    """
    if settings.search == "grid":
        return list(list_grid(settings))
    found: dict[str, Values] = {}
    for k in itertools.count():
        if len(found) == settings.num_trials:
            return list(found.values())
        values = draw_values(settings.parameters, f"{settings.seed} {k}")
        found.setdefault(repr(sorted(values.items())), values)


def draw_values(parameters: Iterable[Parameter], seed: str) -> Values:
    digest = hashlib.sha256(seed.encode()).digest()
    sampler = RandomSampler(seed=int.from_bytes(digest[:4], "little"))
    drawn = {
        one.name: read_label(one, sampler.sample_independent(None, None, one.name, make_distribution(one)))
        for one in sorted(parameters, key=lambda one: one.name)
    }
    return {one.name: drawn[one.name] for one in parameters}


def make_distribution(one: Parameter) -> BaseDistribution:
    if one.choices:
        return CategoricalDistribution([make_label(value) for value in one.choices])
    if one.of_integers:
        return IntDistribution(one.low, one.high, log=one.log, step=one.step or 1)
    return FloatDistribution(one.low, one.high, log=one.log, step=one.step)


def make_label(value: Any) -> Any:
    """The value as optuna stores it: a list as its text."""
    return show_value(value) if isinstance(value, (tuple, list)) else value


def read_label(one: Parameter, label: Any) -> Any:
    return next((value for value in one.choices if make_label(value) == label and type(value) is type(label)), label)


class Study:
    """The trials of a sweep, in a locked directory."""

    def __init__(self, path: Path, settings: SweepSettings, *, more_is_better: bool):
        """Opens the storage, or makes it."""
        self.path = path
        check_journal(path)
        self.parameters = {one.name: one for one in settings.parameters}
        self.storage = JournalStorage(JournalFileBackend(str(path), lock_obj=NoLock()))
        self.more_is_better, direction = more_is_better, "maximize" if more_is_better else "minimize"
        self.study = optuna.create_study(
            storage=self.storage, study_name="sweep", direction=direction, load_if_exists=True
        )

    def add(self, drawn: Sequence[Values]) -> None:
        """Adds the trials that are not there yet; ValueError if there are others."""
        there = self.list_trials()
        distributions = {name: make_distribution(one) for name, one in self.parameters.items()}
        if [one.values for one in there] != [*drawn[: len(there)]]:
            raise self.refuse("has trials with other values")
        for values in drawn[len(there) :]:
            labels = {name: make_label(value) for name, value in values.items()}
            trial = create_trial(state=TrialState.WAITING, params=labels, distributions=distributions)
            self.study.add_trial(trial)

    def list_trials(self) -> list[Trial]:
        return [self.describe(one) for one in self.study.get_trials(deepcopy=False)]

    def read(self, number: int) -> Trial:
        return self.describe(self.study.get_trials(deepcopy=False)[number])

    def describe(self, one: FrozenTrial) -> Trial:
        """The trial; ValueError if the journal's lines do not make a whole one."""
        state = STATES.get(one.state)
        values = {name: read_label(self.parameters[name], one.params.get(name)) for name in self.parameters}
        found = (one.values or []) if state == "complete" else []
        facts = {name: value for name, value in one.user_attrs.items() if name != "error" or state == "failed"}
        has_facts = all(type(facts.get(name)) is int for name in ("step", "steps"))
        if state is None or (state == "complete" and not (found and is_number(found[0]) and has_facts)):
            raise self.refuse(f"trial_{one.number} is {one.state.name.lower()} without a number as its result")
        return Trial(number=one.number, values=values, state=state, result=found[0] if found else None, facts=facts)

    def refuse(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {problem}; {REMOVE}")

    def find_id(self, number: int) -> int:
        return self.study.get_trials(deepcopy=False)[number]._trial_id

    def note(self, number: int, **facts: Any) -> None:
        for name, value in facts.items():
            self.storage.set_trial_user_attr(self.find_id(number), name, value)

    def start(self, number: int) -> None:
        """Notes that a trial is running."""
        if self.study.get_trials(deepcopy=False)[number].state == TrialState.WAITING:
            self.storage.set_trial_state_values(self.find_id(number), state=TrialState.RUNNING)

    def complete(self, number: int, result: float) -> None:
        self.study.tell(number, result)

    def fail(self, number: int, error: str) -> None:
        self.note(number, error=error)
        self.study.tell(number, state=TrialState.FAIL)

    def rank(self, trials: Iterable[Trial]) -> list[Trial]:
        """Trials with a result, best first, and of equal ones the one with the lower number."""
        sign = -1 if self.more_is_better else 1
        found = [one for one in trials if one.result is not None]
        return sorted(found, key=lambda one: (sign * one.result, one.number))


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def check_journal(path: Path) -> None:
    """Removes a line of the journal that was not written to its end, as on a full disk; ValueError for any other
    damaged line, and for one that optuna cannot read."""
    if not path.exists():
        return
    content, replay = path.read_bytes(), JournalStorageReplayResult("")
    *lines, rest = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            replay.apply_logs([json.loads(line)])
        except Exception as error:  # of any type: optuna checks nothing
            problem = f"{type(error).__name__}: {error}".strip(" :")
            raise ValueError(f"{path}: line {number} is damaged ({problem}); {REMOVE}") from None
    if rest:
        with path.open("r+b") as file:
            file.truncate(len(content) - len(rest))


VISIBLE = "CUDA_VISIBLE_DEVICES"
SECONDS_BETWEEN_LOOKS = 0.1
LAST_BYTES = 100_000  # of a log, in which the error message is looked for
# Several launches on one machine each take a free port.
OWN_RENDEZVOUS = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def list_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    import torch  # seconds to import

    return list(map(str, range(torch.cuda.device_count())))


def divide_devices(settings: SweepSettings, devices: list[str]) -> list[dict[str, str]]:
    """For each trial that runs at a time the environment with its devices; ValueError for more than there are."""
    size, wanted = settings.num_processes, settings.num_parallel
    if not devices:
        return [{}] * (1 if wanted == "auto" else wanted)
    most = len(devices) // size
    if most < 1:
        raise ValueError(f"num_processes: given {size}, allowed: at most {len(devices)}, the GPUs")
    if wanted != "auto" and wanted > most:
        raise ValueError(
            f"num_parallel: given {wanted}, allowed: at most {most}, for {len(devices)} GPUs, {size} a trial"
        )
    parts = [devices[i * size : (i + 1) * size] for i in range(most if wanted == "auto" else wanted)]
    return [{VISIBLE: ",".join(part)} for part in parts]


@dataclass(frozen=True)
class Child:
    """A trial's process, and where its output begins in the log."""

    number: int
    stage: Stage
    process: subprocess.Popen
    start_of_log: int

    def read_last_words(self) -> str:
        """Its error message, or else its last lines."""
        with self.stage.file("log").open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.start_of_log, size - LAST_BYTES))
            return find_last_words(log.read().decode(errors="replace"))


class Pool:
    """Runs trials in a locked directory."""

    def __init__(self, root: Path, environments: list[dict[str, str]], *, num_processes: int):
        """Locks the directory; RunError if another process uses it. `environments`: see `divide_devices`."""
        self.root, self.environments, self.num_processes = root, environments, num_processes
        self.lock, self.last_beat = wait_for_lock(root), time.monotonic()
        stop_at_sigterm()

    def run(self, waiting: list[int], make_stage: Callable[[int], Stage], end: Callable[[int, int, str], bool]) -> None:
        """Runs trials, given by number. `end` gets each one's exit code and last words once its process has ended, and
        returns whether it is settled; otherwise it is started again.

        However this is left, no trial is running then: those that were have saved their state.
        """
        waiting, free, running = list(waiting), list(range(len(self.environments))), {}
        try:
            while waiting or running:
                while waiting and free:
                    slot, number = free.pop(0), waiting.pop(0)
                    running[slot] = self.start(number, make_stage(number), self.environments[slot])
                for slot in [slot for slot, child in running.items() if child.process.poll() is not None]:
                    child = running.pop(slot)
                    insort(free, slot)
                    if not end(child.number, child.process.returncode, child.read_last_words()):
                        waiting.insert(0, child.number)
                self.beat()
                time.sleep(SECONDS_BETWEEN_LOOKS)
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            self.end_children(list(running.values()), signal.SIGINT if is_interrupt else signal.SIGTERM)
            raise

    def beat(self) -> None:
        """Touches the lock, where other machines see only from its time that this process is alive."""
        if time.monotonic() - self.last_beat > SECONDS_PER_BEAT:
            self.last_beat = time.monotonic()
            self.lock.beat()

    def start(self, number: int, stage: Stage, environment: Mapping[str, str]) -> Child:
        stage.write_options()
        words = [stage.program, "--config", str(stage.file("yaml")), "--nproc-per-node", str(self.num_processes)]
        words += OWN_RENDEZVOUS if self.num_processes > 1 else ()
        log = stage.file("log")
        start_of_log = log.stat().st_size if log.exists() else 0
        return Child(number, stage, self.launch(words, log, environment), start_of_log)

    def launch(self, words: list[str], log_file: Path, environment: Mapping[str, str]) -> subprocess.Popen:
        """Starts a program whose output is appended to the file."""
        with log_file.open("a", encoding="utf-8") as log:
            return start_child(words, log, more=environment, pass_fds=(self.lock.file,))

    def end_children(self, children: list[Child], number: signal.Signals) -> None:
        """Asks the trials to save and end, and waits. A second Ctrl-C ends them without saving, a third kills them."""
        deadline, num_interrupts = time.monotonic() + SECONDS_TO_SAVE, 0
        processes = [child.process for child in children]
        for process in processes:
            process.send_signal(number)
        while any(process.poll() is None for process in processes):
            try:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            except KeyboardInterrupt:
                num_interrupts += 1
                for process in processes:
                    process.send_signal(signal.SIGINT)
            if num_interrupts > 1 or time.monotonic() > deadline:
                for process in processes:
                    process.kill()
