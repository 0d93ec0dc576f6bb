"""Models to measure, and their labels."""

import re
from dataclasses import dataclass
from pathlib import Path

from mini_trainer.run.file_names import EXPORTS_DIR


@dataclass(frozen=True)
class Named:
    """A model to measure. `label` is its unique name in results, and of its folder."""

    label: str
    name: str  # name or path for engines


def list_models(names: tuple[str, ...]) -> list[Named]:
    found = list(dict.fromkeys(names))
    return [Named(label, name) for label, name in zip(make_labels(found), found, strict=True)]


def make_labels(names: list[str]) -> list[str]:
    """The shortest distinct suffixes of the names, by path components, cleaned for use as file names."""
    parts = [[part for part in name.split("/") if part not in ("", ".", EXPORTS_DIR)] for name in names]
    shortened = (["/".join(own[-count:]) for own in parts] for count in range(1, max(map(len, parts)) + 1))
    labels = next((labels for labels in shortened if len(set(labels)) == len(labels)), names)
    cleaned = [re.sub(r"[^\w.\-]+", "_", label).strip("_.") or "model" for label in labels]
    return [label if cleaned.count(label) == 1 else f"{label}_{i + 1}" for i, label in enumerate(cleaned)]


def name_files(paths: list[str]) -> dict[str, str]:
    """The name of each set by its path: its file's name, without the ending if that is unique."""
    stems = {path: Path(path).name.split(".")[0] for path in paths}
    names = {path: stem if list(stems.values()).count(stem) == 1 else Path(path).name for path, stem in stems.items()}
    twice = sorted({name for name in names.values() if list(names.values()).count(name) > 1})
    if twice or len(names) < len(paths):
        raise ValueError(f"--task, --data: two files are named {', '.join(twice) or 'the same'}: rename one")
    return names
