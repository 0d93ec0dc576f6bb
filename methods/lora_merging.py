"""A model with its adapters added to the weights, a layer at a time, by peft's own arithmetic in fp32."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.weights import Reader


class Merger:
    """What a merged model is made from: the base's tensors as they are stored, and peft's layers without memory."""

    def __init__(
        self, model: PreTrainedModel, layers: dict[str, nn.Module], renamed: dict[str, str], stored: dict[str, Reader]
    ):
        """`renamed` has for each parameter of the base, by its name in `model` with adapters, the name before."""
        self.layers, self.renamed, self.stored = layers, renamed, stored
        saved = model.state_dict().keys()
        self.buffers = [name for name, _ in model.named_buffers() if name in saved]

    def read_base(self, name: str) -> Tensor:
        """A parameter of the base as it is stored, by its name in the model with adapters."""
        return self.stored[self.renamed[name]]()

    @torch.no_grad()
    def merge(self, trained: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the merged model, parameters as `dtype`, from the values `trained` of all that trains."""
        done = set()
        for prefix, layer in self.layers.items():
            for name, weight in self.merge_layer(prefix, layer, trained):
                done.add(name)
                yield name, weight.to(dtype)
        for name in [name for name in self.renamed.values() if name not in done]:
            weight = trained[name] if name in trained else self.stored[name]()
            yield name, weight.to(dtype)
        for name in self.buffers:
            yield name, self.stored[name]()

    def merge_layer(self, prefix: str, layer: nn.Module, trained: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one layer, by their names before it got an adapter, in fp32."""
        layer = copy.deepcopy(layer)
        for key in [key for key, _ in layer.named_parameters()]:
            name, (owner, _, attribute) = f"{prefix}.{key}", key.rpartition(".")
            value = trained[name] if name in trained else self.read_base(name)
            setattr(layer.get_submodule(owner), attribute, nn.Parameter(value.float(), requires_grad=False))
        inner, path = layer, prefix
        while hasattr(inner, "base_layer"):
            inner.merge(safe_merge=False)
            inner, path = inner.base_layer, f"{path}.base_layer"
        for key, param in inner.named_parameters():
            yield self.renamed[f"{path}.{key}"], param.data
