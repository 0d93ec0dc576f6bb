"""Converts rows with images to conversations with bare image parts, and the place of each image.

| where the row has its images                                                             |
|------------------------------------------------------------------------------------------|
| in parts: {"type": "image", "image": X}, or "path" or "url" for "image"                  |
| in parts: {"type": "image_url", "image_url": {"url": X}}                                 |
| in a column, images or image: X for each <image> in a text, or each {"type": "image"}    |

X is the path of a file, relative to the row's file; a data: URL; a web URL; {"path": ..., "bytes": ...}; or bytes.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_trainer.data.chat.conversation import IMAGE_PART
from mini_trainer.data.rows.column_names import Fields
from mini_trainer.data.rows.turn_texts import parse_lists
from mini_trainer.data.stores.image_files import as_data_url
from mini_trainer.data.stores.json_lines import quote

MARKER = "<image>"  # LLaVA's marker
IMAGE_COLUMNS = ("images", "image")
TURNS = {"messages": "content", "conversations": "value"}


@dataclass(frozen=True)
class ImageFolders:
    """Directories of images: of each file of rows, by its name, and of the data set."""

    of_files: dict[str, Path]
    of_data: Path

    def find_path(self, value: Any, file: str) -> str:
        """An image as stored in the data set: a path relative to its directory, a web URL, or a data: URL."""
        if isinstance(value, dict):
            value = next((value[name] for name in ("bytes", "path", "url") if value.get(name)), None)
        if isinstance(value, bytes):
            return as_data_url(value)
        if not isinstance(value, str) or not value:
            raise ValueError(f"an image is {quote(value)}, expected a path, a data: URL or bytes")
        if value.startswith("data:") or "://" in value:
            return value
        return os.path.relpath(self.of_files[file] / value, self.of_data)


def take_images(fields: Fields) -> tuple[Fields, list[Any]]:
    """The row with bare image parts, and the value of each of them, in the order of the text."""
    waiting = read_column(fields)
    num_given = len(waiting)
    key = next((key for key in TURNS if isinstance(fields.get(key), list)), None)
    if key is None:
        if waiting:
            raise ValueError("has images but no messages or conversations")
        return fields, []
    found: list[Any] = []
    turns = [take_from_turn(turn, TURNS[key], waiting, found, has_column=num_given > 0) for turn in fields[key]]
    if waiting:
        raise ValueError(f"{num_given} images, but the texts have places for {num_given - len(waiting)} ({MARKER})")
    return {**fields, key: turns}, found


def read_column(fields: Fields) -> list[Any]:
    """The values of the row's column of images."""
    columns = parse_lists({name: fields[name] for name in IMAGE_COLUMNS if name in fields}, IMAGE_COLUMNS)
    given = columns.get("images", columns.get("image"))
    if given is None:
        return []
    return list(given) if isinstance(given, list) else [given]


def take_from_turn(turn: Any, key: str, waiting: list[Any], found: list[Any], *, has_column: bool) -> Any:
    """The message with bare image parts. Appends the value of each to `found`, or else the next of `waiting`."""
    if not isinstance(turn, dict):
        return turn
    key = "content" if key not in turn else key
    content = turn.get(key)
    if isinstance(content, str) and has_column and MARKER in content:
        content = [
            part
            for i, text in enumerate(content.split(MARKER))
            for part in ([IMAGE_PART] * (i > 0) + [{"type": "text", "text": text}] * bool(text))
        ]
    if not isinstance(content, list):
        return turn
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("image", "image_url"):
            parts.append(part)
            continue
        value = next((part[name] for name in ("image", "image_url", "path", "url") if name in part), None)
        if value is None and not waiting:
            raise ValueError("more places for images than images")
        found.append(waiting.pop(0) if value is None else value)
        parts.append(IMAGE_PART)
    return {**turn, key: parts}
