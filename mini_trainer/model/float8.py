"""torchao's linear layers with products in fp8."""

import importlib.util
from dataclasses import replace

import torch
from torch import nn

from mini_trainer.distributed.devices import describe_device
from mini_trainer.distributed.ending import log

MIN_SIZE = 256  # minimum input and output size of a layer: below, casting costs more than fp8 saves


def apply_float8(blocks: nn.ModuleList, device: torch.device) -> None:
    """Replaces the blocks' large linear layers with torchao's in fp8. Each row of activations has its own scale, so
    that no token affects another, and weight gradients are computed in bf16, which works for any number of tokens."""
    is_installed = importlib.util.find_spec("torchao") is not None
    if not is_able(device) or not is_installed:
        raise ValueError(
            "--float8 needs a Hopper GPU or newer and the package torchao (pip install torchao); the device is"
            f" {describe_device(device)}, torchao is {'' if is_installed else 'not '}installed"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_suited(module: nn.Module, name: str) -> bool:
        return all(size % 16 == 0 and size >= MIN_SIZE for size in module.weight.shape)

    num_suited = sum(isinstance(module, nn.Linear) and is_suited(module, "") for module in blocks.modules())
    if num_suited == 0:
        raise ValueError(
            "--float8 has no effect on this model: no linear layer in its blocks has sizes of at least"
            f" {MIN_SIZE} that are multiples of 16"
        )
    log.info(f"float8: {num_suited} linear layers")
    # Compiled kernels that compute a scale twice may round it to two powers of two: a row is then twice as large.
    recipe = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    config = replace(recipe, round_scales_to_power_of_2=False)
    convert_to_float8_training(blocks, module_filter_fn=is_suited, config=config)


def is_able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
