"""Tensor values in a simulation, for models that read them: those that follow from given ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

MOST_ELEMENTS = 2**26  # of a tensor whose values are kept


class KnownValues(TorchDispatchMode):
    """While entered inside `fake`, tensors made from real ones keep their values, and so do results computed from these
    alone. This simulates vision towers that cut their rows by tensor values: image sizes, places of padding.
    """

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self.fake = fake
        self.values = WeakTensorKeyDictionary()  # simulated tensor -> real one

    def simulate(self, tensor: Tensor) -> Tensor:
        """A simulated tensor in the place of a real one, with its values."""
        with _disable_current_modes():
            simulated = self.fake.from_tensor(tensor)
            self.values[simulated] = tensor.clone()  # as long as `tensor` itself lives, `fake` keeps what it made of it
        return simulated

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(function, OpOverload) or torch.Tag.nondeterministic_seeded in function.tags:
            return function(*args, **kwargs)
        given = list_tensors((*args, *kwargs.values()))
        is_known = all(tensor in self.values or is_real(tensor) for tensor in given)
        try:
            result = function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if is_known:
                return tree_map_only(Tensor, self.simulate, self.compute(function, args, kwargs))
            if function._schema.name not in ("aten::index", "aten::index_put"):
                raise
            return function(args[0], self.number_masked(args[1]), *args[2:], **kwargs)
        made = list_tensors((result,))
        if is_known and made and all(is_kept(tensor, is_new=not given) for tensor in made):
            self.values.update(zip(made, list_tensors((self.compute(function, args, kwargs),)), strict=True))
        elif function._schema.is_mutable:
            for tensor in made:
                self.values.pop(tensor, None)
        return result

    def compute(self, function: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The operation on the real tensors."""
        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, lambda tensor: self.values.get(tensor, tensor), (args, kwargs))
            return function(*args, **kwargs)

    def number_masked(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Indices with the places that a known mask chooses in the mask's place."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool and index in self.values:
                with _disable_current_modes():
                    places = self.values[index].nonzero(as_tuple=True)
                found += map(self.simulate, places)
            else:
                found.append(index)
        return found


def list_tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among an operation's arguments or results, which may hold lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += list_tensors(value)
    return found


def is_real(tensor: Tensor) -> bool:
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


def is_kept(tensor: Tensor, *, is_new: bool) -> bool:
    """Whether the operation's values are computed: tensors made from nothing may be meant to hold a model's numbers."""
    return tensor.numel() <= MOST_ELEMENTS and not (is_new and tensor.is_floating_point())
