"""Models of many families, exported untouched."""

from pathlib import Path

import torch
from tiny_models import FAMILIES, SHAPE, build, load_source
from transformers import AutoTokenizer, DeepseekV3Config, Glm4MoeConfig

from mini_trainer.distributed.world import World
from mini_trainer.model.config import load_generation_config
from mini_trainer.model.method import Full
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.run.export import ExportParts, export_model

MODELS = FAMILIES | {
    # routers with a buffer that belongs to the checkpoint
    "deepseek_v3": DeepseekV3Config(
        **SHAPE | dict(num_key_value_heads=4), moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE, head_dim=8, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=1,
    ),
}  # fmt: skip


def make_parts(path: Path, *, dtype: torch.dtype = torch.float32) -> ExportParts:
    source, tokenizer = load_source(path), AutoTokenizer.from_pretrained(path)
    return ExportParts(TextFamily(), Full(), load_generation_config(str(path), source.config), tokenizer, dtype, source)


def export(path: Path, export_dir: Path, world: World, *, dtype: torch.dtype = torch.float32) -> Path:
    export_model(build(path, world), export_dir, make_parts(path, dtype=dtype), world=world)
    return export_dir
