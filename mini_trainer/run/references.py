"""A run's reference model: scores the data once, and keeps the numbers next to it."""

import functools
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.config import ModelSource
from mini_trainer.model.fingerprints import digest_data, fingerprint_model
from mini_trainer.model.hashed_tensors import read_hashed, write_hashed
from mini_trainer.model.scoring.data_scores import score_data
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.run.inputs import REFERENCE_MODEL, RunInputs

# Rows of a data set that are scored together and then written: a run that is killed continues from there.
PART_SIZE = 4096


def add_reference(
    inputs: RunInputs,
    model: PackedModel,
    build: Callable[[ModelSource], PackedModel],
    *,
    world: World,
    progress: Callable[[str], None],
) -> None:
    """Adds the objective's reference column to the run's data; scores rows that no run has scored. `model`: the model
    at the start of the run, the default reference; `build` makes another one. All ranks call this."""
    reference = inputs.objective.reference
    key = call_on_rank0(world, lambda: identify_reference(inputs))
    known = []
    for data in list_sets(inputs):
        values = call_on_rank0(world, lambda data=data: read_values(data, key))  # (rows, 2) fp32; NaN if unknown
        known.append((data, values, find_missing(data, values)))
    num_missing, num_rows = sum(len(rows) for *_, rows in known), sum(len(data.kept) for data, *_ in known)
    log.info(f"reference: {num_rows - num_missing:,} of {num_rows:,} samples scored before, {num_missing:,} to score")
    other = inputs.other_models.get(REFERENCE_MODEL)
    scorer = model if not num_missing or other is None else build(other)
    score = functools.partial(
        score_data,
        scorer,
        cap=inputs.data_options.max_tokens_per_gpu,
        world=world,
        by_sample=True,
        progress=lambda where: progress(f"reference, {where}"),
    )
    for data, values, missing in known:
        for part in split_rows(missing, [len(source.lengths) for source in data.sources]):
            found = score(data=data.restricted_to(part), objective=inputs.objective)
            values[part] = reference.read(found.sums[part].numpy())
            call_on_rank0(world, lambda data=data, values=values: write_values(data, values, key))
        data.add_column(reference.column, values)
    del score, scorer
    gc.collect()  # the modules of another model refer to each other


def list_sets(inputs: RunInputs) -> list[Mixture]:
    return [data for data in (inputs.data, inputs.validation_data) if data is not None]


def find_unscored(inputs: RunInputs) -> list[tuple[Mixture, np.ndarray]]:
    """The rows of the run's data that it will score before its first step."""
    key = identify_reference(inputs)
    return [(data, find_missing(data, read_values(data, key))) for data in list_sets(inputs)]


def assume_reference(inputs: RunInputs) -> None:
    """Adds zeros in place of the reference's log-probabilities, for measurements of speed."""
    for data in list_sets(inputs):
        data.add_column(inputs.objective.reference.column, np.zeros((len(data.lengths), 2), np.float32))


def locate_values(source: TokenizedData, key: str) -> Path:
    digest = hash_json([key, digest_data(source)])
    return source.path.with_name(f"{source.path.name}.reference-{digest[:32]}.safetensors")


def read_values(data: Mixture, key: str) -> np.ndarray:  # (rows, 2) fp32
    """The known values of each row; NaN for the others."""
    return np.concatenate([read_file(locate_values(source, key), len(source.lengths)) for source in data.sources])


def read_file(path: Path, num_rows: int) -> np.ndarray:  # (rows, 2) fp32
    """The values in a file; NaN for all if it is missing, damaged, or another one under this name."""
    if path.exists():
        try:
            tensors, about = read_hashed(path, what=str(path))
            if about == {"name": path.name} and tensors["values"].shape == (num_rows, 2):
                return tensors["values"].numpy()
            log.warning(f"warning: {path}: of other rows or another model: its rows are scored again")
        except (ValueError, KeyError) as error:
            log.warning(f"warning: {error}: its rows are scored again")
    return np.full((num_rows, 2), np.nan, np.float32)


def find_missing(data: Mixture, values: np.ndarray) -> np.ndarray:
    return data.kept[np.isnan(values[data.kept]).any(axis=1)]


def split_rows(rows: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Sorted rows of data sets of these sizes, in parts of at most PART_SIZE neighbours in one set. The parts do not
    depend on which of them are known already: a run that continues packs the others as one that was not killed, and
    gets the same bits."""
    firsts = np.cumsum([0, *sizes])[:-1]
    borders = np.concatenate([first + np.arange(0, size, PART_SIZE) for first, size in zip(firsts, sizes, strict=True)])
    return [part for part in np.split(rows, np.searchsorted(rows, borders[1:])) if len(part)]


def write_values(data: Mixture, values: np.ndarray, key: str) -> None:
    """Keeps the values; a data set in a directory that cannot be written to is scored again by the next run."""
    ends = np.cumsum([len(source.lengths) for source in data.sources])[:-1]
    for source, own in zip(data.sources, np.split(values, ends), strict=True):
        try:
            path = locate_values(source, key)
            write_hashed(path, {"values": torch.from_numpy(own)}, {"name": path.name})
        except OSError as error:
            log.warning(f"warning: the reference's log-probabilities cannot be kept for later runs: {error}")
            return


def identify_reference(inputs: RunInputs) -> str:
    """A hash of everything but the data that affects the reference's numbers."""
    if (other := inputs.other_models.get(REFERENCE_MODEL)) is not None:  # without the method's layers
        return hash_json([fingerprint_model(other.directory), [], "none", str(inputs.compute_dtype)])
    return identify_start(inputs)


def identify_start(inputs: RunInputs) -> str:
    """A hash of everything that affects the numbers of the model at the start of the run, but what it reads."""
    method_data, quantization = inputs.method.list_data_hashes(), inputs.values["base_quantization"]
    parts = [fingerprint_model(inputs.model_dir), method_data, quantization, str(inputs.compute_dtype)]
    return hash_json(parts if inputs.origin is None else [*parts, inputs.origin.digest])  # whose weights the run takes
