"""Reads what is stored, the one place that does: only regular files, never without a limit. Also opens files of this
project's own to write to them, never through a link, which would lead into somebody else's file.

Bytes, texts, JSON, the metrics of a run, and the tensors of a safetensors file.
"""

import errno
import hashlib
import json
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

NOT_REGULAR = "is not a regular file"
JSON_TYPES = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}
MOST_BYTES = 256 << 20  # of a file that is read whole
WAYS = {"rb": os.O_RDONLY, "r+b": os.O_RDWR, "w": os.O_WRONLY | os.O_CREAT, "wb": os.O_WRONLY | os.O_CREAT,
        "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND}  # fmt: skip


def open_descriptor(path: Path, flags: int, *, follows: bool) -> int:
    """A descriptor of a regular file. OSError for a pipe, a device or a socket, which could block forever or never
    end, and unless it `follows` them for a link."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | (0 if follows else os.O_NOFOLLOW), 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            raise OSError(f"{path}: {NOT_REGULAR}") from None
        if error.errno == errno.ELOOP and not follows:
            raise OSError(f"{path}: is a link, which is not followed: remove it") from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path}: {NOT_REGULAR}")


def open_regular(path: Path, *, follows: bool = True) -> BinaryIO:
    """Opens a file to read its bytes. OSError as of `open_descriptor`."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY, follows=follows), "rb")


def open_own(path: Path, mode: str) -> IO[Any]:
    """Opens a file of this project's own, to write to it: rb, r+b, w, wb, a or ab; texts are UTF-8. OSError for a link,
    or for anything else that is no regular file."""
    descriptor = open_descriptor(path, WAYS[mode], follows=False)
    if mode[0] == "w":
        os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8")


def check_unicode(words: Iterable[str]) -> None:
    """UnicodeEncodeError for words that are not UTF-8: reports, JSON files and trackers cannot name such paths."""
    for word in words:
        word.encode()


def read_bytes(path: Path, *, most: int = MOST_BYTES, follows: bool = True) -> bytes:
    """A file's bytes. OSError as of `open_descriptor`; ValueError, without the file's name, if it is too large."""
    with open_regular(path, follows=follows) as file:
        if (num_bytes := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"it has {num_bytes:,} bytes, allowed: {most:,}")
        return file.read()


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """A file's text, in UTF-8. OSError as of `open_descriptor`; ValueError if it is too large or not UTF-8."""
    try:
        return read_bytes(path, most=most).decode()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def map_file(path: Path, *, follows: bool = True) -> mmap.mmap:
    """A file mapped into memory, to be read. OSError as of `open_descriptor`; ValueError for an empty one."""
    with open_regular(path, follows=follows) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def write_over(path: Path, text: str) -> None:
    """Writes a file of our own, not in one step: for what nobody reads back."""
    with open_own(path, "w") as file:
        file.write(text)


def open_tensors(path: Path, framework: str = "pt") -> Any:
    """safetensors' reader of a file. OSError or SafetensorError if it cannot be read."""
    from safetensors import safe_open

    if path.exists() and not path.is_file():  # a pipe or a device, which could block forever
        raise OSError(f"{path}: {NOT_REGULAR}")
    return safe_open(path, framework)


def hash_file(path: Path) -> dict[str, Any]:
    """A file's entry for the manifest."""
    with open_regular(path) as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_document(path: Path) -> Any:
    """The value in a JSON file; OSError or ValueError, without the file's name, if it is too large or not JSON."""
    return json.loads(read_bytes(path))


def read_json(path: Path) -> Any:
    """A JSON file; ValueError naming it if it is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing" if not path.exists() else f"{path.name} is not a regular file")
    try:
        return read_document(path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError naming the file if it cannot be read or holds something else."""
    try:
        content = read_document(path)
    except RecursionError:
        raise ValueError(f"{path}: cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {str(error).removeprefix(f'{path}: ')}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object, but {JSON_TYPES[type(content)]}")
    return content


def read_fields(path: Path, kinds: Mapping[str, Any], *, written_by: str, advice: str = "") -> dict[str, Any]:
    """The object in a JSON file that has these keys, of these types; ValueError naming the file and the other keys."""
    try:
        content = read_object(path)
    except ValueError as error:
        raise ValueError(f"{error}{advice}") from None
    if wrong := list_wrong(content, kinds):
        raise ValueError(f"{path}: not as {written_by} writes it (see {', '.join(wrong)}){advice}")
    return content


def list_wrong(content: dict[str, Any], kinds: Mapping[str, Any]) -> list[str]:
    """The keys that an object lacks, or has with a value of another type."""

    def fits(value: Any, kind: Any) -> bool:  # true and false are not numbers
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))

    return [name for name, kind in kinds.items() if name not in content or not fits(content[name], kind)]


def read_metrics(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yields number, text and content of each complete line of a run's metrics file; None for a damaged line. Yields
    nothing if there is no file."""
    if path.exists():
        with open_regular(path, follows=False) as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):  # the last line is incomplete after a kill, and while it is written
                    yield number, line, parse_metrics(line)


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    """The metrics of a step or a validation; None if the line is damaged."""
    row = parse_object(line) or {}
    return row if type(row.get("step")) is int and "loss" in row else None


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The object that a line of JSON holds; None if the line is damaged, or holds something else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
