"""Language models of text, and the text towers of multi-modal ones.

T tokens in a packed row, N trained tokens among them, L tokens of one sequence, H hidden size, V vocabulary size.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from families.family import Family, Own, Reader
from families.micro_batch import MicroBatch, chunk_sequences
from families.packed_row import describe_row
from families.router_loss import sum_router_losses
from families.row_part import gather_ids
from pretrained.text_tower import (
    LeftOut,
    find_decoder,
    find_needed,
    find_placeholders,
    is_multimodal,
    keep_text_tower,
    text_config,
)

WITHOUT_SCALE = ("aya_vision", "cohere2_vision")  # whose forward in transformers drops their text model's logit_scale
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # as configs call that of logits


@dataclass(frozen=True)
class TextFamily(Family):
    """Causal language models; of multi-modal ones the text tower."""

    # How much the auxiliary loss of a mixture of experts counts; None: as the model's config says.
    router_aux_loss: float | None = None

    peft_task = "CAUSAL_LM"

    def check_config(self, config: PreTrainedConfig, *, trust_remote_code: bool) -> str | None:
        # A decoder alone, saved from such a model (BartForCausalLM), says no of itself; its class says yes.
        if getattr(config, "is_encoder_decoder", False) or getattr(type(config), "is_encoder_decoder", False):
            return (
                f"model type {config.model_type!r} is an encoder-decoder: it learns a target from a source, which its"
                " encoder reads apart, and here a row is one text: give a decoder-only model"
            )
        is_custom = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        text = text_config(config)
        if text is not config and getattr(text, "is_encoder_decoder", False):
            return (
                f"model type {config.model_type!r} is an encoder-decoder: what it writes depends on what its encoder"
                " has read, and packed rows have nothing for it to read"
            )
        if not is_custom and type(config) not in choose_auto_class(config)._model_mapping:
            return f"model type {config.model_type!r} has no causal language model in transformers"
        if getattr(text, "vocab_size", None) is None:
            return f"model type {config.model_type!r} has no language model with a vocabulary"
        return find_lost_scale(config)

    def make_model(self, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        auto_class = choose_auto_class(config)
        model = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        if is_multimodal(config) and (needed := find_needed(model)):
            raise ValueError(
                f"model type {config.model_type!r} cannot be trained on text: {type(model).__name__} takes none without"
                f" {', '.join(needed)}"
            )
        find_router_loss(model, self.router_aux_loss)  # what it refuses is refused before weights are read
        return model

    def load_model(
        self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        return choose_auto_class(config).from_pretrained(
            model_dir,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report says it, and the caller refuses
            trust_remote_code=trust_remote_code,
        )

    def leave_out(self, model: PreTrainedModel) -> LeftOut:
        return keep_text_tower(model)

    def list_foreign(self, config: PreTrainedConfig) -> dict[int, str]:
        return find_placeholders(config)

    def open_reader(self, model: PreTrainedModel) -> "TextReader":
        return TextReader(model, router_aux_loss=find_router_loss(model, self.router_aux_loss))


def choose_auto_class(config: PreTrainedConfig) -> Any:
    """transformers' Auto class of a config: of a multi-modal one, that of the whole model and not of its text alone."""
    is_whole = type(config) in AutoModelForMultimodalLM._model_mapping
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForMultimodalLM if is_whole and (is_multimodal(config) or not is_causal) else AutoModelForCausalLM


def find_lost_scale(config: PreTrainedConfig) -> str | None:
    """Why a model whose logits transformers computes without their scale cannot be trained; None for all others."""
    scale = getattr(text_config(config), "logit_scale", 1.0)
    if config.model_type not in WITHOUT_SCALE or scale == 1.0:
        return None
    return (
        f"model type {config.model_type!r}: its whole model in transformers leaves out the logit_scale of its"
        f" text_config ({scale}), by which its language model alone multiplies logits: its loss is another one than the"
        " model was trained with. Give the text model by itself (cohere2)"
    )


@dataclass(frozen=True)
class Projection:
    """What logits are computed from: softcap * tanh((hidden @ weight.T + bias) / softcap).

    Without `softcap` the logits are as they are; with it: Gemma 2, arXiv 2408.00118, section 2.
    """

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H), the head's
    bias: Tensor | None = None  # (V,)
    softcap: float | None = None


class TextReader(Reader):
    """Reads rows with a language model, and says what its logits are computed from."""

    def __init__(self, model: PreTrainedModel, *, router_aux_loss: float = 0.0):
        super().__init__(model)
        config = text_config(model.config)
        caps = (getattr(config, name, None) for name in SOFTCAPS)
        self.softcap = next((cap for cap in caps if cap is not None), None)
        # Cohere and Muse Glimmer multiply the logits, Granite and Inkling divide them; all are linear, so the hidden
        # states take the factor.
        scale = getattr(config, "logit_scale", None)
        self.logit_scale = (1.0 if scale is None else scale) / getattr(config, "logits_scaling", 1.0)
        self.logit_scale /= getattr(config, "logits_mup_width_multiplier", None) or 1.0
        self.logit_scale *= getattr(config, "output_multiplier", None) or 1.0
        self.transform = find_head_transform(model)
        is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
        self.chunk_size = config.attention_chunk_size if is_chunked else None
        self.router_aux_loss = router_aux_loss
        self.routed = dict(output_router_logits=True) if router_aux_loss else {}

    def encode(self, micro_batch: MicroBatch) -> Tensor:  # (1, T, H)
        self.extra_losses, self.reports = {}, {}
        if self.chunk_size is not None:
            chunks = chunk_sequences(micro_batch.row, self.chunk_size)
            micro_batch = micro_batch.with_row(replace(micro_batch.row, chunks=chunks))
        inputs = describe_row(micro_batch, pad_position=self.pad_position) | self.embed(micro_batch)
        outputs = find_decoder(self.model)(**inputs, **self.routed)
        if self.router_aux_loss:
            router_sum, loads = sum_router_losses(
                outputs.router_logits,
                micro_batch.row.cu_seqlens,
                micro_batch.targets.index,
                num_chosen=count_chosen(self.model),
                row_group=micro_batch.row.row_group,
            )
            self.extra_losses = {"tokens": self.router_aux_loss * router_sum}
            self.reports = {"router_loss": router_sum.detach(), "expert_loads": loads}
        return outputs.last_hidden_state

    def embed(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """What the decoder is given beside, or in the place of, the row's token ids."""
        return {}

    def project(self, hidden: Tensor) -> Projection:  # (N, H)
        """What the logits of these hidden states are computed from."""
        if self.transform is not None:
            hidden = self.transform_hidden(hidden)
        if self.logit_scale != 1.0:
            hidden = hidden * self.logit_scale
        head = self.model.get_output_embeddings()
        return Projection(hidden, head.weight, head.bias, self.softcap)

    def transform_hidden(self, hidden: Tensor) -> Tensor:  # (N, H) -> (N, H')
        """What enters the head's matrix where the model does something to the hidden states first (BERT)."""
        head = self.model.get_output_embeddings()
        head.forward = pass_on  # the matrix itself may be a part of what is called here
        try:
            return self.transform(hidden)
        finally:
            del head.forward

    def run_own(self, micro_batch: MicroBatch) -> Own:
        input_ids = gather_ids(micro_batch.row)  # (1, L)
        hidden = find_decoder(self.model)(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.collect_own(hidden, self.model(input_ids=input_ids, use_cache=False, **self.routed))

    def collect_own(self, hidden: Tensor, outputs: Any) -> Own:
        if not self.router_aux_loss:
            return Own(hidden, outputs.logits)
        return Own(hidden, outputs.logits, self.router_aux_loss * outputs.aux_loss * hidden.shape[1])


def pass_on(hidden: Tensor) -> Tensor:
    return hidden


def find_head_transform(model: PreTrainedModel) -> nn.Module | None:
    """What stands between the model's last hidden states and its head's matrix; None if there is nothing with weights.

    It is the one module beside what holds the base model that has weights of its own; the start check tells whether
    that is so.
    """
    head = model.get_output_embeddings()
    base = find_decoder(model)
    inside = {*base.parameters(), *head.parameters()}
    children = [child for child in model.children() if base not in child.modules() and child is not head]
    found = [child for child in children if not inside.issuperset(child.parameters())]
    return found[0] if len(found) == 1 else None


def find_router_loss(model: PreTrainedModel, asked: float | None) -> float:
    """What the auxiliary loss of the model's experts counts: as `asked`, else as its config says; 0: there is none."""
    config = text_config(model.config)
    if asked is None:
        # JetMoE calls it otherwise than all others.
        known = (getattr(config, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
        is_on = getattr(config, "output_router_logits", False)
        asked = next((value for value in known if value is not None), 0.0) if is_on else 0.0
    has_loss = "output_router_logits" in inspect.signature(type(model).forward).parameters
    if asked and not (has_loss and count_chosen(model)):
        raise ValueError(
            f"--router-aux-loss {asked}: transformers has no auxiliary loss of experts for model type"
            f" {model.config.model_type!r}; leave it out, or give 0"
        )
    return asked


def count_chosen(model: PreTrainedModel) -> int:
    """Experts that a token goes to; 0 for a model without experts."""
    of_model = getattr(model, "num_experts_per_tok", None)
    return of_model or getattr(text_config(model.config), "num_experts_per_tok", None) or 0
