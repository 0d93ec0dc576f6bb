"""Models that a run reads and does not train: its reference, scored once and kept next to the data, and its teacher."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from mini_trainer.data.stores.disk import hash_json, written_aside
from mini_trainer.data.stores.model_files import find_model, name_model
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.pairs import pair
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.config import ModelSource, check_rope, load_config
from mini_trainer.model.scoring.data_scores import score_data
from mini_trainer.model.scoring.score_files import NoScores, ScoreColumn, ScoreFile, digest_data, locate_scores
from mini_trainer.model.teaching import OtherModel, StartWeights
from mini_trainer.objectives.families.packed_row import check_positions
from mini_trainer.objectives.objective import SELF, Objective
from mini_trainer.objectives.packed_model import PackedModel
from mini_trainer.objectives.soft_targets import SOFT_COLUMN
from mini_trainer.objectives.teachers import SEEN_COLUMN
from mini_trainer.options import TrainOptions
from mini_trainer.options.reading import check_regular
from mini_trainer.run.inputs import REFERENCE_MODEL, TEACHER_MODEL, RunInputs
from mini_trainer.run.start_checks import check_task


def open_other_models(options: TrainOptions, inputs: RunInputs) -> None:
    """Finds the models that options name, and collects what is wrong with them."""
    names = {REFERENCE_MODEL: options.preference.reference_model, TEACHER_MODEL: options.teacher.teacher_model}
    for flag, name in names.items():
        if name not in (None, SELF):
            found = inputs.errors.attempt(lambda flag=flag, name=name: open_other_model(flag, name, options, inputs))
            inputs.other_models |= {} if found is None else {flag: found}
    if options.teacher.teacher_model is not None and inputs.data is not None:
        teacher = inputs.other_models.get(TEACHER_MODEL)
        config = inputs.config if teacher is None else teacher.config
        inputs.errors.attempt(lambda: check_rope(config, longest=inputs.longest_taught))


def open_other_model(flag: str, name: str, options: TrainOptions, inputs: RunInputs) -> ModelSource:
    """The model of this flag; ValueError if it cannot read the run's data."""
    trust = options.model.trust_remote_code
    model_dir = find_model(name, revision=None, trust_remote_code=trust, flag=flag)
    config = load_config(model_dir, inputs.family, trust_remote_code=trust)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust)
    if fingerprint_tokenizer(tokenizer) != fingerprint_tokenizer(inputs.tokenizer):
        raise ValueError(
            f"{flag} {name}: has another tokenizer than the data was made with: its probabilities would be of other"
            " texts"
        )
    return ModelSource(model_dir, config, trust, name=name)


# Rows of a data set that are scored together and then written: a run that is killed continues from there.
PART_SIZE = 4096


def add_reference(
    options: TrainOptions,
    inputs: RunInputs,
    model: PackedModel,
    build: Callable[[ModelSource], PackedModel],
    *,
    world: World,
    progress: Callable[[str], None],
) -> None:
    """Adds the objective's reference column, if it has one, to the run's data; scores rows that no run has scored.

    `model`: as the run starts, the reference by default; `build` makes another one. All ranks call this.
    """
    column = inputs.objective.reference_column
    if column is None:
        return
    key = call_on_rank0(world, lambda: inputs.identify_reference(options))
    known = [read_known(data, key, world) for data in list_sets(inputs)]
    num_missing, num_rows = sum(len(own.missing) for own in known), sum(len(own.data.kept) for own in known)
    log.info(f"reference: {num_rows - num_missing:,} of {num_rows:,} samples scored before, {num_missing:,} to score")
    if num_missing and options.preference.reuse_reference_only:
        raise ValueError(
            f"--reuse-reference-only: {num_missing:,} samples have no log-probabilities by this reference model; leave"
            " the option out to compute them"
        )
    other = inputs.other_models.get(REFERENCE_MODEL)
    scorer = model if not num_missing or other is None else build(other)
    for own in known:
        score_missing(
            own,
            scorer,
            inputs.objective,
            cap=inputs.data_options.max_tokens_per_gpu,
            world=world,
            progress=lambda where: progress(f"reference, {where}"),
        )
        own.data.add_column(column, own.values)
    del scorer
    gc.collect()  # the modules of another model refer to each other


@dataclass(frozen=True)
class Known:
    """The known values of a data set's rows by one reference model."""

    data: Mixture
    key: str  # a hash of all that decides the model's numbers but the data
    values: np.ndarray  # (rows, 2) fp32; NaN where it is not known
    missing: np.ndarray  # (n,) rows that are kept and not known


def read_known(data: Mixture, key: str, world: World) -> Known:
    values = call_on_rank0(world, lambda: read_values(data, key))
    return Known(data, key, values, find_missing(data, values))


def score_missing(
    known: Known,
    scorer: PackedModel,
    objective: Objective,
    *,
    cap: int,
    world: World,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Scores the missing rows, and writes what is known after each part of them. All ranks call this."""
    for part in split_rows(known.missing, [len(source.lengths) for source in known.data.sources]):
        restricted = known.data.restricted_to(part)
        found = score_data(scorer, restricted, objective, cap=cap, world=world, by_sample=True, progress=progress)
        known.values[part] = objective.read_reference(found.sums[part].numpy())
        call_on_rank0(world, lambda: write_values(known.data, known.values, known.key))


def list_sets(inputs: RunInputs) -> list[Mixture]:
    return [data for data in (inputs.data, inputs.validation_data) if data is not None]


def find_unscored(options: TrainOptions, inputs: RunInputs) -> list[tuple[Mixture, np.ndarray]]:
    """The rows of the run's data that it will score before its first step."""
    key = inputs.identify_reference(options)
    return [] if key is None else [(data, find_missing(data, read_values(data, key))) for data in list_sets(inputs)]


def assume_reference(inputs: RunInputs) -> None:
    """Adds zeros in place of the reference's log-probabilities, for measurements of speed."""
    if inputs.objective.reference_column is not None:
        for data in list_sets(inputs):
            data.add_column(inputs.objective.reference_column, np.zeros((len(data.lengths), 2), np.float32))


def locate_values(source: TokenizedData, key: str) -> Path:
    digest = hash_json([key, digest_data(source)])
    return source.path.with_name(f"{source.path.name}.reference-{digest[:16]}.npz")


def read_values(data: Mixture, key: str) -> np.ndarray:  # (rows, 2) fp32
    """The known values of each row; NaN for the others."""
    return np.concatenate([read_file(locate_values(source, key), len(source.lengths)) for source in data.sources])


def read_file(path: Path, num_rows: int) -> np.ndarray:  # (rows, 2) fp32
    """The values in a file, whose checksum numpy compares; NaN for all if it is missing or damaged."""
    unknown = np.full((num_rows, 2), np.nan, np.float32)
    if not path.exists():
        return unknown
    try:
        check_regular(path)
        with np.load(path) as file:
            values = file["values"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        log.warning(f"warning: {path}: damaged ({error}): its rows are scored again")
        return unknown
    if values.shape != unknown.shape or values.dtype != unknown.dtype:
        log.warning(f"warning: {path}: has {values.dtype} {values.shape}, not {num_rows} rows: scored again")
        return unknown
    return values


def find_missing(data: Mixture, values: np.ndarray) -> np.ndarray:
    return data.kept[np.isnan(values[data.kept]).any(axis=1)]


def split_rows(rows: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Sorted rows of data sets of these sizes, in parts of at most PART_SIZE neighbours in one set.

    The parts do not depend on which of them are known already: a run that continues packs the others as one that was
    not killed, and gets the same bits.
    """
    firsts = np.cumsum([0, *sizes])[:-1]
    borders = np.concatenate([first + np.arange(0, size, PART_SIZE) for first, size in zip(firsts, sizes, strict=True)])
    return [part for part in np.split(rows, np.searchsorted(rows, borders[1:])) if len(part)]


def write_values(data: Mixture, values: np.ndarray, key: str) -> None:
    """Keeps the values; a data set in a directory that cannot be written to is scored again by the next run."""
    ends = np.cumsum([len(source.lengths) for source in data.sources])[:-1]
    for source, own in zip(data.sources, np.split(values, ends), strict=True):
        try:
            with written_aside(locate_values(source, key)) as (aside,), aside.open("wb") as file:
                np.savez(file, values=own)
        except OSError as error:
            log.warning(f"warning: the reference's log-probabilities cannot be kept for later runs: {error}")
            return


def open_teacher_data(inputs: RunInputs, paths: Sequence[str]) -> None:
    """Opens the data sets that a teacher reads beside the run's; ValueError if their rows do not fit."""
    seen = Mixture([TokenizedData(path, option="--teacher-data") for path in paths])
    check_task(inputs.data, seen, option="--teacher-data")
    pair(inputs.data, seen, column=SEEN_COLUMN)
    inputs.teacher_data = seen


def open_scores(inputs: RunInputs, objective: Objective) -> Objective:
    """Adds the teacher's scores to the run's data, if the objective learns from them; returns the objective for them.

    ValueError if a training set that needs them has none, or they do not fit. Validation sets are measured by them if
    all have some.
    """
    inputs.teacher = SELF if objective.teacher_model == SELF else None
    name = objective.scores_name
    if name is None:
        return objective
    taught = [source for i, source in enumerate(inputs.data.sources) if objective.needs_scores(i)]
    files = add_scores(inputs.data, name, taught)
    held_out = inputs.validation_data
    if held_out is not None:
        without = [str(source.path) for source in held_out.sources if not locate_scores(source.path, name).exists()]
        if without:
            log.info(f"validation: no teacher's scores of {', '.join(without)}: measured by the cross-entropy alone")
        else:
            files += add_scores(held_out, name, held_out.sources)
    inputs.teacher, inputs.scores = hash_json([file.sidecar for file in files]), files
    return objective.with_scores([file.sidecar for file in files])


def add_scores(data: Mixture, name: str, taught: Sequence[TokenizedData]) -> list[ScoreFile]:
    """Adds the scores to the data; returns the files of the `taught` sets, the only ones that are read.

    ValueError for ids that the model does not have: padding rows of a server's head.
    """
    files = {source: ScoreFile(source, name) for source in taught}
    for file in files.values():
        if file.sidecar["max_token_id"] >= data.vocab_size:
            raise ValueError(
                f"{file.path}: names token id {file.sidecar['max_token_id']}, beyond the model's vocabulary of"
                f" {data.vocab_size}: score the data by --engine hf, which leaves out what is not the tokenizer's"
            )
    top_k = files[taught[0]].sidecar["top_k"]
    data.add_column(SOFT_COLUMN, ScoreColumn([files.get(source) or NoScores(source, top_k) for source in data.sources]))
    return list(files.values())


def add_teacher(inputs: RunInputs, model: PackedModel, build: Callable[[ModelSource], PackedModel]) -> None:
    """Gives the model's reader its teacher, if the objective has one that reads rows. All ranks call this.

    `model`: as the run starts, before a checkpoint is restored; `build` makes another one.
    """
    if inputs.objective.teacher_model == SELF:
        check_positions(model.model, longest=inputs.longest_taught)
        model.reader.teacher = teacher = StartWeights(model)
        log.info(f"teacher: the model as the run starts, {teacher.num_bytes / 1e9:.2f} GB of copies on each rank")
    elif inputs.objective.teacher_model is not None:
        source = inputs.other_models[TEACHER_MODEL]
        other = build(source).requires_grad_(False).eval()
        check_positions(other.model, longest=inputs.longest_taught)
        model.reader.teacher = OtherModel(other)
        num_parameters = sum(param.numel() for param in other.parameters())
        log.info(f"teacher: {name_model(source.name)}, {num_parameters:,} parameters, in {other.compute_dtype}")
