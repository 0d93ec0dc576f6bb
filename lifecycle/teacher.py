"""A run's teacher: files of its scores next to the data sets, or a model that reads each micro-batch first."""

from collections.abc import Callable

from corpus.mixture import Mixture
from disk import hash_json
from lifecycle.inputs import RunInputs
from lifecycle.reference import find_other, find_reference
from model.config import ModelSource
from model.fingerprints import fingerprint_model
from model.teaching import OtherModel, StartWeights
from objectives.objective import SELF, Objective
from objectives.packed_model import PackedModel
from objectives.soft_targets import SOFT_COLUMN
from options import TrainOptions
from pretrained.files import name_model
from ranks.ending import log
from ranks.world import World
from scoring.score_files import ScoreColumn, ScoreFile, locate_scores


def open_teacher(inputs: RunInputs, objective: Objective, options: TrainOptions) -> Objective:
    """Finds the objective's teacher, if it has one; returns the objective for what was found.

    A teacher's scores become a column of the data. ValueError if a training set has none, or they do not fit.
    Validation sets are measured by them if all have some.
    """
    if objective.teacher_model is not None:
        inputs.teacher = identify_teacher(objective.teacher_model, options)
    name = objective.scores_name
    if name is None:
        return objective
    files = add_scores(inputs.data, name)
    held_out = inputs.validation_data
    if held_out is not None:
        without = [str(source.path) for source in held_out.sources if not locate_scores(source.path, name).exists()]
        if without:
            log.info(f"validation: no teacher's scores of {', '.join(without)}: measured by the cross-entropy alone")
        else:
            files += add_scores(held_out, name)
    inputs.teacher = hash_json([file.sidecar for file in files])
    return objective.with_scores([file.sidecar for file in files])


def add_scores(data: Mixture, name: str) -> list[ScoreFile]:
    """Adds the scores to the data; ValueError for ids that the model does not have: padding rows of a server's head."""
    files = [ScoreFile(source, name) for source in data.sources]
    for file in files:
        if file.sidecar["max_token_id"] >= data.vocab_size:
            raise ValueError(
                f"{file.path}: names token id {file.sidecar['max_token_id']}, beyond the model's vocabulary of"
                f" {data.vocab_size}: score the data by --engine hf, which leaves out what is not the tokenizer's"
            )
    data.add_column(SOFT_COLUMN, ScoreColumn(files))
    return files


def identify_teacher(name: str, options: TrainOptions) -> str:
    """A digest of the weights of --teacher-model."""
    return SELF if name == SELF else fingerprint_model(find_other(name, options))


def add_teacher(
    options: TrainOptions,
    inputs: RunInputs,
    model: PackedModel,
    build: Callable[[ModelSource], PackedModel],
    *,
    world: World,
) -> None:
    """Gives the model's reader its teacher, if the objective has one that reads rows. All ranks call this.

    `model`: as the run starts, before a checkpoint is restored; `build` makes another one, frozen.
    """
    name = inputs.objective.teacher_model
    if name is None:
        return
    if name == SELF:
        model.reader.teacher = teacher = StartWeights(model)
        log.info(f"teacher: the model as the run starts, {teacher.num_bytes / 1e9:.2f} GB of copies on each rank")
        return
    other = build(find_reference("--teacher-model", name, options, inputs))
    other.requires_grad_(False).eval()
    model.reader.teacher = OtherModel(other)
    num_parameters = sum(param.numel() for param in other.parameters())
    log.info(f"teacher: {name_model(name)}, {num_parameters:,} parameters, in {other.compute_dtype}")
