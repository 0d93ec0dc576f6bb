"""Tensors in a model's files: shape, dtype, a function that reads each, a check that all are finite, quantization."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from mini_trainer.data.stores.model_files import list_weights
from mini_trainer.options.reading import open_tensors, read_object


def check_finite(tensor: Tensor, name: str, *, where: object) -> Tensor:
    """Returns `tensor`; ValueError, with its name and `where` it is from, unless all its numbers are finite."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return tensor
    numbers = tensor.float() if tensor.itemsize == 1 else tensor  # torch cannot sum float8
    # Their sum takes one pass without a copy, but it may overflow.
    if math.isfinite(numbers.sum(dtype=torch.float32).item()) or bool(numbers.isfinite().all()):
        return tensor
    num_nan, num_inf = int(numbers.isnan().sum()), int(numbers.isinf().sum())
    found = " and ".join(f"{count:,} {what}" for count, what in ((num_nan, "NaN"), (num_inf, "infinite")) if count)
    raise ValueError(
        f"{where}: {name} has {found} among {tensor.numel():,} numbers: the weights are damaged, or from a training run"
        " that diverged; use others"
    )


FP8 = ("F8_E4M3", "F8_E5M2")  # as safetensors names them
QUANTIZED_TYPES = (*FP8, "U8", "I8")  # dtypes that only quantized weights are stored in

Settings = dict[str, Any]  # `quantization_config` of a config.json
Reader = Callable[[], Tensor]  # returns a tensor as stored, on the CPU; may be mapped from the file
Readers = dict[str, Reader]  # by the names of parameters and buffers


@dataclass(frozen=True)
class Stored:
    """A tensor that has not been read."""

    read: Reader
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, F8_E4M3, U8


class StoredFiles:
    """The weight files of a model directory. A file is closed after each tensor, which releases its pages; `kept_open`
    parses all names and shapes only once: for a hundred experts that become one tensor."""

    def __init__(self, path: Path):
        self.path = path
        self.opened: dict[str, Any] | None = None  # by name; None outside `kept_open`

    def find(self) -> dict[str, Stored]:
        """All tensors by their names in the files."""
        stored = {}
        for name in list_weights(self.path):
            with open_tensors(self.path / name) as file:
                for key in file.keys():  # noqa: SIM118
                    part = file.get_slice(key)
                    read = functools.partial(self.read, name, key)
                    stored[key] = Stored(read, tuple(part.get_shape()), part.get_dtype())
        return stored

    def read(self, name: str, key: str) -> Tensor:
        """Reads a memory-mapped tensor: its pages are read on use, and released with it."""
        if self.opened is None:
            return read_tensor(self.path / name, key)
        if name not in self.opened:
            self.opened[name] = open_tensors(self.path / name)
        return self.opened[name].get_tensor(key)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keeps files open once they have been opened, inside this block."""
        self.opened = {}
        try:
            yield
        finally:
            self.opened = None


def read_tensor(path: Path, key: str) -> Tensor:
    """Reads a memory-mapped tensor: its pages are read on use, and released with it."""
    with open_tensors(path) as file:
        return file.get_tensor(key)


def find_quantization(model_dir: str | Path) -> Settings | None:
    """The quantization settings of a model, None without any; ValueError if they are not an object."""
    config = read_object(Path(model_dir) / "config.json")
    texts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    found = [part[key] for part in texts for key in ("quantization_config", "compression_config") if part.get(key)]
    if not found:
        return None
    if not isinstance(found[0], dict):
        raise ValueError(f"{model_dir}/config.json: quantization_config is {found[0]!r:.80}, not a JSON object")
    return found[0]


def choose_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Dtype to dequantize to: the config's, or bf16 if that is not a compute dtype."""
    named = getattr(config, "dtype", None)
    return named if named in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16


NUM_AHEAD = 2  # tensors that are read while another is in use; fused experts have gigabytes each


@contextmanager
def reading_ahead(readers: dict[str, Reader], module_names: Iterable[str]) -> Iterator[None]:
    """Makes all `readers` return tensors that are read ahead, in the order of `module_names`, inside this block.
    One thread reads them, so that readers need not be safe for several; they can be taken in any order."""
    by_module: dict[str, list[str]] = {}
    for name in readers:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    waiting = {name: None for module in dict.fromkeys(module_names) for name in by_module.get(module, ())}
    own, begun = dict(readers), {}

    def begin(name: str) -> None:
        waiting.pop(name, None)
        begun[name] = thread.submit(own.pop(name))

    def take(name: str) -> Tensor:
        if name not in begun:
            begin(name)
        future = begun.pop(name)
        while waiting and len(begun) < NUM_AHEAD:
            begin(next(iter(waiting)))
        return future.result()

    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        readers |= {name: functools.partial(take, name) for name in readers}
        try:
            yield
        finally:
            thread.shutdown(cancel_futures=True)
