"""Stores results with a record of how they were made, so that they are not computed again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import list_wrong, read_object, written_aside


def is_made_by(path: Path, made_by: dict[str, Any]) -> bool:
    """Whether `path` exists and was made by `made_by`; ValueError if it was made by something else."""
    beside = name_beside(path)
    if not beside.is_file() or not path.is_file():
        return False
    if read_object(beside) != json.loads(json.dumps(made_by)):
        raise ValueError(
            f"{path}: was measured differently before (see {beside.name}): name another --output-dir, or remove it"
        )
    return True


def read_lines(
    path: Path, kinds: Mapping[str, Any] | None = None, *, advice: str = "remove it to measure again"
) -> list[Any]:
    """The values of a JSONL file, with `kinds` objects with these keys, of these types; ValueError names a file and a
    line that is damaged."""
    try:
        # Bytes, because splitlines splits text also at line separators within answers.
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; {advice}") from None
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            values.append(parse_line(line, kinds))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is damaged: {error}; {advice}") from None
    return values


def read_samples(path: Path, *, advice: str = "remove it to measure again") -> dict[str, list[dict[str, Any]]]:
    """The samples of each task of the harness; ValueError names a damaged file."""
    found = read_object(path)
    for name, samples in found.items():
        is_whole = isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples)
        if not is_whole or any(list_wrong(sample, {"index": int, "scores": dict}) for sample in samples):
            raise ValueError(f"{path}: not as evaluate writes it (see {name}); {advice}")
    return found


def parse_line(line: bytes, kinds: Mapping[str, Any] | None) -> Any:
    value = json.loads(line)
    wrong = [] if kinds is None else list_wrong(value, kinds) if isinstance(value, dict) else list(kinds)
    if wrong:
        raise ValueError(f"see {', '.join(wrong)}")
    return value


def write_made(path: Path, text: str, made_by: dict[str, Any]) -> None:
    with written_aside(path, name_beside(path)) as (aside, beside):
        aside.write_text(text, encoding="utf-8")
        beside.write_text(json.dumps(made_by), encoding="utf-8")


def name_beside(path: Path) -> Path:
    return path.with_suffix(".made_by.json")
