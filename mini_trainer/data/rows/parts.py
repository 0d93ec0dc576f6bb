"""Parts of a data set: several processes each tokenize some of the rows, and one joins the results.

    OUTPUT.parts/part_3_of_8.rows         an Arrow stream with a row for the result of each of its chunks, in order
    OUTPUT.parts/part_3_of_8.meta.json    how they were made, and the hash of that file; a part with it is complete

A part holds the results that a worker hands to the process that writes, so a join repeats the writing of a run on one
machine. Chunks are the same in both, as sections of files have chunks of their own (data/rows/files.py). Bytes and JSON
are all that a part can hold: whoever changes one, with its hash, changes data, and runs no code.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mini_trainer.data.chat.conversation import Pictures, Remark, TokenizedChat, TrainedSpan
from mini_trainer.data.columns.encoding import TokenizedFeedback, TokenizedPair
from mini_trainer.data.rows.files import Sections, Source, list_sections, to_stream
from mini_trainer.data.rows.labelled_tokens import TokenizedText
from mini_trainer.data.rows.report import Totals
from mini_trainer.data.rows.rows import ChunkResult
from mini_trainer.data.rows.split import SideResult
from mini_trainer.data.rows.writer import EncodedSamples, TokenizedSample
from mini_trainer.data.stores.disk import remove, sync_file, written_aside
from mini_trainer.distributed.ending import RunError
from mini_trainer.distributed.lock import SECONDS_PER_BEAT, RunLock
from mini_trainer.options import flag_name
from mini_trainer.options.reading import hash_file, open_regular, read_document

FORMAT_VERSION = 6
# A row is the result of a chunk; `counts` is JSON: each side's kind of samples and totals, the reasons, the bytes read.
SCHEMA = pa.schema({"samples": pa.list_(pa.large_binary()), "rejected": pa.large_binary(), "counts": pa.large_string()})
# Classes whose objects the counts can hold, by name.
RECORDS = {
    one.__name__: one
    for one in (Totals, TokenizedSample, TokenizedChat, TokenizedPair, TokenizedFeedback, TokenizedText,
                TrainedSpan, Pictures, Remark)
}  # fmt: skip
MAPPINGS = {"dict": dict, "Counter": Counter}
MANIFEST = re.compile(r"part_([0-9]+)_of_([0-9]+)\.meta\.json")


@dataclass(frozen=True)
class Part:
    """One of `count` parts, numbered from 1."""

    directory: Path
    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def rows(self) -> Path:
        return self.directory / f"part_{self.index}_of_{self.count}.rows"

    @property
    def manifest(self) -> Path:
        return self.rows.with_suffix(".meta.json")

    @cached_property
    def content(self) -> dict[str, Any] | None:
        """The manifest; None if the part is not complete."""
        try:
            content = read_document(self.manifest)
            return content if self.rows.stat().st_size == content["file"]["size"] else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def name_directory(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def list_parts(directory: Path, count: int) -> list[Part]:
    return [Part(directory, index, count) for index in range(1, count + 1)]


def find_parts(directory: Path) -> list[Part]:
    """The parts in `directory` that may be complete, of any number of parts."""
    names = map(MANIFEST.fullmatch, sorted(path.name for path in directory.glob("part_*.meta.json")))
    return [Part(directory, int(name[1]), int(name[2])) for name in names if name is not None]


def find_date(directory: Path, count: int, sources: Sequence[Source]) -> str | None:
    """The date in the rows of a complete part of `count` parts of these sources; None if there is none."""
    found = [part.content["made_with"] for part in list_parts(directory, count) if part.content is not None]
    inputs = json.loads(json.dumps(identify_sources(sources))) if found else []
    return next((made_with.get("date") for made_with in found if made_with["sources"] == inputs), None)


def find_count(directory: Path) -> int:
    """The number of parts that the complete ones in `directory` belong to."""
    counts = sorted({part.count for part in find_parts(directory)})
    if len(counts) != 1:
        found = f"has parts of {' and of '.join(map(str, counts))}" if counts else "has no complete part"
        raise ValueError(f"--join: {directory} {found}: make all parts with the same number N in --shard I/N")
    return counts[0]


def divide(sources: Sequence[Source], index: int, count: int) -> list[Source]:
    """The sources with the sections of part `index`: those that begin in its share of the bytes of all sources.
    ValueError if the sources cannot be divided."""
    if any(source.read is not None for source in sources):
        raise ValueError("only files can be divided among processes: give rows by --input-file")
    starts = [list_sections(source) for source in sources]
    if count > 1 and len(sources) == 1 and not sources[0].has_sections:
        raise ValueError(
            f"--input-file {sources[0]}: cannot be divided among {count} processes; .jsonl and local"
            " .parquet can, if not compressed. Use one process, or give several files, which are then taken whole"
        )
    num_bytes, offset, divided = max(1, sum(source.num_bytes for source in sources)), 0, []
    for source, begins in zip(sources, starts, strict=True):
        owners = [min((offset + begin) * count // num_bytes, count - 1) + 1 for begin in begins]
        offset += source.num_bytes
        if index in owners:
            start = owners.index(index)
            end = start + owners.count(index)
            divided.append(replace(source, sections=Sections(start, None if end == len(begins) else end)))
    return divided


def count_bytes(divided: Sequence[Source]) -> int:
    """The bytes of the sources' sections."""
    total = 0
    for source in divided:
        borders = [*list_sections(source), source.num_bytes]
        end = -1 if source.sections.end is None else source.sections.end
        total += borders[end] - borders[source.sections.start]
    return total


def identify_sources(sources: Sequence[Source]) -> list[list[Any]]:
    """Name, size and modification time of each file; of a remote one what its store says."""
    identities = []
    for source in sources:
        if source.remote is not None:
            identities.append([source.name, source.remote.num_bytes, source.remote.version])
        else:
            stat = source.path.stat()
            identities.append([source.name, stat.st_size, stat.st_mtime_ns])
    return identities


def write_part(part: Part, results: Iterable[ChunkResult], describe: Callable[[], dict[str, Any]]) -> None:
    """Writes the results, and then the manifest with what `describe` returns."""
    part.directory.mkdir(parents=True, exist_ok=True)
    with written_aside(part.rows, part.manifest) as (rows, manifest):
        with pa.OSFile(str(rows), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            for result in results:
                writer.write_batch(pack_result(result))
        sync_file(rows)
        manifest.write_text(json.dumps(describe() | {"file": hash_file(rows)}, indent=2) + "\n")
        sync_file(manifest)


def pack_result(result: ChunkResult) -> pa.RecordBatch:
    packed = [pack_samples(side.samples) for side in result.sides]
    sides = [[kind, encode_counts(side.totals)] for (kind, _), side in zip(packed, result.sides, strict=True)]
    counts = json.dumps([sides, result.reasons, result.num_bytes])
    row = {"samples": [data for _, data in packed], "rejected": result.rejected, "counts": counts}
    return pa.RecordBatch.from_pylist([row], schema=SCHEMA)


def unpack_result(batch: pa.RecordBatch) -> ChunkResult:
    (row,) = batch.to_pylist()
    sides, reasons, num_bytes = json.loads(row["counts"])
    unpacked = [
        SideResult(unpack_samples(kind, data), decode_counts(totals))
        for (kind, totals), data in zip(sides, row["samples"], strict=True)
    ]
    return ChunkResult(unpacked, row["rejected"], [(place, reason) for place, reason in reasons], num_bytes)


def encode_counts(value: Any) -> Any:
    """JSON for counts: objects, tuples and mappings become {name of the class: content}."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [encode_counts(item) for item in value]
        case tuple():
            return {"tuple": [encode_counts(item) for item in value]}
        case dict():  # the keys of some are numbers or remarks
            return {type(value).__name__: [[encode_counts(key), encode_counts(item)] for key, item in value.items()]}
    assert RECORDS.get(type(value).__name__) is type(value), f"counts hold a {type(value)}"
    return {type(value).__name__: {one.name: encode_counts(getattr(value, one.name)) for one in fields(value)}}


def decode_counts(value: Any) -> Any:
    """The counts that `encode_counts` took. KeyError for an unknown class; TypeError, ValueError for other content."""
    match value:
        case list():
            return [decode_counts(item) for item in value]
        case dict():
            ((name, content),) = value.items()
            if name == "tuple":
                return tuple(decode_counts(content))
            if name in MAPPINGS:
                return MAPPINGS[name]({decode_counts(key): decode_counts(item) for key, item in content})
            return RECORDS[name](**{key: decode_counts(item) for key, item in content.items()})
    return value


def pack_samples(samples: EncodedSamples | np.ndarray) -> tuple[str, bytes]:
    match samples:
        case bytes():
            return "lines", samples
        case np.ndarray():
            return "ids", samples.tobytes()
        case pa.RecordBatch():
            return "batch", to_stream(samples)
    raise AssertionError(f"samples of {type(samples)}")


def unpack_samples(kind: str, data: bytes) -> EncodedSamples | np.ndarray:
    match kind:
        case "lines":
            return data
        case "ids":
            return np.frombuffer(data, np.int32)
        case "batch":
            return pa.ipc.open_stream(data).read_next_batch()
    raise ValueError(f"samples of kind {kind}")


def read_results(parts: Sequence[Part]) -> Iterator[ChunkResult]:
    """Yields the results of all parts, in order; ValueError naming a part that is not as it was written. Each is
    verified before it is read."""
    for part in parts:
        if hash_file(part.rows) != part.content["file"]:
            raise make_damaged_error(part, "its hash is not that of its manifest")
        try:
            with open_regular(part.rows) as file, pa.ipc.open_stream(file) as batches:
                for batch in batches:
                    batch.validate(full=True)
                    yield unpack_result(batch)
        except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError, pa.ArrowException) as error:
            raise make_damaged_error(part, f"{type(error).__name__}: {error}") from None


def make_damaged_error(part: Part, reason: str) -> ValueError:
    return ValueError(f"part {part}: {part.rows} is damaged ({reason}): remove it, and pass --shard {part} again")


def find_faults(parts: Sequence[Part], made_with: dict[str, Any]) -> dict[Part, str]:
    """The parts that cannot be joined to a data set of this configuration, and why."""
    faults = {}
    for part in parts:
        if part.content is None:
            faults[part] = "is not there yet"
        elif difference := find_difference(part.content["made_with"], made_with):
            faults[part] = f"was made with another configuration: {difference}"
    return faults


def find_difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """The first difference between two configurations, in words."""
    their_options, our_options = theirs["options"], ours["options"]
    for name, value in our_options.items():
        if their_options.get(name) != value:
            return f"{flag_name(name)} was {their_options.get(name)}, is {value}"
    for their_source, our_source in zip(theirs["sources"], ours["sources"], strict=False):
        if their_source != our_source:
            return f"the input {our_source[0]} has changed (name, size or time)"
    for name, value in ours.items():
        if theirs.get(name) != value:
            is_short = isinstance(value, int) or name == "date"
            words = name.replace("_", " ")
            return f"{words} was {theirs.get(name)}, is {value}" if is_short else f"{words} differs"
    return None


def fill_in(sources: Sequence[Source], parts: Sequence[Part]) -> None:
    """Sets the sources' formats and hashes, as the parts have found them."""
    for part in parts:
        for number, data_format, sha256 in part.content["read"]:
            sources[number].format, sources[number].sha256 = data_format, sha256


class JoinedElsewhere(ValueError):
    """Another process is joining the parts."""


@contextmanager
def joining(directory: Path) -> Iterator[None]:
    """Holds the parts' lock; removes their directory if it is empty then. JoinedElsewhere if another process does."""
    try:
        lock = RunLock(directory)
    except RunError as error:
        raise JoinedElsewhere(f"--join: {str(error).replace('--output-dir ', '')}") from None
    has_ended = threading.Event()

    def beat() -> None:
        while not has_ended.wait(SECONDS_PER_BEAT):
            lock.beat()

    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        lock.release()
        with suppress(OSError):  # it holds parts
            directory.rmdir()


def remove_parts(parts: Sequence[Part]) -> None:
    """Removes the parts, with what killed processes left of them; manifests first, so that none seems complete."""
    for part in parts:
        for path in (part.manifest, part.rows):
            remove(path)
            for leftover in part.directory.glob(f".{path.name}.*.part"):
                remove(leftover)
