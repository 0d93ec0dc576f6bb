"""Splits .csv and .tsv tables into rows. The first row names the columns; a quoted cell can span several lines."""

import csv
from collections.abc import Iterable, Iterator

from mini_trainer.data.stores.json_lines import MAX_ROW_BYTES, NUM_BYTES_SHOWN, BadRow, Line, TooLong

DELIMITERS = {".csv": ",", ".tsv": "\t"}
OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}


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
        self.beginning = self.beginning or line[:NUM_BYTES_SHOWN]
        self.num_bytes += len(line)
        if self.num_bytes > MAX_ROW_BYTES:
            raise OSError(
                f"the row that begins in line {self.first_line} is longer than {MAX_ROW_BYTES:,} bytes: perhaps it has"
                " an unclosed quote"
            )
        return line.decode(errors="surrogateescape")  # invalid UTF-8 is reported once the row is complete


def split_table(lines: Iterable[Line], ending: str) -> Iterator[Line]:
    """Yields the rows after the header as cells by column, without empty cells. Raises OSError if the header, or the
    text after a quote, cannot be read."""
    csv.field_size_limit(MAX_ROW_BYTES)
    cells = CellReader(lines)
    rows = csv.reader(cells, delimiter=DELIMITERS[ending], strict=True)
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
            reason = explain_error(str(error), cells)
            if columns is None:
                raise OSError(f"line {cells.first_line}, the header: {reason}") from None
            yield cells.first_line, BadRow(cells.beginning, reason)
            continue
        if columns is None:
            columns = check_header(row, cells, ending) if row else None
        elif not row:
            yield cells.first_line, b""
        else:
            yield cells.first_line, make_row(row, columns, cells)


def explain_error(error: str, cells: CellReader) -> str:
    where = "" if cells.first_line == cells.last_line else f" (lines {cells.first_line} to {cells.last_line})"
    if "expected after" in error:
        return f"text follows a closing quote{where}: in a quoted cell, quotes are written twice"
    if "new-line character" in error:
        return "a carriage return within the line: lines must end with a line feed"
    return f"not a row of a table{where}: {error}"


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


def check_header(row: list[str], cells: CellReader, ending: str) -> list[str]:
    """The names of the columns. Raises OSError for an invalid header."""
    columns = [name.strip() for name in row]
    text = "".join(columns)
    if cells.too_long or "\0" in text or not text.isprintable():
        raise OSError("its first line names no columns; a table must be UTF-8 text (not UTF-16)")
    twice = [name for name in columns if name and columns.count(name) > 1]
    if twice:
        raise OSError(f"its first line names the column {twice[0]!r} twice")
    if len(columns) == 1:
        for character, word in OTHER_DELIMITERS.items():
            if character in text:
                raise OSError(
                    f"its first line is one column, {text!r}, with {word} in it; columns of {ending} are separated by"
                    f" {OTHER_DELIMITERS[DELIMITERS[ending]]}"
                )
    return columns
