"""What the safetensors files of a model hold: every tensor's shape and type, and a function that reads it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from model.files import list_weights

Reader = Callable[[], Tensor]  # gives a tensor as it is stored, on the CPU; the memory may be the file's


@dataclass(frozen=True)
class Stored:
    """A tensor that has not been read."""

    read: Reader
    shape: tuple[int, ...]
    dtype: str  # by safetensors' name: F32, BF16, F8_E4M3, U8


def find_stored(path: Path) -> dict[str, Stored]:
    """Every tensor of a model directory by its name in the files."""
    stored = {}
    for name in list_weights(path):
        with safe_open(path / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                slice_ = file.get_slice(key)
                read = functools.partial(read_tensor, path / name, key)
                stored[key] = Stored(read, tuple(slice_.get_shape()), slice_.get_dtype())
    return stored


def read_tensor(path: Path, key: str) -> Tensor:
    """One tensor, mapped into memory: its pages are read when they are used, and given back with it."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key)
