"""A model with its adapters added to the weights, a layer at a time, by peft's own arithmetic in fp32."""

import copy
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.gathering import WeightGroup
from model.weights import Reader


class Merger:
    """What a merged model is made from: the base's tensors as they are stored, and peft's layers without memory."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[str, nn.Module],
        renamed: dict[str, str],
        stored: dict[str, Reader],
        *,
        shapes: dict[str, torch.Size],
    ):
        """`renamed` has for each parameter of the base, by its name in `model` with adapters, the name before; `shapes`
        what it is like, by that name."""
        self.layers, self.renamed, self.stored, self.shapes = layers, renamed, stored, shapes
        saved = model.state_dict().keys()
        self.buffers = [name for name, _ in model.named_buffers() if name in saved]

    def read_base(self, name: str) -> Tensor:
        """A parameter of the base as it is stored, by its name in the model with adapters."""
        return self.stored[self.renamed[name]]()

    def list_groups(self, trained: dict[str, Tensor], dtype: torch.dtype) -> list[WeightGroup]:
        """The merged model, a layer at a time, parameters as `dtype`, from the values `trained` of all that trains."""

        def group(names: Iterable[str], gather: Callable[[], dict[str, Tensor]]) -> WeightGroup:
            return WeightGroup(
                {name: torch.empty(self.shapes[name], dtype=dtype, device="meta") for name in names}, gather
            )

        def merge(prefix: str, layer: nn.Module) -> dict[str, Tensor]:
            return {name: weight.to(dtype) for name, weight in self.merge_layer(prefix, layer, trained).items()}

        def read(name: str) -> dict[str, Tensor]:
            weight = trained[name] if name in trained else self.stored[name]()
            return {name: weight.to(dtype)}

        groups = [
            group(self.list_inner(prefix, layer)[1], functools.partial(merge, prefix, layer))
            for prefix, layer in self.layers.items()
        ]
        done = {name for merged in groups for name in merged.shapes}
        groups += [group([name], functools.partial(read, name)) for name in self.renamed.values() if name not in done]
        for name in self.buffers:
            buffer = self.stored[name]()
            groups.append(WeightGroup({name: buffer.to("meta")}, functools.partial(dict, {name: buffer})))
        return groups

    @torch.no_grad()
    def merge_layer(self, prefix: str, layer: nn.Module, trained: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of one layer, by their names before it got an adapter, in fp32."""
        layer = copy.deepcopy(layer)
        for key in [key for key, _ in layer.named_parameters()]:
            name, (owner, _, attribute) = f"{prefix}.{key}", key.rpartition(".")
            value = trained[name] if name in trained else self.read_base(name)
            setattr(layer.get_submodule(owner), attribute, nn.Parameter(value.float(), requires_grad=False))
        outer = layer
        while hasattr(outer, "base_layer"):
            outer.merge(safe_merge=False)
            outer = outer.base_layer
        inner, names = self.list_inner(prefix, layer)
        return dict(zip(names, (param.data for param in inner.parameters()), strict=True))

    def list_inner(self, prefix: str, layer: nn.Module) -> tuple[nn.Module, list[str]]:
        """The layer that one with adapters stands around, and its parameters' names before that."""
        while hasattr(layer, "base_layer"):
            layer, prefix = layer.base_layer, f"{prefix}.base_layer"
        return layer, [self.renamed[f"{prefix}.{key}"] for key, _ in layer.named_parameters()]
