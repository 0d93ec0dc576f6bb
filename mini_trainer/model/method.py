"""Interface of methods: hooks with defaults, which a method overrides as needed; full fine-tuning needs none."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from mini_trainer.distributed.world import World
from mini_trainer.model.config import ModelSource
from mini_trainer.model.weights import Readers, WeightGroup, gather_parameters
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.text_tower import LeftOut
from mini_trainer.objectives.objective import KernelSwitch, Objective, PackedModel
from mini_trainer.options import DataOptions

if TYPE_CHECKING:
    from mini_trainer.distributed.compilation import Compiled


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device, with all changes to its code except a method's layers."""

    model: PreTrainedModel
    blocks: nn.ModuleList
    backend: str  # attention backend (model.attention)
    compute_dtype: torch.dtype
    source: ModelSource
    family: Family
    left_out: LeftOut = field(default_factory=LeftOut)  # parts of a multimodal model other than its text tower
    kept: frozenset[nn.Parameter] = frozenset()  # what computes in fp32 in a model of any type (model.precision)
    tiled: tuple[str, ...] = ()  # names of the modules to run on a tile of the row at a time
    kernels: KernelSwitch = field(default_factory=KernelSwitch)  # fused ones
    compiled: "tuple[Compiled, ...]" = ()  # the blocks' forward methods, with --compile

    def list_kept(self) -> frozenset[str]:
        """Names of the `kept` parameters, which a method's layers may have changed."""
        return frozenset(name for name, param in self.model.named_parameters() if param in self.kept)


class Method:
    """Which parameters of a model train, and how. The defaults are those of full fine-tuning.

    All ranks call every hook except `list_data_hashes`, `write_extras` and `load_export`, which only rank 0 calls.

    A run calls, in order: `open_files`, `list_data_hashes`, `study`, `choose_layers`, `prepare`, `fill`; in every step
    `constrain_gradients` and `constrain_weights`; for an export `measure`, `gather_weights`, `write_extras` and
    `load_export`. A plan calls `lay_out` and `give_memory` instead of `prepare` and `fill`.
    """

    title: str  # for reports and model cards; required
    tags: tuple[str, ...] = ()  # for model cards
    relation: Literal["finetune", "adapter"] = "finetune"  # relation of an export to its base model, in the hub's terms
    takes_long = False  # `prepare` is too slow for a plan that only measures speed
    saves_frozen = True  # checkpoints hold frozen parameters too; if not, they are read again from the model's files
    vocabulary_multiple = 64  # an extended vocabulary is padded to a multiple of this many rows
    metrics: tuple[str, ...] = ()  # names of the values that `measure` returns
    recomputed: frozenset[str] = frozenset()  # operations whose outputs selective checkpointing does not keep
    export_error = 0.0  # allowed relative difference of an export's loss from the trained model's, beyond rounding

    @classmethod
    def make(cls, options: Any, *, seed: int) -> "Method":
        """The method with its group of options. `seed`: the run's."""
        return cls(options)

    def open_files(self, tokenizer: PreTrainedTokenizerBase, data_options: DataOptions) -> None:
        """Reads the files that its options name; ValueError if they do not fit the model. Default: none.
        In `data_options`, a token cap of "auto" has been resolved to a number."""

    def read_generation_config(self) -> GenerationConfig | None:
        """The generation config that its files have in place of the model's; ValueError if it cannot be used."""
        return None

    def list_data_hashes(self) -> list[str]:
        """SHA-256, in a fixed order, of the files it reads that affect the run's numbers. On rank 0. Default: none."""
        return []

    def list_read_files(self) -> dict[str, Path]:
        """Files that every rank reads itself, by the option that names them. Default: none."""
        return {}

    def verify_files(self) -> None:
        """Checks the files that it reads against the hashes recorded when they were written. Default: none."""

    def study(self, build_plain: Callable[[], PackedModel], *, objective: Objective, world: World) -> None:
        """Analyzes a fully trainable model before the run's own is built. Default: nothing."""

    def choose_layers(self, meta: MetaModel) -> None:
        """Chooses the layers to replace, before weights are read; ValueError if the options match none."""

    def prepare(self, meta: MetaModel, readers: Readers, *, world: World, progress: Callable[[str], None]) -> None:
        """Inserts its layers into the meta model, and sets the trainable parameters and their dtypes. `readers` is
        empty except on rank 0; `progress` is called during a long start. Default: all parameters are trainable."""

    def lay_out(self, meta: MetaModel) -> None:
        """Does what `prepare` does, from shapes alone."""

    def fill(self, module: nn.Module, name: str, readers: Readers, *, world: World) -> None:
        """Fills one of its own layers, removing the readers it used from `readers`; ignores other modules."""

    def give_memory(self, module: nn.Module, *, world: World) -> None:
        """Allocates those tensors of its own layer that `fill` sets and FSDP does not shard."""

    def keep_operations(self, kept: frozenset[str]) -> frozenset[str]:
        """Operations among `kept` whose outputs selective checkpointing keeps."""
        return kept - self.recomputed

    def constrain_gradients(self) -> None:
        """Modifies gradients before their norm is computed. Default: no change."""

    def constrain_weights(self) -> None:
        """Modifies weights after the optimizer's update. Default: no change."""

    def measure(self, dtype: torch.dtype) -> dict[str, float]:
        """Method-specific metrics of an export of this type, measured at every one. Default: none."""
        return {}

    def count_added(self) -> int:
        """Number of parameters of its layers beyond the weights that they replace. Default: 0."""
        return 0

    def count_export_bytes(self, model_bytes: int) -> int:
        """Size in bytes of an export's weights. Default: `model_bytes`, the size of the whole model."""
        return model_bytes

    def describe(self) -> str:
        """Description for the start report. Default: the title."""
        return self.title

    def gather_weights(self, packed_model: PackedModel, dtype: torch.dtype, *, world: World) -> list[WeightGroup]:
        """The export's weights, to be gathered group by group in this order. Default: all parameters.
        Empty if `write_extras` writes the whole export, and on other ranks if only rank 0 takes part."""
        return gather_parameters(packed_model.model, dtype, world=world)

    def write_extras(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes additional files next to an export's weights and tokenizer. On rank 0. Default: none."""

    def load_export(self, directory: Path, source: ModelSource, family: Family) -> PreTrainedModel:
        """Loads an export in float32 on the CPU, as a user would. On rank 0.
        ValueError if weights are missing; other errors come from the library that loads it."""
        trust = source.trust_remote_code
        model, report = family.load_model(str(directory), dtype=torch.float32, trust_remote_code=trust)
        missing = sorted(map(str, [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]))
        if missing:
            raise ValueError(f"weights are missing: {', '.join(missing)}")
        return model


class Full(Method):
    """Trains every parameter."""

    title = "full fine-tuning"
