"""Attention that is limited to chunks of a sequence (Llama 4)."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


def mark_chunked(model: nn.Module, config: PreTrainedConfig) -> None:
    """Marks the layers whose attention is limited to chunks of a sequence (Llama 4).

    This is done in advance because torch.compile would recompile for every layer if attention looked at `layer_idx`.
    """
    layer_types = getattr(config, "layer_types", None) or ()
    for module in model.modules() if "chunked_attention" in layer_types else ():
        index = getattr(module, "layer_idx", None)
        if index is not None and layer_types[index] == "chunked_attention":
            module.attends_in_chunks = True


def correct_temperature(module: nn.Module, query: Tensor, position_ids: Tensor) -> Tensor:
    """Corrects the temperature of queries (1, Hq, T, D) to positions in sequences instead of the row (Llama 4)."""
    in_row = torch.arange(query.shape[2], device=query.device)
    wanted, used = (
        torch.log1p(torch.floor((positions + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for positions in (position_ids[0].float(), in_row.float())
    )
    return (query * (wanted / used)[:, None]).to(query.dtype)
