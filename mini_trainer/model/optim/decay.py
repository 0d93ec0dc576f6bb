"""Which weights get weight decay: decided by a parameter's role, not by its number of dimensions."""

import re

from torch import nn
from transformers.pytorch_utils import Conv1D

# Modules whose "weight" is a matrix or a table of rows; torch's convolutions share a private base class.
MATRICES = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Bilinear, Conv1D, nn.modules.conv._ConvNd)
# Names of parameters that other modules hold: biases, norms, scales and the decay rates of a recurrence. All else that
# they hold are matrices, such as fused experts, and tables.
NEVER = re.compile(r"bias|norm|scale|gamma|lambda|decay|^a_log$|^d$")


def find_decayed(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: weights of linear layers, embeddings and convolutions, and
    other parameters with two dimensions or more, such as fused experts, unless they are biases, norms or scales."""
    return {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key, param in module.named_parameters(recurse=False)
        if is_decayed(module, key, param)
    }


def is_decayed(module: nn.Module, key: str, param: nn.Parameter) -> bool:
    """Whether weight decay applies to the parameter that `module` itself holds as `key`."""
    if param.ndim < 2 or key.endswith("bias"):
        return False
    if isinstance(module, MATRICES):
        return True
    # Every transformers model has its own norm classes, with Norm in the name.
    is_norm = any("norm" in base.__name__.lower() for base in type(module).__mro__)
    return not is_norm and NEVER.search(key.lower()) is None
