"""Writes an export's weights, as they are gathered, into the same files as transformers' `save_pretrained`."""

import json
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lifecycle.tensor_files import DTYPES, lay_out, write_into
from model.weights import NOT_PLANNABLE
from pretrained.files import INDEX, WEIGHTS
from ranks.ending import log

PATTERN = WEIGHTS.replace(".safetensors", "{suffix}.safetensors")


class WeightStream:
    """An export's weight files, laid out from shapes and filled by `add`.

    Names passed in are the model's own; transformers' conversions map them to stored names, and split tensors such as
    fused experts, once all tensors that a conversion needs have arrived. Only these are kept in memory.
    """

    def __init__(self, shell: PreTrainedModel, shapes: dict[str, Tensor], directory: Path, *, max_bytes: int):
        """`shell` and `shapes` are on the meta device."""
        ignored = shell._keys_to_ignore_on_save or ()
        shapes = {name: shape for name, shape in shapes.items() if name not in ignored}
        stored = revert_weight_conversion(shell, shapes)
        split = split_state_dict_into_shards_factory(
            stored,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,  # parts of one tensor share a file
            filename_pattern=PATTERN,
            max_shard_size=max_bytes,
        )
        self.shell, self.directory, self.stored, self.file_of = shell, directory, stored, split.tensor_to_filename
        self.places: dict[str, range] = {}  # byte ranges of tensors not yet written
        for file, names in split.filename_to_tensors.items():
            entries = {name: (DTYPES[stored[name].dtype], stored[name].shape) for name in names}
            self.places |= lay_out(directory / file, entries)
        if split.is_sharded:
            metadata = {"total_parameters": shell.num_parameters(), **split.metadata}
            index = json.dumps({"metadata": metadata, "weight_map": self.file_of}, indent=2, sort_keys=True)
            (directory / INDEX).write_text(index + "\n", encoding="utf-8")
        self.members = find_groups(shell, shapes)  # for each tensor, those converted together with it
        self.held: dict[str, Tensor] = {}  # tensors that wait for others of their conversion

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Adds tensors, and writes all conversions that are now complete."""
        self.held |= {name: tensor for name, tensor in tensors.items() if name in self.members}
        for name in tensors:
            members = self.members.get(name, ())
            if members and all(member in self.held for member in members):
                self.write({member: self.held.pop(member) for member in members})

    def write(self, group: dict[str, Tensor]) -> None:
        for name, tensor in revert_weight_conversion(self.shell, group).items():
            expected = self.stored[name]
            kinds = [f"{list(each.shape)} {each.dtype}" for each in (tensor, expected)]
            assert kinds[0] == kinds[1], f"{name} is {kinds[0]}, but {kinds[1]} was planned"
            write_into(self.directory / self.file_of[name], self.places.pop(name), tensor)

    def finish(self) -> None:
        """Checks that everything has been added."""
        assert not self.places, f"{len(self.places)} tensors were not written, such as {min(self.places)}"


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
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    converters = [each.reverse_transform() for each in conversions if isinstance(each, WeightConverter)]
    return {name: rename_source_key(name, [], converters, reverse=True)[0] for name in names}
