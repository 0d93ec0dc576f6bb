"""The door for objectives: what the rest of the program asks of one. `CausalLM` is the only one so far."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from objectives.micro_batch import MicroBatch, Sample


class PackedModel(Protocol):
    """A torch module that maps a packed micro-batch to its summed loss."""

    model: PreTrainedModel
    backend: str  # of model.attention
    compute_dtype: torch.dtype
    router_loss: Tensor | None  # of the last micro-batch: summed over tokens, times its coefficient; with gradients
    reports: dict[str, Tensor]  # other sums over the last micro-batch, by name; of the same shapes on every rank

    def __call__(self, micro_batch: MicroBatch) -> Tensor:
        """The loss summed over the micro-batch's targets: an fp32 scalar."""
        ...

    def score(self, micro_batch: MicroBatch) -> Tensor:
        """(num_sources, scores) fp64: sums over the micro-batch of what a validation measures. No gradients."""
        ...

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """The packed row's final hidden states (1, T, H), for the start-up check."""
        ...

    def reference(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Of a row that holds one sequence, the model's own answer: hidden states (1, L, H) and the summed loss.

        The loss includes `router_loss`.
        """
        ...


class Objective(Protocol):
    """What is learned from a micro-batch: which model of transformers, from which samples, by which loss."""

    peft_task: str  # how an adapter's config calls it

    def check_config(self, config: PreTrainedConfig, *, trust_remote_code: bool) -> str | None:
        """Why a model of this config cannot have this objective; None if it can."""
        ...

    def make_model(self, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        """A model of this config, randomly initialised, on the device that is torch's default."""
        ...

    def load_model(
        self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model with its weights, and transformers' report on what was missing or of another size."""
        ...

    def wrap(
        self, model: PreTrainedModel, *, backend: str, compute_dtype: torch.dtype, fuses_loss: bool
    ) -> PackedModel:
        """The module that is trained; with `fuses_loss` the loss's arithmetic is compiled."""
        ...

    def pack(self, samples: Sequence[Sample], *, sources: np.ndarray | None = None, num_sources: int = 1) -> MicroBatch:
        """A micro-batch of the samples; `sources` (samples,): from which of `num_sources` data sets each one is."""
        ...

    def summarize(self, sums: Tensor) -> dict[str, float]:
        """What a validation says of sums (scores,) of `PackedModel.score`, by name: `loss` among them."""
        ...

    def make_idle_sample(self) -> Sample:
        """What a rank without work trains on: no target, so that it takes part in every collective."""
        ...

    def make_probe(self, num_tokens: int, num_trained: int, *, longest: int) -> MicroBatch:
        """A micro-batch to measure with: sequences of `longest` tokens, and one with the rest; some of them trained."""
        ...

    def make_check_sample(self, token_ids: np.ndarray) -> Sample:
        """A sample with targets, of these tokens (L,), for the start-up check."""
        ...
