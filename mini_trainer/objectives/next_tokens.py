"""Language modelling: the summed cross-entropy of each next token, with or without images in the text.

T tokens in a packed row, N trained tokens among them, L tokens of one sequence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mini_trainer.data.columns.base import CAUSAL_LM, IGNORED, VISION, CountLabels, DataTask, Sample
from mini_trainer.data.columns.token_columns import WEIGHTS_COLUMN
from mini_trainer.distributed.world import RowGroup
from mini_trainer.objectives.families.family import Family, ReferenceForward
from mini_trainer.objectives.families.micro_batch import MicroBatch, Row, Targets
from mini_trainer.objectives.families.text import TextFamily, TextRowModel
from mini_trainer.objectives.objective import (
    TARGETS,
    Loss,
    LossSums,
    Objective,
    ObjectiveSettings,
    Scores,
)
from mini_trainer.objectives.token_loss import (
    CHUNK_BYTES,
    CrossEntropy,
    MeasureChunk,
    TrainedTokens,
    score_tokens,
    sum_token_loss,
)
from mini_trainer.options.doors import WEIGHTINGS

MAX_EXPONENT = 700.0  # of a perplexity, which is a number and not infinity


@dataclass
class NextTokens(Targets):
    """Each token's successor, if it is trained."""

    labels: Tensor = None  # (T,) int64; IGNORED where nothing is trained or the sequence ends
    weights: Tensor | None = None  # (T,) fp32, of each label's loss; None: all are 1

    def take_part(self, part: slice) -> "NextTokens":
        first, end = np.searchsorted(self.index.numpy(), [part.start, part.stop])
        return NextTokens(
            self.index[first:end] - part.start,
            None if self.sources is None else self.sources[first:end].contiguous(),
            self.num_sources,
            pad_to(self.labels, part.stop, IGNORED)[part].contiguous(),
            None if self.weights is None else pad_to(self.weights, part.stop, 0)[part].contiguous(),
        )

    def gather(self, row_group: RowGroup, *, num_tokens: int) -> "NextTokens":
        labels = row_group.gather(self.labels, dim=0)[:num_tokens]
        return NextTokens(torch.nonzero(labels != IGNORED)[:, 0], labels=labels)


def pad_to(tensor: Tensor, length: int, value: int) -> Tensor:
    return nn.functional.pad(tensor, (0, max(0, length - len(tensor))), value=value)


@dataclass(frozen=True)
class TokenLoss(Loss):
    """Cross-entropy of next tokens. Label smoothing applies to training; validations measure without it."""

    smoothing: float = 0.0
    is_fused: bool = False
    weighting: str | None = None  # of each token's loss by the model's own probabilities (token_loss.WEIGHTINGS)

    def predict(self, row_model: TextRowModel, hidden: Tensor, micro_batch: MicroBatch) -> TrainedTokens:
        """The inputs of the loss of the micro-batch's trained tokens."""
        targets = micro_batch.targets
        projection = row_model.project(hidden[0, targets.index])  # (N, H)
        return TrainedTokens(
            hidden=projection.hidden,
            weight=projection.weight,
            targets=targets.labels[targets.index],
            bias=projection.bias,
            token_weights=None if targets.weights is None else targets.weights[targets.index],
            softcap=projection.softcap,
        )

    def sum(self, predicted: TrainedTokens, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        targets = micro_batch.targets
        measure = CrossEntropy(predicted, self.smoothing, self.is_fused, self.weighting)
        if self.weighting is None and targets.num_sources == 1:
            return LossSums(sum_token_loss(predicted, measure))
        return self.sum_by_source(targets, predicted, measure, num_values=1 if self.weighting is None else 2)

    def sum_by_source(
        self,
        targets: NextTokens,
        tokens: TrainedTokens,
        measure: MeasureChunk,
        *,
        num_values: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> LossSums:
        """The summed loss; reports the sums of the tokens' values for each data set."""
        sums = torch.zeros(targets.num_sources, num_values, device=targets.labels.device)
        loss = sum_token_loss(tokens, measure, chunk_bytes=chunk_bytes, by_source=(targets.find_sources(), sums))
        return LossSums(loss, reports={"source_losses": sums[:, 0], "source_values": sums})

    def score(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Scores:
        return Scores(self.score_sources(self.read(row_model, micro_batch), micro_batch.targets))

    def score_sources(self, tokens: TrainedTokens, targets: NextTokens) -> Tensor:  # (num_sources, 3) fp64
        """Summed loss, number of correct top-1 predictions, and number of targets of each data set."""
        scores = score_tokens(tokens)  # (N, 3)
        sums = scores.new_zeros(targets.num_sources, scores.shape[1])
        return sums.index_add_(0, targets.find_sources(), scores)

    def sum_own(self, own: ReferenceForward, targets: NextTokens) -> Tensor:
        logits, labels = own.logits[0, targets.index].float(), targets.labels[targets.index]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=self.smoothing)
        if self.weighting is not None:
            losses = losses * WEIGHTINGS[self.weighting](logits.log_softmax(dim=1), labels[:, None])[:, 0]
        return losses.sum()


@dataclass(frozen=True)
class CausalLM(Objective):
    """Language modelling on chats, completions and documents."""

    family: Family = field(default_factory=TextFamily)
    label_smoothing: float = 0.0
    weighting: str | None = None  # of each token's loss by the model's own probabilities

    name = CAUSAL_LM
    metrics = {"loss": False, "perplexity": False, "token_accuracy": True}  # noqa: RUF012

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> Family:
        return TextFamily(settings.router_aux_loss, settings.router_loss_over)

    @classmethod
    def make(
        cls, settings: ObjectiveSettings, family: Family, task: DataTask, count_labels: CountLabels | None
    ) -> "CausalLM":
        o = settings.classification
        return cls(family, settings.noise, label_smoothing=o.label_smoothing, weighting=o.loss_weighting)

    def with_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        labels = np.where(trainable, sample["input_ids"], IGNORED)
        if num_trained is not None:
            labels[:] = IGNORED
            labels[1 : 1 + num_trained] = 1
        return sample | {"labels": labels}

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> NextTokens:
        """Either all samples have weights or none, but for an idle one."""
        labels = shift(np.concatenate([sample["labels"] for sample in samples]), row, last=IGNORED).astype(np.int64)
        weights = None
        if WEIGHTS_COLUMN in samples[0]:
            given = [sample.get(WEIGHTS_COLUMN, np.zeros(len(sample["labels"]))) for sample in samples]
            weights = torch.from_numpy(shift(np.concatenate(given), row, last=0).astype(np.float32))
        index = torch.from_numpy(np.flatnonzero(labels != IGNORED))
        return NextTokens(index, labels=torch.from_numpy(labels), weights=weights)

    def make_loss(self, *, is_fused: bool = False) -> TokenLoss:
        return TokenLoss(self.label_smoothing, is_fused, self.weighting)

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, float]:
        if self.weighting is None:
            return {}
        return {"cross_entropy": float(reports["source_values"][:, 1].sum()) / (divisors[TARGETS] or 1)}

    def describe_source(self, reports: Mapping[str, np.ndarray], source: int, divisor: float) -> dict[str, Any]:
        if self.weighting is None:
            return {}
        cross_entropy = float(reports["source_values"][source, 1])
        return {"cross_entropy": cross_entropy / divisor if divisor else None}

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        loss_sum, num_right, num_targets = sums.tolist()
        loss = loss_sum / num_targets
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, MAX_EXPONENT)),
            "token_accuracy": num_right / num_targets,
            "num_loss_counted_tokens": int(num_targets),
        }


def shift(values: np.ndarray, row: Row, *, last: int) -> np.ndarray:  # (T,)
    """Each token's successor's value; a sequence's last token, which predicts nothing, has `last`."""
    shifted = np.append(values[1:], last)
    shifted[row.cu_seqlens.numpy()[1:] - 1] = last
    return shifted


@dataclass(frozen=True)
class VisionLanguage(CausalLM):
    """The next tokens of texts with images."""

    name = VISION

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> Family:
        from mini_trainer.objectives.families.vision import VisionLanguageFamily

        vision, text_family = settings.vision, super().make_family(settings)
        return VisionLanguageFamily(text_family, tuple(vision.freeze), max_patches=vision.max_image_tokens_per_gpu)
