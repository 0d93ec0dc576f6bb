"""A checkpoint on disk: safetensors files, JSON, and a manifest that allows every byte of them to be checked.

    step_40/
      rank_00000.safetensors ...   each rank's shards of weights and optimizer state
      state.json                   the run's counters, options and fingerprints
      manifest.json                written last: the tensors' layout, every file's size and SHA-256, and its own

A checkpoint is written under a temporary name and renamed when complete, so one that has its final name was complete
at that time. Nothing is ever unpickled, and names in the manifest are only compared, never opened.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from mini_trainer.data.stores.contents import MANIFEST, load_manifest
from mini_trainer.options.reading import open_tensors
from mini_trainer.run.file_names import STATE, find_checkpoints
from mini_trainer.run.write_pool import DTYPES, TensorFile, WritePool

DAMAGED = "damaged_"  # name prefix of damaged checkpoints


def write_tensors(path: Path, tensors: dict[str, Tensor], pool: WritePool) -> dict[str, Any]:
    """Writes `tensors` to a safetensors file, and flushes it; returns its manifest entry. OSError if writing fails."""
    try:
        kinds = {name: (DTYPES[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
        TensorFile(path, kinds, pool).fill(lambda name: tensors[name].cpu())
        return pool.finish()[path]
    finally:
        pool.drop()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads the manifest, and checks it against its own checksum and the names and sizes of the directory's files.
    ValueError, naming the file, if anything is missing, of a different size, or unexpected."""
    if not directory.exists():
        raise ValueError("there is no such directory")
    if (directory / MANIFEST).is_symlink():
        raise ValueError(f"{MANIFEST} is not a regular file")
    manifest = load_manifest(directory)
    check_manifest(manifest)
    found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(directory)}
    del found[MANIFEST]
    expected = manifest["files"]
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise ValueError(f"{name} is missing")
        if name not in expected:
            raise ValueError(f"{name} does not belong to it")
        if not stat.S_ISREG(found[name].st_mode):
            raise ValueError(f"{name} is not a regular file")
        if found[name].st_size != expected[name]["size"]:
            raise ValueError(f"{name} has {found[name].st_size} bytes instead of {expected[name]['size']}")
    return manifest


def check_manifest(manifest: dict[str, Any]) -> None:
    """ValueError if the manifest does not have the expected form; a modified one may have a valid checksum."""
    try:
        num_shards = manifest["num_shards"]
        names = {STATE, *map(shard_name, range(min(num_shards, len(manifest["files"]))))}
        is_sound = num_shards >= 1 and manifest["files"].keys() == names
        for entry in manifest["files"].values():
            is_sound &= isinstance(entry["size"], int) and isinstance(entry["sha256"], str)
        for layout in manifest["tensors"].values():
            is_sound &= all(isinstance(length, int) and length >= 0 for length in layout["shape"])
            is_sound &= layout["dim"] is None or layout["dim"] in range(len(layout["shape"]))
            is_sound &= layout["dtype"] in DTYPES.values()
    except (KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"{MANIFEST} does not have the form that train.py writes")


def check_hash(name: str, found: dict[str, Any], entry: dict[str, Any]) -> None:
    """ValueError if the size and hash `found` in a file are not those of its manifest entry."""
    if found != entry:
        raise ValueError(f"{name} is damaged: its SHA-256 differs from the manifest's")


class TensorReader:
    """Reads any part of a checkpoint's tensors, written by any number of ranks."""

    def __init__(self, directory: Path, layout: dict[str, Any]):
        """`layout` has the manifest's `num_shards` and `tensors`."""
        self.directory, self.layout, self._files = directory, layout, {}

    def read(self, target: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fills `target` with the box of the whole tensor `name` that starts at `offset`."""
        layout, num_shards = self.layout["tensors"][name], self.layout["num_shards"]
        dim, shape = layout["dim"], layout["shape"]
        for shard in find_shards(layout, num_shards, offset, target.shape):
            start, stop = [0] * len(shape), list(shape)
            if dim is not None:
                start[dim], stop[dim] = chunk_range(shape[dim], shard, num_shards)
            low = [max(a, b) for a, b in zip(start, offset, strict=True)]
            high = [min(a, b + n) for a, b, n in zip(stop, offset, target.shape, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            try:
                if shard not in self._files:
                    self._files[shard] = open_tensors(self.directory / shard_name(shard))
                file = self._files[shard]
                part = file.get_slice(name)[slices(low, high, start)] if shape else file.get_tensor(name)
                target[slices(low, high, offset)].copy_(part)
            except (OSError, SafetensorError, RuntimeError, IndexError) as error:
                raise ValueError(f"{self.directory / shard_name(shard)}: {name} cannot be read: {error}") from None


def find_shards(layout: dict[str, Any], num_shards: int, offset: Sequence[int], shape: Sequence[int]) -> range:
    """The shards that can hold a box of a tensor. Checking every rank's would take ranks x tensors operations."""
    if (dim := layout["dim"]) is None:
        return range(1)
    length = max(1, -(-layout["shape"][dim] // num_shards))
    return range(offset[dim] // length, min(-(-(offset[dim] + shape[dim]) // length), num_shards))


def slices(low: list[int], high: list[int], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def chunk_range(size: int, index: int, count: int) -> tuple[int, int]:
    """Start and end of part `index` of `count`, as torch.chunk and FSDP2 divide `size`."""
    length = -(-size // count)
    return min(index * length, size), min((index + 1) * length, size)


def shard_name(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def set_aside(directory: Path) -> Path:
    """Renames a damaged checkpoint so that it is never loaded; returns its new path."""
    number = 0
    while (target := directory.parent / f"{DAMAGED}{directory.name}{f'_{number}' if number else ''}").exists():
        number += 1
    os.rename(directory, target)
    return target


def check_links(directory: Path) -> None:
    """ValueError for a checkpoint that is a symbolic link, whose target could change or vanish unnoticed."""
    for path in find_checkpoints(directory):
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link to {os.readlink(path)}, but a checkpoint must be a directory: move it here,"
                " or remove the link and pass the directory to --resume with a new --output-dir"
            )


def has_checkpoints(directory: Path) -> bool:
    """Whether there are checkpoints here, including damaged ones."""
    return bool(find_checkpoints(directory)) or any(directory.glob(f"{DAMAGED}*"))
