"""Faster layers: liger-kernel's Triton kernels instead of transformers' norms, rotary embeddings and MLPs, and
torchao's linear layers with products in fp8.

liger-kernel replaces methods of a model's modules, and functions of transformers' Python modules, where every later
call in the process finds them. All of it is recorded, so that the start-up check can compare with the original code.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from mini_trainer.distributed.devices import describe_device
from mini_trainer.distributed.ending import log
from mini_trainer.objectives.families.text_tower import is_multimodal

ABSENT = object()  # value of an attribute that is not set
process_wide: list["Replaced"] = []  # attributes replaced by the last model's kernels, for all models of this process


class Replaced(NamedTuple):
    """An attribute set by liger-kernel, and its earlier value."""

    owner: Any  # a module of the model, its class, or the Python module of that class
    name: str
    original: Any


def apply_liger_kernels(model: PreTrainedModel, device: torch.device, *, keeps_products: bool) -> tuple[Replaced, ...]:
    """Replaces norms, rotary embeddings and MLPs with liger-kernel's; returns the replaced attributes.

    Experts held as one tensor keep their own code: liger-kernel's routing waits for the GPU in every layer (0.8.5).
    The loss is not replaced: its kernel syncs with the GPU and cannot weight tokens. With `keeps_products`, rotary
    embeddings are not replaced either: liger-kernel's work in place, and would rotate kept outputs twice. Otherwise the
    family's own default decides, since liger-kernel raises where it has no kernel for the family's rotary embeddings.
    """
    check_device(device)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if is_multimodal(model.config):
        raise ValueError(f"--use-liger-kernels: not supported for multimodal models ({model.config.model_type!r})")
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"--use-liger-kernels: liger-kernel does not support model type {model.config.model_type!r}")
    if getattr(model.config, "mlp_bias", False):
        raise ValueError("--use-liger-kernels: liger-kernel's MLPs have no biases, but this model's do (mlp_bias)")
    forget_liger_kernels()  # or an earlier model's rotary embeddings would stay where this one must not have them
    rope = {"rope": False} if keeps_products else {}
    return record_replaced(
        model,
        lambda: _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False, **rope),
    )


def forget_liger_kernels() -> None:
    """Restores functions that an earlier model's kernels have replaced for all models of this process."""
    set_all(process_wide)
    process_wide.clear()


def check_device(device: torch.device) -> None:
    """ValueError without a GPU, or without liger-kernel."""
    is_installed = importlib.util.find_spec("liger_kernel") is not None
    if device.type != "cuda" or not is_installed:
        raise ValueError(
            "--use-liger-kernels needs a CUDA device and the package liger-kernel (pip install liger-kernel);"
            f" the device is {device.type}, liger-kernel is {'' if is_installed else 'not '}installed"
        )


def record_replaced(model: PreTrainedModel, replace: Callable[[], None]) -> tuple[Replaced, ...]:
    """Calls `replace`; returns the attributes that it changed on the model's modules, their classes and their files."""
    modules = list(model.modules())
    classes = {type(module) for module in modules}
    owners = [*modules, *classes, *(sys.modules[name] for name in {each.__module__ for each in classes})]
    before = [(owner, dict(vars(owner))) for owner in owners]
    activations = {key: dict.__getitem__(ACT2FN, key) for key in ACT2FN}  # as classes, not yet instantiated
    replace()
    ACT2FN.update(activations)  # a table of all models; the layers of this one have theirs already
    replaced = tuple(
        Replaced(owner, name, attributes.get(name, ABSENT))
        for owner, attributes in before
        for name in attributes.keys() | vars(owner).keys()
        if vars(owner).get(name, ABSENT) is not attributes.get(name, ABSENT)
    )
    of_experts = tuple(each for each in replaced if is_of_experts(each))
    set_all(of_experts)
    replaced = tuple(each for each in replaced if each not in of_experts)
    process_wide[:] = [each for each in replaced if not isinstance(each.owner, nn.Module)]
    return replaced


def is_of_experts(replaced: Replaced) -> bool:
    """Whether the attribute belongs to experts held as one tensor, or is a class that liger-kernel has for them."""
    owner, value = replaced.owner, vars(replaced.owner).get(replaced.name)
    if isinstance(owner, nn.Module):
        return any(param.ndim == 3 for param in owner.parameters(recurse=False))
    return isinstance(value, type) and value.__name__ == "LigerExperts"


@contextmanager
def restored(replaced: tuple[Replaced, ...]) -> Iterator[None]:
    """Original code in the context; afterwards what was there, with anything that has been wrapped around it since."""
    current = [Replaced(owner, name, vars(owner).get(name, ABSENT)) for owner, name, _ in replaced]
    set_all(replaced)
    try:
        yield
    finally:
        set_all(current)


def set_all(attributes: list[Replaced] | tuple[Replaced, ...]) -> None:
    for owner, name, value in attributes:
        if value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)


MIN_SIZE = 256  # minimum input and output size of a layer: below, casting costs more than fp8 saves


def apply_float8(blocks: nn.ModuleList, device: torch.device) -> None:
    """Replaces the blocks' large linear layers with torchao's in fp8.

    Each row of activations has its own scale, so that no token affects another, and weight gradients are computed in
    bf16, which works for any number of tokens.
    """
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
