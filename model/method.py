"""The door for methods: what the rest of the program asks of one. `Full` is in methods/full.py, `OSFT` in osft.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from families.family import Family
from families.micro_batch import MicroBatch
from families.text_tower import LeftOut
from model.config import ModelSource
from model.weights import Reader
from objectives.objective import Objective
from objectives.packed_model import PackedModel
from options import DataOptions
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


@dataclass(frozen=True)
class WeightGroup:
    """Tensors of an export that come together: what they will be, and a function that gives them."""

    shapes: dict[str, Tensor]  # without memory (on the meta device), by name
    gather: Callable[[], dict[str, Tensor]]  # whole, on rank 0's CPU; nothing on the other ranks. All ranks call it


class Method(Protocol):
    """What of a model trains, and what that asks of the run. All ranks call every function, but
    `list_data_hashes` and `write_extras`, which are rank 0's.

    In the order of a run: `open_files`, `list_data_hashes`, `study`, `choose_layers`, `prepare`, `fill`; in every step
    `constrain_gradients` and `constrain_weights`; where the model is exported `measure`, `gather_weights` and
    `write_extras`. A plan calls `lay_out` and `give_memory` in the place of `prepare` and `fill`.
    """

    title: str  # as reports name it; empty: nothing is out of the ordinary
    takes_long: bool  # whether `prepare` takes so long that a plan, which measures speed, had better not call it
    saves_frozen: bool  # whether checkpoints hold what does not train, too; else it comes from the model's files again

    vocabulary_multiple: int  # a vocabulary that grows has a multiple of this many rows

    def open_files(self, tokenizer: PreTrainedTokenizerBase, data_options: DataOptions) -> None:
        """Reads what the options name beside model and data; ValueError for what does not fit.

        Of `data_options` the cap is a number of tokens, auto or not.
        """
        ...

    def list_data_hashes(self) -> list[str]:
        """SHA-256, in a fixed order, of whatever it reads that decides what the run computes. On rank 0."""
        ...

    def list_read_files(self) -> dict[str, Path]:
        """Files beside model and data that every rank reads itself, by the option that names them."""
        ...

    def study(self, build_plain: Callable[[], PackedModel], *, objective: Objective, world: World) -> None:
        """Before the model is built: whatever has to be found out with one that trains as a whole."""
        ...

    def choose_layers(self, meta: MetaModel) -> None:
        """Chooses the layers that it will replace; ValueError where the options name none. Before weights are read."""
        ...

    def prepare(
        self,
        meta: MetaModel,
        readers: dict[str, Reader],
        *,
        world: World,
        progress: Callable[[str], None],
    ) -> None:
        """Puts its layers into the meta model, and says of every parameter whether it trains, and of which type it is.

        `readers` are rank 0's, and empty on the other ranks; `progress` hears of a long start.
        """
        ...

    def lay_out(self, meta: MetaModel) -> None:
        """As `prepare`, from shapes alone."""
        ...

    def fill(self, module: nn.Module, name: str, readers: dict[str, Reader], *, world: World) -> None:
        """Gives a layer of its own its values, and takes what it used out of `readers`; leaves other modules alone."""
        ...

    def give_memory(self, module: nn.Module, *, world: World) -> None:
        """Gives a layer of its own memory for what `fill` would give it and FSDP does not shard."""
        ...

    def check_start(self, packed_model: PackedModel, micro_batch: MicroBatch) -> None:
        """ValueError if the model, before the first step and in eval mode, does not compute what it should."""
        ...

    def keep_operations(self, kept: frozenset[str]) -> frozenset[str]:
        """Of the operations whose outputs selective checkpointing keeps, those that it should."""
        ...

    def constrain_gradients(self) -> None:
        """Before the gradients' norm is taken."""
        ...

    def constrain_weights(self) -> None:
        """After the optimizer's update."""
        ...

    metrics: tuple[str, ...]  # the names of what `measure` gives

    def measure(self) -> dict[str, float]:
        """Metrics of its own, where the model is exported."""
        ...

    def count_added(self) -> int:
        """Numbers in its layers beyond the weights that these stand for."""
        ...

    def count_export_bytes(self, model_bytes: int) -> int:
        """Of an export's weights, where those of a whole model have `model_bytes`."""
        ...

    def describe(self) -> str:
        """For the start's report: what trains, where that is not everything."""
        ...

    def gather_weights(self, packed_model: PackedModel, dtype: torch.dtype, *, world: World) -> list[WeightGroup]:
        """What an export holds of the model, gathered group by group, in this order.

        Empty where what `write_extras` writes is the export, and on the other ranks where only rank 0 has a part in it.
        """
        ...

    def write_extras(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Rank 0: files of its own beside the weights and tokenizer of an export."""
        ...
