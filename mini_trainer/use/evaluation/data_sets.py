"""Scores models on tokenized sets of any task; existing results are reused."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mini_trainer.data.columns.base import CAUSAL_LM, PREFERENCE, SEQUENCES, TOKENS, describe_task, list_sequences
from mini_trainer.data.columns.label_columns import describe_names
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData, verify_data
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
from mini_trainer.use.evaluation.results import Measured, is_made_by
from mini_trainer.use.evaluation.set_scores import CLASSES, LOSSES, PAIRS, Kept
from mini_trainer.use.inference.loading import FoundModel

MAX_TOKENS_SHOWN = 2000  # per sequence
# Of two answers, a language model prefers the one whose tokens are more probable in the mean.
WITHOUT_REFERENCE = PreferenceOptions(preference_loss="simpo", preference_beta=1, preference_gamma=0)


# The objective that measures a model, and how its scores are kept, by the set's objective and the model's kind of
# classification: None for language models.
MEASURES = {
    (CAUSAL_LM, None): (CAUSAL_LM, LOSSES),
    (SEQUENCES, SEQUENCES): (SEQUENCES, CLASSES),
    (TOKENS, TOKENS): (TOKENS, CLASSES),
    (PREFERENCE, None): (PREFERENCE, PAIRS),
    (PREFERENCE, SEQUENCES): (REWARD, PAIRS),
}


def open_set(path: str, *, cache_dir: str) -> Mixture:
    """Opens a tokenized data set; ValueError if it has no trained tokens."""
    data = Mixture([TokenizedData(path, option="--data", cache_dir=cache_dir)])
    data.check_trained("--data")
    return data


def open_objective(data: Mixture, found: FoundModel) -> tuple[Objective, Kept]:
    """The model's objective on the set, and how its scores are kept; ValueError for a model of another kind."""
    task, kind = data.task, found.classifies
    if (task.objective, kind) not in MEASURES:
        raise ValueError(
            f"--data {data.sources[0].path} is for {describe_task(task)}, but --model {found.name} for"
            f" {kind or CAUSAL_LM}; allowed: {', '.join(f'{a} on {b or CAUSAL_LM}' for a, b in MEASURES)}"
        )
    name, kept = MEASURES[task.objective, kind]
    settings = ObjectiveSettings(head_seed=None if found.adapter is None else 0, preference=WITHOUT_REFERENCE)
    return make_objective(name, settings, make_family(name, settings), task, data.count_labels), kept


def check_set(data: Mixture, found: FoundModel) -> None:
    """ValueError if the set does not fit the model: tokenizer, task, labels, or length of samples."""
    path, sidecar = data.sources[0].path, data.sources[0].sidecar
    if sidecar is not None and sidecar.get("tokenizer_fingerprint") != fingerprint_tokenizer(found.tokenizer):
        raise ValueError(
            f"--data {path}: was made with a tokenizer other than {found.name}'s: tokenize it with that model's"
            " (losses of different tokenizers cannot be compared)"
        )
    objective, _ = open_objective(data, found)
    if (obstacle := objective.family.check_config(found.config, trust_remote_code=found.trust_remote_code)) is not None:
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
    names, model, problem = tuple(config.id2label[i] for i in sorted(config.id2label)), f"--model {found.name}", ""
    if objective.name == REWARD:
        problem = f"{model} has {len(names)} outputs: a reward model has one" if len(names) > 1 else ""
    elif len(names) != task.num_labels if task.label_type == "regression" else names != task.label_names:
        labels = f"the labels of {model} are {describe_names(names)}"
        problem = f"{labels}: tokenize the rows with --label-names in the model's order"
    elif getattr(config, "problem_type", None) not in (None, PROBLEM_TYPES[task.label_type]):
        problem = f"{model} for {config.problem_type}"
    if problem:
        raise ValueError(f"--data {path} is for {describe_task(task)}, but {problem}")


def measure_sets(
    found: FoundModel, data_sets: dict[str, Mixture], folder: Path, *, dtype: str, cap: int, world: World
) -> dict[str, np.ndarray]:
    """The model's losses or predictions, by the set's name; reuses files in `folder`. All ranks call this."""
    identity = found.identify() | {"dtype": dtype, "device": world.device.type, "torch": torch.__version__}
    scorer: PackedModel | None = None
    outcome = {}
    for name, data in data_sets.items():
        objective, kept = open_objective(data, found)
        path, made_by = folder / f"{name}.{kept.file}", identity | {"data": fingerprint_data(data.sources[0])}
        if not call_on_rank0(world, functools.partial(is_made_by, path, made_by)):
            family = objective.family.complete(found.config, found.tokenizer, trust_remote_code=found.trust_remote_code)
            objective = replace(objective, family=family)
            scorer = scorer or build_scorer(found, objective, dtype=dtype, world=world)
            check_positions(scorer.model, longest=data.longest_sequence)
            scores = score_data(scorer, data, objective, cap=cap, world=world, by_sample=True)
            call_on_rank0(world, functools.partial(kept.write, path, scores, objective, made_by))
        outcome[name] = kept.read(path)
    return outcome


def build_scorer(found: FoundModel, objective: Objective, *, dtype: str, world: World) -> PackedModel:
    """Builds the model as for a run's validation. All ranks call this."""
    if dtype == "float16":
        raise ValueError("--dtype float16: --data is computed in bfloat16 or float32, as in a run")
    method = Full() if found.adapter is None else METHODS["lora"].from_adapter(found.adapter, flag="--model")
    source = ModelSource(found.directory, found.config, found.trust_remote_code, name=found.base_name)
    compute = ComputeOptions(compute_dtype=dtype, activation_checkpointing="none")
    model = build_model(source, compute, ShardingOptions(), objective=objective, method=method, world=world)
    check_model(model, objective, world=world)
    return model.eval()


def verify_files(found: Iterable[FoundModel], data_sets: Iterable[Mixture]) -> None:
    """Checks what will be read against the hashes recorded when it was written."""
    for model in found:
        model.verify()
    for data in data_sets:
        verify_data(*data.sources)


def collect_set(name: str, data: Mixture, found: FoundModel, tables: Sequence[np.ndarray]) -> Measured:
    """All models' results side by side, with the samples' texts decoded by their common tokenizer."""

    def show(row: int) -> str:
        ids = (input_ids[:MAX_TOKENS_SHOWN] for input_ids in list_sequences(data.read(row)))
        return "\n\n--- or ---\n\n".join(found.tokenizer.decode(one, clean_up_tokenization_spaces=False) for one in ids)

    objective, kept = open_objective(data, found)
    return kept.collect(name, objective, tables, show)
