"""YAML files of tasks and groups for EleutherAI's harness: their names there, and the files that they depend on.

Files are read as data here, and none of the functions that they name is called.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from disk import hash_file

FUNCTION = "!function"
DATA_KEYS = ("dataset_path", "dataset_name", "dataset_kwargs")  # whose texts can name files
IGNORED_FOLDERS = {"__pycache__", ".ipynb_checkpoints"}  # as the harness does


class Loader(yaml.SafeLoader):
    """Reads a function as its name."""


Loader.add_constructor(FUNCTION, lambda loader, node: {FUNCTION: loader.construct_scalar(node)})


def is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def read_config(path: Path, including: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Path]]:
    """A file's keys with those of the files that it includes, and all files read. ValueError names a broken one."""
    path = path.resolve()
    if path in including:
        raise ValueError(f"{path}: includes itself")
    try:
        config = yaml.load(path.read_bytes(), Loader=Loader)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected keys and values, as the harness's tasks have them")
    included = config.pop("include", [])
    merged: dict[str, Any] = {}
    files = [path]
    for name in included if isinstance(included, list) else [included]:
        found, below = read_config(path.parent / str(name), (*including, path))
        found.pop("task_list", None)
        merged |= found
        files += below
    return merged | config, files


def find_name(path: Path) -> str:
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
    """The files below a folder that define each task, group and tag; others are left out, as the harness does."""
    index: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.yaml")):
        if IGNORED_FOLDERS.intersection(path.parts):
            continue
        try:
            name, (config, _) = find_name(path), read_config(path)
        except ValueError:
            continue
        tags = config.get("tag") or []
        for known in [name, *([tags] if isinstance(tags, str) else tags)]:
            index.setdefault(known, []).append(path)
    return index


def list_members(config: dict[str, Any]) -> Iterator[str]:
    """The names of a group's tasks, and of those of the groups inside of it."""
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
    """A file's name for the harness, and what its results depend on: `files` by path with their digests, and `others`,
    names of tasks that are the harness's own."""
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
    digests = {os.path.relpath(found, path.parent): hash_file(found)["sha256"] for found in depends}
    return {"name": find_name(path), "files": dict(sorted(digests.items())), "others": sorted(others)}


def find_modules(config: dict[str, Any], files: Sequence[Path]) -> Iterator[Path]:
    """The Python files beside those whose functions a task names, which may import each other."""
    names = [value[FUNCTION] for value in walk(config) if isinstance(value, dict) and FUNCTION in value]
    for name in names:
        module = name.rpartition(".")[0].replace(".", "/") + ".py"
        for folder in {file.parent for file in files}:
            if (folder / module).is_file():
                yield from (folder / module).parent.glob("*.py")


def find_data(config: dict[str, Any]) -> Iterator[Path]:
    """The files of this machine that a task's data set is read from."""
    for value in walk([config.get(key) for key in DATA_KEYS]):
        for name in glob.glob(value, recursive=True) if isinstance(value, str) else []:
            path = Path(name).resolve()
            yield from (found for found in ([path] if path.is_file() else path.rglob("*")) if found.is_file())


def walk(value: Any) -> Iterator[Any]:
    """A value and all that are in it."""
    yield value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        yield from walk(item)
