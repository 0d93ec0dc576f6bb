"""Classification and regression models on encoders and decoders; the model's own head maps states to logits.

T tokens in a packed row, n sequences in it, N targets, C classes, H hidden size.
"""

import copy
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from mini_trainer.data.columns.base import Sample, list_sequences
from mini_trainer.objectives.families import family
from mini_trainer.objectives.families.text_tower import find_base

NO_TOKEN = -1  # not the id of any token


# The activation of the logits, as sentence-transformers' CrossEncoder and vLLM read it in a config.
IDENTITY = "torch.nn.modules.linear.Identity"


@dataclass(frozen=True)
class Labels:
    """Labels of a model's head, as stored in an export's config."""

    names: tuple[str, ...]  # of the classes, or of the numbers to predict
    problem_type: str | None = None  # for sequences, in transformers' terms

    def write_into(self, config: PreTrainedConfig) -> None:
        """Sets these labels in `config`."""
        config.id2label = dict(enumerate(self.names))
        config.label2id = {name: i for i, name in enumerate(self.names)}
        if self.problem_type is not None:
            config.problem_type = self.problem_type  # pyrefly: ignore[bad-assignment]
        if self.problem_type == "regression":  # one number passes through a sigmoid otherwise
            config.sentence_transformers = {"activation_fn": IDENTITY}


@dataclass(frozen=True)
class ClassifierFamily(family.Family):
    """Classifiers of tokens or of whole sequences."""

    of_tokens: bool
    labels: Labels | None = None  # set once the data is known
    pad_token_id: int | None = None  # set once the tokenizer is known
    seed: int | None = None  # for a head that the model's files lack; None: they must have it

    keeps_unused = False  # unused tensors such as a language model's head

    @property
    def peft_task(self) -> str:
        return "TOKEN_CLS" if self.of_tokens else "SEQ_CLS"

    @property
    def auto_class(self) -> Any:
        return AutoModelForTokenClassification if self.of_tokens else AutoModelForSequenceClassification

    def check_config(self, config: PreTrainedConfig, *, trust_remote_code: bool) -> str | None:
        what = "token-classification" if self.of_tokens else "sequence-classification"
        is_custom = trust_remote_code and self.auto_class.__name__ in (getattr(config, "auto_map", None) or {})
        if type(config) not in self.auto_class._model_mapping and not is_custom:
            return f"model type {config.model_type!r} has no {what} in transformers"
        if type(config.get_text_config(decoder=True)) is not type(config) and not is_custom:
            return (
                f"model type {config.model_type!r} is multimodal (its config contains others), but classifiers train"
                " on text only: give its text model, saved separately"
            )
        return None

    def make_model(self, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        self.labels.write_into(config)
        return self.auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)

    def load_model(self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool) -> family.Loaded:
        loading = dict(dtype=dtype, trust_remote_code=trust_remote_code, **family.REPORTED)
        return self.auto_class.from_pretrained(model_dir, num_labels=len(self.labels.names), **loading)

    def find_head(self, model: PreTrainedModel) -> list[str]:
        """Names of the modules with weights outside the base model, and of the base's pooler (BERT)."""
        base, pooler = find_base(model), getattr(find_base(model), "pooler", None)
        parts = [child for child in model.children() if child is not base] + [pooler]
        return [name for name, module in model.named_modules() if module in parts and list(module.parameters())]

    def make_missing(self, model: PreTrainedModel, names: Iterable[str]) -> dict[str, Tensor]:
        """Values of head parameters that the model's files lack, as transformers initializes them."""
        if self.seed is None:
            return {}
        shell, head = copy.deepcopy(model).to("meta"), self.find_head(model)
        digest = hashlib.sha256(f"{self.seed} {' '.join(head)}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            for name in head:
                for module in shell.get_submodule(name).modules():
                    for key, param in module.named_parameters(recurse=False):
                        module.register_parameter(key, nn.Parameter(torch.zeros(param.shape)))
                    shell._init_weights(module)
            shell._init_weights(shell)  # ModernBERT initializes its head as a whole
        made = {f"{name}.{key}": p for name in head for key, p in shell.get_submodule(name).named_parameters()}
        return {name: made[name].detach() for name in names if name in made}

    def complete(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
    ) -> "ClassifierFamily":
        return replace(self, pad_token_id=tokenizer.pad_token_id)

    def open_row_model(self, model: PreTrainedModel) -> "ClassifierRowModel":
        if self.pad_token_id is not None and self.pad_token_id < model.config.vocab_size:
            model.config.pad_token_id = self.pad_token_id  # as in an export: decoders search for it
        return ClassifierRowModel(model, of_tokens=self.of_tokens)

    def pack(self, samples: Sequence[Sample]) -> tuple[family.Row, Tensor | None]:
        """The row, and which text of its pair each token belongs to (1, T), if any sample has these types."""
        row = replace(family.pack_row([ids for sample in samples for ids in list_sequences(sample)]), is_two_sided=True)
        if not any("token_type_ids" in sample for sample in samples):
            return row, None
        types = [sample.get("token_type_ids", np.zeros(len(sample["input_ids"]))) for sample in samples]
        return row, torch.from_numpy(np.concatenate(types).astype(np.int64))[None]


class ClassifierRowModel(family.RowModel):
    """Reads rows with a classifier. The base model runs once over the packed row; the state that its head reads from
    each sequence (or labelled token) then passes through the model's own forward, as a sequence of one token."""

    def __init__(self, model: PreTrainedModel, *, of_tokens: bool):
        super().__init__(model)
        self.of_tokens = of_tokens
        self.pooling = None if of_tokens else find_pooling(model)
        self.takes_types = "token_type_ids" in inspect.signature(type(find_base(model)).forward).parameters

    def encode(self, micro_batch: family.MicroBatch, *, shared: Tensor | None = None) -> family.Encoded:
        arguments = family.describe_row(micro_batch, pad_position=self.pad_position) | self.describe_types(micro_batch)
        return family.Encoded(find_base(self.model)(**arguments).last_hidden_state)

    def describe_types(self, micro_batch: family.MicroBatch) -> dict[str, Tensor]:
        if micro_batch.extras is None or not self.takes_types:
            return {}
        return {"token_type_ids": micro_batch.extras}

    def classify(self, hidden: Tensor, row: family.Row, index: Tensor) -> Tensor:  # (1, T, H), (N,) -> (N, C) fp32
        """The logits of these tokens or sequences of the row."""
        # (1, N, H), or (N, 1, H) for sequences
        states = hidden[:, index] if self.of_tokens else self.pool(hidden[0], row)[index, None]
        with states_for_tokens(self.model, states):
            input_ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
            logits = self.model(input_ids=input_ids).logits
        return logits.reshape(len(index), logits.shape[-1]).float()

    def pool(self, hidden: Tensor, row: family.Row) -> Tensor:  # (T, H) -> (n, H)
        """For each sequence, the state that the model's head reads."""
        starts, ends = row.cu_seqlens[:-1].long(), row.cu_seqlens[1:].long()
        if self.pooling == "first":
            return hidden[starts]
        num_tokens, num_sequences = len(hidden), len(starts)
        index = torch.arange(num_tokens, device=hidden.device)
        sequence_of = torch.searchsorted(ends, index, right=True)  # (T,)
        if self.pooling == "mean":
            sums = torch.zeros(num_sequences, hidden.shape[1], device=hidden.device)  # fp32: bf16 sums would saturate
            sums = sums.index_add(0, sequence_of, hidden.float())
            return (sums / (ends - starts)[:, None]).to(hidden.dtype)
        # The last token whose id is not the padding's, with which a sequence may end; the first if there is none.
        pad_id = self.model.config.pad_token_id
        if pad_id is not None:
            index = torch.where(row.input_ids[0] == pad_id, 0, index)
        return hidden[starts.scatter_reduce(0, sequence_of, index, "amax")]

    def run_own(self, micro_batch: family.MicroBatch) -> family.ReferenceForward:
        arguments = dict(input_ids=micro_batch.row.input_ids) | self.describe_types(micro_batch)
        hidden = find_base(self.model)(**arguments, use_cache=False).last_hidden_state
        return family.ReferenceForward(hidden, self.model(**arguments).logits)


@contextmanager
def states_for_tokens(model: PreTrainedModel, states: Tensor) -> Iterator[None]:
    """Makes the model's base return `states` (sequences, tokens, H) for any input."""
    base, config = find_base(model), model.config
    pooler = getattr(base, "pooler", None)
    outputs = BaseModelOutputWithPoolingAndCrossAttentions(
        last_hidden_state=states, pooler_output=None if pooler is None else pooler(states)
    )
    own_forward = vars(base).get("forward")  # set if the class's forward was wrapped
    base.forward = lambda *args, **kwargs: outputs
    pad_token_id, config.pad_token_id = config.pad_token_id, NO_TOKEN  # the input has no padding
    try:
        yield
    finally:
        config.pad_token_id = pad_token_id
        if own_forward is None:
            del base.forward
        else:
            base.forward = own_forward


def find_pooling(model: PreTrainedModel) -> Literal["first", "last", "mean"]:
    """Which state of a sequence the model's head reads; the start-up check verifies it."""
    if getattr(model.config, "classifier_pooling", None) == "mean":  # ModernBERT
        return "mean"
    is_causal = any(getattr(module, "is_causal", False) for module in find_base(model).modules())
    return "last" if is_causal or isinstance(model, GenericForSequenceClassification) else "first"
