"""Tensors kept for later runs: a safetensors file with a text that says what they are of, and a hash over both."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from mini_trainer.data.stores.disk import written_aside
from mini_trainer.options.reading import open_tensors

ABOUT, KEY = "about", "sha256"  # the one entry of a file's metadata, and the hash within it
# Also JSON of another form. No ValueError of the block itself.
UNREADABLE = (OSError, SafetensorError, KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError)


def write_hashed(path: Path, tensors: dict[str, Tensor], about: Mapping[str, Any]) -> None:
    """Replaces a file by these tensors (on the CPU). OSError if it cannot be written."""
    metadata = {ABOUT: json.dumps({**about, KEY: hash_tensors(tensors, about)})}
    try:
        with written_aside(path) as (aside,):
            save_file(tensors, aside, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None


@contextmanager
def open_hashed(path: Path, *keys: str, what: str) -> Iterator[tuple[safe_open, dict[str, Any]]]:
    """Yields the open file, not compared with its hash, and what it is about, with these keys. ValueError, also in the
    block, for a file that `write_hashed` has not written so; `what`: the file in that message."""
    try:
        with open_tensors(path) as file:
            about = json.loads(file.metadata()[ABOUT])
            if missing := {KEY, *keys} - about.keys():
                raise KeyError(min(missing))
            yield file, about
    except UNREADABLE as error:
        raise ValueError(f"{what}: {type(error).__name__}: {str(error).removeprefix(f'{path}: ')}") from None


def read_hashed(path: Path, *keys: str, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors and what they are about; ValueError if they have another hash than the recorded one."""
    with open_hashed(path, *keys, what=what) as (file, about):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about.pop(KEY) != hash_tensors(tensors, about):
            raise ValueError(f"{what}: damaged: its hash differs from the recorded one")
    return tensors, about


def hash_tensors(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(-1).view(uint8).numpy())
    return digest.hexdigest()
