"""Settings of a sweep: the YAML file of `mini-trainer sweep`, checked before anything runs."""

import dataclasses
import difflib
import functools
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mini_trainer.options import PRESETS, TrainOptions, group_options, iterate_fields, list_preset_values
from mini_trainer.options.option_files import parse_value, parse_values, read_option_file
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.urls import is_url

Values = dict[str, Any]  # options by name

BY_SWEEP = "is set for each trial by the sweep itself; leave it out"
NO_TRIAL = "starts no training; leave it out"
UPLOADS_ALL = "would upload every trial; leave it out, and train the best one again with it"
RESERVED = {
    **dict.fromkeys(("output_dir", "config", "resume", "track_name"), BY_SWEEP),
    **dict.fromkeys(("dry_run", "print_config", "plan_world_size", "plan_device"), NO_TRIAL),
    "preset": "is no option of a single trial; give it in train",
    "max_time": "would end trials early without a result; leave it out",
    **dict.fromkeys(("push_to_hub", "upload_to"), UPLOADS_ALL),
    "allow_changed_options": "would let a trial continue with other options; leave it out",
}
# Options that say when a run ends, or what its schedule is, which the rungs of a halving search decide.
RESERVED_IN_HALVING = ("max_epochs", "max_samples", "max_tokens", "schedule_steps", "continue_from")
UNEXPORTED = {"export_best": False, "save_final_checkpoint": False}  # unless the file says otherwise
FILE_OPTIONS = ("data_path", "validation_data_path", "input_file")  # whose contents decide a trial's result
KEYS_OF_RANGE = ("low", "high", "log", "step")
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
    search: Literal["grid", "random", "halving"] = "grid"
    """grid: all combinations; random: num_trials of them, drawn at random; halving: as many trials as the other two,
    of which the best continue at each rung (synchronous successive halving, arXiv 1502.07943)."""
    num_trials: int | None = None
    """random, halving: number of trials to draw."""
    seed: int = 0
    """Random seed of the draws."""
    min_steps: int | None = None
    """halving: steps of the first rung; each next one has reduction_factor times as many, up to max_steps."""
    reduction_factor: int = 3
    """halving: one of so many trials continues after a rung."""
    num_processes: int = 1
    """Processes of each trial, one for each GPU."""
    num_parallel: int | Literal["auto"] = "auto"
    """Trials at the same time; auto: as many as the GPUs allow, one on a CPU."""
    train: Values = field(default_factory=dict)
    """Options of train.py that all trials share."""
    parameters: tuple[Parameter, ...] = ()
    """Options that differ."""

    @property
    def root(self) -> Path:
        return Path(self.output_dir).absolute()

    @property
    def metric(self) -> str:
        """The metric of validations that decides which trial is best."""
        return self.train.get("best_metric", "loss")

    @property
    def is_drawn(self) -> bool:
        return self.num_trials is not None

    @property
    def rungs(self) -> tuple[int | None, ...]:
        """Steps after which trials are compared, the last of them the whole run's; (None,) without rungs."""
        if self.search != "halving":
            return (None,)
        powers = (self.min_steps * self.reduction_factor**i for i in itertools.count())
        most = self.train["max_steps"]
        return (*itertools.takewhile(lambda steps: steps < most, powers), most)

    def options_of(self, values: Values) -> Values:
        """All options of a trial with these values, but for its directory.

        In a halving search each rung ends with a validation that the whole run has as well.
        """
        validations = {} if self.min_steps is None else {"validate_every_steps": self.min_steps}
        return UNEXPORTED | validations | self.train | values


def read_settings(path: Path, *, output_dir: str | None = None, allowed: Collection[str] = ()) -> SweepSettings:
    """Reads and checks a YAML file; `output_dir` replaces its own. One ValueError for all problems, with the keys.

    `allowed`: environment variables to fill in.
    """
    given = read_option_file(path, named=str(path), allowed=allowed)
    readers = READERS | {"train": functools.partial(read_train, allowed=allowed)}
    given |= {} if output_dir is None else {"output_dir": output_dir}
    fields = {one.name: one for one in dataclasses.fields(SweepSettings)}
    found, problems = {}, []
    for key, value in given.items():
        try:
            if key not in fields:
                close = difflib.get_close_matches(str(key), fields, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(fields)}"
                raise ValueError(f"unknown key {key!r}; {hint}")
            found[key] = readers.get(key, read_plain)(key, value)
        except ValueError as error:
            problems.append(str(error))
    problems += [f"{name}: required" for name in ("output_dir", "train", "parameters") if name not in given]
    if not problems:
        names = {one.name for one in found["parameters"]}
        problems = [f"{name}: in train and in parameters; give one of them" for name in find_own(given) & names]
        shared = {name: value for name, value in found["train"].items() if name not in names}  # files are overridden
        settings = SweepSettings(**found | {"train": shared})
        problems += find_setting_problems(settings, given)
    if problems:
        raise ValueError(f"{path}: " + "\n  ".join(problems))
    return settings


def find_own(given: Mapping[str, Any]) -> set[str]:
    """The options of `train` that the sweep's own file gives."""
    return {str(name).replace("-", "_") for name in given["train"]}


def read_plain(key: str, value: Any) -> Any:
    return parse_value(key, value, SweepSettings)


def read_train(key: str, given: Any, *, allowed: Collection[str]) -> Values:
    """The options that all trials share: of `config`, of `preset`, and the file's own, which win over both."""
    values = dict(as_mapping(key, given, "'option: value' lines"))
    files = {}
    for path in parse_value("config", values.pop("config", []), TrainOptions):
        of_file = read_option_file(Path(path), named=f"{key}: config: {path}", allowed=allowed)
        of_file.pop("output_dir", None)  # as a flag would win over it, the trial's own directory does
        files |= {str(name).replace("-", "_"): value for name, value in of_file.items()}
    merged = files | values
    preset = merged.pop("preset", None)
    if preset is not None and str(preset) not in PRESETS:  # it may be a list
        raise ValueError(f"{key}: preset: given {preset!r}, allowed: {', '.join(PRESETS)}")
    values = parse_values(merged, TrainOptions, where=f"{key}:", reserved=RESERVED)
    return list_preset_values(preset, values) | values


def read_parameters(key: str, given: Any) -> tuple[Parameter, ...]:
    given = as_mapping(key, given, "'option: [value, ...]' or 'option: {low: ..., high: ...}' lines")
    found = parse_values(given, TrainOptions, where=f"{key}:", reserved=RESERVED, parse=read_parameter)
    return tuple(found.values())


def read_parameter(option: str, given: Any, options_class: type) -> Parameter:
    read = read_range if isinstance(given, dict) else read_choices
    return read(option, given, options_class)


def as_mapping(key: str, given: Any, allowed: str) -> Mapping[Any, Any]:
    if not isinstance(given, dict) or not given:
        raise ValueError(f"{key}: given {given!r}, allowed: {allowed}")
    return given


READERS = {"parameters": read_parameters}


def read_choices(option: str, given: Any, options_class: type) -> Parameter:
    if not isinstance(given, list) or len(given) < 2:
        raise ValueError(f"{option}: given {given!r}, allowed: a list of several values, or {{low: ..., high: ...}}")
    values, problems = [], []
    for value in given:
        try:
            values.append(parse_value(option, value, options_class))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    if len(set(map(repr, values))) < len(values):
        raise ValueError(f"{option}: given {given!r}, in which a value is repeated")
    return Parameter(name=option, choices=tuple(values))


def read_range(option: str, given: dict[Any, Any], options_class: type) -> Parameter:
    unknown = [str(key) for key in given if key not in KEYS_OF_RANGE]
    missing = [key for key in ("low", "high") if key not in given]
    if unknown or missing:
        what = f"unknown {', '.join(unknown)}" if unknown else f"without {' and '.join(missing)}"
        raise ValueError(f"{option}: a range {what}; allowed: low, high, and log: true or step")
    numbers = {key: parse_value(option, given[key], options_class) for key in ("low", "high", "step") if key in given}
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in numbers.values()):
        raise ValueError(f"{option}: takes no numbers; give a list of values")
    log, step = given.get("log", False), numbers.get("step")
    if not isinstance(log, bool):
        raise ValueError(f"{option}: log: given {log!r}, allowed: true or false")
    if not -math.inf < numbers["low"] < numbers["high"] < math.inf:
        raise ValueError(f"{option}: low {numbers['low']}, high {numbers['high']}: low must be below high")
    if log and (step is not None or numbers["low"] <= 0):
        raise ValueError(f"{option}: log: true needs low above 0, and takes no step")
    if step is not None and not 0 < step <= numbers["high"] - numbers["low"]:
        raise ValueError(f"{option}: step: given {step}, allowed: above 0, at most high - low")
    return Parameter(name=option, **numbers, log=log)


def find_setting_problems(settings: SweepSettings, given: Mapping[str, Any]) -> list[str]:
    """Keys without effect, missing ones, numbers out of range."""
    s, problems = settings, []
    for name in ("num_trials", "min_steps", "num_processes", "num_parallel"):
        value = getattr(s, name)
        if value not in (None, "auto") and value < 1:
            problems.append(f"{name}: given {value}, allowed: at least 1")
    if s.reduction_factor < 2:
        problems.append(f"reduction_factor: given {s.reduction_factor}, allowed: at least 2")
    if s.search == "grid" and s.is_drawn:
        problems.append("num_trials has no effect with search: grid, which has all combinations; use search: random")
    if s.search == "random" and not s.is_drawn:
        problems.append("search: random needs num_trials")
    if "seed" in given and not s.is_drawn:
        problems.append("seed has no effect without num_trials; the seed of training is train: {seed: ...}")
    problems += find_halving_problems(s, given) + find_space_problems(s)
    return problems


def find_halving_problems(s: SweepSettings, given: Mapping[str, Any]) -> list[str]:
    if s.search != "halving":
        useless = [name for name in ("min_steps", "reduction_factor") if name in given]
        return [f"{', '.join(useless)}: no effect with search: {s.search}, only with halving"] if useless else []
    names = {one.name for one in s.parameters}
    problems = [
        f"{name}: not with search: halving, whose trials all have the steps of train: {{max_steps: ...}}"
        for name in (*RESERVED_IN_HALVING, *(["max_steps"] if "max_steps" in names else []))
        if name in names or s.train.get(name) is not None
    ]
    most = s.train.get("max_steps")
    if most is None:
        problems.append("search: halving needs train: {max_steps: ...}")
    if s.min_steps is None:
        problems.append("search: halving needs min_steps, the steps after which trials are first compared")
    elif most is not None and s.min_steps >= most:
        problems.append(f"min_steps: given {s.min_steps}, allowed: below max_steps, {most}")
    every = s.train.get("validate_every_steps")
    if "validate_every_steps" in names or (every and s.min_steps is not None and s.min_steps % every):
        problems.append(
            f"validate_every_steps: given {every or 'several'}, allowed: what divides min_steps, {s.min_steps}"
        )
    if s.train.get("weight_average") == "tail" or "weight_average" in names:
        problems.append("weight_average: tail, or several: not with search: halving, since it ends with the run")
    return problems


def find_space_problems(s: SweepSettings) -> list[str]:
    """Combinations that are too many in a grid, or fewer than the trials to draw."""
    counts = {one.name: one.count_values() for one in s.parameters}
    endless = [name for name, count in counts.items() if count is None]
    if not s.is_drawn and endless:
        return [f"{', '.join(endless)}: a range of any numbers has no grid; give a list, a step, or num_trials"]
    most = math.inf if endless else math.prod(counts.values())
    if not s.is_drawn and most > MOST_TRIALS:
        return [f"a grid of {most:,} trials, allowed: at most {MOST_TRIALS:,}; give shorter lists, or num_trials"]
    if s.is_drawn and s.num_trials > most:
        return [f"num_trials: given {s.num_trials}, allowed: at most {most}, all combinations"]
    if s.is_drawn and s.num_trials > MOST_TRIALS:
        return [f"num_trials: given {s.num_trials}, allowed: at most {MOST_TRIALS}"]
    return []


def list_grid(settings: SweepSettings) -> Iterator[Values]:
    """The values of all combinations, the last parameter's changing fastest."""
    for combination in itertools.product(*(one.list_values() for one in settings.parameters)):
        yield {one.name: value for one, value in zip(settings.parameters, combination, strict=True)}


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
    missing = [
        option.name
        for option, _ in iterate_fields(TrainOptions)
        if option.default is option.default_factory is dataclasses.MISSING and option.name not in complete
    ]
    if missing:
        return [f"train: {', '.join(missing)}: required"]
    grouped = group_options(TrainOptions, **complete)
    problems = find_problems(grouped)
    if not grouped.end.is_given:
        problems.append("train: no end is given; give max_steps, max_epochs, max_samples or max_tokens")
    if not (grouped.validation.is_asked or grouped.rows.validation_share):
        problems.append("train: no validation data, by which trials are compared; give validation_data_path")
    return problems


def describe_trials(numbers: Sequence[int], num_trials: int) -> str:
    if len(numbers) == num_trials:
        return "all trials"
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"trial{'s' if len(numbers) > 1 else ''} {shown}"


def describe_values(values: Values) -> str:
    """The values of a trial in one line."""
    return ", ".join(f"{name} {show_value(value)}" for name, value in values.items())


def show_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def list_files(settings: SweepSettings, trials: Sequence[Values]) -> list[Path]:
    """The files of rows and data sets of all trials; ValueError for one that does not exist."""
    named: dict[str, str] = {}
    for values in trials:
        options = settings.options_of(values)
        named |= {path: name for name in FILE_OPTIONS for path in as_tuple(options.get(name))}
    elsewhere = [f"{name} {path}: must be local for a sweep" for path, name in named.items() if is_url(path)]
    if elsewhere:
        raise ValueError("\n  ".join(elsewhere))
    missing = [f"{name}: {path} does not exist" for path, name in named.items() if not Path(path).exists()]
    if missing:
        raise ValueError("\n  ".join(missing))
    return [Path(path) for path in named]


def as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def describe_settings(settings: SweepSettings) -> Values:
    """The settings that decide the results, as JSON returns them."""
    values = dataclasses.asdict(settings)
    for key in ("output_dir", "num_processes", "num_parallel"):
        del values[key]
    return json.loads(json.dumps(values))
