"""Splits files into chunks of raw rows: .jsonl, .json, .csv, .tsv, .parquet and .txt, also compressed; directories;
and such files in object stores and on web servers (data/stores/remote.py).

Rows are not parsed here, and no file is held in memory but a JSON list. A row longer than MAX_ROW_BYTES is skipped.

A file has sections, which can be read without the rows before them and have chunks of their own: of .jsonl the rows
whose first byte lies in [k * SECTION_BYTES, (k + 1) * SECTION_BYTES), of .parquet some consecutive row groups. Other
and compressed files are one section.
"""

import hashlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from mini_trainer.data.rows.lines import BLOCK_BYTES, Encoding, find_fault, pop_bom, read_lines, skip_lines, split_lines
from mini_trainer.data.rows.values import RowReader
from mini_trainer.data.stores.json_lines import BadRow, Line, RawRow, TooLong
from mini_trainer.data.stores.made import MADE
from mini_trainer.data.stores.parquet import RowBatch, check_groups, choose_batch_rows, count_rows, cut_batch
from mini_trainer.data.stores.remote import RemoteFile, find_remote
from mini_trainer.options.reading import check_unicode, open_regular
from mini_trainer.options.urls import is_url

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
WORKBOOKS = (".xlsx", ".xls", ".ods")
ENDINGS_IN_WORDS = f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, and may be compressed ({', '.join(COMPRESSIONS)})"
NUM_SKIPPED_SHOWN = 10  # files of a folder that a note names
CHUNK_ROWS = 1000  # most rows of a chunk, and of an Arrow record batch of the output
CHUNK_BYTES = 4 << 20  # bounds chunks of long rows: a worker needs some hundred bytes per token
SECTION_BYTES = 8 << 20


@dataclass(frozen=True)
class Chunk:
    """Some consecutive rows of a file, unparsed."""

    file: str  # its name in messages
    first_row: int  # number of its first row, from 1; counts blank lines and a table's header
    encoding: Encoding
    lines: list[Line]  # the rows, unless the encoding is "arrow"
    table: bytes  # the rows as an Arrow stream, if the encoding is "arrow"
    num_bytes: int  # bytes of the file on disk that were read for it
    format: str | None = None  # None until a row of the file has one

    @property
    def size(self) -> int:
        """Bytes of its rows."""
        return len(self.table) + sum(count_bytes(value) for _, value in self.lines)


@dataclass(frozen=True)
class Sections:
    """The sections [start, end) of a file; `end` None: to its last."""

    start: int = 0
    end: int | None = None

    def __contains__(self, section: int) -> bool:
        return self.start <= section and (self.end is None or section < self.end)


@dataclass(frozen=True)
class Folder:
    """A given folder, and the files in it that are not read because of their endings."""

    name: str
    skipped: tuple[str, ...]


@dataclass
class Source:
    """A file of rows, or rows from `read`. `format` is set when it has been read, and `sha256` if all of it has."""

    path: Path
    name: str  # in messages and the sidecar: the path within the input directory, or the file's name
    num_bytes: int  # 0: not known before it is read
    sha256: str | None = None
    format: str | None = None
    read: Callable[["Source"], Iterator[Chunk]] | None = None  # returns the rows if they are not in a file
    sections: Sections = Sections()  # to read
    remote: RemoteFile | None = None  # the file, if `path` is only its name
    folder: Folder | None = None  # in which it was found, if it was not named itself

    def __str__(self) -> str:
        """Its path or URL."""
        return str(self.path) if self.remote is None else self.remote.url

    @property
    def has_sections(self) -> bool:
        divisible = (".jsonl",) if self.remote is not None else (".jsonl", ".parquet")  # a remote one is copied whole
        return self.read is None and self.compression is None and self.ending in divisible

    @property
    def is_local(self) -> bool:
        return self.read is None and self.remote is None

    def open(self) -> io.RawIOBase:
        """The bytes of its file, unbuffered."""
        return open_regular(self.path).detach() if self.remote is None else self.remote.open()

    @property
    def compression(self) -> str | None:
        return COMPRESSIONS.get(self.path.suffix.lower())

    @property
    def ending(self) -> str:
        return data_ending(self.path)


def data_ending(path: PurePath) -> str:
    """The ending that shows a file's format, in lower case: .jsonl for a.jsonl.gz, a.JSONL and a.ndjson."""
    ending = (path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()
    return ".jsonl" if ending == ".ndjson" else ending


def find_sources(inputs: Sequence[str], *, flag: str = "--input-file") -> list[Source]:
    """The files named by `inputs` (values of `flag`), in their order; files of a directory, recursively, by name; URLs
    of files, folders, or with wildcards. ValueError for a path that is missing, named twice, or ends otherwise."""
    sources = []
    for given in inputs:
        path = Path(given)
        if is_url(given):
            sources += find_at_url(given, flag=flag)
        elif path.is_dir():
            sources += find_in_directory(path, flag=flag)
        elif not path.is_file():
            asking = "; to ask the model something: mini-trainer chat MODEL" if flag == "--prompts" else ""
            raise ValueError(f"{flag} {path}: no such file{asking}")
        elif data_ending(path) not in ENDINGS:
            saved = "; save its sheet as CSV UTF-8, and give that" if data_ending(path) in WORKBOOKS else ""
            raise ValueError(f"{flag} {path}: must end in {ENDINGS_IN_WORDS}{saved}")
        else:
            sources.append(Source(path, path.name, path.stat().st_size))
    seen: set[Path | str] = set()
    for source in sources:
        identity = source.path.resolve() if source.is_local else str(source)
        if identity in seen:
            raise ValueError(f"{flag}: {source} is named twice; its rows would count twice")
        seen.add(identity)
    return sources


def find_at_url(url: str, *, flag: str) -> list[Source]:
    """The file, or the data files below or matching the URL."""
    found, folder = find_remote(url, flag=flag), None
    if len(found) > 1 or not found:
        names, skipped = choose_files([PurePath(name) for name, _ in found])
        folder, chosen = Folder(url, skipped), {name.as_posix() for name in names}
        found = [(name, remote) for name, remote in found if name in chosen]
    if not found or data_ending(PurePath(found[0][0])) not in ENDINGS:
        raise ValueError(f"{flag} {url}: must be, or match or hold, files that end in {ENDINGS_IN_WORDS}")
    return [Source(Path(name), name, remote.num_bytes, remote=remote, folder=folder) for name, remote in found]


def find_in_directory(directory: Path, *, flag: str) -> list[Source]:
    """The directory's data files, except hidden ones and files that process_data.py wrote next to an output."""
    names, skipped = choose_files([path.relative_to(directory) for path in directory.rglob("*") if path.is_file()])
    if not names:
        raise ValueError(f"{flag} {directory}: no file in it ends in {ENDINGS_IN_WORDS}")
    check_unicode(str(directory / name) for name in names)
    folder = Folder(str(directory), skipped)
    return [Source(directory / one, one.as_posix(), (directory / one).stat().st_size, folder=folder) for one in names]


def choose_files(paths: Iterable[PurePath]) -> tuple[list[PurePath], tuple[str, ...]]:
    """The files of a folder that hold rows, by name, and the names of those with other endings. Leaves out hidden ones,
    and those that process_data.py and `run_training` write next to an output."""
    others = [
        path
        for path in sorted(paths)
        if not path.name.endswith((".meta.json", ".rejected.jsonl", MADE))
        and not any(part.startswith(".") or part.endswith(".tokenizer") for part in path.parts)
    ]
    chosen = [path for path in others if data_ending(path) in ENDINGS]
    return chosen, tuple(path.as_posix() for path in others if data_ending(path) not in ENDINGS)


def describe_skipped(sources: Sequence[Source]) -> list[str]:
    """A note on each folder that has files with endings that are not read."""
    folders = dict.fromkeys(source.folder for source in sources if source.folder is not None and source.folder.skipped)
    return [
        f"{folder.name}: {len(folder.skipped):,} file{'s' * (len(folder.skipped) > 1)} of other kinds not read, such as"
        f" {', '.join(map(repr, folder.skipped[:NUM_SKIPPED_SHOWN]))}; files of rows end in {ENDINGS_IN_WORDS}"
        for folder in folders
    ]


def check_folder(source: Source, firsts: dict[Folder, Source]) -> None:
    """Raises ValueError if the source's format is not that of the first one of its folder, which `firsts` remembers: a
    licence among chats is not a document to train on."""
    if source.folder is None or source.format is None:
        return
    first = firsts.setdefault(source.folder, source)
    if first.format != source.format:
        raise ValueError(
            f"{source.folder.name}: its files have different formats: {first.name} is read as {first.format},"
            f" {source.name} as {source.format}. Name the files to read instead of their folder, or the format of all"
            " of them (--format)"
        )


def list_sections(source: Source) -> list[int]:
    """The bytes of the file where its sections begin; of .parquet as its row groups' sizes divide them."""
    if not source.has_sections:
        return [0]
    if source.ending == ".jsonl":
        return list(range(0, max(source.num_bytes, 1), SECTION_BYTES))
    with refused_if_damaged(source), open_regular(source.path) as file:
        metadata = pq.read_metadata(file)
    sizes = [sum(metadata.row_group(i).total_byte_size for i in group) for group in group_rows(metadata)]
    return [source.num_bytes * sum(sizes[:i]) // max(sum(sizes), 1) for i in range(len(sizes))]


def group_rows(metadata: pq.FileMetaData) -> list[range]:
    """The row groups of each section of a Parquet file: as many as reach SECTION_BYTES."""
    groups, start, num_bytes = [], 0, 0
    for i in range(metadata.num_row_groups):
        num_bytes += metadata.row_group(i).total_byte_size
        if num_bytes >= SECTION_BYTES or i + 1 == metadata.num_row_groups:
            groups.append(range(start, i + 1))
            start, num_bytes = i + 1, 0
    return groups or [range(0)]


class HashingReader(io.RawIOBase):
    """A file that is read once, in order. Invariant: `num_bytes`, and `digest` if it `hashes`, cover what was read."""

    def __init__(self, file: io.RawIOBase, *, hashes: bool = True) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.num_bytes, self.hashes = 0, hashes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.file.readinto(buffer)
        if self.hashes:
            self.digest.update(memoryview(buffer)[:count])
        self.num_bytes += count
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


def read_chunks(source: Source) -> Iterator[Chunk]:
    """Yields the rows of the source's sections; ValueError if the file is damaged. Sets `source.sha256` at the end, if
    the last section is one of them."""
    if source.read is not None:
        yield from source.read(source)
        return
    has_end = source.sections.end is None
    with HashingReader(source.open(), hashes=has_end) as raw, refused_if_damaged(source):
        file: Any = raw
        if source.compression is not None:
            file = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), source.compression)
        with io.BufferedReader(file, BLOCK_BYTES) as stream:
            if source.ending in (".jsonl", ".json") and source.sections.start == 0:
                fault = find_fault(stream.peek(BLOCK_BYTES), may_be_list=source.ending == ".json")
                if fault is not None:
                    raise ValueError(f"{source}: {fault}")
            if source.ending == ".parquet":
                yield from read_parquet(stream, source=source, is_file=source.is_local and source.compression is None)
            elif source.has_sections:
                yield from read_sections(stream, source=source, reader=raw)
            else:
                encoding, lines = read_lines(stream, source.ending)
                first_row = 2 if encoding == "table" else 1
                yield from pack_lines(
                    encoding, zip(repeat(0), lines), source=source, reader=raw, first_row=first_row, num_read=0
                )
            while has_end and raw.read(BLOCK_BYTES):  # the hash covers the whole file
                pass
        source.sha256 = raw.digest.hexdigest() if has_end else None
    if source.remote is not None:
        source.remote.check_unchanged()


@contextmanager
def refused_if_damaged(source: Source) -> Iterator[None]:
    """Raises ValueError naming the file if it cannot be read."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{source}: damaged, or not in the format of its ending: {error}") from None


def read_sections(stream: BinaryIO, *, source: Source, reader: HashingReader) -> Iterator[Chunk]:
    """Yields the rows of the source's sections of a .jsonl file."""
    num_before, start = 0, SECTION_BYTES * source.sections.start
    if start > 0:
        num_before, position = skip_lines(stream, start)
    else:
        position = pop_bom(stream)
    lines = find_sections(split_lines(stream, num_before), position, source.sections)
    yield from pack_lines("json", lines, source=source, reader=reader, first_row=num_before + 1, num_read=start)


def find_sections(lines: Iterable[Line], position: int, sections: Sections) -> Iterator[tuple[int, Line]]:
    """Yields the lines of these sections with the section of each; the first line is at byte `position`."""
    for line in lines:
        section = position // SECTION_BYTES
        if section not in sections:
            return
        yield section, line
        position += line[1].num_bytes if isinstance(line[1], TooLong) else len(line[1])


def pack_lines(
    encoding: Encoding,
    lines: Iterable[tuple[int, Line]],
    *,
    source: Source,
    reader: HashingReader,
    first_row: int,
    num_read: int,
) -> Iterator[Chunk]:
    """Yields the lines, which come with their sections, in chunks of at most CHUNK_ROWS, fewer if they reach
    CHUNK_BYTES or their section ends. `num_read`: bytes of the file before the first line."""
    chunk: list[Line] = []
    num_bytes, chunk_section = 0, 0
    for section, line in lines:
        if chunk and (len(chunk) == CHUNK_ROWS or num_bytes >= CHUNK_BYTES or section != chunk_section):
            yield Chunk(source.name, first_row, encoding, chunk, b"", reader.num_bytes - num_read)
            num_read, first_row = reader.num_bytes, first_row + len(chunk)
            chunk, num_bytes = [], 0
        chunk.append(line)
        num_bytes, chunk_section = num_bytes + count_bytes(line[1]), section
    if chunk:
        yield Chunk(source.name, first_row, encoding, chunk, b"", reader.num_bytes - num_read)


def count_bytes(value: bytes | TooLong | BadRow | dict[str, str]) -> int:
    """Approximate number of bytes held of a row."""
    return sum(map(len, value.values())) if isinstance(value, dict) else len(value) if isinstance(value, bytes) else 0


def read_parquet(stream: BinaryIO, *, source: Source, is_file: bool) -> Iterator[Chunk]:
    """Yields the rows of the source's sections of a Parquet file. It is read from its end, so one that is compressed or
    remote is copied to a temporary file."""
    with open_regular(source.path) if is_file else tempfile.TemporaryFile() as unpacked:
        if not is_file:
            shutil.copyfileobj(stream, unpacked, BLOCK_BYTES)
        metadata = pq.read_metadata(unpacked)
        check_groups(metadata, str(source))
        table = pq.ParquetFile(unpacked, metadata=metadata, pre_buffer=False)
        most_rows = choose_batch_rows(metadata, most_rows=CHUNK_ROWS, most_bytes=CHUNK_BYTES)
        first_row = 1
        for section, group in enumerate(group_rows(metadata)):
            if section not in source.sections:
                first_row += sum(metadata.row_group(i).num_rows for i in group)
                continue
            batches = table.iter_batches(batch_size=most_rows, row_groups=list(group))
            for batch in chain.from_iterable(cut_batch(batch, most_bytes=2 * CHUNK_BYTES) for batch in batches):
                count = count_rows(batch)
                num_bytes = source.num_bytes * count // metadata.num_rows
                yield make_chunk(source.name, first_row, batch, num_bytes=num_bytes)
                first_row += count


def make_chunk(file: str, first_row: int, batch: RowBatch, *, num_bytes: int | None = None) -> Chunk:
    """A chunk of rows in Arrow's form, or of one that is too long; by default of as many bytes as it has in memory."""
    if isinstance(batch, TooLong):
        return Chunk(file, first_row, "json", [(first_row, batch)], b"", num_bytes or 0)
    stream = to_stream(batch)
    return Chunk(file, first_row, "arrow", [], stream, len(stream) if num_bytes is None else num_bytes)


def to_stream(batch: pa.RecordBatch) -> bytes:
    """A record batch as an Arrow stream; pickling it might include the buffers that it is a slice of."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def iterate_rows(chunk: Chunk) -> Iterator[RawRow]:
    """Yields a chunk's rows, unparsed; those of Arrow with JSON's values."""
    if chunk.encoding == "arrow":
        for number, (values, lost) in enumerate(read_arrow(chunk), start=chunk.first_row):
            yield RawRow(number, number, values, lost)
        return
    for number, (line, value) in enumerate(chunk.lines, start=chunk.first_row):
        yield RawRow(number, line, value)


def read_arrow(chunk: Chunk) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The rows of a chunk that is an Arrow stream; ValueError, with the file, if Python cannot hold them."""
    table = pa.ipc.open_stream(chunk.table).read_all()
    if twice := [name for name in table.column_names if table.column_names.count(name) > 1]:
        raise ValueError(f"{chunk.file}: has the column {twice[0]!r} twice")
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns.append(column.to_pylist())
        except (ValueError, OverflowError, pa.ArrowException) as error:  # a key twice, a date beyond the year 9999
            where = f"the column {name!r}, in rows from {chunk.first_row} on"
            raise ValueError(f"{chunk.file}: {where}: cannot be read: {error}") from None
    rows = [dict(zip(table.column_names, values, strict=True)) for values in zip(*columns, strict=True)]
    return RowReader(table.schema).read(rows)
