"""The door for model families: which model of transformers there is, and how it reads a packed row.

T tokens in a packed row, L tokens of one sequence, N tokens with a target, H hidden size, V vocabulary size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from families.micro_batch import MicroBatch, Row, pack_row
from families.packed_row import find_pad_position
from families.sample import Sample, list_sequences
from pretrained.text_tower import LeftOut

NUM_PROBE_IDS = 64  # different tokens in a probe, so that a mixture of experts uses several of them


@dataclass(frozen=True)
class Own:
    """What a model's own forward pass says of one sequence: the oracle of the start check."""

    hidden: Tensor  # (1, L, H)
    logits: Tensor  # (1, L, V), or (1, C) of C classes
    extra_loss: Tensor | float = 0.0  # summed over the sequence's tokens


class Teacher(Protocol):
    """Another model, or this one at another time, that reads the same rows without gradients."""

    def read(self, micro_batch: MicroBatch, predict: Callable[["Reader", MicroBatch], Any]) -> Any:
        """What `predict` gives of the teacher's own reader. Ranks that share a model call this together."""


class Reader(ABC):
    """How one model reads packed rows. Not a module: it holds nothing that the model does not.

    `encode` leaves in `extra_losses` what counts in the loss beside the targets' own, by the name of the divisor of its
    sum over the global batch, and in `reports` other sums over the micro-batch, of the same shapes on every rank.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.pad_position = model, find_pad_position(model)
        self.extra_losses: dict[str, Tensor] = {}
        self.reports: dict[str, Tensor] = {}
        self.teacher: Teacher | None = None

    @abstractmethod
    def encode(self, micro_batch: MicroBatch) -> Tensor:  # (1, T, H)
        """The packed row's final hidden states."""

    @abstractmethod
    def run_own(self, micro_batch: MicroBatch) -> Own:
        """The model's own forward pass over the row's one sequence. Ranks that share a row call this together."""


@dataclass(frozen=True)
class Family(ABC):
    """A kind of models. The defaults are those of a model of text alone, all of which is in its files and trains."""

    peft_task = ""  # how an adapter's config calls it
    keeps_unused = True  # whether an export holds the tensors of the model's files that its class has no place for

    @abstractmethod
    def check_config(self, config: PreTrainedConfig, *, trust_remote_code: bool) -> str | None:
        """Why a model of this config is none of the family; None if it is one."""

    @abstractmethod
    def make_model(self, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        """A model of this config, randomly initialised, on the device that is torch's default."""

    @abstractmethod
    def load_model(
        self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model with its weights, and transformers' report of what was missing or of another size."""

    @abstractmethod
    def open_reader(self, model: PreTrainedModel) -> Reader:
        """What reads rows with the model."""

    def complete(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
    ) -> "Family":
        """The family with all that it needs of a model's files and the data's tokenizer."""
        return self

    def leave_out(self, model: PreTrainedModel) -> LeftOut:
        """Takes out of the model what neither computes nor trains: an export has it from the model's files."""
        return LeftOut()

    def list_foreign(self, config: PreTrainedConfig) -> dict[int, str]:
        """Token ids that stand for what the model is not given, and how the config calls each: not for data."""
        return {}

    def find_head(self, model: PreTrainedModel) -> list[str]:
        """Names of the modules that train by every method, since the model's files need not have them."""
        return []

    def find_tower_layers(self, model: PreTrainedModel) -> list[str]:
        """Names of the linear layers outside of the decoder that adapters may have."""
        return []

    def make_missing(self, model: PreTrainedModel, names: Iterable[str]) -> dict[str, Tensor]:
        """Initial values for those of the parameters that the files lack, or have in another shape, that may begin
        anew."""
        return {}

    def pack(self, samples: Sequence[Sample]) -> tuple[Row, Any]:
        """One row of the samples, and what else the model is given."""
        return pack_row([ids for sample in samples for ids in list_sequences(sample)]), None

    def make_check_sample(self, token_ids: np.ndarray) -> tuple[Sample, np.ndarray]:
        """A sample of these tokens (L,) for the start check, and which of its tokens may be trained (L',) bool."""
        return {"input_ids": token_ids}, np.ones(len(token_ids), dtype=bool)

    def make_probes(self, lengths: Sequence[int]) -> list[Sample]:
        """Samples of these lengths to measure time and memory with."""
        return [{"input_ids": np.arange(length) % NUM_PROBE_IDS} for length in lengths]
