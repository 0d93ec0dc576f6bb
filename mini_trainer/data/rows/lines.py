"""Divides the bytes of a file into rows: lines, elements of a JSON list, rows of a table, or a whole text.

Rows are not parsed. One longer than MAX_ROW_BYTES is skipped, and only its beginning is held in memory.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO, Literal

from mini_trainer.data.rows.tables import DELIMITERS, split_table
from mini_trainer.data.stores.json_lines import (
    MAX_ROW_BYTES,
    NUM_BYTES_SHOWN,
    BadRow,
    Line,
    TooLong,
    parse_json,
    quote,
)

BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Encoding = Literal["json", "text", "table", "arrow"]

# Text without delimiters, skipped in one match: in a string up to its end; within an element up to a bracket, between
# elements also up to a comma, with strings as wholes. A match stops early after 99 escapes or strings, which bounds its
# memory; the next character is then handled by itself. Possessive groups would need no such bound, but Python 3.11.2
# matches them wrongly.
STRING = rb'[^"\\]*+(?:\\.[^"\\]*+){0,99}'
IN_STRING = re.compile(STRING, re.DOTALL)
IN_ELEMENT = re.compile(rb'[^"\[\]{}]*+(?:"' + STRING + rb'"[^"\[\]{}]*+){0,99}', re.DOTALL)
BETWEEN_ELEMENTS = re.compile(rb'[^"\[\]{},]*+(?:"' + STRING + rb'"[^"\[\]{},]*+){0,99}', re.DOTALL)

LIST = "is a JSON list, but in .jsonl each line is a row: give the file the ending .json"
SPREAD = (
    "has objects on several lines, but each line is a row: write each object on one line, for example by"
    " `jq -c . OLD > NEW.jsonl`, or, if they are a list within one object, `jq -c .KEY[] OLD > NEW.jsonl`"
)


def starts_with_mark(stream: BinaryIO) -> bool:
    return stream.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK)


def read_lines(stream: BinaryIO, ending: str) -> tuple[Encoding, Iterator[Line]]:
    """The encoding of the rows, and the rows. A .json file that does not begin with a list holds JSON lines."""
    if starts_with_mark(stream):
        stream.read(len(BYTE_ORDER_MARK))
    if ending == ".txt":
        return "text", split_text(stream)
    if ending == ".json" and stream.peek(BLOCK_BYTES).lstrip()[:1] == b"[":
        return "json", split_json_list(stream)
    if ending in DELIMITERS:
        return "table", split_table(split_lines(stream), ending)
    return "json", split_lines(stream)


def split_text(stream: BinaryIO) -> Iterator[Line]:
    """Yields a text file as one row."""
    text = stream.read(MAX_ROW_BYTES + 1)
    if len(text) <= MAX_ROW_BYTES:
        yield 1, text
    else:
        rest = sum(map(len, iter(partial(stream.read, BLOCK_BYTES), b"")))
        yield 1, TooLong(text[:NUM_BYTES_SHOWN], len(text) + rest)


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
    """Yields lines, which end only at line feeds, numbered from `number` + 1. Lines that are too long are skipped in
    pieces."""
    for line in iter(partial(stream.readline, MAX_ROW_BYTES + 1), b""):
        number += 1
        if len(line) <= MAX_ROW_BYTES:
            yield number, line
            continue
        beginning, num_bytes, piece = line[:NUM_BYTES_SHOWN], len(line), line[-1:]
        del line
        while piece and not piece.endswith(b"\n"):
            piece = stream.readline(BLOCK_BYTES)
            num_bytes += len(piece)
        yield number, TooLong(beginning, num_bytes)


def split_json_list(stream: BinaryIO) -> Iterator[Line]:
    """Yields the elements of a JSON list, with the lines where they begin. Follows brackets and strings, checks nothing
    else.

    Malformed elements (nothing between two commas, text after the list) are yielded too, to be refused as rows. Raises
    OSError if the list does not end.

    ijson 3.6 is faster but no replacement: it yields values without lines, ends at the first element that is damaged or
    not UTF-8, accepts repeated keys, turns half a character into "?", and holds elements of any size (295 MB more for
    one of 150 MB; 69 MB here). A list of 200 MB took 12 CPU seconds here, less than the workers' tokenization; with
    ijson 2.4, or 4.7 with its values written as JSON again for the workers.
    """
    piece = ElementBuffer()
    block = stream.read(BLOCK_BYTES)
    start = at = block.index(b"[") + 1
    piece.line += block[:start].count(b"\n")
    depth, in_string, is_first, has_ended = 0, False, True, False
    while block:
        while not has_ended and at < len(block):
            pattern = IN_STRING if in_string else IN_ELEMENT if depth else BETWEEN_ELEMENTS
            at = pattern.match(block, at).end()
            mark = block[at : at + 1]
            at += len(mark)
            if mark == b"\\":
                at += 1  # the character after it is no delimiter
            elif mark == b'"':
                in_string = not in_string
            elif mark in (b"[", b"{"):
                depth += 1
            elif depth > 0:
                depth -= mark in (b"]", b"}")
            elif mark:
                has_ended = mark != b","
                piece.add(block[start : at - 1])
                is_empty_list = is_first and has_ended
                start, is_first = at, False
                yield from piece.take(when_blank=b"" if is_empty_list else mark)
        piece.add(block[start:])
        at = max(at - len(block), 0)  # the character after a backslash may be the next block's first
        start, block = 0, stream.read(BLOCK_BYTES)
    if not has_ended:
        raise OSError("the list that it begins with has no end")
    yield from piece.take(when_blank=b"")


class ElementBuffer:
    """Collects the bytes of an element. Invariant: holds at most MAX_ROW_BYTES; `line` is where the element begins."""

    def __init__(self) -> None:
        self.line = 1
        self.clear()

    def clear(self) -> None:
        self.held, self.num_bytes, self.num_newlines = bytearray(), 0, 0

    def add(self, piece: bytes) -> None:
        if not self.held:
            stripped = piece.lstrip()
            self.line += piece[: len(piece) - len(stripped)].count(b"\n")
            piece = stripped
        self.num_bytes += len(piece)
        self.num_newlines += piece.count(b"\n")
        self.held += piece
        if self.num_bytes > MAX_ROW_BYTES:
            del self.held[NUM_BYTES_SHOWN:]

    def take(self, *, when_blank: bytes) -> Iterator[Line]:
        """Yields the element, or `when_blank` if there is none; nothing if both are empty."""
        if self.num_bytes > MAX_ROW_BYTES:
            yield self.line, TooLong(bytes(self.held), self.num_bytes)
        elif self.held or when_blank:
            yield self.line, bytes(self.held).rstrip() or when_blank
        self.line += self.num_newlines
        self.clear()


def parse_row(raw: bytes | TooLong | BadRow | dict[str, Any], encoding: Encoding) -> dict[str, Any] | None:
    """A row as an object; None for a blank line. Raises ValueError for malformed rows."""
    if isinstance(raw, TooLong):
        raise ValueError(f"{raw.num_bytes:,} bytes long, allowed: {MAX_ROW_BYTES:,}; it was skipped")
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
    row = parse_json(text)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {quote(row)}")
    return row


def find_fault(beginning: bytes, *, may_be_list: bool) -> str | None:
    """Why a file with this beginning does not have one row per line; None if its first line is a row, or merely
    damaged. `may_be_list`: lists are read."""
    text = beginning.decode(errors="replace").lstrip("\ufeff").lstrip()
    line, newline, rest = text.partition("\n")
    if not newline or text[0] not in "[{" or is_json(line):
        return None
    is_cut = line.strip() in ("{", "[") and not is_json(rest.lstrip().partition("\n")[0])
    if not is_cut and not begins_with_json(text):
        return None
    if text[0] == "[":
        return None if may_be_list else LIST
    return SPREAD


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def begins_with_json(text: str) -> bool:
    try:
        json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return True
