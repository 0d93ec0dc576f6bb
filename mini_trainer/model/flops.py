"""The FLOPs of a training step, counted from the shapes of the model and of its vision tower."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.model.attention import list_heads
from mini_trainer.model.blocks import find_mixers
from mini_trainer.objectives.families.text_tower import find_blocks, find_number, is_multimodal, list_parts, text_config
from mini_trainer.objectives.objective import Objective

if TYPE_CHECKING:
    from mini_trainer.data.tokenized.image_sizes import SampleImages

NOT_ATTENDING = frozenset({"linear_attention", "mamba", "conv", "moe", "mlp"})  # values of config.layer_types


@dataclass(frozen=True)
class TowerFlops:
    """FLOPs of vision tower and projector, forward and backward; forward only for frozen parts before a trained one."""

    per_patch: float  # the vision tower's matrices, and attention within windows
    per_pair: float  # a pair of patches in one image or tile: full attention
    per_token: float  # the projector's matrices, per token for the language model


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of forward and backward, counted as 6 per matrix weight and token (4 if frozen), without recomputation.

    The head counts for trained tokens only, since only they reach it; the embedding table does not count. Attention
    counts scores and values for the pairs that a causal (and windowed) layer sees in each sequence. (Kaplan et al.
    2020, arXiv 2001.08361, 2.1; Chowdhery et al. 2022, arXiv 2204.02311, appendix B.) Layers with a recurrent state
    count its products token by token, however their kernels group them (see `count_state_products`).
    """

    per_token: float
    per_loss_token: float
    per_pair: tuple[float, ...]  # per visible pair of query and key, in each layer
    windows: tuple[int | None, ...]  # each layer's attention window; None: no window
    forward_per_token: float  # of a forward pass alone: 2 per matrix weight
    forward_per_loss_token: float
    tower: TowerFlops | None = None  # None: a text-only model

    def of_images(self, images: "SampleImages") -> np.ndarray:  # (samples,)
        """FLOPs of tower and projector over each sample's images."""
        tower = self.tower
        return tower.per_token * images.tokens + tower.per_patch * images.patches + tower.per_pair * images.pairs

    def of_rows(self, rows: np.ndarray, data: Mixture, objective: Objective) -> float:
        """FLOPs of a global batch of these rows of the data.
        Sequences that are read ahead count forward, with as many targets as those that train."""
        sequences, num_targets = data.list_sequences(rows), int(data.num_loss_tokens[rows].sum())
        trains = sequences.places < (objective.num_trained_sequences or math.inf)
        flops = self.of_batch(sequences.lengths[trains], num_targets, data.images and data.images.of(rows))
        return flops if trains.all() else flops + self.of_forward(sequences.lengths[~trains], num_targets)

    def of_scores(self, rows: np.ndarray, data: Mixture, objective: Objective) -> float:
        """FLOPs of a forward pass over all sequences of these rows; those that are read ahead as in `of_rows`."""
        sequences, num_targets = data.list_sequences(rows), int(data.num_loss_tokens[rows].sum())
        times = 1 if objective.num_trained_sequences is None else 2
        return self.of_forward(sequences.lengths, times * num_targets)

    def of_batch(self, lengths: np.ndarray, num_loss_tokens: int, images: "SampleImages | None" = None) -> float:
        """FLOPs of one global batch; `lengths` (sequences,) in tokens, `images` of its samples."""
        flops = self.per_token * lengths.sum() + self.per_loss_token * num_loss_tokens + self.of_attention(lengths)
        return flops if images is None else flops + float(self.of_images(images).sum())

    def of_forward(self, lengths: np.ndarray, num_loss_tokens: int) -> float:
        """FLOPs of a forward pass over sequences of text (sequences,)."""
        tokens = self.forward_per_token * lengths.sum() + self.forward_per_loss_token * num_loss_tokens
        return tokens + self.of_attention(lengths) / 3

    def of_attention(self, lengths: np.ndarray) -> float:
        """FLOPs of attention's scores and values, forward and backward."""
        lengths, flops = lengths.astype(float), 0.0
        for window in set(self.windows):
            seen = lengths if window is None else np.minimum(lengths, window)
            flops += self.sum_per_pair(window) * float((seen * (lengths - seen / 2)).sum())
        return flops

    def sum_per_pair(self, window: int | None) -> float:
        """FLOPs per visible pair of query and key, over all layers with this window."""
        return sum(cost for cost, of_layer in zip(self.per_pair, self.windows, strict=True) if of_layer == window)

    @property
    def attention_cost(self) -> float:
        """c in a sequence's cost L + c·L², for the packer; windowed layers are linear in L."""
        return self.sum_per_pair(None) / 2 / self.per_token


def count_state_products(module: nn.Module) -> float:
    """Size of a layer's recurrent state; each token updates and reads every element: 4 FLOPs forward, 8 backward.

    A state space model has a vector per channel (Dao and Gu 2024, arXiv 2405.21060), linear attention a matrix per
    head. The delta rule reads its state once more, to correct it, and counts 1.5 times (Yang et al. 2024,
    arXiv 2412.06464).
    """
    if hasattr(module, "ssm_state_size"):  # Mamba 1 and 2
        return module.intermediate_size * module.ssm_state_size
    if hasattr(module, "head_k_dim"):  # gated delta nets
        return 1.5 * module.num_v_heads * module.head_k_dim * module.head_v_dim
    if hasattr(module, "A_log") and hasattr(module, "head_dim"):  # Kimi's delta attention
        return 1.5 * module.num_heads * module.head_dim**2
    if hasattr(module, "slope_rate"):  # MiniMax's lightning attention
        return module.num_attention_heads * module.head_dim**2
    if hasattr(module, "igate_preact"):  # xLSTM
        return module.qk_dim * module.v_dim / module.config.num_heads
    return 0.0


def count_flops(model: PreTrainedModel) -> FlopCount:
    """`FlopCount` of a model; a mixture of experts counts its active experts.
    A classifier's head counts for every token (it is small), and its attention as if it were causal."""
    whole, config, head = model.config, text_config(model.config), model.get_output_embeddings()
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) or m is head}
    num_experts = find_number(config, "num_local_experts", "num_experts", "moe_num_experts") or 1
    num_active = find_number(config, "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k") or 1
    active = num_active / num_experts
    if (tower := count_tower(model, whole)) is not None:  # its matrices process patches, not tokens
        parts = list_parts(model)
        outside |= {id(model.get_parameter(name)) for name in (*parts["vision"], *parts["projector"])}
    matrices = forward = 0.0  # FLOPs per token
    for _, module in model.named_modules(remove_duplicate=False):  # a layer that is used twice computes twice (Zamba)
        for name, param in module.named_parameters(recurse=False):
            is_state = name == "A_log"  # two-dimensional in Mamba 1, but not a matrix product
            if param.ndim < 2 or id(param) in outside or is_state:
                continue
            is_grouped = param.ndim == 3 and not isinstance(module, nn.Conv1d)  # experts are stored as one 3-D tensor
            numbers = param.numel() * (active if is_grouped else 1)
            matrices += numbers * (6 if param.requires_grad else 4)
            forward += 2 * numbers
    blocks = find_blocks(model)
    mixers = [module for block in blocks for mixer in find_mixers(block) for module in mixer.modules()]
    states = sum(count_state_products(module) for module in mixers)
    shapes = [module.packed_shape for module in model.modules() if hasattr(module, "packed_shape")]  # of methods
    packed = sum(math.prod(shape) * (active if len(shape) == 3 else 1) for shape in shapes)
    matrices, forward = matrices + 12 * states + 4 * packed, forward + 4 * states + 2 * packed
    # On average a token sees half a chunk, but a full window.
    windows = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": (getattr(config, "attention_chunk_size", None) or 0) // 2 or None,
    }
    num_layers = max(getattr(config, "num_hidden_layers", 0), len(blocks))
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    heads = list_heads(config)
    if len(heads) == 1:
        heads *= len(layer_types)
    attending = [
        (num_heads * size, windows.get(kind))
        for (num_heads, size), kind in zip(heads, layer_types, strict=False)
        if kind not in NOT_ATTENDING
    ]
    return FlopCount(
        per_token=matrices,
        per_loss_token=0 if head is None else (6 if head.weight.requires_grad else 4) * head.weight.numel(),
        per_pair=tuple(12 * width for width, _ in attending),
        windows=tuple(window for _, window in attending),
        forward_per_token=forward,
        forward_per_loss_token=0 if head is None else 2 * head.weight.numel(),
        tower=tower,
    )


def count_tower(model: PreTrainedModel, config: PreTrainedConfig) -> TowerFlops | None:
    """`TowerFlops` of a vision-language model, counted from the shapes of its parts like those of `count_flops`; None
    for others. A projector's matrices count once per output token, which is right for most (LLaVA's, Qwen-VL's). Those
    of Llama 4's adapter, which merges 4 patches, count for each of them: 4 % too much for a released model's tower."""
    vision = getattr(config, "vision_config", None)
    parts = list_parts(model) if vision is not None and is_multimodal(config) else {"vision": []}
    if not parts["vision"]:
        return None
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
