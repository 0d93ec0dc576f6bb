"""Interface of model families: making and loading transformers' models, and running them on packed rows.

A micro-batch is what a rank trains on: one packed row of samples, the family's additional inputs, and the targets.
Ranks can share a row (--context-parallel): it is split into parts, and gathered again. T tokens in a packed row of n
sequences, L tokens of one of them, N targets, or ranks that share a row, H hidden size, V vocabulary size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mini_trainer.data.columns.base import Sample, list_sequences
from mini_trainer.distributed.world import RowGroup
from mini_trainer.objectives.families.text_tower import LeftOut, find_decoder

Part = TypeVar("Part")
Loaded = tuple[PreTrainedModel, dict[str, Any]]  # with transformers' report of missing and mismatched weights
# Options with which transformers reports them: the caller refuses them, or reinitializes a classifier's head.
REPORTED = dict(use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True)


@dataclass
class Blocks:
    """Image tokens, which attend to each other in both directions."""

    of: Tensor  # (T,) int64: index of each token's image; -1 for text
    are_everywhere: bool = True  # False: only in layers whose attention is limited to a window (Gemma 4)


@dataclass  # not frozen: torch.compile would recompile frozen ones for each new value of a field
class Row:
    """Sequences packed into one row: tokens, positions, borders and attention rules."""

    input_ids: Tensor  # (1, T) int64
    position_ids: Tensor  # (1, T) int64, restarts at 0 in every sequence
    cu_seqlens: Tensor  # (n + 1,) int32, cumulative lengths
    max_seqlen: int
    seq_lengths: list[int]
    has_targets: Tensor  # (n,) bool: whether each sequence has any; `Objective.pack` sets it
    is_two_sided: bool = False  # whether bidirectional attention is allowed
    blocks: Blocks | None = None
    chunks: "Row | None" = None  # the same row with borders inside sequences (see `row_parts`)
    # The ranks that share the row: this is a part of it, with the whole row's borders. None: all of it.
    row_group: RowGroup | None = None


@dataclass
class Targets:
    """An objective's targets for a row. Subclasses of objectives add fields."""

    index: Tensor  # (N,) int64: what has a target, by its number in the row: tokens, or for some objectives sequences
    sources: Tensor | None = None  # (N,) int64: each target's data set; None: all are of the first
    num_sources: int = 1  # number of data sets

    def find_sequences(self, row: Row) -> Tensor:  # (N,)
        """Index of each target's sequence in the whole row."""
        first = 0 if row.row_group is None else row.row_group.rank * row.input_ids.shape[1]
        return torch.searchsorted(row.cu_seqlens[1:].long(), self.index + first, right=True)

    def list_places(self, row: Row) -> Tensor:  # (N, 2)
        """The sequence of each target, a token, and its position there."""
        return torch.stack([self.find_sequences(row), row.position_ids[0, self.index]], dim=1)

    def find_sources(self) -> Tensor:  # (N,) int64
        """The data set of each target."""
        return torch.zeros_like(self.index) if self.sources is None else self.sources

    def with_sources(self, sources: np.ndarray, sample_of: np.ndarray) -> "Targets":
        """The targets with their data sets, from the samples' (samples,) and each target's sample (N,)."""
        return replace(self, sources=torch.from_numpy(sources[sample_of]))

    def sum_by_source(self, values: Tensor) -> Tensor:  # (N, m) -> (num_sources, m)
        sums = values.new_zeros(self.num_sources, values.shape[1])
        return sums.index_add_(0, self.find_sources(), values)

    def report_sources(self, losses: Tensor, divisors: Tensor) -> dict[str, Tensor]:  # (N,) each
        """Reports of each data set's summed loss and divisor, if there are several."""
        if self.num_sources == 1:
            return {}
        sums = self.sum_by_source(torch.stack([losses.detach(), divisors], dim=1))
        return {"source_losses": sums[:, 0], "source_divisors": sums[:, 1]}

    def take_part(self, part: slice) -> "Targets":
        """The targets of the row's tokens in `part` (--context-parallel)."""
        raise NotImplementedError(f"{type(self).__name__} cannot be divided over the ranks that share a row")

    def gather(self, row_group: RowGroup, *, num_tokens: int) -> "Targets":
        """The targets of all parts of a row, of its first `num_tokens` tokens. All ranks of the group call this."""
        raise NotImplementedError(f"{type(self).__name__} cannot be divided over the ranks that share a row")


class MicroBatch:
    """Input of one forward and backward pass on one rank.
    A plain class, since it is passed to blocks: FSDP's hooks would descend into a dataclass and cast its tensors."""

    def __init__(self, row: Row, targets: Targets, *, extras: Any = None):
        """`extras`: the family's additional inputs."""
        self.row, self.targets, self.extras = row, targets, extras

    def replace(self, **parts: Any) -> "MicroBatch":
        """A copy with other parts, by their names."""
        return MicroBatch(**vars(self) | parts)

    def map(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Applies `function` to every tensor."""
        parts = {name: map_tensors(getattr(self, name), function) for name in ("row", "targets", "extras")}
        return self.replace(**parts)

    def to(self, device: torch.device) -> "MicroBatch":
        """Copies to `device`, without blocking if the memory is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        return self.map(Tensor.pin_memory)


def map_tensors(part: Part, function: Callable[[Tensor], Tensor]) -> Part:
    """Applies `function` to all tensors in `part`, also in nested dataclasses, dicts and micro-batches."""
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, MicroBatch):
        return part.map(function)
    if isinstance(part, dict):
        return {name: map_tensors(value, function) for name, value in part.items()}
    if is_dataclass(part):
        return replace(part, **{entry.name: map_tensors(getattr(part, entry.name), function) for entry in fields(part)})
    return part


def pack_row(sequences: Sequence[np.ndarray]) -> Row:
    """Packs the token ids of sequences, each (length,), into one row."""
    lengths = [len(input_ids) for input_ids in sequences]
    return Row(
        input_ids=torch.from_numpy(np.concatenate(sequences).astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        max_seqlen=max(lengths),
        seq_lengths=lengths,
        has_targets=torch.zeros(len(lengths), dtype=torch.bool),
    )


def describe_row(micro_batch: MicroBatch, *, pad_position: int | None) -> dict[str, Any]:
    """Arguments of a base model's forward pass over the packed row."""
    row = micro_batch.row
    return dict(
        input_ids=row.input_ids,
        position_ids=number_positions(row, pad_position=pad_position),
        use_cache=False,
        cu_seq_lens_q=row.cu_seqlens,
        cu_seq_lens_k=row.cu_seqlens,
        max_length_q=row.max_seqlen,
        max_length_k=row.max_seqlen,
        micro_batch=micro_batch,  # for the functions of model.attention
    )


def number_positions(row: Row, *, pad_position: int | None) -> Tensor:  # (1, T)
    """Each token's position in its sequence, from 0, or, if padding has a position (RoBERTa), from the next one.
    In the second case padding tokens get that position and are not counted, as in the model's own forward."""
    if pad_position is None:
        return row.position_ids
    is_counted = (row.input_ids != pad_position).long()
    counts = is_counted.cumsum(dim=1)
    index = torch.arange(counts.shape[1], device=counts.device)
    firsts = index - row.position_ids  # (1, T): index of the first token of each token's sequence
    before = (counts - is_counted).gather(1, firsts)
    return (counts - before) * is_counted + pad_position


def find_pad_position(model: PreTrainedModel) -> int | None:
    """Padding's index in the model's table of positions (RoBERTa), after which sequences start; None without one."""
    table = find_position_table(model)
    return None if table is None else table.padding_idx


def find_position_table(model: PreTrainedModel) -> nn.Embedding | None:
    """The model's learned position embeddings; None for other kinds of positions (rotary embeddings)."""
    tables = [
        module
        for name, module in find_decoder(model).named_modules()
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, nn.Embedding)
    ]
    return tables[0] if tables else None


def check_positions(model: PreTrainedModel, *, longest: int) -> None:
    """ValueError if the longest sample, of `longest` tokens, exceeds the model's positions."""
    table = find_position_table(model)
    if table is None:
        return
    limit = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    if longest > limit:
        raise ValueError(
            f"model type {model.config.model_type!r} has positions for {limit} tokens, but the longest sample has"
            f" {longest}: drop longer samples (--max-tokens-per-gpu {limit} --drop-overlong), or tokenize the data"
            f" again with --max-sample-num-tokens {limit}"
        )


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
    """Another model that reads the same rows without gradients."""

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
    def load_model(self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool) -> Loaded:
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
