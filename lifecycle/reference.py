"""What a reference model says of a run's data, computed once before training and kept next to each data set."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from chat.fingerprints import fingerprint_tokenizer
from chat.templates import load_tokenizer
from corpus.mixture import Mixture
from corpus.reader import TokenizedData
from disk import hash_json, written_aside
from lifecycle.inputs import RunInputs
from model.config import ModelSource, load_config
from model.fingerprints import fingerprint_data, fingerprint_model
from objectives.packed_model import PackedModel
from options import TrainOptions
from pretrained.files import find_model
from ranks.ending import log
from ranks.world import World, call_on_rank0
from scoring.data_scores import score_data

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
    key = call_on_rank0(world, lambda: identify_reference(options, inputs))
    sets = [data for data in (inputs.data, inputs.validation_data) if data is not None]
    values = [call_on_rank0(world, lambda data=data: read_values(data, key)) for data in sets]
    missing = [find_missing(data, known) for data, known in zip(sets, values, strict=True)]
    num_missing, num_rows = sum(map(len, missing)), sum(len(data.kept) for data in sets)
    log.info(f"reference: {num_rows - num_missing:,} of {num_rows:,} samples scored before, {num_missing:,} to score")
    if num_missing and options.preference.reuse_reference_only:
        raise ValueError(
            f"--reuse-reference-only: {num_missing:,} samples have no log-probabilities by this reference model; leave"
            " the option out to compute them"
        )
    other = options.preference.reference_model
    scorer = model if not num_missing or other is None else build(find_reference(other, options, inputs))
    for data, known, rows in zip(sets, values, missing, strict=True):
        for part in split_rows(rows, [len(source.lengths) for source in data.sources]):
            cap = inputs.data_options.max_tokens_per_gpu
            found = score_data(
                scorer,
                data.restricted_to(part),
                inputs.objective,
                cap=cap,
                world=world,
                by_sample=True,
                progress=lambda where: progress(f"reference, {where}"),
            )
            known[part] = inputs.objective.read_reference(found.sums[part].numpy())
            call_on_rank0(world, lambda data=data, known=known: write_values(data, known, key))
        data.add_column(column, known)


def identify_reference(options: TrainOptions, inputs: RunInputs) -> str:
    """A hash of all that decides the reference's numbers but the data."""
    other = options.preference.reference_model
    model_dir = inputs.model_dir if other is None else find_other(other, options)
    method = inputs.method.list_data_hashes() if other is None else []
    return hash_json([fingerprint_model(model_dir), method, options.lora.base_quantization, str(inputs.compute_dtype)])


def find_other(name: str, options: TrainOptions) -> str:
    return find_model(name, revision=None, trust_remote_code=options.model.trust_remote_code)


def find_reference(name: str, options: TrainOptions, inputs: RunInputs) -> ModelSource:
    """The model of --reference-model; ValueError if it cannot score the run's data."""
    trust, model_dir = options.model.trust_remote_code, find_other(name, options)
    config = load_config(model_dir, inputs.family, trust_remote_code=trust)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust)
    if fingerprint_tokenizer(tokenizer) != fingerprint_tokenizer(inputs.tokenizer):
        raise ValueError(
            f"--reference-model {name}: has another tokenizer than the data was made with: its log-probabilities would"
            " be of other texts"
        )
    return ModelSource(model_dir, config, trust, name=name)


def locate_values(source: TokenizedData, key: str) -> Path:
    rows = fingerprint_data(source.path, source=None, lengths=source.lengths, kept=source.lengths[:0])
    return source.path.with_name(f"{source.path.name}.reference-{hash_json([key, rows])[:16]}.npy")


def read_values(data: Mixture, key: str) -> np.ndarray:  # (rows, 2) fp32
    """What is known of each row; NaN for the others."""
    values = []
    for source in data.sources:
        path, size = locate_values(source, key), len(source.lengths)
        values.append(np.load(path) if path.exists() else np.full((size, 2), np.nan, np.float32))
    return np.concatenate(values)


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
                np.save(file, own)
        except OSError as error:
            log.warning(f"warning: the reference's log-probabilities cannot be kept for later runs: {error}")
            return
