"""Where a model's transformer blocks are."""

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer blocks: the module list as long as the model is deep."""
    num_blocks = model.config.num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks:
            return module
    raise ValueError(f"model type {model.config.model_type!r}: no list of {num_blocks} blocks found to shard")


def find_linear_layers(model: PreTrainedModel, blocks: nn.ModuleList) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers inside the blocks, by name."""
    inside = {module for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if module in inside and isinstance(module, (nn.Linear, Conv1D))
    }
