"""Full fine-tuning: every parameter trains; and how a model's parameters are gathered, for every method."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from model.method import MetaModel
from model.weights import Reader
from objectives.micro_batch import MicroBatch
from objectives.objective import Objective, PackedModel
from options import DataOptions
from ranks.world import World


class Full:
    """Everything trains (see `model.method.Method`)."""

    title = ""
    takes_long = False
    metrics = ()
    saves_frozen = True
    vocabulary_multiple = 64

    def open_files(self, tokenizer: PreTrainedTokenizerBase, data_options: DataOptions) -> None:
        pass

    def list_data_hashes(self) -> list[str]:
        return []

    def study(self, build_plain: Callable[[], PackedModel], *, objective: Objective, world: World) -> None:
        pass

    def choose_layers(self, meta: MetaModel) -> None:
        pass

    def prepare(
        self, meta: MetaModel, readers: dict[str, Reader], *, world: World, progress: Callable[[str], None]
    ) -> None:
        pass

    def lay_out(self, meta: MetaModel) -> None:
        pass

    def fill(self, module: nn.Module, name: str, readers: dict[str, Reader], *, world: World) -> None:
        pass

    def give_memory(self, module: nn.Module, *, world: World) -> None:
        pass

    def check_start(self, packed_model: PackedModel, micro_batch: MicroBatch) -> None:
        pass

    def keep_operations(self, kept: frozenset[str]) -> frozenset[str]:
        return kept

    def constrain_gradients(self) -> None:
        pass

    def constrain_weights(self) -> None:
        pass

    def measure(self) -> dict[str, float]:
        return {}

    def count_added(self) -> int:
        return 0

    def count_export_bytes(self, model_bytes: int) -> int:
        return model_bytes

    def describe(self) -> str:
        return ""

    def gather_weights(
        self, packed_model: PackedModel, dtype: torch.dtype, *, world: World
    ) -> Iterator[tuple[str, Tensor | None]]:
        return gather_parameters(packed_model.model, dtype, world=world)

    def write_extras(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        pass


def gather_parameters(
    model: PreTrainedModel, dtype: torch.dtype, *, world: World, leave_out: Collection[str] = ()
) -> Iterator[tuple[str, Tensor | None]]:
    """Each parameter, whole and in `dtype`, on rank 0's CPU; None on the other ranks. Tied parameters come once.

    So do the buffers that belong to a checkpoint, as they are. All ranks call this.
    """
    is_rank0 = world.rank == 0
    for name, param in model.named_parameters():
        if name not in leave_out:
            weight = param.detach().to(world.device, dtype).full_tensor()
            yield name, weight.cpu() if is_rank0 else None
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved and name not in leave_out:
            yield name, buffer.cpu() if is_rank0 else None
