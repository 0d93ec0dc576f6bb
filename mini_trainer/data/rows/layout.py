"""Recognises files that are not JSON lines, to give one reason for the file instead of one per line."""

import json
import shlex
from json.decoder import scanstring
from typing import Any

# Keys of rows whose values may be lists of objects; a list under another key may hold the rows themselves.
OF_ROWS = {
    *("messages", "conversations", "prompt", "completion", "generation", "chosen", "rejected", "chosen_response"),
    *("rejected_response", "tools", "functions", "images", "image", "history", "tokens"),
}
DECODER = json.JSONDecoder()
LIST = "is a JSON list, but in .jsonl each line is a row: give the file the ending .json"
SPREAD = (
    "has objects on several lines, but each line is a row: write each object on one line, for example by"
    " `jq -c . OLD > NEW.jsonl`"
)


def find_fault(beginning: bytes, *, may_be_list: bool) -> str | None:
    """Why a file with this beginning does not have one row per line; None if its first line is a row, or merely
    damaged. `may_be_list`: lists are read."""
    text = beginning.decode(errors="replace").lstrip("\ufeff").lstrip()
    line, newline, rest = text.partition("\n")
    if not newline or text[0] not in "[{" or is_json(line):
        return None
    value, end = read_value(text)
    is_cut = end is None and line.strip() in ("{", "[") and not is_json(rest.lstrip().partition("\n")[0])
    if end is None and not is_cut:
        return None
    if text[0] == "[":
        return None if may_be_list else LIST
    key = find_key_of_list(text) if end is None else find_wrapped(value) if not text[end:].strip() else None
    if key is None:
        return SPREAD
    path = shlex.quote(f".[{json.dumps(key, ensure_ascii=False)}]")
    return f"is {describe_wrapper(key)}, for example by `jq {path} OLD.json > NEW.json`"


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_value(text: str) -> tuple[Any, int | None]:
    """The JSON value that the text begins with, and where it ends; None if it has none."""
    try:
        return DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, None


def find_wrapped(value: Any) -> str | None:
    """The key under which an object may hold rows: a list of objects that is not part of a row."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if key not in OF_ROWS and isinstance(item, list) and item and all(isinstance(one, dict) for one in item):
            return key
    return None


def describe_wrapper(key: str) -> str:
    return f"an object around a list of objects, under {key!r}: if these are the rows, write the list alone"


def find_key_of_list(text: str) -> str | None:
    """`find_wrapped` for the beginning of an object's text."""
    at = 1
    try:
        while True:
            at = skip_spaces(text, at)
            key, at = scanstring(text, at + 1, True)
            at = skip_spaces(text, skip_spaces(text, at) + 1)
            if text[at] == "[" and text[skip_spaces(text, at + 1)] == "{" and key not in OF_ROWS:
                return key
            at = skip_spaces(text, DECODER.raw_decode(text, at)[1]) + 1
    except (ValueError, IndexError, RecursionError):
        return None


def skip_spaces(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at
