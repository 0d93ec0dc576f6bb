"""Writes an export's weights, while they are gathered, and the files that it copies from a multimodal model."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mini_trainer.data.stores.model_files import INDEX, WEIGHTS
from mini_trainer.distributed.ending import log
from mini_trainer.model.gathering import WeightGroup
from mini_trainer.model.weights import NOT_PLANNABLE
from mini_trainer.run.write_pool import DTYPES, TensorFile, WritePool

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
            f"warning: rank 0 holds the whole model during the export, since it is not known which of its tensors are"
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
