"""An export's weights, written as they are gathered into the files that transformers' `save_pretrained` would write."""

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
    """The weights' files of an export, laid out from shapes, and filled by `add`.

    Names are the model's own; in the files they are those that its family is stored by, and what it stores apart, such
    as experts that are one tensor in the model, is taken apart: by transformers' own conversions, once all tensors that
    one of them needs are there. Only these are held.
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
        self.places: dict[str, range] = {}  # of what has not been written
        for file, names in split.filename_to_tensors.items():
            entries = {name: (DTYPES[stored[name].dtype], stored[name].shape) for name in names}
            self.places |= lay_out(directory / file, entries)
        if split.is_sharded:
            metadata = {"total_parameters": shell.num_parameters(), **split.metadata}
            index = json.dumps({"metadata": metadata, "weight_map": self.file_of}, indent=2, sort_keys=True)
            (directory / INDEX).write_text(index + "\n", encoding="utf-8")
        self.members = find_groups(shell, shapes)  # of each tensor: those that are converted with it
        self.held: dict[str, Tensor] = {}  # until the others of a conversion are there

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Writes what is complete with these."""
        self.held |= {name: tensor for name, tensor in tensors.items() if name in self.members}
        for name in tensors:
            members = self.members.get(name, ())
            if members and all(member in self.held for member in members):
                self.write({member: self.held.pop(member) for member in members})

    def write(self, group: dict[str, Tensor]) -> None:
        for name, tensor in revert_weight_conversion(self.shell, group).items():
            expected = self.stored[name]
            kinds = [f"{list(each.shape)} {each.dtype}" for each in (tensor, expected)]
            assert kinds[0] == kinds[1], f"{name} is {kinds[0]}, and {kinds[1]} was planned"
            write_into(self.directory / self.file_of[name], self.places.pop(name), tensor)

    def finish(self) -> None:
        """Once everything has been added."""
        assert not self.places, f"{len(self.places)} tensors were not written, such as {min(self.places)}"


def find_groups(model: PreTrainedModel, names: Iterable[str]) -> dict[str, list[str]]:
    """For each tensor of the model those that go through one of transformers' conversions with it, in order."""
    names = list(names)
    try:
        targets = find_targets(model, names)
    except NOT_PLANNABLE as error:
        log.warning(
            f"warning: rank 0 holds the whole model while it is exported: which of its tensors are stored together is"
            f" not known ({type(error).__name__}: {error})"
        )
        targets = dict.fromkeys(names, "")
    groups: dict[str, list[str]] = {}
    for name, target in targets.items():
        groups.setdefault(target, []).append(name)
    return {name: groups[target] for name, target in targets.items()}


def find_targets(model: PreTrainedModel, names: list[str]) -> dict[str, str]:
    """What each tensor is converted to where it is stored, or its own name: by transformers' internals, which change
    from version to version."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    converters = [each.reverse_transform() for each in conversions if isinstance(each, WeightConverter)]
    return {name: rename_source_key(name, [], converters, reverse=True)[0] for name in names}
