"""Parts that an export copies from the base model: untrained tensors, and processor files."""

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.model_files import INDEX, WEIGHTS, list_weights
from mini_trainer.model.stored_tensors import Stored
from mini_trainer.options.reading import open_regular, read_object
from mini_trainer.run.write_pool import METADATA, TensorFile, WritePool, encode_header

DEQUANTIZED = "dequantized.safetensors"  # temporary name, until the file is numbered
COPIED_BYTES = 16 << 20  # copied at once
PROCESSOR_FILES = ("*processor*.json", "chat_template.json")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, as the file's header describes it."""

    name: str
    path: Path
    entry: dict[str, Any]  # dtype and shape
    start: int  # its first byte in the file
    num_bytes: int


def find_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Every tensor in a model's files, by name."""
    found = {}
    for path in (model_dir / name for name in list_weights(model_dir)):
        header, data = read_header(path)
        for name, entry in header.items():
            start, end = entry.pop("data_offsets")
            found[name] = StoredTensor(name, path, entry, data + start, end - start)
    return found


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Reads the tensors' entries in a safetensors file's header; also returns the offset of the file's data."""
    with open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def add_tensors(
    directory: Path,
    left_out: dict[str, Stored],
    own_tensors: dict[str, StoredTensor],
    pool: WritePool,
    *,
    max_bytes: int,
) -> None:
    """Adds tensors that were removed from a model to its weights, in files of at most `max_bytes`, with a common index.
    Tensors stored unchanged among the model's `own_tensors` are copied; quantized ones are written dequantized. The
    weights must be complete: call `pool.wait` before, if it writes them."""
    kinds = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in left_out.items()}
    own_kinds = {name: (tensor.entry["dtype"], tensor.entry["shape"]) for name, tensor in own_tensors.items()}
    tensors = [own_tensors[name] for name in sorted(left_out) if kinds[name] == own_kinds.get(name)]
    copied = {tensor.name for tensor in tensors}
    own = list_weights(directory)
    if quantized := {name: kind for name, kind in kinds.items() if name not in copied}:
        TensorFile(directory / DEQUANTIZED, quantized, pool).fill(lambda name: left_out[name].read())
        pool.wait()
        own = [*own, DEQUANTIZED]
    shards = divide(tensors, max_bytes)
    names = [f"model-{i + 1:05d}-of-{len(own) + len(shards):05d}.safetensors" for i in range(len(own) + len(shards))]
    for old, new in zip(own, names, strict=False):
        pool.rename(directory / old, directory / new)
    for name, shard in zip(names[len(own) :], shards, strict=True):
        write_copies(directory / name, shard, pool)
    pool.wait()
    weight_map, total_size = {}, 0
    for name in names:
        header, _ = read_header(directory / name)
        weight_map |= dict.fromkeys(header, name)
        total_size += sum(end - start for start, end in (entry["data_offsets"] for entry in header.values()))
    known = read_object(directory / INDEX).get("metadata", {}) if (directory / INDEX).exists() else {}
    index = {"metadata": known | {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    assert not (directory / WEIGHTS).exists(), "a weight file outside the index would be read instead of it"


def divide(tensors: Iterable[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """Groups the tensors, in order, by at most `max_bytes`; a larger one gets its own group."""
    shards: list[list[StoredTensor]] = []
    filled = 0
    for tensor in tensors:
        if not shards or filled + tensor.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def write_copies(path: Path, tensors: list[StoredTensor], pool: WritePool) -> None:
    """Starts writing a safetensors file of other files' tensors, of any dtype: their bytes are copied uninterpreted."""
    # Those with the widest numbers come first, so that all are aligned.
    tensors = sorted(tensors, key=lambda one: (-one.num_bytes / max(1, math.prod(one.entry["shape"])), one.name))
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {**tensor.entry, "data_offsets": [end, end + tensor.num_bytes]}
        end += tensor.num_bytes
    text = encode_header(header)
    number, written = pool.add_file(path, text, len(text) + end), len(text)
    for tensor in tensors:
        with open_regular(tensor.path) as source:
            source.seek(tensor.start)
            left = tensor.num_bytes
            while left:
                size = min(left, COPIED_BYTES)
                pool.make_room(size)
                block = source.read(size)
                if len(block) < size:
                    raise OSError(f"{tensor.path} ends before the tensor {tensor.name} does")
                pool.write(number, range(written, written + size), block)
                written, left = written + size, left - size


def copy_processor_files(model_dir: Path, directory: Path) -> None:
    """Copies the processors' configuration, but no chat template if the tokenizer has written one."""
    has_template = (directory / "chat_template.jinja").exists()
    for pattern in PROCESSOR_FILES:
        for file in sorted(model_dir.glob(pattern)):
            if not (file.name == "chat_template.json" and has_template):
                shutil.copyfile(file, directory / file.name)
