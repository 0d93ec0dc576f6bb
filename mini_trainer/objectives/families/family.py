"""Interface of model families: making and loading transformers' models, and running them on packed rows.

T tokens in a packed row, L tokens of one sequence, N tokens with a target, H hidden size, V vocabulary size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mini_trainer.data.columns.base import Sample, list_sequences
from mini_trainer.objectives.families.micro_batch import MicroBatch, Row, find_pad_position, pack_row
from mini_trainer.objectives.families.text_tower import LeftOut

NUM_PROBE_IDS = 64  # different tokens in a probe, so that a mixture of experts uses several experts
NO_SUMS: Mapping[str, Tensor] = MappingProxyType({})


class Encoded(NamedTuple):
    """A packed row as a model has read it."""

    hidden: Tensor  # (1, T, H): the final hidden states
    extra: Mapping[str, Tensor] = NO_SUMS  # terms of the loss: see `LossSums`
    reports: Mapping[str, Tensor] = NO_SUMS


@dataclass(frozen=True)
class ReferenceForward:
    """Results of a model's own forward pass over one sequence: the reference for the start-up check."""

    hidden: Tensor  # (1, L, H)
    logits: Tensor  # (1, L, V), or (1, C) for C classes
    extra_loss: Tensor | float = 0.0  # summed over the sequence's tokens


class Teacher(Protocol):
    """Another model, or this one at another time, that reads the same rows without gradients."""

    def read(self, micro_batch: MicroBatch, predict: Callable[["RowModel", MicroBatch], Any]) -> Any:
        """Calls `predict` with the teacher's own `RowModel`. Ranks that share a model call this together."""


class RowModel(ABC):
    """Runs one model on packed rows. Not a module: it has no parameters."""

    looks_ahead = False  # whether `look_ahead` is called with all micro-batches before the first `encode` of a step

    def __init__(self, model: PreTrainedModel):
        self.model, self.pad_position = model, find_pad_position(model)
        self.teacher: Teacher | None = None

    @abstractmethod
    def encode(self, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> Encoded:
        """Runs the model on the packed row. `shared`: in a step, the sum of `look_ahead` over batch and ranks."""

    def look_ahead(self, micro_batch: MicroBatch) -> Tensor:
        """Sums over the micro-batch that `encode` needs of the whole global batch, of the same shape on every rank."""
        raise NotImplementedError

    @abstractmethod
    def run_own(self, micro_batch: MicroBatch) -> ReferenceForward:
        """Runs the model's own forward over the row's only sequence. Ranks that share a row call this together."""


@dataclass(frozen=True)
class Family(ABC):
    """A kind of model. The defaults suit a text-only model whose files hold all its weights, which all train."""

    peft_task = ""  # task_type in an adapter's config
    keeps_unused = True  # whether exports include stored tensors that the model class does not use

    @abstractmethod
    def check_config(self, config: PreTrainedConfig, *, trust_remote_code: bool) -> str | None:
        """Why the family does not support models with this config; None if it does."""

    @abstractmethod
    def make_model(self, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        """Makes a model with this config, randomly initialized, on torch's default device."""

    @abstractmethod
    def load_model(
        self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """Loads the model; also returns transformers' report of missing and mismatched weights."""

    @abstractmethod
    def open_row_model(self, model: PreTrainedModel) -> RowModel:
        """Makes the `RowModel` that runs the model on rows."""

    def complete(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
    ) -> "Family":
        """The family with everything that it needs from a model's files and the data's tokenizer."""
        return self

    def leave_out(self, model: PreTrainedModel) -> LeftOut:
        """Removes unused parts from the model; exports copy them from the model's files."""
        return LeftOut()

    def list_foreign(self, config: PreTrainedConfig) -> dict[int, str]:
        """Placeholder ids for inputs that the model does not get, with the config's names; data must not use them."""
        return {}

    def find_head(self, model: PreTrainedModel) -> list[str]:
        """Names of the modules that every method trains fully, since the model's files may lack them."""
        return []

    def find_tower_layers(self, model: PreTrainedModel) -> list[str]:
        """Names of the linear layers outside the decoder that adapters can target."""
        return []

    def make_missing(self, model: PreTrainedModel, names: Iterable[str]) -> dict[str, Tensor]:
        """Initial values for parameters that the files lack or have in another shape, if they may be reinitialized."""
        return {}

    def pack(self, samples: Sequence[Sample]) -> tuple[Row, Any]:
        """Packs the samples into one row; also returns additional model inputs."""
        return pack_row([ids for sample in samples for ids in list_sequences(sample)]), None

    def make_check_sample(self, token_ids: np.ndarray) -> tuple[Sample, np.ndarray]:
        """Makes a sample of these tokens (L,) for the start-up check; also returns its trainable tokens (L',) bool."""
        return {"input_ids": token_ids}, np.ones(len(token_ids), dtype=bool)

    def make_probes(self, lengths: Sequence[int]) -> list[Sample]:
        """Makes samples of these lengths for measuring time and memory."""
        return [{"input_ids": np.arange(length) % NUM_PROBE_IDS} for length in lengths]
