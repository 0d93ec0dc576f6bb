"""The FLOPs of a vision-language model's tower and projector, counted from their shapes."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from mini_trainer.objectives.families.text_tower import find_number


@dataclass(frozen=True)
class TowerFlops:
    """FLOPs of vision tower and projector, forward and backward; forward only for frozen parts before a trained one."""

    per_patch: float  # the vision tower's matrices, and attention within windows
    per_pair: float  # a pair of patches in one image or tile: full attention
    per_token: float  # the projector's matrices, per token for the language model


def count_parts(model: nn.Module, vision: PreTrainedConfig, parts: dict[str, list[str]]) -> TowerFlops:
    """`TowerFlops` of a model with these parts and this config of its tower; counts matrices as `flops.count_flops`. A
    projector's matrices count once per output token, which is right for most (LLaVA's, Qwen-VL's). Those of Llama 4's
    adapter, which merges 4 patches, count for each of them: 4 % too much for a released model's tower."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    passes, flops = 2, {}  # FLOPs per frozen weight: 2 forward, 2 more for backward once an earlier part trains
    for part in ("vision", "projector"):
        params = [p for p in map(model.get_parameter, parts[part]) if p.ndim > 1 and id(p) not in tables]
        trains = any(param.requires_grad for param in params)
        passes = 4 if trains else passes
        flops[part] = float(sum(param.numel() * (6 if param.requires_grad else passes) for param in params))
        if part == "vision":
            per_product = 12 if trains else 4  # FLOPs per pair of patches and dimension
    depth = find_number(vision, "depth", "num_hidden_layers", "num_layers")
    width = find_number(vision, "embed_dim", "hidden_size") if not hasattr(vision, "intermediate_size") else 0
    width = width or find_number(vision, "hidden_size", "embed_dim")
    whole = getattr(vision, "fullatt_block_indexes", None)
    num_whole = depth if whole is None else len(whole)
    in_window = 0 if whole is None else (vision.window_size // vision.patch_size) ** 2
    return TowerFlops(
        per_patch=flops["vision"] + per_product * width * (depth - num_whole) * in_window,
        per_pair=per_product * width * num_whole,
        per_token=flops["projector"],
    )
