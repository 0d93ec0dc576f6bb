"""Text-only language models, and the text towers of multimodal models; the load-balancing loss of experts.

T tokens in a packed row of n sequences, N trained tokens among them, L tokens of one sequence, H hidden size, V
vocabulary size, E experts, K of them chosen for a token.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from mini_trainer.objectives.families import family, text_tower

GLOBAL_BATCH = "global-batch"  # --router-loss-over: all loads are counted ahead
WITHOUT_SCALE = ("aya_vision", "cohere2_vision")  # model types whose forward ignores their text model's logit_scale
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # config keys of logit soft caps


@dataclass(frozen=True)
class TextFamily(family.Family):
    """Causal language models, and the text towers of multimodal models."""

    # Coefficient of a mixture of experts' auxiliary loss; None: from the model's config.
    router_aux_loss: float | None = None
    router_loss_over: str = "sequence"  # or GLOBAL_BATCH

    peft_task = "CAUSAL_LM"

    def check_config(self, config: PreTrainedConfig, *, trust_remote_code: bool) -> str | None:
        # A decoder saved from such a model (BartForCausalLM) has False in its config, but True in the config's class.
        if getattr(config, "is_encoder_decoder", False) or getattr(type(config), "is_encoder_decoder", False):
            return (
                f"model type {config.model_type!r} is an encoder-decoder, which needs separate source and target texts,"
                " but a row here is one text: use a decoder-only model"
            )
        is_custom = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        text = text_tower.text_config(config)
        if text is not config and getattr(text, "is_encoder_decoder", False):
            return (
                f"model type {config.model_type!r} is an encoder-decoder, but packed rows have no input for its encoder"
            )
        if not is_custom and type(config) not in choose_auto_class(config)._model_mapping:
            return f"model type {config.model_type!r} has no causal language model in transformers"
        if getattr(text, "vocab_size", None) is None:
            return f"model type {config.model_type!r} has no language model with a vocabulary"
        return find_lost_scale(config)

    def make_model(self, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        auto_class = choose_auto_class(config)
        model = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        if text_tower.is_multimodal(config) and (needed := text_tower.find_needed(model)):
            raise ValueError(
                f"model type {config.model_type!r} cannot be trained on text: {type(model).__name__} also requires"
                f" {', '.join(needed)}"
            )
        self.check_router_loss(model)
        return model

    def load_model(self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool) -> family.Loaded:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        loading = dict(dtype=dtype, trust_remote_code=trust_remote_code, **family.REPORTED)
        return choose_auto_class(config).from_pretrained(model_dir, **loading)

    def leave_out(self, model: PreTrainedModel) -> text_tower.LeftOut:
        return text_tower.keep_text_tower(model)

    def list_foreign(self, config: PreTrainedConfig) -> dict[int, str]:
        return text_tower.find_placeholders(config)

    def check_router_loss(self, model: PreTrainedModel) -> None:
        """ValueError if the model has no auxiliary loss of experts for the options, before weights are read."""
        coefficient = find_router_loss(model, self.router_aux_loss)
        if self.router_loss_over == GLOBAL_BATCH and not coefficient:
            raise ValueError(
                f"--router-loss-over {self.router_loss_over} has no effect without a load-balancing loss: add"
                " --router-aux-loss, such as 0.001, or remove the option"
            )

    def open_row_model(self, model: PreTrainedModel) -> "TextRowModel":
        coefficient = find_router_loss(model, self.router_aux_loss)
        return TextRowModel(model, router_aux_loss=coefficient, router_loss_over=self.router_loss_over)


def choose_auto_class(config: PreTrainedConfig) -> Any:
    """transformers' Auto class for a config; for a multimodal one, the class of the whole model."""
    is_whole = type(config) in AutoModelForMultimodalLM._model_mapping
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    needs_whole = is_whole and (text_tower.is_multimodal(config) or not is_causal)
    return AutoModelForMultimodalLM if needs_whole else AutoModelForCausalLM


def find_lost_scale(config: PreTrainedConfig) -> str | None:
    """Why a model cannot be trained if transformers ignores its logit scale; None for other models."""
    scale = getattr(text_tower.text_config(config), "logit_scale", 1.0)
    if config.model_type not in WITHOUT_SCALE or scale == 1.0:
        return None
    return (
        f"model type {config.model_type!r}: its whole model in transformers leaves out the logit_scale of its"
        f" text_config ({scale}), which its language model alone applies: its loss differs from the one that the model"
        " was trained with. Give the text model separately (cohere2)"
    )


@dataclass(frozen=True)
class Projection:
    """The computation of logits: softcap * tanh((hidden @ weight.T + bias) / softcap).
    Without `softcap`, hidden @ weight.T + bias. Soft-capping: Gemma 2, arXiv 2408.00118, section 2."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H), the head's
    bias: Tensor | None = None  # (V,)
    softcap: float | None = None


class TextRowModel(family.RowModel):
    """Reads rows with a language model, and returns the projection that computes its logits."""

    def __init__(self, model: PreTrainedModel, *, router_aux_loss: float = 0.0, router_loss_over: str = "sequence"):
        super().__init__(model)
        config = text_tower.text_config(model.config)
        caps = (getattr(config, name, None) for name in SOFTCAPS)
        self.softcap = next((cap for cap in caps if cap is not None), None)
        # Cohere and Muse Glimmer multiply the logits, Granite and Inkling divide them; since this is linear, the factor
        # is applied to the hidden states.
        scale = getattr(config, "logit_scale", None)
        self.logit_scale = (1.0 if scale is None else scale) / getattr(config, "logits_scaling", 1.0)
        self.logit_scale /= getattr(config, "logits_mup_width_multiplier", None) or 1.0
        self.logit_scale *= getattr(config, "output_multiplier", None) or 1.0
        self.num_logits = text_tower.find_cut(model.config)
        self.transform = find_head_transform(model)
        is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
        self.chunk_size = config.attention_chunk_size if is_chunked else None
        self.router_aux_loss = router_aux_loss
        self.looks_ahead = router_loss_over == GLOBAL_BATCH
        self.routed = dict(output_router_logits=True) if router_aux_loss else {}

    def encode(self, micro_batch: family.MicroBatch, *, shared: Tensor | None = None) -> family.Encoded:
        if self.chunk_size is not None:
            from mini_trainer.objectives.families.row_parts import chunk_sequences

            chunks = chunk_sequences(micro_batch.row, self.chunk_size)
            micro_batch = micro_batch.replace(row=replace(micro_batch.row, chunks=chunks))
        inputs = family.describe_row(micro_batch, pad_position=self.pad_position) | self.embed(micro_batch)
        outputs = text_tower.find_decoder(self.model)(**inputs, **self.routed)
        if not self.router_aux_loss:
            return family.Encoded(outputs.last_hidden_state)
        from mini_trainer.objectives.families.routers import sum_router_losses

        router_sum, loads = sum_router_losses(
            outputs.router_logits, micro_batch.row, num_chosen=count_chosen(self.model), loads_of_batch=shared
        )
        return family.Encoded(
            outputs.last_hidden_state,
            {"tokens": self.router_aux_loss * router_sum},
            {"router_loss": router_sum.detach(), "expert_loads": loads},
        )

    def look_ahead(self, micro_batch: family.MicroBatch) -> Tensor:  # (E,) fp64
        """How often each expert is chosen, over all layers."""
        return self.encode(micro_batch).reports["expert_loads"].double().sum(0)

    def embed(self, micro_batch: family.MicroBatch) -> dict[str, Any]:
        """Decoder arguments that add to or replace the row's token ids."""
        return {}

    def project(self, hidden: Tensor) -> Projection:  # (N, H)
        """The projection that computes the logits of these hidden states."""
        if self.transform is not None:
            hidden = self.transform_hidden(hidden)
        if self.logit_scale != 1.0:
            hidden = hidden * self.logit_scale
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, head.bias
        if self.num_logits is not None:
            weight, bias = weight[: self.num_logits], None if bias is None else bias[: self.num_logits]
        return Projection(hidden.to(weight.dtype), weight, bias, self.softcap)

    def transform_hidden(self, hidden: Tensor) -> Tensor:  # (N, H) -> (N, H')
        """Applies the head's transform (BERT) before its projection."""
        head = self.model.get_output_embeddings()
        head.forward = lambda hidden: hidden  # the transform may include the projection itself
        try:
            return self.transform(hidden)
        finally:
            del head.forward

    def run_own(self, micro_batch: family.MicroBatch) -> family.ReferenceForward:
        row, input_ids = micro_batch.row, micro_batch.row.input_ids
        if row.row_group is not None:
            input_ids = row.row_group.gather(input_ids, dim=1)[:, : row.seq_lengths[0]]  # (1, L), without padding
        hidden = text_tower.find_decoder(self.model)(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.collect_own(hidden, self.model(input_ids=input_ids, use_cache=False, **self.routed))

    def collect_own(self, hidden: Tensor, outputs: Any) -> family.ReferenceForward:
        if not self.router_aux_loss:
            return family.ReferenceForward(hidden, outputs.logits)
        router_loss = self.router_aux_loss * outputs.aux_loss * hidden.shape[1]
        return family.ReferenceForward(hidden, outputs.logits, router_loss)


def find_head_transform(model: PreTrainedModel) -> nn.Module | None:
    """The transform between the model's last hidden states and its head's projection; None if it has no weights. It is
    the only other module with its own weights; the start-up check verifies the result."""
    head = model.get_output_embeddings()
    base = text_tower.find_decoder(model)
    inside = {*base.parameters(), *head.parameters()}
    children = [child for child in model.children() if base not in child.modules() and child is not head]
    found = [child for child in children if not inside.issuperset(child.parameters())]
    return found[0] if len(found) == 1 else None


def find_router_loss(model: PreTrainedModel, asked: float | None) -> float:
    """Coefficient of the experts' auxiliary loss: as `asked`, else from the model's config; 0: no such loss."""
    config = text_tower.text_config(model.config)
    if asked is None:
        # JetMoE uses its own key.
        known = (getattr(config, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
        is_on = getattr(config, "output_router_logits", False)
        asked = next((value for value in known if value is not None), 0.0) if is_on else 0.0
    has_loss = "output_router_logits" in inspect.signature(type(model).forward).parameters
    if asked and not (has_loss and count_chosen(model)):
        raise ValueError(
            f"--router-aux-loss {asked}: transformers has no auxiliary loss of experts for model type"
            f" {model.config.model_type!r}; remove the option, or set it to 0"
        )
    return asked


def count_chosen(model: PreTrainedModel) -> int:
    """Number of experts per token; 0 for a model without experts."""
    of_model = getattr(model, "num_experts_per_tok", None)
    return of_model or getattr(text_tower.text_config(model.config), "num_experts_per_tok", None) or 0
