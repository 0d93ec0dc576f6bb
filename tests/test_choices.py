"""Options with a fixed set of values: a value without code is refused by its name, at the start."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_origin

import pytest
import torch

from mini_trainer import options as all_options
from mini_trainer.data.rows.rows import IMPLEMENTED_ROWS
from mini_trainer.evaluate_model import evaluate
from mini_trainer.generate import generate
from mini_trainer.options import (
    BoardOptions,
    ContinualOptions,
    EvaluateOptions,
    ExportGgufOptions,
    GenerateOptions,
    ImportConfigOptions,
    MergeAdapterOptions,
    MergeModelsOptions,
    PlotOptions,
    ProcessDataOptions,
    ScoreDataOptions,
    SweepOptions,
    TrainOptions,
    VerifyOptions,
    flag_name,
    group_options,
)
from mini_trainer.options.choices import check_choices, list_choices
from mini_trainer.options.fields import iterate_fields
from mini_trainer.process_data import process_data
from mini_trainer.run.choosing import IMPLEMENTED
from mini_trainer.run.start import open_inputs
from mini_trainer.sampler import RunPosition
from mini_trainer.tools.export_gguf import export_gguf
from mini_trainer.tools.import_config import import_config
from mini_trainer.tools.merge_adapter import merge_adapter
from mini_trainer.tools.score_data import score
from mini_trainer.use.inference import engines as choice

open_run = functools.partial(open_inputs, device=torch.device("cpu"), world_size=1, start=RunPosition())
PROGRAMS: dict[type, Callable[[Any], Any]] = {
    TrainOptions: open_run,
    ProcessDataOptions: process_data,
    GenerateOptions: lambda options: generate(options, None),
    EvaluateOptions: lambda options: evaluate(options, None),
    MergeAdapterOptions: lambda options: merge_adapter(options, None),
    ExportGgufOptions: export_gguf,
    ImportConfigOptions: import_config,
    ScoreDataOptions: lambda options: score(options, None),
}
WITHOUT_CHOICES = {BoardOptions, ContinualOptions, MergeModelsOptions, PlotOptions, SweepOptions, VerifyOptions}
CHOICES = [(program, name) for program in PROGRAMS for name in list_choices(program)]


def make_options(program: type, **values: object) -> Any:
    """Options of a program, those that are required being any text."""
    required = {
        option.name: ("any",) if get_origin(option.type) is tuple else "any"
        for option, _ in iterate_fields(program)
        if option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING
    }
    return group_options(program, **(required | values))


def default_of(program: type, name: str) -> object:
    return all_options.flatten_options(make_options(program))[name]


@pytest.mark.parametrize(("program", "name"), CHOICES, ids=[f"{program.__name__}-{name}" for program, name in CHOICES])
def test_a_value_that_is_added_without_code_is_refused_by_name(program, name):
    value = ("new-choice",) if isinstance(default_of(program, name), tuple) else "new-choice"
    with pytest.raises(ValueError, match=f"{flag_name(name)} new-choice: .*implemented"):
        PROGRAMS[program](make_options(program, **{name: value}))


def test_every_value_that_is_offered_has_code():
    tables = {TrainOptions: IMPLEMENTED, ProcessDataOptions: IMPLEMENTED_ROWS, GenerateOptions: choice.IMPLEMENTED}
    for program, implemented in tables.items():
        missing = {name: {*values} - {*implemented[name]} for name, values in list_choices(program).items()}
        assert not any(missing.values()), missing
        for name, values in list_choices(program).items():
            for value in values:
                given = (value,) if isinstance(default_of(program, name), tuple) else value
                check_choices(make_options(program, **{name: given}), implemented)


def test_an_option_without_a_table_is_noticed():
    with pytest.raises(KeyError, match="lr_scheduler"):
        check_choices(make_options(TrainOptions), {k: v for k, v in IMPLEMENTED.items() if k != "lr_scheduler"})


def test_every_program_is_here():
    known = {cls for name, cls in vars(all_options).items() if isinstance(cls, type) and name.endswith("Options")}
    grouped = {entry.type for cls in known for entry in dataclasses.fields(cls) if dataclasses.is_dataclass(entry.type)}
    assert known - grouped == PROGRAMS.keys() | WITHOUT_CHOICES
