"""Which weights are matrices between hidden states, and how many each is: what Muon works on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mini_trainer.model.optim.decay import find_decayed
from mini_trainer.objectives.families.text_tower import text_config


@dataclass(frozen=True)
class Layout:
    """How the outputs of several matrices lie in one weight: in `num_groups` runs of `sizes` after one another.

    Queries, keys and values in one weight are one run of three sizes; interleaved by heads, a run for each head.
    """

    sizes: tuple[int, ...] = ()  # outputs of each matrix in a run; none: the weight is one matrix
    num_groups: int = 1
    is_transposed: bool = False  # stored as (inputs, outputs)

    def cut(self, weight: Tensor) -> list[Tensor]:
        """The matrices of `weight` (..., rows, columns), each as (..., outputs, inputs)."""
        weight = weight.mT if self.is_transposed else weight
        if not self.sizes:
            return [weight]
        parts = weight.unflatten(-2, (self.num_groups, sum(self.sizes))).split(self.sizes, dim=-2)
        return [part.flatten(-3, -2) for part in parts]

    def list_shapes(self, weight: Tensor) -> list[torch.Size]:
        """Shapes of its matrices, one expert's if there are several: (outputs, inputs)."""
        return [part.shape for part in self.cut(torch.empty(weight.shape[-2:], device="meta"))]

    def join(self, matrices: list[Tensor]) -> Tensor:
        """The weight that `cut` cuts into these."""
        weight = matrices[0]
        if self.sizes:
            parts = [matrix.unflatten(-2, (self.num_groups, -1)) for matrix in matrices]
            weight = torch.cat(parts, dim=-2).flatten(-3, -2)
        return weight.mT if self.is_transposed else weight


# From the language model's config and the number of the weight's rows.
Maker = Callable[[PreTrainedConfig, int], Layout]


def is_single(config: PreTrainedConfig, num_rows: int) -> Layout:
    return Layout()


def is_transposed(config: PreTrainedConfig, num_rows: int) -> Layout:
    return Layout(is_transposed=True)


def has_halves(config: PreTrainedConfig, num_rows: int) -> Layout:
    return Layout((num_rows // 2,) * 2)


def has_queries_keys_values(config: PreTrainedConfig, num_rows: int) -> Layout:
    num_keys = config.num_key_value_heads * num_rows // (config.num_attention_heads + 2 * config.num_key_value_heads)
    return Layout((num_rows - 2 * num_keys, num_keys, num_keys))


def has_thirds_transposed(config: PreTrainedConfig, num_rows: int) -> Layout:
    return Layout((num_rows,) * 3, is_transposed=True)


def has_thirds_by_heads(config: PreTrainedConfig, num_rows: int) -> Layout:
    return Layout((num_rows // config.num_attention_heads // 3,) * 3, config.num_attention_heads)


def has_pairs_transposed(config: PreTrainedConfig, num_rows: int) -> Layout:
    return Layout((1, 1), config.intermediate_size, is_transposed=True)


def has_latent_and_position(config: PreTrainedConfig, num_rows: int) -> Layout:
    return Layout((config.kv_lora_rank, config.qk_rope_head_dim))


def has_keys_and_values_by_heads(config: PreTrainedConfig, num_rows: int) -> Layout:
    return Layout((config.qk_nope_head_dim, config.v_head_dim), config.num_attention_heads)


def list_single(names: str) -> dict[str, Maker]:
    return dict.fromkeys(names.split(), is_single)


ATTENTION, MLP = list_single("q_proj k_proj v_proj o_proj"), list_single("gate_proj up_proj down_proj")
LLAMA = ATTENTION | MLP
EXPERTS = {"gate": is_single, "experts.gate_up_proj": has_halves, "experts.down_proj": is_single}
LLAMA_LIKE = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo", "olmo2",
    "olmo3", "cohere", "cohere2", "smollm3", "seed_oss",
)  # fmt: skip
# Layouts by model type and by the last part of a weight's name.
FAMILIES: dict[str, dict[str, Maker]] = (
    dict.fromkeys(LLAMA_LIKE, LLAMA)
    | dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), LLAMA | EXPERTS)
    | dict.fromkeys(("glm", "glm4"), ATTENTION | {"gate_up_proj": has_halves, "down_proj": is_single})
)
FAMILIES["phi3"] = FAMILIES["glm"] | {"qkv_proj": has_queries_keys_values}
FAMILIES["phi"] = list_single("q_proj k_proj v_proj dense fc1 fc2")
FAMILIES["starcoder2"] = ATTENTION | list_single("c_fc c_proj")
FAMILIES["gpt2"] = {"c_attn": has_thirds_transposed, "c_proj": is_transposed, "c_fc": is_transposed}
FAMILIES["gpt_neox"] = list_single("dense dense_h_to_4h dense_4h_to_h") | {"query_key_value": has_thirds_by_heads}
FAMILIES["gpt_oss"] = (
    ATTENTION
    | list_single("router")
    | {"experts.gate_up_proj": has_pairs_transposed, "experts.down_proj": is_transposed}
)
FAMILIES["deepseek_v3"] = (
    LLAMA
    | EXPERTS
    | list_single("q_a_proj q_b_proj")
    | {"kv_a_proj_with_mqa": has_latent_and_position, "kv_b_proj": has_keys_and_values_by_heads}
)
# Weights with a row for each token, position or class, and single rows: AdamW's.
OTHERS = {"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "score", "classifier", "shared_expert_gate"}


def find_family(config: PreTrainedConfig) -> dict[str, Maker]:
    """The layouts of the language model's weights; ValueError if they are not known."""
    if (model_type := text_config(config).model_type) not in FAMILIES:
        raise ValueError(
            f"--optimizer muon: of which matrices the weights of model type {model_type!r} are made is only known of"
            f" {', '.join(sorted(FAMILIES))}: use adamw"
        )
    return FAMILIES[model_type]


def find_matrices(model: nn.Module) -> dict[str, Layout]:
    """Layouts of the trained matrices between hidden states, by their names in `model`.

    ValueError if the model's family, or a weight with two dimensions or more, is in no table.
    """
    config = next(module.config for module in model.modules() if isinstance(module, PreTrainedModel))
    makers, decayed, found = find_family(config), find_decayed(model), {}
    for name, param in model.named_parameters():
        last = name.removesuffix(".weight").split(".")
        kind = ".".join(last[-2:] if last[-2:-1] == ["experts"] else last[-1:])
        if not param.requires_grad or kind in OTHERS or name not in decayed:  # norms, biases
            continue
        if kind not in makers:
            raise ValueError(
                f"--optimizer muon: {name} is not known to be a matrix between hidden states ({', '.join(makers)}) or"
                f" something else ({', '.join(sorted(OTHERS))}): use adamw"
            )
        found[name] = makers[kind](text_config(config), param.shape[-2])
    return found
