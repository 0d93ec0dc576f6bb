"""Options with a fixed set of values: each has code, and other values are refused by their names at the start."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any, get_origin

import pytest
import torch

from mini_trainer import options as train_options
from mini_trainer.data.chat.masking import THINKING_PREFIXES
from mini_trainer.data.chat.tokens import MODES as CONTROL_MODES
from mini_trainer.data.columns.label_columns import LABEL_TYPES
from mini_trainer.data.tokenized.mixture import WEIGHED_BY
from mini_trainer.distributed.devices import DTYPES
from mini_trainer.evaluate_model import evaluate
from mini_trainer.generate import generate
from mini_trainer.model.activation_checkpointing import MODES
from mini_trainer.model.attention import BACKENDS, FUNCTIONS
from mini_trainer.model.methods.lora import BASE_QUANTIZATIONS, LORA_EXPORTS
from mini_trainer.model.methods.osft_directions import ALLOCATIONS
from mini_trainer.model.methods.osft_subspaces import BASES
from mini_trainer.model.optim.averages import AVERAGES
from mini_trainer.model.optim.muon import SCALES
from mini_trainer.model.optim.rates import SCHEDULES
from mini_trainer.model.sharding import KEEPING, RESHARDING
from mini_trainer.objectives.divergences import FROM_LOGITS, FROM_TOP
from mini_trainer.objectives.families.vision import FREEZABLE
from mini_trainer.objectives.preference_losses import LOSSES
from mini_trainer.objectives.token_loss import WEIGHTINGS
from mini_trainer.options import PRESETS, TrainOptions, doors, flag_name, flatten_options, group_options, tools
from mini_trainer.options.choices import list_choices
from mini_trainer.options.fields import iterate_fields
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.tools import (
    BoardOptions,
    ContinualOptions,
    EvaluateOptions,
    ExportGgufOptions,
    ExportRunOptions,
    GenerateOptions,
    ImportConfigOptions,
    MergeAdapterOptions,
    PlotOptions,
    ProcessDataOptions,
    RecipeOptions,
    ScoreDataOptions,
    ServeOptions,
    SweepOptions,
    VerifyOptions,
)
from mini_trainer.process_data import process_data
from mini_trainer.run.start import open_inputs
from mini_trainer.sampler import RunPosition
from mini_trainer.tools.export_gguf import export_gguf
from mini_trainer.tools.import_config import import_config
from mini_trainer.tools.merge_adapter import merge_adapter
from mini_trainer.tools.score_data import score
from mini_trainer.tools.serve import serve
from mini_trainer.use.exporters.gguf_file import TYPES

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
    ServeOptions: serve,
}
WITHOUT_CHOICES = {
    *(BoardOptions, ContinualOptions, ExportRunOptions, PlotOptions, RecipeOptions),
    *(SweepOptions, VerifyOptions),
}
CHOICES = [(program, name) for program in PROGRAMS for name in list_choices(program)]
FORMATS = (*doors.TEXT_FORMATS, *doors.NAMED_FORMATS)
# What the code has, by option; of options of several programs, for all of them.
CODE: dict[str, Collection[str]] = {
    "activation_checkpointing": ("auto", *MODES),
    "attention": ("auto", *BACKENDS),
    "base_quantization": BASE_QUANTIZATIONS,
    "callback_errors": ("stop", "log"),
    "compute_dtype": ("auto", *DTYPES),
    "control_tokens": CONTROL_MODES,
    "data_weights_by": WEIGHED_BY,
    "dtype": ("auto", *DTYPES, *TYPES),
    "engine": doors.ENGINES,
    "export_dtype": DTYPES,
    "format": FORMATS,
    "freeze": FREEZABLE,
    "label_type": LABEL_TYPES,
    "logging_level": logging.getLevelNamesMapping(),
    "lora_export": LORA_EXPORTS,
    "loss_weighting": WEIGHTINGS,
    "lr_scheduler": SCHEDULES,
    "master_weights": DTYPES,
    "max_tokens_per_gpu": ("auto",),
    "micro_batch_grad_sync": ("every", "last"),
    "muon_scale": SCALES,
    "objective": OBJECTIVES,
    "optimizer": doors.OPTIMIZERS,
    "osft_basis": BASES,
    "osft_rank_allocation": ALLOCATIONS,
    "preference_loss": LOSSES,
    "preset": PRESETS,
    "reshard_after_backward": KEEPING,
    "reshard_after_forward": RESHARDING,
    "router_loss_over": ("sequence", "global-batch"),
    "sharding": ("full", "hybrid"),
    "teacher_divergence": {*FROM_TOP, *FROM_LOGITS},
    "thinking_prefix": THINKING_PREFIXES,
    "track": doors.TRACKERS,
    "trainer": doors.TRAINERS,
    "weight_average": ("none", *AVERAGES),
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
    with pytest.raises(ValueError, match=f"{flag_name(name)} new-choice"):
        PROGRAMS[program](make_options(program, **{name: value}))


def test_every_value_that_is_offered_has_code():
    assert FUNCTIONS.keys() == BACKENDS.keys()
    for program in PROGRAMS:
        missing = {name: {*values} - {*CODE[name]} for name, values in list_choices(program).items()}
        assert not any(missing.values()), missing


def test_every_program_is_here():
    spaces = {**vars(train_options), **vars(tools)}
    known = {cls for name, cls in spaces.items() if isinstance(cls, type) and name.endswith("Options")}
    grouped = {entry.type for cls in known for entry in dataclasses.fields(cls) if dataclasses.is_dataclass(entry.type)}
    assert known - grouped == PROGRAMS.keys() | WITHOUT_CHOICES
