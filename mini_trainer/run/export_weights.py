"""Writes an export's weights, while they are gathered, and the files that it copies from a multimodal model."""

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mini_trainer.data.stores.disk import read_object
from mini_trainer.data.stores.model_files import INDEX, WEIGHTS, list_weights
from mini_trainer.distributed.ending import log
from mini_trainer.model.gathering import WeightGroup
from mini_trainer.model.stored_tensors import Stored
from mini_trainer.model.weights import NOT_PLANNABLE
from mini_trainer.run.write_pool import DTYPES, METADATA, TensorFile, WritePool, encode_header

PATTERN = WEIGHTS.replace(".safetensors", "{suffix}.safetensors")


class WeightStream:
    """An export's weight files, laid out from shapes and filled by `add`, on the threads of `pool`.

    Names passed in are the model's own; transformers' conversions map them to stored names, and split tensors such as
    fused experts, once all tensors that a conversion needs have arrived. These are kept in memory until then.
    """

    def __init__(
        self, shell: PreTrainedModel, shapes: dict[str, Tensor], directory: Path, pool: WritePool, *, max_bytes: int
    ):
        """`shell` and `shapes` are on the meta device."""
        self.shell, self.conversions = shell, list_conversions(shell)
        shell._weight_conversions = self.conversions or None  # or transformers lists them again for every tensor
        ignored = shell._keys_to_ignore_on_save or ()
        shapes = {name: shape for name, shape in shapes.items() if name not in ignored}
        stored = self.revert(shapes)
        split = split_state_dict_into_shards_factory(
            stored,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,  # parts of one tensor share a file
            filename_pattern=PATTERN,
            max_shard_size=max_bytes,
        )
        self.pool, self.stored = pool, stored
        self.file_of: dict[str, TensorFile] = {}
        for file, names in split.filename_to_tensors.items():
            entries = {name: (DTYPES[stored[name].dtype], stored[name].shape) for name in names}
            self.file_of |= dict.fromkeys(names, TensorFile(directory / file, entries, pool))
        if split.is_sharded:
            metadata = {"total_parameters": shell.num_parameters(), **split.metadata}
            index = json.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True)
            (directory / INDEX).write_text(index + "\n", encoding="utf-8")
        self.members = find_groups(shell, shapes)  # for each tensor, those converted together with it
        self.turns = self.find_turns(shapes)
        self.held: dict[str, Tensor] = {}  # tensors that wait for others of their conversion

    def sort(self, groups: list[WeightGroup]) -> list[int]:
        """The indices of `groups` in the order in which `add` should receive them.

        In any other order most bytes would be read back to be hashed, and one file would be hashed at a time.
        """
        return sorted(range(len(groups)), key=lambda i: min(self.turns.get(name, (0, 0)) for name in groups[i].shapes))

    def find_turns(self, shapes: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
        """For each tensor, the turn of the first that its conversion stores."""
        turns = {}
        for name, members in self.members.items():
            if name == members[0]:
                is_plain = len(members) == 1 and name in self.stored
                group = {member: shapes[member] for member in members}
                stored = [name] if is_plain else self.revert(group)
                turns |= dict.fromkeys(members, min(map(self.turn_of, stored)))
        return turns

    def revert(self, group: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are stored."""
        return revert_weight_conversion(self.shell, group) if self.conversions else group

    def turn_of(self, stored_name: str) -> tuple[int, int]:
        """When to write a stored tensor, among the others."""
        file = self.file_of[stored_name]
        return self.pool.turn_of(file.number, file.places[stored_name].start)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Adds tensors, and starts writing all conversions that are now complete."""
        self.held |= {name: tensor for name, tensor in tensors.items() if name in self.members}
        for name in tensors:
            members = self.members.get(name, ())
            if members and all(member in self.held for member in members):
                self.write({member: self.held.pop(member) for member in members})

    def write(self, group: dict[str, Tensor]) -> None:
        converted = self.revert(group)
        for name in sorted(converted, key=self.turn_of):
            tensor = converted[name]
            expected = self.stored[name]
            kinds = [f"{list(each.shape)} {each.dtype}" for each in (tensor, expected)]
            assert kinds[0] == kinds[1], f"{name} is {kinds[0]}, but {kinds[1]} was planned"
            self.file_of[name].write(name, tensor)

    def finish(self) -> None:
        """Waits until everything is written; raises the first error. Checks that everything has been added."""
        self.pool.wait()
        missing = [name for name, file in self.file_of.items() if name in file.places]
        assert not missing, f"{len(missing)} tensors were not written, such as {min(missing)}"


def find_groups(model: PreTrainedModel, names: Iterable[str]) -> dict[str, list[str]]:
    """For each tensor of the model, the tensors that go through the same transformers conversion, in order."""
    names = list(names)
    try:
        targets = find_targets(model, names)
    except NOT_PLANNABLE as error:
        log.warning(
            f"warning: rank 0 holds the whole model during the export, since it is unknown which of its tensors are"
            f" stored together ({type(error).__name__}: {error})"
        )
        targets = dict.fromkeys(names, "")
    groups: dict[str, list[str]] = {}
    for name, target in targets.items():
        groups.setdefault(target, []).append(name)
    return {name: groups[target] for name, target in targets.items()}


def find_targets(model: PreTrainedModel, names: list[str]) -> dict[str, str]:
    """Maps each tensor to its converted, stored name, or its own; uses transformers' internals, which change between
    versions."""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = reversed(list_conversions(model))
    converters = [each.reverse_transform() for each in conversions if isinstance(each, WeightConverter)]
    return {name: rename_source_key(name, [], converters, reverse=True)[0] for name in names}


def list_conversions(model: PreTrainedModel) -> list[Any]:
    """The conversions that `revert_weight_conversion` reverts for a model that was made from a config."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in found if type(each).__name__ != "PrefixChange"]  # which only a loaded model reverts


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

    @property
    def alignment(self) -> float:
        """Bytes per number: in a file, tensors with the widest numbers come first, so that all are aligned."""
        return self.num_bytes / max(1, math.prod(self.entry["shape"]))


def find_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Every tensor in a model's files, by name."""
    found = {}
    for path in (model_dir / name for name in list_weights(model_dir)):
        header, data = read_header(path)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry.pop("data_offsets")
            found[name] = StoredTensor(name, path, entry, data + start, end - start)
    return found


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Reads a safetensors file's header; also returns the offset of its data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


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
    weights must be complete: call `pool.wait` before, if it writes them.
    """
    tensors = [own_tensors[name] for name in sorted(left_out) if is_copied(left_out[name], own_tensors.get(name))]
    copied = {tensor.name for tensor in tensors}
    own = list_weights(directory)
    if quantized := {name: tensor for name, tensor in left_out.items() if name not in copied}:
        write_stored(directory / DEQUANTIZED, quantized, pool)
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
        header.pop("__metadata__", None)
        weight_map |= dict.fromkeys(header, name)
        total_size += sum(end - start for start, end in (entry["data_offsets"] for entry in header.values()))
    known = read_object(directory / INDEX).get("metadata", {}) if (directory / INDEX).exists() else {}
    index = {"metadata": known | {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    assert not (directory / WEIGHTS).exists(), "a weight file outside the index would be read instead of it"


def is_copied(tensor: Stored, own: StoredTensor | None) -> bool:
    """Whether a tensor is stored unchanged in the model's files."""
    return own is not None and (tensor.dtype, list(tensor.shape)) == (own.entry["dtype"], own.entry["shape"])


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


def write_stored(path: Path, tensors: dict[str, Stored], pool: WritePool) -> None:
    """Writes a safetensors file, dequantizing one tensor at a time."""
    file = TensorFile(path, {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, pool)
    for name, place in list(file.places.items()):
        pool.make_room(len(place))
        file.write(name, tensors[name].read())
    pool.wait()


def write_copies(path: Path, tensors: list[StoredTensor], pool: WritePool) -> None:
    """Starts writing a safetensors file of other files' tensors, of any dtype: their bytes are copied uninterpreted."""
    tensors = sorted(tensors, key=lambda tensor: (-tensor.alignment, tensor.name))
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {**tensor.entry, "data_offsets": [end, end + tensor.num_bytes]}
        end += tensor.num_bytes
    text = encode_header(header)
    number, written = pool.add_file(path, text, len(text) + end), len(text)
    for tensor in tensors:
        with tensor.path.open("rb") as source:
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
