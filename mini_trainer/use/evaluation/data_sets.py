"""Scores models on tokenized sets of any task; existing results are reused."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mini_trainer.data.columns.base import CAUSAL_LM, PREFERENCE, SEQUENCES, TOKENS, describe_task, list_sequences
from mini_trainer.data.columns.label_columns import describe_names
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.build import build_model
from mini_trainer.model.check import check_model
from mini_trainer.model.config import ModelSource, check_rope
from mini_trainer.model.fingerprints import fingerprint_data
from mini_trainer.model.method import Full
from mini_trainer.model.scoring.data_scores import score_data
from mini_trainer.objectives.classes import PROBLEM_TYPES
from mini_trainer.objectives.families.family import check_positions
from mini_trainer.objectives.families.text_tower import count_logits
from mini_trainer.objectives.objective import Objective, ObjectiveSettings, PackedModel, make_family, make_objective
from mini_trainer.objectives.rewards import REWARD
from mini_trainer.options import ComputeOptions, PreferenceOptions, ShardingOptions
from mini_trainer.options.doors import METHODS
from mini_trainer.use.evaluation.results import Measured, is_made_by, write_made
from mini_trainer.use.evaluation.set_scores import CLASSES, LOSSES, PAIRS, Kept
from mini_trainer.use.inference.loading import FoundModel

MAX_TOKENS_SHOWN = 2000  # per sequence
# Of two answers, a language model prefers the one whose tokens are more probable in the mean.
WITHOUT_REFERENCE = PreferenceOptions(preference_loss="simpo", preference_beta=1, preference_gamma=0)


@dataclass(frozen=True)
class SetMeasure:
    """How a model is measured on a set: the objective, and how its scores are kept and collected."""

    objective: str
    kept: Kept


# By the set's objective, and the model's kind of classification: None for language models.
MEASURES = {
    (CAUSAL_LM, None): SetMeasure(CAUSAL_LM, LOSSES),
    (SEQUENCES, SEQUENCES): SetMeasure(SEQUENCES, CLASSES),
    (TOKENS, TOKENS): SetMeasure(TOKENS, CLASSES),
    (PREFERENCE, None): SetMeasure(PREFERENCE, PAIRS),
    (PREFERENCE, SEQUENCES): SetMeasure(REWARD, PAIRS),
}


def open_set(path: str, *, cache_dir: str) -> Mixture:
    """Opens a tokenized data set; ValueError if it has no trained tokens."""
    data = Mixture([TokenizedData(path, option="--data", cache_dir=cache_dir)])
    data.check_trained("--data")
    return data


def choose_measure(data: Mixture, found: FoundModel) -> SetMeasure:
    """How the model is measured on the set; ValueError for a model of another kind."""
    measure = MEASURES.get((data.task.objective, found.classifies))
    if measure is None:
        path, kind = data.sources[0].path, found.classifies or CAUSAL_LM
        raise ValueError(
            f"--data {path} is for {describe_task(data.task)}, but --model {found.name} for {kind}; allowed:"
            f" {', '.join(f'{a} on {b or CAUSAL_LM}' for a, b in MEASURES)}"
        )
    return measure


def open_objective(data: Mixture, found: FoundModel) -> Objective:
    """The objective that measures the model on the set."""
    settings = ObjectiveSettings(head_seed=None if found.adapter is None else 0, preference=WITHOUT_REFERENCE)
    name = choose_measure(data, found).objective
    return make_objective(name, settings, make_family(name, settings), data.task, data.count_labels)


def check_set(data: Mixture, found: FoundModel) -> None:
    """ValueError if the set does not fit the model: tokenizer, task, labels, or length of samples."""
    path = data.sources[0].path
    sidecar = data.sources[0].sidecar
    if sidecar is not None and sidecar.get("tokenizer_fingerprint") != fingerprint_tokenizer(found.tokenizer):
        raise ValueError(
            f"--data {path}: was made with a tokenizer other than {found.name}'s: tokenize it with that model's"
            " (losses of different tokenizers cannot be compared)"
        )
    objective = open_objective(data, found)
    obstacle = objective.family.check_config(found.config, trust_remote_code=found.trust_remote_code)
    if obstacle is not None:
        raise ValueError(f"--model {found.name}: {obstacle}")
    if found.classifies is not None:
        check_labels(data, found, objective)
    data.vocab_size = count_logits(found.config)
    check_rope(found.config, longest=data.longest_sequence)


def check_labels(data: Mixture, found: FoundModel, objective: Objective) -> None:
    """ValueError if names or order of the model's classes differ from the set's."""
    path, task, config = data.sources[0].path, data.task, found.config
    if found.adapter is not None:
        log.warning(f"note: {found.name}: an adapter does not name its classes; assuming the order of {path}")
        return
    names = tuple(config.id2label[i] for i in sorted(config.id2label))
    if objective.name == REWARD:
        if len(names) > 1:
            raise ValueError(
                f"--data {path} is for {describe_task(task)}, but --model {found.name} has {len(names)} outputs: a"
                " reward model has one"
            )
        return
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
        objective, kept = open_objective(data, found), choose_measure(data, found).kept
        (source,) = data.sources
        digest = fingerprint_data(source)
        path, made_by = folder / f"{name}.{kept.file}", identity | {"data": digest}
        if not call_on_rank0(world, lambda path=path, made_by=made_by: is_made_by(path, made_by)):
            trust = found.trust_remote_code
            family = objective.family.complete(found.config, found.tokenizer, trust_remote_code=trust)
            objective = replace(objective, family=family)
            scorer = scorer or build_scorer(found, objective, dtype=dtype, world=world)
            check_positions(scorer.model, longest=data.longest_sequence)
            scores = score_data(scorer, data, objective, cap=cap, world=world, by_sample=True)
            describe = functools.partial(kept.describe, scores, objective)
            call_on_rank0(world, functools.partial(write_lines, path, describe, made_by))
        outcome[name] = kept.read(path)
    return outcome


def build_scorer(found: FoundModel, objective: Objective, *, dtype: str, world: World) -> PackedModel:
    """Builds the model as for a run's validation. All ranks call this."""
    if dtype == "float16":
        raise ValueError("--dtype float16: --data is computed in bfloat16 or float32, as in a run")
    method = Full() if found.adapter is None else METHODS["lora"].from_adapter(found.adapter, flag="--model")
    model = build_model(
        ModelSource(found.directory, found.config, found.trust_remote_code, name=found.base_name),
        ComputeOptions(compute_dtype=dtype, activation_checkpointing="none"),
        ShardingOptions(),
        objective=objective,
        method=method,
        world=world,
    )
    check_model(model, objective, world=world)
    return model.eval()


def write_lines(path: Path, describe: Callable[[], list[dict[str, Any]]], made_by: dict[str, Any]) -> None:
    write_made(path, "".join(json.dumps(line) + "\n" for line in describe()), made_by)


def collect_set(name: str, data: Mixture, found: FoundModel, tables: Sequence[np.ndarray]) -> Measured:
    """All models' results side by side, with the samples' texts decoded by their common tokenizer."""

    def show(row: int) -> str:
        texts = [
            found.tokenizer.decode(input_ids[:MAX_TOKENS_SHOWN], clean_up_tokenization_spaces=False)
            for input_ids in list_sequences(data.read(row))
        ]
        return "\n\n--- or ---\n\n".join(texts)

    return choose_measure(data, found).kept.collect(name, open_objective(data, found), tables, show)
