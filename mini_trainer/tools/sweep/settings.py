"""Settings of a sweep: the YAML file of `mini-trainer sweep`, checked before anything runs, and the trials drawn."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mini_trainer.options import PRESETS, TRAINING_DATA, TrainOptions, group_options, list_preset_values, option_files
from mini_trainer.options.fields import option
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.urls import is_url

Values = dict[str, Any]  # options by name

BY_SWEEP = "is set for each trial by the sweep itself; leave it out"
NO_TRIAL = "starts no training; leave it out"
UPLOADS_ALL = "would upload every trial; leave it out, and train the best one again with it"
RESERVED = {
    **dict.fromkeys(("output_dir", "config", "resume"), BY_SWEEP),
    **dict.fromkeys(("dry_run", "print_config", "plan_for"), NO_TRIAL),
    "preset": "cannot differ between trials; give it in train",
    "max_time": "would end trials early without a result; leave it out",
    **dict.fromkeys(("push_to_hub", "upload_to"), UPLOADS_ALL),
    "allow_changed_options": "would let a trial continue with other options; leave it out",
}
UNEXPORTED = {"export_best": False, "save_final_checkpoint": False}  # unless the file says otherwise
FILE_OPTIONS = ("data_path", "validation_data_path", "input_file")  # whose contents decide a trial's result
KEYS_OF_RANGE = ("low", "high", "step", "log")
MOST_TRIALS = 10_000  # checking the options of each takes a millisecond


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An option that differs between trials: one of `choices`, or a number of a range."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False  # drawn uniformly in the logarithm
    step: float | None = None  # distance of the values; None: any number, or any integer

    @property
    def of_integers(self) -> bool:
        return isinstance(self.low, int)

    def count_values(self) -> int | None:
        """Number of values, if they are finitely many and equally probable."""
        if self.choices:
            return len(self.choices)
        if self.log or (self.step is None and not self.of_integers):
            return None
        return math.floor((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    def list_values(self) -> tuple[Any, ...]:
        """All values that `count_values` counts."""
        return self.choices or tuple(self.low + i * (self.step or 1) for i in range(self.count_values()))


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """A sweep."""

    output_dir: str
    """Directory of the sweep."""
    search: Literal["grid", "random"] = "grid"
    """grid: all combinations; random: num_trials of them, drawn at random."""
    num_trials: int | None = option(None, at_least=1, at_most=MOST_TRIALS, only_with=("search", ("random",)))
    """random: number of trials to draw."""
    seed: int = 0
    """Random seed of the draws."""
    num_processes: int = option(1, at_least=1)
    """Processes of each trial, one for each GPU."""
    num_parallel: int | Literal["auto"] = option("auto", at_least=1)
    """Trials at the same time; auto: as many as the GPUs allow, one on a CPU."""
    train: Values
    """Options of train.py that all trials share."""
    parameters: tuple[Parameter, ...]
    """Options that differ."""

    @property
    def root(self) -> Path:
        return Path(self.output_dir).absolute()

    @property
    def metric(self) -> str:
        """The metric of validations that decides which trial is best."""
        return self.train.get("best_metric", "loss").partition(":")[0]

    def options_of(self, values: Values) -> Values:
        """All options of a trial with these values, but for its directory."""
        return UNEXPORTED | self.train | values


def read_settings(path: Path, *, output_dir: str | None = None) -> SweepSettings:
    """Reads and checks a YAML file; `output_dir` replaces its own. One ValueError for all problems, with the keys."""
    given = option_files.read_option_file(path, named=str(path))
    readers = {"train": read_train, "parameters": read_parameters}
    with option_files.naming_place(str(path)):
        given = option_files.name_values(given) | ({} if output_dir is None else {"output_dir": output_dir})
        settings = option_files.make_settings(given, SweepSettings, readers)
        names, own = [one.name for one in settings.parameters], option_files.name_values(given["train"])
        problems = [f"{name}: in train and in parameters; give one of them" for name in names if name in own]
        shared = {name: value for name, value in settings.train.items() if name not in names}  # files are overridden
        settings = dataclasses.replace(settings, train=shared)
        if settings.search == "random" and settings.num_trials is None:
            problems.append("search: random needs num_trials")
        if settings.seed != SweepSettings.seed and settings.num_trials is None:
            problems.append("seed has no effect without num_trials; the seed of training is train: {seed: ...}")
        option_files.refuse(problems + find_space_problems(settings))
    return settings


def read_train(given: Any) -> Values:
    """The options that all trials share: of `config`, of `preset`, and the file's own, which win over both."""
    values, of_files = option_files.name_values(given), {}
    for path in option_files.parse_value("config", values.pop("config", []), TrainOptions):
        of_file = option_files.name_values(option_files.read_option_file(Path(path), named=f"config: {path}"))
        of_file.pop("output_dir", None)  # as a flag would win over it, the trial's own directory does
        of_files |= of_file
    merged = of_files | values
    if (preset := merged.pop("preset", None)) is not None and str(preset) not in PRESETS:  # it may be a list
        raise ValueError(f"preset: given {preset!r}, allowed: {', '.join(PRESETS)}")
    values = option_files.read_options(merged, TrainOptions, RESERVED)
    return list_preset_values(preset, values) | values


def read_parameters(given: Any) -> tuple[Parameter, ...]:
    """The options that differ between trials; ValueError if there are none."""
    if not given:
        raise ValueError(f"given {given!r}, allowed: 'option: [value, ...]' or 'option: {{low: ..., high: ...}}' lines")
    return tuple(option_files.read_options(given, TrainOptions, RESERVED, parse=read_parameter).values())


def read_parameter(name: str, given: Any, options_class: type) -> Parameter:
    if isinstance(given, dict):
        with option_files.naming_place(name):
            return read_range(name, given, options_class)
    if not isinstance(given, list) or len(given) < 2:
        raise ValueError(f"{name}: given {given!r}, allowed: a list of several values, or {{low: ..., high: ...}}")
    values = option_files.convert_each(
        dict(enumerate(given)), lambda _, value: option_files.parse_value(name, value, options_class)
    ).values()
    if len(set(map(repr, values))) < len(values):
        raise ValueError(f"{name}: given {given!r}, in which a value is repeated")
    return Parameter(name=name, choices=tuple(values))


def read_range(name: str, given: dict[Any, Any], options_class: type) -> Parameter:
    def read(key: str, value: Any) -> Any:
        known, owner = (key, Parameter) if key == "log" else (name, options_class)
        return option_files.parse_value(known, value, owner)

    found = option_files.convert_known(given, KEYS_OF_RANGE, read)
    if missing := [key for key in ("low", "high") if key not in found]:
        raise ValueError(f"{', '.join(missing)}: required; or give a list of values")
    low, high, step, log = (found.get(key) for key in KEYS_OF_RANGE)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (low, high, step or 0)):
        raise ValueError("takes no numbers; give a list of values")
    if float in {type(low), type(high), type(step)}:  # also of an option that takes both kinds of numbers
        found |= {key: float(found[key]) for key in ("low", "high", "step") if key in found}
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"low {low}, high {high}: low must be below high")
    if log and (step is not None or low <= 0):
        raise ValueError("log: true needs low above 0, and takes no step")
    if step is not None and not 0 < step <= high - low:
        raise ValueError(f"step: given {step}, allowed: above 0, at most high - low")
    return Parameter(name=name, **found)


def find_space_problems(s: SweepSettings) -> list[str]:
    """Combinations that are too many in a grid, or fewer than the trials to draw."""
    counts = {one.name: one.count_values() for one in s.parameters}
    endless = [name for name, count in counts.items() if count is None]
    if s.num_trials is None and endless:
        return [f"{', '.join(endless)}: a range of any numbers has no grid; give a list, a step, or num_trials"]
    most = math.inf if endless else math.prod(counts.values())
    if s.num_trials is None and most > MOST_TRIALS:
        return [f"a grid of {most:,} trials, allowed: at most {MOST_TRIALS:,}; give shorter lists, or num_trials"]
    if s.num_trials is not None and s.num_trials > most:
        return [f"num_trials: given {s.num_trials}, allowed: at most {most}, all combinations"]
    return []


def list_grid(settings: SweepSettings) -> Iterator[Values]:
    """The values of all combinations, the last parameter's changing fastest."""
    for combination in itertools.product(*(one.list_values() for one in settings.parameters)):
        yield {one.name: value for one, value in zip(settings.parameters, combination, strict=True)}


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


def draw_values(parameters: Sequence[Parameter], seed: str) -> Values:
    from optuna.samplers import RandomSampler  # a second to import

    digest = hashlib.sha256(seed.encode()).digest()
    sampler, drawn = RandomSampler(seed=int.from_bytes(digest[:4], "little")), {}
    for one in sorted(parameters, key=lambda one: one.name):
        value = sampler.sample_independent(None, None, one.name, make_distribution(one))
        drawn[one.name] = one.choices[value] if one.choices else value
    return {one.name: drawn[one.name] for one in parameters}


def make_distribution(one: Parameter) -> Any:
    """optuna's distribution of an option's values; of choices, that of their places."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if one.choices:
        return CategoricalDistribution(range(len(one.choices)))
    if one.of_integers:
        return IntDistribution(one.low, one.high, log=one.log, step=one.step or 1)
    return FloatDistribution(one.low, one.high, log=one.log, step=one.step)


def check_trials(settings: SweepSettings, trials: Sequence[Values]) -> None:
    """ValueError for options that train.py would refuse, with the trials that have them."""
    found: dict[str, list[int]] = {}
    for number, values in enumerate(trials):
        for problem in find_trial_problems(settings.options_of(values)):
            found.setdefault(problem, []).append(number)
    if found:
        lines = [f"{problem} ({describe_trials(numbers, len(trials))})" for problem, numbers in found.items()]
        raise ValueError("options that cannot be used as they are:\n  " + "\n  ".join(lines))


def find_trial_problems(options: Values) -> list[str]:
    complete = {"output_dir": "D"} | options
    if missing := option_files.list_missing(TrainOptions, complete):
        return [f"train: {', '.join(missing)}: required"]
    grouped = group_options(TrainOptions, **complete)
    problems = find_problems(grouped)
    if not grouped.end.is_given:
        problems.append("train: no end is given; give max_steps, max_epochs, max_samples or max_tokens")
    if not (grouped.validation.validation_data_path or grouped.rows.validation_share):
        problems.append("train: no validation data to compare trials by; give validation_data_path")
    return problems


def describe_trials(numbers: Sequence[int], num_trials: int) -> str:
    if len(numbers) == num_trials:
        return "all trials"
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"trial{'s' if len(numbers) > 1 else ''} {shown}"


def show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def list_files(settings: SweepSettings, trials: Sequence[Values]) -> list[Path]:
    """The files of rows and data sets of all trials; ValueError for one that does not exist."""
    named: dict[str, str] = {}
    for values in trials:
        options = settings.options_of(values)
        named |= {path: name for name in FILE_OPTIONS for path in options.get(name, ()) if path != TRAINING_DATA}
    option_files.refuse(f"{name} {path}: must be local for a sweep" for path, name in named.items() if is_url(path))
    option_files.refuse(f"{name}: {path} does not exist" for path, name in named.items() if not Path(path).exists())
    return [Path(path) for path in named]


def describe_settings(settings: SweepSettings) -> Values:
    """The settings that decide the results, as JSON returns them."""
    values = dataclasses.asdict(settings)
    for key in ("output_dir", "num_processes", "num_parallel"):
        del values[key]
    return json.loads(json.dumps(values))
