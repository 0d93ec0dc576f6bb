"""Files of a teacher's scores: one record for each trained token of a data set, in the rows' order, and a sidecar.

DATA.NAME.scores holds records of objectives.soft_targets one after the other, without a header, so that a row's lie at
a place that follows from the data set alone; DATA.NAME.scores.json says whose they are. Until it is complete, a file
ends in .part.
"""

import bisect
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.data.stores.contents import check_recorded, sign, warn_of_edited
from mini_trainer.data.stores.disk import naming_failed_writes, write_text
from mini_trainer.data.tokenized.by_row import RowNumbers, RunningSums
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.model.fingerprints import digest_data
from mini_trainer.objectives.soft_targets import make_record_type
from mini_trainer.options.reading import open_descriptor, open_own, open_regular, read_fields, read_object

# Types of the sidecar's entries.
SIDECAR_TYPES = {"data": str, "teacher": str, "tokenizer": str, "top_k": int, "temperature": float | int, "file": dict,
                 "num_ids": int, "dtype": str, "num_tokens": int, "loss": float, "tail": float}  # fmt: skip
PART_BYTES = 32 << 20  # of records that are computed before they are written


@dataclass(frozen=True)
class ScoreIdentity:
    """The inputs that determine scores."""

    data: str  # digest of the data set
    teacher: str  # digest of its weights
    tokenizer: str
    teacher_data: str | None  # digest of the teacher's data set, if it is a different one
    top_k: int
    temperature: float
    num_ids: int  # of the tokenizer
    dtype: str


def locate_scores(data_path: Path, name: str) -> Path:
    return data_path.with_name(f"{data_path.name}.{name}.scores")


def count_trained(data: TokenizedData) -> RunningSums:
    """Sums of the trained tokens of the rows before any row."""
    counts = data.num_loss_tokens
    sums = RunningSums(lambda first, end: counts[first:end], len(counts), total=int(counts.sum(dtype=np.int64)))
    sums.walk(len(counts))  # now: several threads may read
    data.release_pages()
    return sums


class ScoreWriter:
    """Writes one data set's scores, part by part; continues a file that a killed process has begun."""

    def __init__(self, data: TokenizedData, path: Path, identity: ScoreIdentity, *, teacher: str):
        """ValueError if the file was made, or begun, with something else. `teacher`: its name, for the sidecar."""
        self.path, self.identity, self.teacher = path, identity, teacher
        self.part, self.sidecar = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.json")
        self.item_size, self.trained = make_record_type(identity.top_k).itemsize, count_trained(data)
        was_finished = path.exists() and self.sidecar.exists()
        begun = self.sidecar if was_finished else self.begun
        if begun.exists() and (path.exists() or self.part.exists()):
            check_identity(
                begun, identity, advice=f"remove {begun.name.removesuffix('.json')}, or choose another --name"
            )
        # A damaged file is made again.
        self.is_complete = was_finished and path.stat().st_size == self.trained.total * self.item_size

    @property
    def begun(self) -> Path:
        return self.path.with_name(f"{self.part.name}.json")

    def list_parts(self) -> list[tuple[int, int]]:
        """Ranges of the rows that are not written yet, each of as many as are written together; independent of what is
        written already, so a resumed scoring packs the rest like an uninterrupted one, and gets the same bits."""
        num_written = self.part.stat().st_size // self.item_size if self.begun.exists() and self.part.exists() else 0
        parts, first, before = [], 0, self.trained.before
        while first < self.trained.size:
            most = before(first) + PART_BYTES // self.item_size
            end = max(first + 1, bisect.bisect_right(range(self.trained.size + 1), most, lo=first, key=before) - 1)
            parts.append((first, end))
            first = end
        return [(first, end) for first, end in parts if before(end) > num_written]

    def write(self, first: int, end: int, records: np.ndarray) -> None:
        """Appends the records of these rows to those of all rows before them; ValueError if some of those are gone."""
        start, num_records = self.trained.before(first), self.trained.before(end) - self.trained.before(first)
        assert len(records) == num_records, (len(records), num_records)
        if first == 0:
            write_text(self.begun, json.dumps(asdict(self.identity)) + "\n")
        needed_bytes = self.trained.total * self.item_size
        with (
            naming_failed_writes(self.path, parts=[self.part], needed_bytes=needed_bytes),
            open_own(self.part, "r+b" if start else "wb") as file,
        ):
            if os.fstat(file.fileno()).st_size < start * self.item_size:  # the gap would be filled with zeros
                raise ValueError(f"{self.part}: another process writes it, too: wait for that one to end")
            file.truncate(start * self.item_size)
            file.seek(start * self.item_size)
            file.write(records.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> dict[str, Any]:
        """Puts the complete file in its place; returns the sidecar."""
        found = asdict(self.identity) | {"teacher_name": self.teacher}
        found |= summarize_scores(self.part, self.identity.top_k)
        write_text(self.sidecar, json.dumps(sign(found), indent=2) + "\n")
        self.part.replace(self.path)
        self.begun.unlink()
        return found


def check_identity(sidecar: Path, identity: ScoreIdentity, *, advice: str) -> None:
    """ValueError that names the differences from the sidecar."""
    known = read_object(sidecar)
    other = [name for name, value in asdict(identity).items() if known.get(name) != value]
    if other:
        raise ValueError(f"{sidecar}: was made with other {', '.join(other).replace('_', ' ')}; {advice}")


def read_score_sidecar(path: Path) -> dict[str, Any]:
    """The sidecar of complete scores; ValueError naming the entries that are missing or of another kind."""
    return read_fields(path, SIDECAR_TYPES, written_by="score-data", advice=": score the data again")


class ScoreFile:
    """The complete scores of a data set: `file[row]` are its records (trained tokens,)."""

    def __init__(self, data: TokenizedData, name: str):
        """ValueError if there are none, or if they are of other data."""
        self.path = locate_scores(data.path, name)
        if not self.path.exists():
            raise ValueError(
                f"{self.path}: no scores of {data.path}: mini-trainer score-data --data-path {data.path}"
                f" --name {name} --model-name-or-path TEACHER makes them"
            )
        self.sidecar_path = self.path.with_name(f"{self.path.name}.json")
        self.sidecar = read_score_sidecar(self.sidecar_path)
        self.record_type, self.trained = make_record_type(self.sidecar["top_k"]), count_trained(data)
        self.num_records = data.num_loss_tokens  # (rows,)
        if self.sidecar["data"] != digest_data(data):
            raise ValueError(f"{self.path}: its scores are of other data than {data.path} holds now: score it again")
        expected = self.trained.total * self.record_type.itemsize
        if self.path.stat().st_size != expected:
            raise ValueError(f"{self.path}: has {self.path.stat().st_size:,} bytes, expected {expected:,}: score again")

    def verify(self) -> None:
        """Checks the file against the hash in its sidecar."""
        check_recorded(self.path, self.sidecar["file"], record=str(self.sidecar_path))
        warn_of_edited(self.sidecar_path, self.sidecar)

    def __getitem__(self, row: int) -> np.ndarray:
        size, start = self.record_type.itemsize, self.trained.before(row) * self.record_type.itemsize
        return np.frombuffer(os.pread(self.file, int(self.num_records[row]) * size, start), self.record_type)

    @functools.cached_property
    def file(self) -> int:
        return open_descriptor(self.path, os.O_RDONLY, follows=True)


class ScoreColumn:
    """The scores of several data sets that follow each other, by the mixture's rows."""

    def __init__(self, files: Sequence[ScoreFile]):
        self.files = list(files)
        self.numbers = RowNumbers(len(file.num_records) for file in self.files)

    def __getitem__(self, row: int) -> np.ndarray:
        source, own_row = self.numbers.find(row)
        return self.files[source][own_row]


def summarize_scores(path: Path, top_k: int) -> dict[str, Any]:
    """Means over a file's tokens (loss, probability of tokens not named), and its size and hash."""
    record_type, loss, tail, count = make_record_type(top_k), 0.0, 0.0, 0
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while part := file.read(record_type.itemsize * (PART_BYTES // record_type.itemsize)):
            digest.update(part)
            records = np.frombuffer(part, record_type)
            loss += float(records["target"].astype(np.float64).sum())
            tail += float(np.exp(-records["tail"].astype(np.float64)).sum())
            count += len(records)
    recorded = {"size": path.stat().st_size, "sha256": digest.hexdigest()}
    return {"num_tokens": count, "loss": loss / count, "tail": tail / count, "file": recorded}
