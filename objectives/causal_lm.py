"""Causal language models: from packed token ids to the summed cross-entropy of each next token.

T tokens in a packed row, N trained tokens among them, L tokens of one sequence, H hidden size, V vocabulary size.
"""

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from chat.labels import IGNORED
from objectives.columns import CountLabels, Task, check_task
from objectives.embedding_noise import EmbeddingNoise
from objectives.micro_batch import MicroBatch, Sample, chunk_sequences, make_idle_sample, pack_samples
from objectives.objective import Scores
from objectives.packed_row import describe_row, find_pad_position
from objectives.router_loss import sum_router_losses
from objectives.row_part import gather_row, take_part
from objectives.sight import Sight
from objectives.text_tower import (
    LeftOut,
    find_base,
    find_decoder,
    find_needed,
    find_placeholders,
    is_multimodal,
    keep_text_tower,
    text_config,
)
from objectives.token_loss import TrainedTokens, score_tokens, sum_token_loss
from ranks.row_group import RowGroup

MAX_EXPONENT = 700.0  # of a perplexity, which is a number and not infinity
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # as configs call that of logits
WITHOUT_SCALE = ("aya_vision", "cohere2_vision")  # whose forward in transformers drops their text model's logit_scale
NUM_PROBE_IDS = 64  # different tokens in a probe, so that a mixture of experts uses several of them


class CausalLM:
    """The objective of causal language models (see `objectives.objective.Objective`)."""

    name, peft_task = "causal-lm", "CAUSAL_LM"
    keeps_unused = True

    def __init__(
        self,
        *,
        router_aux_loss: float | None = None,
        label_smoothing: float = 0.0,
        noise: EmbeddingNoise | None = None,
    ):
        """`router_aux_loss`: how much a mixture of experts' auxiliary loss counts; None: as the model's config says.

        `label_smoothing` and `noise` concern what is trained; validations measure without them.
        """
        self.router_aux_loss, self.label_smoothing, self.noise = router_aux_loss, label_smoothing, noise
        self.row_group: RowGroup | None = None

    def open_data(self, task: Task, count_labels: CountLabels) -> None:
        check_task(task, self.name)

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        pass

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

    def find_head(self, model: PreTrainedModel) -> list[str]:
        return []

    def find_tower_layers(self, model: PreTrainedModel) -> list[str]:
        return []

    def make_missing(self, model: PreTrainedModel, names: Iterable[str]) -> dict[str, Tensor]:
        return {}

    def wrap(
        self, model: PreTrainedModel, *, backend: str, compute_dtype: torch.dtype, fuses_loss: bool
    ) -> "PackedCausalLM":
        packed_model = PackedCausalLM(
            model,
            backend=backend,
            compute_dtype=compute_dtype,
            fuses_loss=fuses_loss,
            router_aux_loss=find_router_loss(model, self.router_aux_loss),
            label_smoothing=self.label_smoothing,
        )
        if self.noise is not None:
            self.noise.attach(packed_model)
        return packed_model

    def pack(self, samples: Sequence[Sample], *, sources: np.ndarray | None = None, num_sources: int = 1) -> MicroBatch:
        return take_part(pack_samples(samples, sources=sources, num_sources=num_sources), self.row_group)

    def measure_divisor(self, num_targets: int, samples: Iterable[Sample]) -> float:
        return num_targets

    def list_metrics(self) -> dict[str, bool]:
        return {"loss": False, "perplexity": False, "token_accuracy": True}

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        loss_sum, num_right, num_targets = sums.tolist()
        loss = loss_sum / num_targets
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, MAX_EXPONENT)),
            "token_accuracy": num_right / num_targets,
            "num_loss_counted_tokens": int(num_targets),
        }

    def describe_prediction(self, prediction: np.ndarray) -> dict[str, Any]:
        raise AssertionError("a language model's validation gives no predictions")

    def make_idle_sample(self) -> Sample:
        return make_idle_sample()

    def make_probe(self, num_tokens: int, num_trained: int, *, longest: int) -> MicroBatch:
        """About `num_trained` of the tokens are trained."""
        samples = []
        for start in range(0, num_tokens, longest):
            length = min(longest, num_tokens - start)
            labels = np.full(length, IGNORED)
            labels[1 : 1 + -(-num_trained * length // num_tokens)] = 1
            samples.append((np.arange(length) % NUM_PROBE_IDS, labels, None))
        return take_part(pack_samples(samples), self.row_group)

    def make_check_sample(self, token_ids: np.ndarray) -> Sample:
        return token_ids, token_ids, None


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


class PackedCausalLM(nn.Module):
    """A causal language model that maps a packed micro-batch to its summed loss, without ever holding all logits."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: str,
        compute_dtype: torch.dtype,
        fuses_loss: bool = False,
        router_aux_loss: float = 0.0,
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        self.model = model
        self.backend = backend  # of model.attention
        self.compute_dtype = compute_dtype
        config = text_config(model.config)
        caps = (getattr(config, name, None) for name in SOFTCAPS)
        self.softcap = next((cap for cap in caps if cap is not None), None)
        # Cohere and Muse Glimmer multiply the logits, Granite and Inkling divide them; all are linear, so the hidden
        # states take the factor.
        scale = getattr(config, "logit_scale", None)
        self.logit_scale = (1.0 if scale is None else scale) / getattr(config, "logits_scaling", 1.0)
        self.logit_scale /= getattr(config, "logits_mup_width_multiplier", None) or 1.0
        self.logit_scale *= getattr(config, "output_multiplier", None) or 1.0
        self.transform = [find_head_transform(model)]  # in a list: it is a part of the model already
        self.pad_position = find_pad_position(model)
        is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
        self.chunk_size = config.attention_chunk_size if is_chunked else None
        self.fuses_loss = fuses_loss
        self.router_aux_loss = router_aux_loss
        self.sight: Sight | None = None  # of a model that sees images
        self.label_smoothing = label_smoothing
        self.router_loss: Tensor | None = None
        self.reports: dict[str, Tensor] = {}

    def encode(self, micro_batch: MicroBatch) -> Tensor:  # (1, T, H)
        """The packed row's final hidden states; leaves `router_loss` and what it is about."""
        self.router_loss, self.reports = None, {}
        if self.chunk_size is not None:
            micro_batch = replace(micro_batch, chunks=chunk_sequences(micro_batch, self.chunk_size))
        routed = dict(output_router_logits=True) if self.router_aux_loss else {}
        row = describe_row(micro_batch, pad_position=self.pad_position)
        if self.sight is not None:
            row |= self.sight.embed(micro_batch)
        outputs = find_decoder(self.model)(**row, **routed)
        if self.router_aux_loss:
            router_sum, loads = sum_router_losses(
                outputs.router_logits,
                micro_batch.cu_seqlens,
                micro_batch.trained_index,
                num_chosen=count_chosen(self.model),
                row_group=micro_batch.row_group,
            )
            self.router_loss = self.router_aux_loss * router_sum
            self.reports = {"router_loss": router_sum.detach(), "expert_loads": loads}
        return outputs.last_hidden_state

    def transform_hidden(self, hidden: Tensor) -> Tensor:  # (N, H) -> (N, H')
        """What enters the head's matrix: the hidden states, unless the model does something to them first (BERT)."""
        (transform,) = self.transform
        if transform is None:
            return hidden
        head = self.model.get_output_embeddings()
        head.forward = pass_on  # the matrix itself may be a part of what is called here
        try:
            return transform(hidden)
        finally:
            del head.forward

    def predict(self, micro_batch: MicroBatch) -> TrainedTokens:
        """What the loss of the micro-batch's trained tokens is computed from."""
        hidden = self.transform_hidden(self.encode(micro_batch)[0, micro_batch.trained_index])  # (N, H)
        if self.logit_scale != 1.0:
            hidden = hidden * self.logit_scale
        head, weights = self.model.get_output_embeddings(), micro_batch.target_weights
        return TrainedTokens(
            hidden=hidden,
            weight=head.weight,
            targets=micro_batch.targets[micro_batch.trained_index],
            bias=head.bias,
            token_weights=None if weights is None else weights[micro_batch.trained_index],
            softcap=self.softcap,
        )

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Sum of the (weighted) cross-entropy over the micro-batch's trained tokens: fp32 scalar."""
        tokens, by_source = self.predict(micro_batch), None
        if micro_batch.num_sources > 1:
            sums = torch.zeros(micro_batch.num_sources, device=micro_batch.targets.device)
            self.reports["source_losses"] = sums
            by_source = None if micro_batch.sources is None else (micro_batch.sources, sums)
        return sum_token_loss(tokens, smoothing=self.label_smoothing, compiled=self.fuses_loss, by_source=by_source)

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch) -> Scores:
        """Of each data set the summed loss, the number of targets that were most likely, and that of targets."""
        scores = score_tokens(self.predict(micro_batch))  # (N, 3)
        sums = scores.new_zeros(micro_batch.num_sources, scores.shape[1])
        if micro_batch.sources is None:
            sums[0] = scores.sum(0)
            return Scores(sums)
        return Scores(sums.index_add_(0, micro_batch.sources, scores))

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:  # (1, T, H)
        """`encode` for the self-checks: an entry point of its own, which FSDP knows about."""
        hidden, row_group = self.encode(micro_batch), micro_batch.row_group
        # FSDP's hooks want no view.
        return hidden.clone() if row_group is None else row_group.gather(hidden, dim=1)

    def reference(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The model's own answer for the row's one sequence: hidden states (1, L, H) and the summed loss."""
        micro_batch = gather_row(micro_batch)
        input_ids = micro_batch.input_ids  # (1, L)
        sees = self.sight is not None
        own = self.sight.describe_own(micro_batch) if sees else dict(input_ids=input_ids)
        base = find_base(self.model) if sees else find_decoder(self.model)
        hidden = base(**own, use_cache=False).last_hidden_state
        routed = dict(output_router_logits=True) if self.router_aux_loss else {}
        outputs = self.model(**own, use_cache=False, **routed)
        logits = outputs.logits  # (1, L, V)
        loss_sum = nn.functional.cross_entropy(
            logits[0].float(),
            micro_batch.targets,
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if self.router_aux_loss:
            loss_sum = loss_sum + self.router_aux_loss * outputs.aux_loss * input_ids.shape[1]
        return hidden, loss_sum


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
