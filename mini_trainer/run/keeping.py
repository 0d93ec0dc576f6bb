"""The old samples of --keep, and what the start says of them, which is computed once before training.

    {--data-cache-dir}/kept/{key}/{part}.records: those of objectives.soft_targets of the samples' trained tokens

The key is a hash of the samples, the start, and everything else that affects its numbers.
"""

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mini_trainer.data.stores.disk import hash_json, locked, written_aside
from mini_trainer.data.stores.made import MADE, is_as_made, record_made
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.outputs import DataSetFiles
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.fingerprints import digest_data
from mini_trainer.model.scoring.data_scores import score_data
from mini_trainer.objectives.keeping import Keeping
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.objectives.soft_targets import SINGLE, SOFT_COLUMN, make_record_type
from mini_trainer.options import parse_subset
from mini_trainer.options.places import expand
from mini_trainer.options.reading import open_own, open_regular
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.references import identify_start
from mini_trainer.run.start_checks import check_task

FOLDER, KEY_LENGTH = "kept", 32  # digits of the hash
PART_SIZE = 512  # samples that are scored together and then written: a run that is killed continues from there


def open_old(paths: Sequence[str], inputs: RunInputs, *, num_sharing: int) -> Mixture:
    """Opens the data sets of --keep; ValueError if they do not fit the run and its data."""
    o, cache_dir = inputs.data_options, inputs.values["data_cache_dir"]
    old = Mixture([TokenizedData(path, option="--keep", cache_dir=cache_dir) for path in paths])
    check_task(inputs.data, old, option="--keep")
    num_dropped = old.fit_to(o.max_tokens_per_gpu, num_sharing=num_sharing, drop_overlong=o.drop_overlong)
    if o.subset is not None:
        old.take_subset(parse_subset(o.subset), seed=o.seed)
    old.check_trained("--keep")
    dropped = f"; {num_dropped:,} dropped, longer than --max-tokens-per-gpu" if num_dropped else ""
    log.info(f"keep: {len(old.kept):,} samples, {old.num_tokens:,} tokens{dropped}")
    return old


@dataclass(frozen=True)
class StartScores:
    """What the start says of old samples: a column of records, by the mixture's rows."""

    rows: np.ndarray  # (samples,) sorted
    firsts: np.ndarray  # (samples + 1,): number of records before each row's, in its part
    parts: list[np.ndarray]

    def __getitem__(self, row: int) -> np.ndarray:
        i = int(np.searchsorted(self.rows, row))
        assert self.rows[i] == row, row
        part = self.parts[i // PART_SIZE]
        first = self.firsts[i] - self.firsts[i // PART_SIZE * PART_SIZE]
        return part[first : first + self.firsts[i + 1] - self.firsts[i]]


def add_scores(inputs: RunInputs, model: PackedModel, *, world: World, progress: Callable[[str], None]) -> None:
    """Gives the old samples that the run draws what `model`, the model at its start, says of them; computes what no run
    has computed. All ranks call this."""
    old, objective = inputs.old, inputs.objective.of_old
    rows, paths = call_on_rank0(world, lambda: locate_scores(inputs))
    with contextlib.ExitStack() as held:
        while not call_on_rank0(world, lambda: hold(paths, held)):
            progress("another run that scores the same old samples")
            time.sleep(1)
        missing = call_on_rank0(world, lambda: find_missing(paths))
        num_missing = sum(len(take_part(rows, number)) for number in missing)
        log.info(f"keep: {len(rows):,} samples in the run's steps, {num_missing:,} of them to score")
        for number in missing:
            found = score_data(
                model,
                old.data.restricted_to(take_part(rows, number)),
                objective,
                cap=inputs.data_options.max_tokens_per_gpu,
                world=world,
                progress=lambda where: progress(f"what the start says of old samples, {where}"),
            )
            call_on_rank0(world, lambda path=paths[number], found=found: write(path, objective, found.predictions))
        call_on_rank0(world, lambda: record_made(paths[0].with_name(MADE), paths[0].parent.name, paths))
    if not paths[-1].exists():
        raise ValueError(f"--data-cache-dir: {paths[-1]}, which the first node has written, is not visible on this one")
    firsts = np.concatenate([[0], np.cumsum(old.data.num_loss_tokens[rows])])
    borders = firsts[[*range(0, len(rows), PART_SIZE), len(rows)]]
    record_type = make_record_type(objective.top_k, SINGLE)
    parts = [map_records(path, record_type, size) for path, size in zip(paths, np.diff(borders).tolist(), strict=True)]
    old.data.add_column(SOFT_COLUMN, StartScores(rows, firsts, parts))


def map_records(path: Path, record_type: np.dtype, size: int) -> np.ndarray:  # (size,)
    with open_regular(path) as file:  # an empty file cannot be mapped
        return np.memmap(file, record_type, mode="r", shape=size) if size else np.empty(0, record_type)


def show_drawn(inputs: RunInputs) -> None:
    """Copies samples that a model has drawn, with their sidecar, into the run's directory, for people to look at."""
    for source in inputs.old_data.sources:
        for path in (source.path, DataSetFiles(source.path).sidecar) if "drawn_with" in (source.sidecar or {}) else ():
            with written_aside(Path(inputs.values["output_dir"], f"kept_{path.name}")) as (aside,):
                shutil.copyfile(path, aside)


def find_unscored(inputs: RunInputs) -> list[tuple[Mixture, np.ndarray]]:
    """The old samples that the run will score before its first step."""
    rows, paths = locate_scores(inputs)
    missing = [take_part(rows, number) for number in find_missing(paths)]
    return [(inputs.old.data, np.concatenate([rows[:0], *missing]))]


def locate_scores(inputs: RunInputs) -> tuple[np.ndarray, list[Path]]:
    """The samples that the run draws, sorted, and the files of what the start says of them, existing or not."""
    old, cache_dir = inputs.old, expand(inputs.values["data_cache_dir"])
    rows = old.list_drawn(inputs.num_steps)
    digests = [digest_data(source) for source in old.data.sources]
    drawn = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
    key = hash_json([identify_start(inputs), inputs.objective.top_k, digests, drawn])
    folder = cache_dir / FOLDER / key[:KEY_LENGTH]
    return rows, [folder / f"{number:05}.records" for number in range(-(-len(rows) // PART_SIZE))]


def take_part(rows: np.ndarray, number: int) -> np.ndarray:
    return rows[number * PART_SIZE : (number + 1) * PART_SIZE]


def hold(paths: Sequence[Path], held: contextlib.ExitStack) -> bool:
    """Lets one run at a time write the files, until `held` is left; False while another one does."""
    folder = paths[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(locked(folder / ".lock", waits=False))
    except BlockingIOError:
        return False
    return True


def find_missing(paths: Sequence[Path]) -> list[int]:
    """The parts that are not written yet: all of them, if those that are there were changed."""
    record = paths[0].with_name(MADE)
    if record.exists():
        return [] if is_as_made(record, record.parent.name) else list(range(len(paths)))
    return [number for number, path in enumerate(paths) if not path.exists()]


def write(path: Path, objective: Keeping, predictions: np.ndarray) -> None:
    with written_aside(path) as (aside,), open_own(aside, "wb") as file:
        file.write(objective.read_predictions(predictions).tobytes())
