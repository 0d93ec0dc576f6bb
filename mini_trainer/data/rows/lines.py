"""Divides the bytes of a file into rows: lines, elements of a JSON list, rows of a table, or a whole text.

Rows are not parsed. One longer than MAX_ROW_BYTES is skipped, and only its beginning is held in memory. A JSON list is
read whole.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, BinaryIO, Literal

from mini_trainer.data.stores import json_lines
from mini_trainer.data.stores.json_lines import BadRow, Line, TooLong

DELIMITERS = {".csv": ",", ".tsv": "\t"}
ALL_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


class CellReader:
    """Decodes lines for the csv module, and keeps track of the lines of the current row."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = iter(lines)
        self.start_row()

    def start_row(self) -> None:
        self.first_line, self.last_line, self.num_bytes, self.beginning, self.too_long = 0, 0, 0, b"", False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, line = next(self.lines)
        self.first_line = self.first_line or number
        self.last_line = number
        if isinstance(line, TooLong):
            self.num_bytes, self.too_long = self.num_bytes + line.num_bytes, True
            return "\n"
        self.beginning = self.beginning or line[: json_lines.NUM_BYTES_SHOWN]
        self.num_bytes += len(line)
        if self.num_bytes > json_lines.MAX_ROW_BYTES:
            raise OSError(
                f"the row that begins in line {self.first_line} is longer than {json_lines.MAX_ROW_BYTES:,} bytes:"
                " perhaps it has an unclosed quote"
            )
        return line.decode(errors="surrogateescape")  # invalid UTF-8 is reported once the row is complete


def split_table(lines: Iterable[Line], ending: str) -> Iterator[Line]:
    """Yields the rows after the header as cells by column, without empty cells. Raises OSError if the header, or the
    text after a quote, cannot be read."""
    csv.field_size_limit(json_lines.MAX_ROW_BYTES)
    header = list(islice(lines := iter(lines), 1))
    cells = CellReader(chain(header, lines))
    rows = csv.reader(cells, delimiter=find_delimiter(header, ending), strict=True)
    columns = None
    while True:
        cells.start_row()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise OSError(f"a quote in line {cells.first_line} opens a cell that does not end") from None
            where = "" if cells.first_line == cells.last_line else f" (lines {cells.first_line} to {cells.last_line})"
            reason = f"not a row of a table{where}: {error}"
            if columns is None:
                raise OSError(f"line {cells.first_line}, the header: {reason}") from None
            yield cells.first_line, BadRow(cells.beginning, reason)
            continue
        if columns is None:
            columns = check_header(row, cells) if row else None
        elif not row:
            yield cells.first_line, b""
        else:
            yield cells.first_line, make_row(row, columns, cells)


def find_delimiter(header: list[Line], ending: str) -> str:
    """The ending's delimiter; where the header has none of them outside of quotes, the only other one that it has."""
    unquoted = b"".join(re.sub(rb'"[^"]*"', b"", line) for _, line in header if isinstance(line, bytes)).decode(
        "latin-1"
    )
    found = [one for one in ALL_DELIMITERS if one in unquoted]
    return found[0] if len(found) == 1 else DELIMITERS[ending]


def make_row(row: list[str], columns: list[str], cells: CellReader) -> dict[str, str] | BadRow | TooLong:
    """Cells by column, or the reason why the row is malformed."""
    if cells.too_long:
        return TooLong(cells.beginning, cells.num_bytes)
    text = "".join(row)
    lines = f" (lines {cells.first_line} to {cells.last_line})" if cells.last_line > cells.first_line else ""
    if text.startswith("\ufeff") or row == columns:
        what = "begins with a byte-order mark" if text.startswith("\ufeff") else "repeats the header"
        return BadRow(cells.beginning, f"{what}{lines}, as if tables had been concatenated: remove it")
    if len(row) != len(columns):
        return BadRow(cells.beginning, f"{len(row)} cells{lines}, but the header has {len(columns)} columns")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            byte = error.object[error.start].encode(errors="surrogateescape")
            return BadRow(cells.beginning, f"not UTF-8{lines}: {byte!r}; save the table as UTF-8")
    if "\0" in text:
        return BadRow(cells.beginning, f"has the character NUL{lines}: the table is damaged, or not UTF-8")
    return {name: cell for name, cell in zip(columns, row, strict=True) if cell}


def check_header(row: list[str], cells: CellReader) -> list[str]:
    """The names of the columns. Raises OSError for an invalid header."""
    columns = [name.strip() for name in row]
    text = "".join(columns)
    if cells.too_long or "\0" in text or not text.isprintable():
        raise OSError("its first line names no columns; a table must be UTF-8 text (not UTF-16)")
    if twice := [name for name in columns if name and columns.count(name) > 1]:
        raise OSError(f"its first line names the column {twice[0]!r} twice")
    if len(columns) == 1 and (found := [words for one, words in ALL_DELIMITERS.items() if one in text]):
        raise OSError(f"its first line is one column, {text!r}: are its columns separated by {' or '.join(found)}?")
    return columns


BLOCK_BYTES = 1 << 20
MAX_LIST_BYTES = 2 << 30  # of a file that is one JSON list
SPACE = re.compile(r"[ \t\r\n]*")  # of JSON
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Encoding = Literal["json", "text", "table", "arrow"]

LIST = "is a JSON list, but in .jsonl each line is a row: give the file the ending .json"
SPREAD = (
    "has objects on several lines, but each line is a row: write each object on one line, for example by"
    " `jq -c . OLD > NEW.jsonl`, or, if they are a list within one object, `jq -c .KEY[] OLD > NEW.jsonl`"
)


def pop_bom(stream: BinaryIO) -> int:
    """Reads a byte-order mark, if the stream begins with one; returns its number of bytes."""
    begins = stream.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK)
    return len(stream.read(len(BYTE_ORDER_MARK))) if begins else 0


def read_lines(stream: BinaryIO, ending: str) -> tuple[Encoding, Iterator[Line]]:
    """The encoding of the rows, and the rows. A .json file that does not begin with a list holds JSON lines."""
    pop_bom(stream)
    if ending == ".txt":
        return "text", split_text(stream)
    if ending == ".json" and stream.peek(BLOCK_BYTES).lstrip()[:1] == b"[":
        return "json", split_json_list(stream)
    if ending in DELIMITERS:
        return "table", split_table(split_lines(stream), ending)
    return "json", split_lines(stream)


def split_text(stream: BinaryIO) -> Iterator[Line]:
    """Yields a text file as one row."""
    text = stream.read(json_lines.MAX_ROW_BYTES + 1)
    if len(text) <= json_lines.MAX_ROW_BYTES:
        yield 1, text
    else:
        rest = sum(map(len, iter(partial(stream.read, BLOCK_BYTES), b"")))
        yield 1, TooLong(text[: json_lines.NUM_BYTES_SHOWN], len(text) + rest)


def skip_lines(stream: BinaryIO, start: int) -> tuple[int, int]:
    """Reads up to the first line that begins at byte `start` or later; the number of lines before it, and its byte."""
    num_lines, position = 0, 0
    while block := stream.read(min(BLOCK_BYTES, start - 1 - position)):
        num_lines, position = num_lines + block.count(b"\n"), position + len(block)
    for piece in iter(partial(stream.readline, BLOCK_BYTES), b""):  # the line of the byte before `start`
        position += len(piece)
        if piece.endswith(b"\n"):
            return num_lines + 1, position
    return num_lines, position


def split_lines(stream: BinaryIO, number: int = 0) -> Iterator[Line]:
    """Yields lines, which end only at line feeds, numbered from `number` + 1. Too long ones are skipped in pieces."""
    for line in iter(partial(stream.readline, json_lines.MAX_ROW_BYTES + 1), b""):
        number += 1
        if len(line) <= json_lines.MAX_ROW_BYTES:
            yield number, line
            continue
        beginning, num_bytes, piece = line[: json_lines.NUM_BYTES_SHOWN], len(line), line[-1:]
        del line
        while piece and not piece.endswith(b"\n"):
            piece = stream.readline(BLOCK_BYTES)
            num_bytes += len(piece)
        yield number, TooLong(beginning, num_bytes)


def split_json_list(stream: BinaryIO) -> Iterator[Line]:
    """Yields the elements of a JSON list, which is read whole, with the lines where they begin. Raises OSError if the
    list is damaged, or has more than MAX_LIST_BYTES."""
    blocks = iter(partial(stream.read, BLOCK_BYTES), b"")
    # A byte becomes a character, so rows that are not UTF-8 reach the check of rows.
    text = "".join(block.decode("latin-1") for block in islice(blocks, MAX_LIST_BYTES // BLOCK_BYTES))
    if stream.peek(1):
        raise OSError(
            f"is a JSON list of more than {MAX_LIST_BYTES >> 30} GiB: write each row on a line, for example by"
            " `jq -c .[] OLD.json > NEW.jsonl`"
        )
    decoder, line, counted, at, mark = json.JSONDecoder(strict=False), 1, 0, text.index("["), "["
    while mark != "]":
        at = SPACE.match(text, at + 1).end()
        if mark == "[" and text.startswith("]", at):
            break
        line, counted = line + text.count("\n", counted, at), at
        try:
            end = decoder.raw_decode(text, at)[1]
        except (ValueError, RecursionError) as error:
            raise OSError(f"the list's element in line {line} is not JSON, or has no end: {error}") from None
        element = text[at:end].encode("latin-1")
        is_too_long = len(element) > json_lines.MAX_ROW_BYTES
        yield line, TooLong(element[: json_lines.NUM_BYTES_SHOWN], len(element)) if is_too_long else element
        at = SPACE.match(text, end).end()
        mark = text[at : at + 1]
        if mark not in ("]", ","):
            raise OSError(f"the list has neither a comma nor an end after its element in line {line}")
    if SPACE.match(text, at + 1).end() < len(text):
        raise OSError("text follows the list that it begins with")


def parse_row(raw: bytes | TooLong | BadRow | dict[str, Any], encoding: Encoding) -> dict[str, Any] | None:
    """A row as an object; None for a blank line. Raises ValueError for malformed rows."""
    if isinstance(raw, TooLong):
        raise ValueError(f"{raw.num_bytes:,} bytes long, allowed: {json_lines.MAX_ROW_BYTES:,}; it was skipped")
    if isinstance(raw, BadRow):
        raise ValueError(raw.reason)
    if isinstance(raw, dict):
        return raw
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.object[error.start : error.end]!r} at byte {error.start + 1}") from None
    if encoding == "text":
        return {"text": text} if text.strip() else None
    text = text.lstrip("\ufeff")  # a byte-order mark, where files were joined
    if not text or text.isspace():
        return None
    row = json_lines.parse_json(text)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {json_lines.quote(row)}")
    return row


def find_fault(beginning: bytes, *, may_be_list: bool) -> str | None:
    """Why a file with this beginning does not have one row per line; None if its first line is a row, or merely
    damaged. `may_be_list`: lists are read."""
    text = beginning.decode(errors="replace").lstrip("\ufeff").lstrip()
    line, newline, rest = text.partition("\n")
    if not newline or text[0] not in "[{" or is_json(line):
        return None
    is_cut = line.strip() in ("{", "[") and not is_json(rest.lstrip().partition("\n")[0])
    if not is_cut and not is_json(text, json.JSONDecoder().raw_decode):
        return None
    if text[0] == "[":
        return None if may_be_list else LIST
    return SPREAD


def is_json(text: str, read: Callable[[str], Any] = json.loads) -> bool:
    try:
        read(text)
    except (ValueError, RecursionError):
        return False
    return True
