"""Scores models on tokenized sets of any task; existing results are reused."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chat.masking import fingerprint_tokenizer
from corpus.mixture import Mixture
from corpus.reader import TokenizedData
from evaluation import classes, losses
from evaluation.kept import is_made_by, write_made
from evaluation.results import Measured
from families.packed_row import check_positions
from inference.models import FoundModel
from lifecycle.choosing import choose_adapter_method
from methods.full import Full
from model.build import build_model
from model.check import check_model
from model.config import ModelSource, check_rope
from model.fingerprints import fingerprint_data
from objectives.choice import Settings, make_family, make_objective
from objectives.classes import PROBLEM_TYPES
from objectives.columns import CAUSAL_LM
from objectives.data_kinds import describe_task
from objectives.label_columns import describe_names
from objectives.objective import Objective
from objectives.packed_model import PackedModel
from options import ComputeOptions, ShardingOptions
from ranks.ending import log
from ranks.world import World, call_on_rank0
from scoring.data_scores import score_data

MAX_TOKENS_SHOWN = 2000  # per sample


def open_set(path: str) -> Mixture:
    """Opens a tokenized data set; ValueError if it has no trained tokens."""
    data = Mixture([TokenizedData(path, option="--data")])
    data.check_trained("--data")
    return data


def open_objective(data: Mixture, *, begins_anew: bool = False) -> Objective:
    """The set's objective with default options; `begins_anew`: the model lacks a head."""
    name, settings = data.task.objective, Settings(head_seed=0 if begins_anew else None)
    return make_objective(name, settings, make_family(name, settings), data.task, data.count_labels)


def check_set(data: Mixture, found: FoundModel) -> None:
    """ValueError if the set does not fit the model: tokenizer, task, labels, or length of samples."""
    path = data.sources[0].path
    sidecar = data.sources[0].sidecar
    if sidecar is not None and sidecar.get("tokenizer_fingerprint") != fingerprint_tokenizer(found.tokenizer):
        raise ValueError(
            f"--data {path}: was made with another tokenizer than {found.name}'s: tokenize it with that model's"
            " (losses of different tokenizers cannot be compared)"
        )
    objective = open_objective(data)
    kind = found.classifies or CAUSAL_LM
    if kind != data.task.objective:
        raise ValueError(f"--data {path} is for {describe_task(data.task)}, but --model {found.name} for {kind}")
    obstacle = objective.family.check_config(found.config, trust_remote_code=found.trust_remote_code)
    if obstacle is not None:
        raise ValueError(f"--model {found.name}: {obstacle}")
    if objective.gives_predictions:
        check_labels(data, found)
    data.vocab_size = found.config.get_text_config(decoder=True).vocab_size
    check_rope(found.config, longest=data.longest_sequence)


def check_labels(data: Mixture, found: FoundModel) -> None:
    """ValueError if the model's classes have other names, or another order, than the set's."""
    path, task, config = data.sources[0].path, data.task, found.config
    if found.adapter is not None:
        log.warning(f"note: {found.name}: an adapter does not name its classes; assuming the order of {path}")
        return
    names = tuple(config.id2label[i] for i in sorted(config.id2label))
    is_other = len(names) != task.num_labels if task.label_type == "regression" else names != task.label_names
    if is_other:
        raise ValueError(
            f"--data {path} is for {describe_task(task)}, but the labels of --model {found.name} are"
            f" {describe_names(names)}: tokenize the rows with --label-names in the model's order"
        )
    if getattr(config, "problem_type", None) not in (None, PROBLEM_TYPES[task.label_type]):
        raise ValueError(
            f"--data {path} is for {describe_task(task)}, but --model {found.name} for {config.problem_type}"
        )


def measure_sets(
    found: FoundModel, data_sets: dict[str, Mixture], folder: Path, *, dtype: str, cap: int, world: World
) -> dict[str, np.ndarray]:
    """The model's losses or predictions on every set, by the set's name; reuses files in `folder`. All ranks call
    this."""
    identity = found.identify() | {"dtype": dtype, "device": world.device.type, "torch": torch.__version__}
    scorer: PackedModel | None = None
    outcome = {}
    for name, data in data_sets.items():
        objective = open_objective(data, begins_anew=found.adapter is not None)
        of_classes = objective.gives_predictions
        (source,) = data.sources
        digest = fingerprint_data(source.path, source=None, lengths=source.lengths, kept=source.kept)
        path, made_by = folder / f"{name}.{(classes if of_classes else losses).FILE}", identity | {"data": digest}
        if not call_on_rank0(world, lambda path=path, made_by=made_by: is_made_by(path, made_by)):
            trust = found.trust_remote_code
            family = objective.family.complete(found.config, found.tokenizer, trust_remote_code=trust)
            objective = replace(objective, family=family)
            scorer = scorer or build_scorer(found, objective, dtype=dtype, world=world)
            describe = score_set(scorer, data, objective, cap=cap, world=world)
            call_on_rank0(world, functools.partial(write_lines, path, describe, made_by))
        outcome[name] = (classes.read_predictions if of_classes else losses.read_losses)(path)
    return outcome


def build_scorer(found: FoundModel, objective: Objective, *, dtype: str, world: World) -> PackedModel:
    """Builds the model as for a run's validation. All ranks call this."""
    if dtype == "float16":
        raise ValueError("--dtype float16: --data is computed in bfloat16 or float32, as in a run")
    method = Full() if found.adapter is None else choose_adapter_method(found.adapter, flag="--model")
    model = build_model(
        ModelSource(found.directory, found.config, found.trust_remote_code, name=found.base_name),
        ComputeOptions(compute_dtype=dtype, activation_checkpointing="none"),
        ShardingOptions(),
        objective=objective,
        method=method,
        world=world,
    )
    check_model(model, objective, method, world=world)
    return model.eval()


def score_set(
    scorer: PackedModel, data: Mixture, objective: Objective, *, cap: int, world: World
) -> Callable[[], list[dict[str, Any]]]:
    """Scores the model on one set; returns a function that makes the file's lines on rank 0. All ranks call this."""
    check_positions(scorer.model, longest=data.longest_sequence)
    found = score_data(scorer, data, objective, cap=cap, world=world, by_sample=True)
    if objective.gives_predictions:
        return functools.partial(classes.describe_predictions, found.predictions, objective)
    return functools.partial(losses.describe_losses, found.sums.numpy())


def write_lines(path: Path, describe: Callable[[], list[dict[str, Any]]], made_by: dict[str, Any]) -> None:
    write_made(path, "".join(json.dumps(line) + "\n" for line in describe()), made_by)


def collect_set(name: str, data: Mixture, found: FoundModel, tables: Sequence[np.ndarray]) -> Measured:
    """All models' results side by side, with the samples' texts decoded by their common tokenizer."""
    objective = open_objective(data)

    def show(row: int) -> str:
        input_ids = data.read(row)["input_ids"]
        return found.tokenizer.decode(input_ids[:MAX_TOKENS_SHOWN], clean_up_tokenization_spaces=False)

    if objective.gives_predictions:
        return classes.collect_classes(name, objective, tables, show)
    return losses.collect_losses(name, tables, show)
