"""The tensors of a checkpoint: their names and layouts in a training state, and filling them from the files again."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mini_trainer.model.method import Method
from mini_trainer.model.stored_tensors import check_finite
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.run.checkpoint_files import DTYPES, TensorReader, chunk_range
from mini_trainer.run.step import TrainState

OPTIMIZER = "optimizer"  # optimizer tensors are named optimizer/<state key>/<parameter>
AVERAGE = "average"  # and those of --weight-average average/<parameter>


def collect_tensors(state: TrainState) -> dict[str, Tensor]:
    """All weights and their optimizer state, by name."""
    tensors, optimizer = collect_weights(state.model, state.method), state.optimizer
    for name, param in state.model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            tensors[f"{OPTIMIZER}/{key}/{name}"] = value
    if state.average is not None:
        tensors |= {f"{AVERAGE}/{name}": value for name, value in state.average.values.items()}
    return tensors


def group_state(names: Iterable[str]) -> dict[str, list[str]]:
    """Keys of the optimizer state by parameter, in the order of the saved `names`."""
    keys: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind == OPTIMIZER:
            key, _, param_name = rest.partition("/")
            keys.setdefault(param_name, []).append(key)
    return keys


def collect_weights(model: PackedModel, method: Method) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint holds: all, or only trained parameters, depending on the method."""
    params = {name: param.detach() for name, param in model.named_parameters()
              if param.requires_grad or method.saves_frozen}  # fmt: skip
    saved = model.state_dict().keys() if method.saves_frozen else ()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {f"model/{name}": tensor for name, tensor in (params | buffers).items()}


def describe_layout(tensor: Tensor) -> dict[str, Any]:
    """A tensor's layout for the manifest: `dim` is the sharded dimension; None if rank 0 has the whole tensor."""
    dim = None
    if isinstance(tensor, DTensor):
        *copies, placement = tensor.placements
        assert all(copy.is_replicate() for copy in copies), f"cannot save a tensor that is placed as {copies}"
        assert isinstance(placement, Shard), f"cannot save a tensor that is placed as {placement}"
        dim = placement.dim
    return {"shape": list(tensor.shape), "dtype": DTYPES[tensor.dtype], "dim": dim}


@torch.no_grad()
def make_state(param: DTensor, layout: dict[str, Any]) -> Tensor:
    """Zeros for optimizer state of `layout`, sharded like `param`, possibly shorter in the last dimension."""
    dtype = next(dtype for dtype, text in DTYPES.items() if text == layout["dtype"])
    if layout["dim"] is None:
        return torch.zeros(layout["shape"], dtype=dtype, device=param.device)
    return torch.zeros_like(param, dtype=dtype)[..., : layout["shape"][-1]].contiguous()


@torch.no_grad()
def fill(tensor: Tensor, name: str, reader: TensorReader) -> None:
    """Fills `tensor`, or this rank's shard of it, with the values saved under `name`."""
    offset = [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        dim, mesh = tensor.placements[-1].dim, tensor.device_mesh["shard"]
        offset[dim], _ = chunk_range(tensor.shape[dim], mesh.get_local_rank(), mesh.size())
        tensor = tensor.to_local()
    reader.read(tensor, name, offset)
    check_finite(tensor, name, where=reader.directory)
