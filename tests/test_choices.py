"""Options with a fixed set of values: each has code, and other values are refused by their names at the start."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any, get_origin

import pytest
import torch

from mini_trainer import options as train_options
from mini_trainer.data.chat.linting import DOUBTS
from mini_trainer.data.chat.masking import THINKING_PREFIXES
from mini_trainer.data.columns.label_columns import LABEL_TYPES
from mini_trainer.model.attention import BACKENDS
from mini_trainer.model.methods.osft_subspaces import BASES
from mini_trainer.objectives.preferences import LOSSES
from mini_trainer.options import TrainOptions, doors, flag_name, flatten_options, group_options, tools
from mini_trainer.options.command_line import refuse_unknown_words
from mini_trainer.options.fields import iterate_fields, list_choices
from mini_trainer.process_data import process_data
from mini_trainer.run.start import open_inputs
from mini_trainer.sampler import RunPosition
from mini_trainer.use.exporters.gguf_file import TYPES

open_run = functools.partial(open_inputs, device=torch.device("cpu"), world_size=1, start=RunPosition())
# Programs that check values which Python passes; those of the others come from the command line alone.
CHECKED: dict[type, Callable[[Any], Any]] = {TrainOptions: open_run, tools.ProcessDataOptions: process_data}
GROUPS = {cls for cls in {**vars(train_options), **vars(tools)}.values() if dataclasses.is_dataclass(cls)}
PARTS = {entry.type for cls in GROUPS for entry in dataclasses.fields(cls)}
PROGRAMS = sorted((cls for cls in GROUPS - PARTS if cls.__name__.endswith("Options")), key=lambda cls: cls.__name__)
CHOICES = [(program, name) for program in PROGRAMS for name in list_choices(program)]
# What the code has, by option; of options of several programs, for all of them.
CODE: dict[str, Collection[str]] = {
    "refuse": DOUBTS,
    "dtype": ("auto", *doors.DTYPES, *TYPES),
    "label_type": LABEL_TYPES,
    "logging_level": logging.getLevelNamesMapping(),
    "master_weights": doors.DTYPES,
    "osft_basis": BASES,
    "preference_loss": LOSSES,
    "thinking_prefix": THINKING_PREFIXES,
}


def make_options(program: type, **values: object) -> Any:
    """Options of a program, those that are required being any text."""
    required = {
        option.name: ("any",) if get_origin(option.type) is tuple else "any"
        for option, _ in iterate_fields(program)
        if option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING
    }
    return group_options(program, **(required | values))


@pytest.mark.parametrize(("program", "name"), CHOICES, ids=[f"{program.__name__}-{name}" for program, name in CHOICES])
def test_a_value_that_is_none_of_the_choices_is_refused_by_name(program, name):
    default = flatten_options(make_options(program))[name]
    value = ("new-choice",) if isinstance(default, tuple) else "new-choice"
    with pytest.raises(ValueError, match=f"{flag_name(name)} new-choice: allowed: "):
        if program in CHECKED:
            CHECKED[program](make_options(program, **{name: value}))
        refuse_unknown_words([flag_name(name), "new-choice"], program)


def test_every_value_that_is_offered_has_code():
    assert doors.ATTENTION.keys() == BACKENDS.keys()
    missing = {
        (program, name): {*list_choices(program)[name]} - {*CODE[name]} for program, name in CHOICES if name in CODE
    }
    assert not any(missing.values()), missing
    assert CODE.keys() <= {name for _, name in CHOICES} and len(CHOICES) > 40
