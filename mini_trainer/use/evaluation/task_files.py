"""YAML files of tasks and groups for EleutherAI's harness: their names, and the files that they depend on.

Files are only read as data here; functions that they name are not called.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import hash_file
from mini_trainer.options.option_files import Loader, read_yaml

FUNCTION = "!function"
DATA_KEYS = ("dataset_path", "dataset_name", "dataset_kwargs")  # their values may be paths
IGNORED_FOLDERS = {"__pycache__", ".ipynb_checkpoints"}  # the harness ignores them


class TaskLoader(Loader):
    """Reads `!function a.b` as {"!function": "a.b"}."""


TaskLoader.add_constructor(FUNCTION, lambda loader, node: {FUNCTION: loader.construct_scalar(node)})


def is_task_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def read_config(path: Path, including: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Path]]:
    """A file's keys, with those of the files that it includes, and the files read. ValueError names a broken file."""
    path = path.resolve()
    if path in including:
        raise ValueError(f"{path}: includes itself")
    config = read_yaml(path, named=str(path), loader=TaskLoader)
    included = config.pop("include", [])
    merged: dict[str, Any] = {}
    files = [path]
    for name in included if isinstance(included, list) else [included]:
        found, below = read_config(path.parent / str(name), (*including, path))
        found.pop("task_list", None)
        merged |= found
        files += below
    return merged | config, files


def name_task(path: Path) -> str:
    """The task or group that a file defines."""
    config, _ = read_config(path)
    name = config.get("group", config.get("task"))
    if isinstance(name, list):
        raise ValueError(f"{path}: 'task' is a list without a 'group': give the list a name with group: NAME")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path}: names neither a 'task' nor a 'group'")
    if "group" in config and path.suffix != ".yaml":
        raise ValueError(f"{path}: the harness looks for groups in files called *.yaml: rename it")
    return name


def index_folder(folder: Path) -> dict[str, list[Path]]:
    """The files below a folder by the tasks, groups and tags that they define; broken files are skipped, as in the
    harness."""
    index: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.yaml")):
        if IGNORED_FOLDERS.intersection(path.parts):
            continue
        try:
            name, (config, _) = name_task(path), read_config(path)
        except ValueError:
            continue
        tags = config.get("tag") or []
        for known in [name, *([tags] if isinstance(tags, str) else tags)]:
            index.setdefault(known, []).append(path)
    return index


def list_members(config: dict[str, Any]) -> Iterator[str]:
    """The names of a group's tasks and of the groups in it, with their tasks."""
    members = config.get("task")
    for member in members if "group" in config and isinstance(members, list) else []:
        if isinstance(member, str):
            yield member
        elif isinstance(member, dict) and "group" in member:
            yield member["group"]
            yield from list_members(member)
        elif isinstance(member, dict) and isinstance(member.get("task"), str):
            yield member["task"]


def describe_task_file(path: Path) -> dict[str, Any]:
    """A file's name for the harness, and the dependencies of its results: `files` by path with digests, and `others` by
    name."""
    files, others = find_dependencies(path)
    digests = {os.path.relpath(found, path.parent): hash_file(found)["sha256"] for found in files}
    return {"name": name_task(path), "files": dict(sorted(digests.items())), "others": sorted(others)}


def find_dependencies(path: Path) -> tuple[set[Path], set[str]]:
    """All files of a task or group, and the names of its tasks that are the harness's own."""
    index, waiting = index_folder(path.parent), [path]
    seen: set[Path] = set()
    depends, others = set(), set()
    while waiting:
        config, files = read_config(waiting.pop())
        if files[0] in seen:
            continue
        seen.add(files[0])
        depends |= {*files, *find_modules(config, files), *find_data(config)}
        for name in list_members(config):
            waiting += index.get(name, [])
            others |= set() if name in index else {name}
    return depends, others


def find_modules(config: dict[str, Any], files: Sequence[Path]) -> Iterator[Path]:
    """The Python files whose functions a task names, and those in the same folders, which they may import."""
    names = [value[FUNCTION] for value in walk(config) if isinstance(value, dict) and FUNCTION in value]
    for name in names:
        module = name.rpartition(".")[0].replace(".", "/") + ".py"
        for folder in {file.parent for file in files}:
            if (folder / module).is_file():
                yield from (folder / module).parent.glob("*.py")


def find_data(config: dict[str, Any]) -> Iterator[Path]:
    """The local files that a task's data set is read from."""
    for value in walk([config.get(key) for key in DATA_KEYS]):
        for name in glob.glob(value, recursive=True) if isinstance(value, str) else []:
            path = Path(name).resolve()
            yield from (found for found in ([path] if path.is_file() else path.rglob("*")) if found.is_file())


def walk(value: Any) -> Iterator[Any]:
    """Yields a value and all values nested in it."""
    yield value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        yield from walk(item)
