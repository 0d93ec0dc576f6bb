"""Tiny randomly initialised models of many families, and a tiny tokenizer, for the tests."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from make_tiny_model import train_tokenizer
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV32Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mini_trainer.distributed.compilation import Compiled
from mini_trainer.distributed.world import World
from mini_trainer.model.build import apply_compile, build_model
from mini_trainer.model.check import check_model
from mini_trainer.model.config import ModelSource, load_config
from mini_trainer.model.method import Full, Method
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options import OSFTOptions, TrainOptions, group_options
from mini_trainer.osft import OSFT

VOCAB_SIZE = 288

SHAPE = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.2,  # attention that matters, so that a wrong one shows
)

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama_tied_bias": LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "mistral_window": MistralConfig(**SHAPE, sliding_window=5),
    "gemma2_softcaps": Gemma2Config(
        **SHAPE, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": Phi3Config(**SHAPE, sliding_window=6),
    "phi_head_bias": PhiConfig(**SHAPE),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    ),
    "olmo2": Olmo2Config(**SHAPE),
    "granite_scaled": GraniteConfig(
        **SHAPE, logits_scaling=4.0, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.5
    ),
    "cohere_scaled": CohereConfig(**SHAPE, logit_scale=0.25),
    "gpt_oss_sinks": GptOssConfig(
        **SHAPE, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=GptOssConfig().rope_parameters | {"original_max_position_embeddings": 256 // 32},
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip

HYBRID_SHAPE = dict(vocab_size=VOCAB_SIZE, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)

# Layers that run once a sequence.
HYBRIDS: dict[str, PreTrainedConfig] = {
    "gated delta net, experts": Qwen3NextConfig(
        **HYBRID_SHAPE, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], head_dim=8,
        intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "mamba 2, attention, experts": NemotronHConfig(
        **HYBRID_SHAPE, layers_block_type=["mamba", "attention", "mlp"], head_dim=8, intermediate_size=48,
        mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=16, expand=2,
    ),
    "mamba 2 alone": Mamba2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2,
        chunk_size=16, expand=2,
    ),
    "short convolution": Lfm2Config(
        **HYBRID_SHAPE, num_hidden_layers=2, layer_types=["conv", "full_attention"], intermediate_size=48,
        block_auto_adjust_ff_dim=False,
    ),
    "attention that chooses keys": DeepseekV32Config(
        **HYBRID_SHAPE | dict(num_key_value_heads=4), num_hidden_layers=2, intermediate_size=48, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, index_topk=4, index_n_heads=2,
        index_head_dim=16, n_routed_experts=4, moe_intermediate_size=24, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    ),
}  # fmt: skip


def save_moved(model: PreTrainedModel, path: Path) -> None:
    """Writes the model with biases, norms and sinks that are random too, so that a wrong one shows."""
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim < 2:
                param.add_(torch.randn_like(param) * 0.2)
    model.save_pretrained(path)


def save_model(config: PreTrainedConfig, path: Path, *, seed: int = 0) -> Path:
    """Writes a randomly initialised fp32 model of `config`; biases, norms and sinks are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_moved(model, path)
    return path


def balance_plainly(model: MixtralForCausalLM, sequences: Sequence[np.ndarray]) -> torch.Tensor:
    """The auxiliary loss of experts by transformers, of one sequence at a time; the mean over their tokens."""
    losses, config = [], model.config
    for ids in sequences:
        outputs = model(torch.from_numpy(ids.astype(np.int64))[None], output_router_logits=True)
        loss = load_balancing_loss_func(outputs.router_logits, config.num_local_experts, config.num_experts_per_tok)
        losses.append(loss * len(ids))
    return torch.stack(losses).sum() / sum(map(len, sequences))


def save_tokenizer(path: Path) -> Path:
    """Adds a byte-level tokenizer that has fewer than `VOCAB_SIZE` entries to a model directory."""
    train_tokenizer([], vocab_size=VOCAB_SIZE).save_pretrained(path)
    return path


def change_json(file: Path, **entries: object) -> None:
    """Sets entries of a JSON file, such as a model's config, which need not be there."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | entries))


def load_source(path: Path) -> ModelSource:
    """The model at `path` as a run finds it."""
    return ModelSource(str(path), load_config(str(path), TextFamily()))


def build(
    path: Path,
    world: World,
    *,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype = torch.float32,
    method: Method | None = None,
    objective: CausalLM | None = None,
    **options: object,
) -> PackedModel:
    """The model at `path` as train.py builds it, by default without activation checkpointing."""
    given = dict(model_name_or_path="", data_path="", output_dir="", activation_checkpointing="none") | options
    grouped = group_options(TrainOptions, **given, compute_dtype=str(dtype).removeprefix("torch."))
    own = dict(objective=CausalLM() if objective is None else objective, method=Full() if method is None else method)
    source = load_source(path)
    return build_model(source, grouped.compute, grouped.sharding, **own, weights_dtype=weights_dtype, world=world)


def make_osft(tmp_path: Path, **options: object) -> OSFT:
    """The method, with its cache in `tmp_path`; options of the group by name."""
    return OSFT(OSFTOptions(**dict(osft=True, osft_cache_dir=str(tmp_path / "cache")) | options))


def check(model: PackedModel, world: World) -> None:
    """The start-up check."""
    check_model(model, CausalLM(), world=world)


def compile_by(backend: str | Callable, monkeypatch: pytest.MonkeyPatch, *, dynamic: bool = True) -> None:
    """What --compile compiles goes to `backend`: "eager" captures it all, and makes no kernels, which take minutes.

    Not `dynamic`: it is captured for the one size that a test gives it, in a tenth of the time, most of which goes into
    reckoning with sizes that are not known.
    """
    monkeypatch.setattr(
        "mini_trainer.model.build.apply_compile", functools.partial(apply_compile, backend=backend, dynamic=dynamic)
    )
    fuse = functools.partial(Compiled, name="the loss", backend=backend, dynamic=dynamic)
    monkeypatch.setattr("mini_trainer.objectives.next_tokens.fuse", functools.cache(fuse))
