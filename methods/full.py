"""Full fine-tuning: every parameter trains; and how a model's parameters are gathered, for every method."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from families.micro_batch import MicroBatch
from model.method import MetaModel, WeightGroup
from model.weights import Reader
from objectives.objective import Objective
from objectives.packed_model import PackedModel
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

    def list_read_files(self) -> dict[str, Path]:
        return {}

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

    def gather_weights(self, packed_model: PackedModel, dtype: torch.dtype, *, world: World) -> list[WeightGroup]:
        return gather_parameters(packed_model.model, dtype, world=world)

    def write_extras(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        pass


def gather_parameters(
    model: PreTrainedModel, dtype: torch.dtype, *, world: World, leave_out: Collection[str] = ()
) -> list[WeightGroup]:
    """Each parameter, whole and in `dtype`; tied parameters once. So do the buffers that belong to a checkpoint, as
    they are."""
    saved = model.state_dict().keys()
    params = [(name, param.detach(), dtype) for name, param in model.named_parameters()]
    buffers = [(name, buffer, buffer.dtype) for name, buffer in model.named_buffers() if name in saved]
    return [
        gather_one(name, tensor.shape, kept_dtype, functools.partial(gather_tensor, tensor, kept_dtype, world=world))
        for name, tensor, kept_dtype in params + buffers
        if name not in leave_out
    ]


def gather_all(groups: Iterable[WeightGroup]) -> dict[str, Tensor]:
    """What all of them give, at once. All ranks call this."""
    return {name: tensor for group in groups for name, tensor in group.gather().items()}


def gather_one(name: str, shape: Sequence[int], dtype: torch.dtype, gather: Callable[[], Tensor | None]) -> WeightGroup:
    """A group of one tensor, from a function that gives None on the other ranks."""

    def gather_named() -> dict[str, Tensor]:
        tensor = gather()
        return {} if tensor is None else {name: tensor}

    return WeightGroup({name: torch.empty(shape, dtype=dtype, device="meta")}, gather_named)


def gather_tensor(tensor: Tensor, dtype: torch.dtype, *, world: World) -> Tensor | None:
    """A parameter or buffer, whole, on rank 0's CPU; None on the other ranks. All ranks call this."""
    whole = tensor.to(world.device, dtype)
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return whole.cpu() if world.rank == 0 else None
