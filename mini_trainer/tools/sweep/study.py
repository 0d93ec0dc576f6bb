"""Trials in optuna's storage: their values, results and ends, and how their values are drawn.

All writes are single lines of optuna's journal: a kill leaves each trial in its old or its new state. Results are also
in the runs, so an older journal, or none, loses nothing but the failures.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
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
