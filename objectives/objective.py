"""The door for objectives: what the rest of the program asks of one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from objectives.columns import CountLabels, Task
from objectives.micro_batch import MicroBatch, Sample
from objectives.text_tower import LeftOut
from ranks.row_group import RowGroup


@dataclass(frozen=True)
class Scores:
    """What a validation learns from a micro-batch."""

    sums: Tensor  # (num_sources, scores) fp64
    # (N, 2 + ...) fp64, of each target: the sequence of the micro-batch that it is of, the token there, and what it is
    # and was predicted. None: the sums are all there is.
    predictions: Tensor | None = None


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

    def score(self, micro_batch: MicroBatch) -> Scores:
        """What a validation measures. No gradients."""
        ...

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """The packed row's final hidden states (1, T, H), of all its parts, for the start-up check."""
        ...

    def reference(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Of a row that holds one sequence, the model's own answer: hidden states (1, L, H) and the summed loss.

        The loss includes `router_loss`.
        """
        ...


class Objective(Protocol):
    """What is learned from a micro-batch: which model of transformers, from which samples, by which loss."""

    name: str  # as --objective and the sidecars of data sets have it
    peft_task: str  # how an adapter's config calls it
    keeps_unused: bool  # whether an export holds the tensors of the model's files that its class has no place for
    row_group: (
        RowGroup | None
    )  # the ranks that share a packed row, of which `pack` and `make_probe` give this one's part

    def open_data(self, task: Task, count_labels: CountLabels) -> None:
        """Learns what the data is for; ValueError where that is something else. Before any of the following."""
        ...

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Learns which tokenizer made the data, before a model is wrapped."""
        ...

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

    def leave_out(self, model: PreTrainedModel) -> LeftOut:
        """Takes out of the model what neither computes nor trains: an export has it from the model's files."""
        ...

    def list_foreign(self, config: PreTrainedConfig) -> dict[int, str]:
        """Token ids that stand for what the model is not given, and how the config calls each: not for data."""
        ...

    def find_head(self, model: PreTrainedModel) -> list[str]:
        """Names of the modules that train by every method, since the model's files need not have them."""
        ...

    def find_tower_layers(self, model: PreTrainedModel) -> list[str]:
        """Names of the linear layers outside of the decoder that adapters may have."""
        ...

    def make_missing(self, model: PreTrainedModel, names: Iterable[str]) -> dict[str, Tensor]:
        """Of those parameters that the model's files do not have (or of another shape) those that may begin anew."""
        ...

    def wrap(
        self, model: PreTrainedModel, *, backend: str, compute_dtype: torch.dtype, fuses_loss: bool
    ) -> PackedModel:
        """The module that is trained; with `fuses_loss` the loss's arithmetic is compiled."""
        ...

    def pack(self, samples: Sequence[Sample], *, sources: np.ndarray | None = None, num_sources: int = 1) -> MicroBatch:
        """A micro-batch of the samples; `sources` (samples,): from which of `num_sources` data sets each one is."""
        ...

    def measure_divisor(self, num_targets: int, samples: Iterable[Sample]) -> float:
        """What the summed loss of a global batch of these samples is divided by: its mean's own weights, summed up."""
        ...

    def list_metrics(self) -> dict[str, bool]:
        """Of the numbers of `summarize` those that can say which model is the best, and whether more is better."""
        ...

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        """What a validation says of sums (scores,) and predictions (N, ...) of all ranks: `loss` among them.

        Of `predictions`, each row as of `Scores` without its first two numbers.
        """
        ...

    def describe_prediction(self, prediction: np.ndarray) -> dict[str, Any]:
        """One of these rows as it is written to a file."""
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
