"""The base class of objectives, which turn micro-batches into losses, and the model with its objective's loss.

An objective is a value, made once data, tokenizer and model files are known. It joins a model family, which reads the
row, with targets, a loss and metrics of validations. T tokens in a packed row, L tokens of one sequence, N targets, H
hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mini_trainer.data.columns.base import VISION, CountLabels, DataTask, Sample, list_sequences
from mini_trainer.distributed.world import RowGroup
from mini_trainer.objectives.families.family import (
    NO_SUMS,
    Family,
    MicroBatch,
    ReferenceForward,
    Row,
    RowModel,
    Targets,
)
from mini_trainer.options import ClassificationOptions, KeepOptions, PreferenceOptions, TeacherOptions, VisionOptions
from mini_trainer.options.doors import open_door
from mini_trainer.options.objectives import ALL_OBJECTIVES, OBJECTIVES

if TYPE_CHECKING:
    from mini_trainer.distributed.compilation import Compiled


TARGETS, TOKENS = "targets", "tokens"  # divisors of sums over the global batch: see `Objective.weigh`


@dataclass(frozen=True)
class ObjectiveSettings:
    """Settings of objectives and families. The defaults measure a model unchanged."""

    classification: ClassificationOptions = field(default_factory=ClassificationOptions)
    vision: VisionOptions = field(default_factory=VisionOptions)
    preference: PreferenceOptions = field(default_factory=PreferenceOptions)
    teacher: TeacherOptions = field(default_factory=TeacherOptions)
    keep: KeepOptions = field(default_factory=KeepOptions)
    router_aux_loss: float | None = None
    router_loss_over: str = "sequence"
    head_seed: int | None = None  # of a classifier's head that the model's files do not have; None: they must have it


class LossSums(NamedTuple):
    """Sums over a micro-batch. A tuple, in which FSDP's hooks find the tensors."""

    loss: Tensor  # over its targets: an fp32 scalar with gradients
    extra: Mapping[str, Tensor] = NO_SUMS  # further terms with gradients, by the name of their divisor: see `weigh`
    reports: Mapping[str, Tensor] = NO_SUMS  # others, for metrics; of the same names and shapes on every rank

    @property
    def total(self) -> Tensor:
        """All terms, each undivided."""
        return self.loss + sum(self.extra.values())


@dataclass(frozen=True)
class Scores:
    """Validation results of one micro-batch."""

    sums: Tensor  # (num_sources, scores) fp64
    # (N, 2 + ...) fp64, of each target: the sequence of the micro-batch that it is of, the token there, and what it is
    # and was predicted. None: the sums are all there is.
    predictions: Tensor | None = None


class Loss(ABC):
    """Compares targets with a model's outputs. Holds no part of a model."""

    looks_ahead: ClassVar[bool] = False  # whether `look_ahead` is called with all micro-batches before the first loss

    def prepare(self, row_model: RowModel, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch with additions computed without gradients before its forward pass. Default: none."""
        return micro_batch

    @abstractmethod
    def predict(self, row_model: RowModel, hidden: Tensor, micro_batch: MicroBatch) -> Any:
        """Computes predictions from the row's final hidden states (1, T, H)."""

    def read(self, row_model: RowModel, micro_batch: MicroBatch) -> Any:
        """The same, from the row itself."""
        return self.predict(row_model, row_model.encode(micro_batch).hidden, micro_batch)

    @abstractmethod
    def sum(self, predicted: Any, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        """Compares predictions with targets. `shared`: the sum of `look_ahead` over the global batch and all ranks."""

    @abstractmethod
    def score(self, row_model: RowModel, micro_batch: MicroBatch) -> Scores:
        """Validation results of the micro-batch. No gradients."""

    @abstractmethod
    def sum_own(self, own: ReferenceForward, targets: Targets) -> Tensor:
        """`sum` of the one sequence with these targets, from the logits of the model's own forward pass."""

    def look_ahead(self, row_model: RowModel, micro_batch: MicroBatch) -> Tensor:
        """Sums over the micro-batch that every loss of the global batch needs, of the same shape on every rank."""
        raise NotImplementedError


@dataclass(frozen=True)
class Reference:
    """Values of the samples by a reference model, which are computed before training."""

    column: str  # of the samples
    read: Callable[[np.ndarray], np.ndarray]  # `Scores.sums` (samples, scores) -> values (samples, ...) fp32


@dataclass(frozen=True)
class Objective(ABC):
    """A training objective: which model learns, from which samples, by which loss."""

    family: Family

    name: ClassVar[str]  # as sidecars of data sets have it
    pipeline_tag: ClassVar[str] = "text-generation"  # of models that it trains, on the hub
    metrics: ClassVar[dict[str, bool]]  # numbers of `summarize` that can choose the best model; whether more is better

    @property
    def title(self) -> str:
        """Its name in model cards and on the console."""
        return self.name

    # Sequences of a sample that train, from the first on; the others are only read ahead, forward. None: all train.
    num_trained_sequences: ClassVar[int | None] = None

    @property
    def reference(self) -> Reference | None:
        """The column that it reads of a reference model, if any."""
        return None

    @property
    def teacher_scores(self) -> str | None:
        """Name of a teacher's files next to the data, from which `with_scores` makes the objective; None without."""
        return None

    def with_scores(self, sidecars: Sequence[Mapping[str, Any]]) -> "Objective":
        """The objective for data whose files have these sidecars; ValueError if they do not fit."""
        raise NotImplementedError

    # How it is made.

    @classmethod
    @abstractmethod
    def make_family(cls, settings: ObjectiveSettings) -> Family:
        """The family of the models that it trains, before the model's files are known."""

    @classmethod
    @abstractmethod
    def make(cls, settings: ObjectiveSettings, family: Family, task: DataTask, count: CountLabels | None) -> Self:
        """The objective on data for `task`; ValueError for settings that cannot be used on it."""

    @classmethod
    def list_metrics(cls) -> dict[str, bool]:
        """`metrics` of all its kinds of data."""
        return cls.metrics

    # Samples.

    @abstractmethod
    def with_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        """The family's sample (L tokens) with targets for checks and measurements: at about `num_trained` of those of
        its tokens that are `trainable` (L,) bool, None: at all of them, 0: at none."""

    @abstractmethod
    def pack_targets(self, samples: Sequence[Sample], row: Row) -> Targets:
        """The targets of the samples in their packed row."""

    def weigh(self, num_targets: int, num_tokens: int, samples: Iterable[Sample]) -> dict[str, float]:
        """Divisors of sums over the global batch, by name: `targets` of its samples' losses, and others of
        what `LossSums.extra` names. `num_tokens`: of all samples that have targets."""
        return {TARGETS: num_targets, TOKENS: num_tokens}

    # The loss and its metrics.

    @abstractmethod
    def make_loss(self, *, is_fused: bool = False) -> Loss:
        """`is_fused`: its arithmetic is compiled."""

    @abstractmethod
    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        """A validation's report, from sums (scores,) and predictions (N, ...) of all ranks: `loss` among them.
        Of `predictions`, each row as of `Scores` without its first two numbers."""

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a training step beside its loss, from `LossSums.reports`, summed over the global batch."""
        return {}

    def describe_source(self, reports: Mapping[str, np.ndarray], source: int, divisor: float) -> dict[str, Any]:
        """Metrics of one of several data sets in a step beside its loss. `divisor`: of the sums, 0 without targets."""
        return {}

    # Derived from the above.

    def pack(
        self,
        samples: Sequence[Sample],
        *,
        sources: np.ndarray | None = None,
        num_sources: int = 1,
        row_group: RowGroup | None = None,
    ) -> MicroBatch:
        """A micro-batch of the samples. `sources` (samples,): the one of `num_sources` data sets that each is from.
        With a `row_group` this rank's part of it. Where no sequence has more than one token, an idle sample joins them:
        torch.compile takes 0 and 1 for constants, and would compile such a row by itself, whenever it comes."""
        if max(len(sequence) for sample in samples for sequence in list_sequences(sample)) == 1:
            samples = [*samples, self.make_idle_sample()]
        row, extras = self.family.pack(samples)
        targets = replace(self.pack_targets(samples, row), num_sources=num_sources)
        sequences = targets.find_sequences(row)  # (N,)
        row = replace(row, has_targets=row.has_targets.index_fill(0, sequences, True))
        if sources is not None:
            sample_of = np.repeat(np.arange(len(samples)), [len(list_sequences(sample)) for sample in samples])
            of_targets = sample_of[sequences.numpy()]  # never an idle sample, which has no targets
            targets = targets.with_sources(sources, of_targets)
        if row_group is not None:
            from mini_trainer.objectives.families.row_parts import take_part

            row, part = take_part(row, row_group)
            targets = targets.take_part(part)
        return MicroBatch(row, targets, extras=extras)

    def make_idle_sample(self) -> Sample:
        """The sample of a rank without work: two tokens, no target, so that it takes part in every collective."""
        return self.with_targets({"input_ids": np.zeros(2, dtype=np.int64)}, np.ones(2, dtype=bool), num_trained=0)

    def make_check_sample(self, token_ids: np.ndarray) -> Sample:
        """A sample with targets, of these tokens (L,), for the start check."""
        return self.with_targets(*self.family.make_check_sample(token_ids))

    def make_probe(
        self, num_tokens: int, num_trained: int, *, longest: int, row_group: RowGroup | None = None
    ) -> MicroBatch:
        """A micro-batch to measure with: sequences of `longest` tokens, and one with the rest; some of them trained."""
        lengths = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
        samples = [
            self.with_targets(sample, np.ones(length, dtype=bool), num_trained=-(-num_trained * length // num_tokens))
            for sample, length in zip(self.family.make_probes(lengths), lengths, strict=True)
        ]
        return self.pack(samples, row_group=row_group)


@dataclass(frozen=True)
class Unlabeled:
    """Packs samples of any kind of data as an `Objective` does, for forward passes that need no targets."""

    family: Family

    def pack(self, samples: Sequence[Sample], *, row_group: RowGroup | None = None, **counted: Any) -> MicroBatch:
        """A micro-batch of the samples. `sources` and `num_sources` mean nothing: no targets are counted by them."""
        row, extras = self.family.pack(samples)
        if row_group is not None:
            from mini_trainer.objectives.families.row_parts import take_part

            row, _ = take_part(row, row_group)
        return MicroBatch(row, Targets(torch.zeros(0, dtype=torch.int64)), extras=extras)

    def make_idle_sample(self) -> Sample:
        return {"input_ids": np.zeros(2, dtype=np.int64)}

    def weigh(self, num_targets: int, num_tokens: int, samples: Iterable[Sample]) -> dict[str, float]:
        return {}


def find_class(name: str) -> type[Objective]:
    """The class of the objective of this name."""
    return open_door(ALL_OBJECTIVES[name].place)


def list_metrics() -> dict[str, bool]:
    """The metrics that some objective's validations report, and whether more of each is better."""
    found: dict[str, bool] = {}
    for name in ALL_OBJECTIVES:
        found |= find_class(name).list_metrics()
    return found


def find_data_kind(name: str) -> str:
    """The kind of data that the objective of this name learns from."""
    return ALL_OBJECTIVES[name].data or name


def make_family(name: str, settings: ObjectiveSettings) -> Family:
    """The model family of the objective of this name."""
    return find_class(name).make_family(settings)


def make_objective(
    name: str, settings: ObjectiveSettings, family: Family, task: DataTask, count: CountLabels | None = None
) -> Objective:
    """The objective on data for `task`; ValueError if the data is for another one. `count`: of classifiers."""
    if task.objective == VISION and name != VISION:
        raise ValueError(
            f"--objective {name}: learns from texts alone, but the data has images (process_data.py --images): give"
            f" --objective causal-lm, or data that was tokenized for {find_data_kind(name)}"
        )
    if task.objective != find_data_kind(name):
        options = [other for other in ALL_OBJECTIVES if other in OBJECTIVES or other == task.objective]
        fitting = [f"--objective {other}" for other in options if task.objective == find_data_kind(other)]
        raise ValueError(
            f"--objective {name}: the data was tokenized for {task.objective}: give {' or '.join(fitting)}, or tokenize"
            " the data again"
        )
    return find_class(name).make(settings, family, task, count)


LOSS, ROW_MODEL = "loss", "row_model"  # who needs sums over the global batch


@dataclass
class KernelSwitch:
    """Whether the modules of a model, and copies of them, compute by fused kernels where they have some."""

    num_modules: int = 0  # that have some
    trials: set[Any] = field(default_factory=set)  # of these, see model.kernels.layers
    is_on: bool = True

    def __deepcopy__(self, memo: dict) -> "KernelSwitch":
        return self

    @contextmanager
    def turned_off(self) -> Iterator[None]:
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


class PackedModel(nn.Module):
    """A model that is trained, sharded and validated. H hidden size, T tokens of a row, L of one sequence."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        *,
        backend: str,
        compute_dtype: torch.dtype,
        kept: Collection[str] = (),
        is_fused: bool = False,
    ):
        """`backend`: of model.attention. `kept`: parameters that compute in fp32. `is_fused`: the loss is compiled."""
        super().__init__()
        self.model, self.backend, self.compute_dtype, self.kept = model, backend, compute_dtype, kept
        self.row_model, self.loss = objective.family.open_row_model(model), objective.make_loss(is_fused=is_fused)
        self.kernels = KernelSwitch()
        self.is_whole = False  # one rank holds all weights, without FSDP
        self.placed_weights: Any = None  # PlacedWeights: all, or those beside FSDP's that compute in fp32
        self.frees_head = False  # after each forward pass, whose results then cannot refer to it
        self.compiled: tuple[Compiled, ...] = ()  # the blocks' forward methods, with --compile

    @property
    def looks_ahead(self) -> bool:
        """Whether the losses of a global batch share sums over all of it (`look_ahead`)."""
        return self.loss.looks_ahead or self.row_model.looks_ahead

    def forward(self, micro_batch: MicroBatch, shared: Mapping[str, Tensor] | None = None) -> LossSums:
        """The micro-batch's loss, and all that counts beside it. `shared`: sums of `look_ahead`."""
        shared = shared or {}
        predicted, extra, reports = self._read(micro_batch, shared.get(ROW_MODEL))
        sums = self.loss.sum(predicted, micro_batch, shared=shared.get(LOSS))
        return LossSums(sums.loss, {**extra, **sums.extra}, {**reports, **sums.reports})

    def _read(self, micro_batch: MicroBatch, shared: Tensor | None) -> tuple[Any, Mapping, Mapping]:
        """Predictions, and the sums of `encode`; the hidden states of the whole row are not kept beyond this."""
        hidden, extra, reports = self.row_model.encode(micro_batch, shared=shared)
        return self.loss.predict(self.row_model, hidden, micro_batch), extra, reports

    @torch.no_grad()
    def prepare(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch as `forward` and `score` take it. All ranks call this together."""
        return self.loss.prepare(self.row_model, micro_batch)

    @torch.no_grad()
    def predict(self, micro_batch: MicroBatch, predict: Callable[[RowModel, MicroBatch], Any]) -> Any:
        """Calls `predict` with this model's `RowModel`."""
        return predict(self.row_model, micro_batch)

    @torch.no_grad()
    def look_ahead(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Sums that the micro-batch adds to those which all losses of its global batch share, by who needs them."""
        sums = {LOSS: self.loss.look_ahead(self.row_model, micro_batch)} if self.loss.looks_ahead else {}
        return sums | ({ROW_MODEL: self.row_model.look_ahead(micro_batch)} if self.row_model.looks_ahead else {})

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch) -> Scores:
        return self.loss.score(self.row_model, micro_batch)

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:  # (1, T, H)
        """The packed row's final hidden states, of all its parts, for the self-checks."""
        hidden, row_group = self.row_model.encode(micro_batch).hidden, micro_batch.row.row_group
        # FSDP's hooks want no view.
        return hidden.clone() if row_group is None else row_group.gather(hidden, dim=1)

    def reference(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The model's own answer for the row's one sequence: hidden states (1, L, H), and the whole summed loss."""
        with self.kernels.turned_off():
            own = self.row_model.run_own(micro_batch)
        row, targets = micro_batch.row, micro_batch.targets
        if row.row_group is not None:
            targets = targets.gather(row.row_group, num_tokens=row.seq_lengths[0])
        return own.hidden, self.loss.sum_own(own, targets) + own.extra_loss
