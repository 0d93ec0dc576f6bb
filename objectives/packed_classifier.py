"""A classifier that maps a packed micro-batch to its summed loss: the model's own code, from its states to its logits.

T tokens in a packed row, n sequences in it, N targets, C classes, K numbers of a target, H hidden size.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from objectives.class_loss import ClassLoss
from objectives.micro_batch import MicroBatch
from objectives.objective import Scores
from objectives.packed_row import describe_row, find_pad_position
from objectives.text_tower import find_base

NO_TOKEN = -1  # an id that no token has


class PackedClassifier(nn.Module):
    """A model for the classes of sequences, or of tokens.

    The base model runs once over the packed row. What its head reads of each sequence (or labelled token) is then
    handed to the model's own forward pass, as if each were a sequence of one token.
    """

    def __init__(
        self, model: PreTrainedModel, *, backend: str, compute_dtype: torch.dtype, loss: ClassLoss, of_tokens: bool
    ):
        super().__init__()
        self.model = model
        self.backend = backend  # of model.attention
        self.compute_dtype = compute_dtype
        self.loss, self.of_tokens = loss, of_tokens
        self.pooling = None if of_tokens else find_pooling(model)
        self.pad_position = find_pad_position(model)
        self.takes_types = "token_type_ids" in inspect.signature(type(find_base(model)).forward).parameters
        self.router_loss: Tensor | None = None
        self.reports: dict[str, Tensor] = {}

    def encode(self, micro_batch: MicroBatch) -> Tensor:  # (1, T, H)
        """The packed row's final hidden states."""
        self.reports = {}
        arguments = describe_row(micro_batch, pad_position=self.pad_position) | self.describe_types(micro_batch)
        return find_base(self.model)(**arguments).last_hidden_state

    def describe_types(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        if micro_batch.token_type_ids is None or not self.takes_types:
            return {}
        return {"token_type_ids": micro_batch.token_type_ids}

    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:  # (N, C) fp32, (N, K)
        """The logits of the micro-batch's targets, and these targets."""
        hidden, trained = self.encode(micro_batch), micro_batch.trained_index
        if self.of_tokens:
            states, targets = hidden[:, trained], micro_batch.targets[trained, None]  # (1, N, H)
        else:
            states, targets = self.pool(hidden[0], micro_batch)[trained, None], micro_batch.targets[trained]
        with states_for_tokens(self.model, states):
            input_ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
            logits = self.model(input_ids=input_ids).logits
        return logits.reshape(len(targets), logits.shape[-1]).float(), targets

    def pool(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:  # (T, H) -> (n, H)
        """Of each sequence the state that the model's head reads."""
        starts, ends = micro_batch.cu_seqlens[:-1].long(), micro_batch.cu_seqlens[1:].long()
        if self.pooling == "first":
            return hidden[starts]
        num_tokens, num_sequences = len(hidden), len(starts)
        index = torch.arange(num_tokens, device=hidden.device)
        sequence_of = torch.searchsorted(ends, index, right=True)  # (T,)
        if self.pooling == "mean":
            sums = torch.zeros(
                num_sequences, hidden.shape[1], device=hidden.device
            )  # in bf16 long sums would stand still
            sums = sums.index_add(0, sequence_of, hidden.float())
            return (sums / (ends - starts)[:, None]).to(hidden.dtype)
        # The last token that is not padding's, whose id a sequence may end with; the first one if all are.
        pad_id = self.model.config.pad_token_id
        if pad_id is not None:
            index = torch.where(micro_batch.input_ids[0] == pad_id, 0, index)
        return hidden[starts.scatter_reduce(0, sequence_of, index, "amax")]

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Sum of the losses of the micro-batch's targets: fp32 scalar."""
        logits, targets = self.predict(micro_batch)
        losses = self.loss.measure(logits, targets)
        if micro_batch.num_sources > 1:
            values = torch.stack([losses.detach(), self.loss.weigh(targets)], dim=1)  # (N, 2)
            sums = values.new_zeros(micro_batch.num_sources, 2)
            if micro_batch.sources is not None:
                sums.index_add_(0, micro_batch.sources, values)
            self.reports["source_losses"], self.reports["source_divisors"] = sums.unbind(1)
        return losses.sum()

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch) -> Scores:
        """Of each data set the summed loss and what it is divided by; of each target where it is, it, and the logits.

        A target is at a token of a sequence of the micro-batch; that of a whole sequence at its first one.
        """
        logits, targets = self.predict(micro_batch)
        scores = torch.stack([self.loss.measure(logits, targets), self.loss.weigh(targets)], dim=1).double()  # (N, 2)
        sums = scores.new_zeros(micro_batch.num_sources, scores.shape[1])
        sources = micro_batch.sources
        sources = torch.zeros(len(scores), dtype=torch.long, device=sums.device) if sources is None else sources
        trained, ends = micro_batch.trained_index, micro_batch.cu_seqlens[1:].long()
        sequences = torch.searchsorted(ends, trained, right=True) if self.of_tokens else trained
        tokens = micro_batch.position_ids[0, trained] if self.of_tokens else torch.zeros_like(trained)
        places = torch.stack([sequences, tokens], dim=1).double()  # (N, 2)
        rows = torch.cat([places, targets.double(), logits.double()], dim=1)
        return Scores(sums.index_add_(0, sources, scores), rows)

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:  # (1, T, H)
        """`encode` for the self-checks: an entry point of its own, which FSDP knows about."""
        return self.encode(micro_batch).clone()  # FSDP's hooks want no view

    def reference(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The model's own answer for the row's one sequence: hidden states (1, L, H) and the summed loss."""
        arguments = dict(input_ids=micro_batch.input_ids) | self.describe_types(micro_batch)
        hidden = find_base(self.model)(**arguments, use_cache=False).last_hidden_state
        targets, is_of_class = micro_batch.targets, self.loss.label_type == "single"  # (L,), or (1, K)
        labels = targets[None] if self.of_tokens else targets[:, 0].long() if is_of_class else targets
        outputs = self.model(**arguments, labels=labels)
        trained = micro_batch.trained_index
        if self.loss.is_plain:
            return hidden, outputs.loss * len(trained)
        logits = outputs.logits.reshape(-1, outputs.logits.shape[-1]).float()[trained]
        return hidden, self.loss.measure(logits, targets.reshape(len(targets), -1)[trained]).sum()


@contextmanager
def states_for_tokens(model: PreTrainedModel, states: Tensor) -> Iterator[None]:
    """Within, the model's base gives `states` (sequences, tokens, H), whatever it is given."""
    base, config = find_base(model), model.config
    pooler = getattr(base, "pooler", None)
    outputs = BaseModelOutputWithPoolingAndCrossAttentions(
        last_hidden_state=states, pooler_output=None if pooler is None else pooler(states)
    )
    own_forward = vars(base).get("forward")  # where something was put before the class's
    base.forward = lambda *args, **kwargs: outputs
    pad_token_id, config.pad_token_id = config.pad_token_id, NO_TOKEN  # what it is given has no padding
    try:
        yield
    finally:
        config.pad_token_id = pad_token_id
        if own_forward is None:
            del base.forward
        else:
            base.forward = own_forward


def find_pooling(model: PreTrainedModel) -> Literal["first", "last", "mean"]:
    """Which state of a sequence the model's head reads; the check at the start tells whether that is so."""
    if getattr(model.config, "classifier_pooling", None) == "mean":  # ModernBERT
        return "mean"
    is_causal = any(getattr(module, "is_causal", False) for module in find_base(model).modules())
    return "last" if is_causal or isinstance(model, GenericForSequenceClassification) else "first"
