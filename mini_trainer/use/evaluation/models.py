"""Models to measure, by name or as exports of a run, and their labels."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from mini_trainer.data.stores.disk import ASIDE, is_link_beside
from mini_trainer.model.methods.adapter_files import ADAPTER_CONFIG
from mini_trainer.run.file_names import EXPORTS_DIR


@dataclass(frozen=True)
class Named:
    """A model to measure. `label` is its unique name in results, and of its folder."""

    label: str
    name: str  # name or path for engines


def list_models(names: tuple[str, ...], run: str | None) -> list[Named]:
    """The models of --model, then the exports of --run in the order of their training."""
    found = list(dict.fromkeys([*names, *([] if run is None else map(str, find_exports(Path(run))))]))
    return [Named(label, name) for label, name in zip(make_labels(found), found, strict=True)]


def find_exports(run: Path) -> list[Path]:
    """The run's exports, by number of trained samples; the best one last."""
    folder = run / EXPORTS_DIR
    if not folder.is_dir():
        found = f"has no {EXPORTS_DIR}" if run.is_dir() else "there is no such directory"
        raise ValueError(f"--run {run}: {found}: name the --output-dir of a run that has exported its model")
    exports = [
        path
        for path in folder.iterdir()
        if not path.name.startswith(ASIDE)
        and not is_link_beside(path)
        and any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    ]
    if not exports:
        raise ValueError(f"--run {run}: {folder} holds no export")
    numbers = {path: re.search(r"\d+", path.name) for path in exports}
    return sorted(exports, key=lambda path: (float(found[0]) if (found := numbers[path]) else math.inf, path.name))


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
