"""Which parameters stay in fp32 in a bfloat16 model, as transformers says: routers' gates and biases, decay rates.

All that gives a parameter a type asks here: masters, weights that compute, files, references and plans.
"""

import functools
import re
from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version


def choose_types(model: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type of each parameter in a model of `dtype`, by its name in transformers' model, as its loader sets it.
    ValueError with a version of transformers whose loader does not say."""
    try:
        kept = tuple(name for name, own in model._get_dtype_plan(dtype).items() if own == torch.float32)
        is_kept = find_pattern(kept) if kept else lambda name: None
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"transformers {transformers_version} does not say which weights stay in float32 in a bfloat16 model"
            f" ({error}): install transformers 5.17 to 5.23"
        ) from None
    return {name: torch.float32 if is_kept(name) else dtype for name in names}


@functools.cache
def find_pattern(patterns: tuple[str, ...]) -> Callable[[str], re.Match | None]:
    from transformers.core_model_loading import build_glob_alternation

    return build_glob_alternation(list(patterns))[0].search


def set_types(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives the parameters of a meta model, still without a method's layers, their types in a model of `dtype`."""
    params = dict(model.named_parameters())
    for name, own in choose_types(model, params, dtype).items():
        params[name].data = params[name].data.to(own)


def find_kept(model: PreTrainedModel, compute_dtype: torch.dtype) -> frozenset[nn.Parameter]:
    """Parameters of a meta model, still without a method's layers, that compute in fp32 in a model of any type."""
    params = dict(model.named_parameters())
    types = choose_types(model, params, compute_dtype)
    return frozenset(params[name] for name, own in types.items() if own != compute_dtype)
