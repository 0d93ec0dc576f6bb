"""Merging adapters into a model's weights, a layer at a time, with peft's own arithmetic in fp32."""

import copy
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mini_trainer.model.gathering import WeightGroup
from mini_trainer.model.weights import Reader


class Merger:
    """Produces a merged model from the base's stored tensors and peft's layers on meta."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[str, nn.Module],
        renamed: dict[str, str],
        stored: dict[str, Reader],
        *,
        shapes: dict[str, torch.Size],
    ):
        """`renamed` maps each base parameter's name in `model` with adapters to its original name; `shapes` has its
        shape by original name."""
        self.layers, self.renamed, self.stored, self.shapes = layers, renamed, stored, shapes
        saved = model.state_dict().keys()
        self.buffers = [name for name, _ in model.named_buffers() if name in saved]

    def read_base(self, name: str) -> Tensor:
        """Reads a stored base parameter by its name in the model with adapters."""
        return self.stored[self.renamed[name]]()

    def list_groups(self, trained: dict[str, Tensor], dtype: torch.dtype) -> list[WeightGroup]:
        """The merged model as groups of one layer, in `dtype`; `trained` holds the values of all trained parameters."""

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
        """The merged tensors of one layer, in fp32, by their original names."""
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
        """The original layer inside one with adapters, and the original names of its parameters."""
        while hasattr(layer, "base_layer"):
            layer, prefix = layer.base_layer, f"{prefix}.base_layer"
        return layer, [self.renamed[f"{prefix}.{key}"] for key, _ in layer.named_parameters()]
