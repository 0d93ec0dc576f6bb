"""The door for methods: the hooks of the base class and their defaults. A method overrides those where it differs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from families.family import Family
from families.micro_batch import MicroBatch
from model.config import ModelSource
from model.gathering import WeightGroup, gather_parameters
from model.weights import Reader
from objectives.objective import Objective
from objectives.packed_model import PackedModel
from options import DataOptions
from pretrained.text_tower import LeftOut
from ranks.world import World


@dataclass(frozen=True)
class MetaModel:
    """A model without memory (on the meta device), with all that changes its code but a method's layers."""

    model: PreTrainedModel
    blocks: nn.ModuleList
    backend: str  # of model.attention
    compute_dtype: torch.dtype
    source: ModelSource
    family: Family
    left_out: LeftOut = field(default_factory=LeftOut)  # of a multi-modal model, all but its text tower
    tiled: tuple[str, ...] = ()  # names of the modules that are to take a tile of the row at a time


class Method:
    """What trains of a model, and what that asks of the run. The defaults are those of full fine-tuning.

    All ranks call every hook, but `list_data_hashes`, `write_extras` and `load_export`, which are rank 0's.

    In the order of a run: `open_files`, `list_data_hashes`, `study`, `choose_layers`, `prepare`, `fill`; in every step
    `constrain_gradients` and `constrain_weights`; for an export `measure`, `gather_weights`, `write_extras` and
    `load_export`. A plan calls `lay_out` and `give_memory` instead of `prepare` and `fill`.
    """

    title: str  # in reports and model cards; required
    tags: tuple[str, ...] = ()  # of model cards
    relation: Literal["finetune", "adapter"] = "finetune"  # of an export to its base model, in the hub's terms
    takes_long = False  # `prepare` is too slow for a plan that only measures speed
    saves_frozen = True  # checkpoints hold frozen parameters too; if not, they are read from the model's files again
    vocabulary_multiple = 64  # a vocabulary that grows is padded to a multiple of this many rows
    metrics: tuple[str, ...] = ()  # names of the values of `measure`
    export_error = 0.0  # by how much an export's loss may differ from the trained model's beyond rounding, relative

    def open_files(self, tokenizer: PreTrainedTokenizerBase, data_options: DataOptions) -> None:
        """Reads the files that its options name; ValueError for those that do not fit. Default: none.

        `data_options` has a number of tokens for the cap, auto or not.
        """

    def list_data_hashes(self) -> list[str]:
        """SHA-256, in a fixed order, of all it reads that decides the run's numbers. On rank 0. Default: none."""
        return []

    def list_read_files(self) -> dict[str, Path]:
        """Files that every rank reads itself, by the option that names them. Default: none."""
        return {}

    def study(self, build_plain: Callable[[], PackedModel], *, objective: Objective, world: World) -> None:
        """Learns from a model that trains as a whole, before the run's own is built. Default: nothing."""

    def choose_layers(self, meta: MetaModel) -> None:
        """Chooses the layers to replace; ValueError where the options name none. Before weights are read."""

    def prepare(
        self, meta: MetaModel, readers: dict[str, Reader], *, world: World, progress: Callable[[str], None]
    ) -> None:
        """Puts its layers into the meta model, and decides which parameters train, and in which type.

        `readers` are rank 0's, and empty on the other ranks; `progress` hears of a long start. Default: all train.
        """

    def lay_out(self, meta: MetaModel) -> None:
        """Does what `prepare` does, from shapes alone."""

    def fill(self, module: nn.Module, name: str, readers: dict[str, Reader], *, world: World) -> None:
        """Gives a layer of its own its values, and takes those it used out of `readers`; ignores other modules."""

    def give_memory(self, module: nn.Module, *, world: World) -> None:
        """Gives a layer of its own memory for the tensors of `fill` that FSDP does not shard."""

    def check_start(self, packed_model: PackedModel, micro_batch: MicroBatch) -> None:
        """ValueError if the model, before the first step and in eval mode, computes anything else than it should."""

    def keep_operations(self, kept: frozenset[str]) -> frozenset[str]:
        """The operations among `kept` whose outputs selective checkpointing is to keep. Default: all."""
        return kept

    def constrain_gradients(self) -> None:
        """Changes the gradients before their norm is taken. Default: not at all."""

    def constrain_weights(self) -> None:
        """Changes the weights after the optimizer's update. Default: not at all."""

    def measure(self) -> dict[str, float]:
        """Metrics of its own, measured when the model is exported. Default: none."""
        return {}

    def count_added(self) -> int:
        """Parameters of its layers in excess of the weights that they stand for. Default: 0."""
        return 0

    def count_export_bytes(self, model_bytes: int) -> int:
        """Size of an export's weights, where the whole model has `model_bytes`, the default."""
        return model_bytes

    def describe(self) -> str:
        """What trains, for the report at the start. Default: the title."""
        return self.title

    def gather_weights(self, packed_model: PackedModel, dtype: torch.dtype, *, world: World) -> list[WeightGroup]:
        """The export's weights, gathered group by group, in this order. Default: all parameters.

        Empty where `write_extras` writes all of the export, and on other ranks where only rank 0 takes part.
        """
        return gather_parameters(packed_model.model, dtype, world=world)

    def write_extras(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes files of its own next to the weights and tokenizer of an export. On rank 0. Default: none."""

    def load_export(self, directory: Path, source: ModelSource, family: Family) -> PreTrainedModel:
        """The model of an export in float32 on the CPU, as a user would load it. On rank 0.

        ValueError if weights are missing; other errors as the library that loads it raises them.
        """
        trust = source.trust_remote_code
        model, report = family.load_model(str(directory), dtype=torch.float32, trust_remote_code=trust)
        missing = sorted(map(str, [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]))
        if missing:
            raise ValueError(f"it lacks weights: {', '.join(missing)}")
        return model
