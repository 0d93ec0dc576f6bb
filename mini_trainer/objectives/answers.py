"""Losses of whole answers: their tokens in a packed row, and the summed log-probability of each.

T tokens in a packed row, N trained tokens among them, S answers.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mini_trainer.distributed.row_group import RowGroup, sum_parts
from mini_trainer.objectives.families.micro_batch import MicroBatch
from mini_trainer.objectives.families.text import TextReader
from mini_trainer.objectives.next_tokens import NextTokens, TokenLoss
from mini_trainer.objectives.sample_numbers import SampleNumbers
from mini_trainer.objectives.sequence_logps import sum_logps


@dataclass
class AnswerTargets(NextTokens):
    """The next tokens of answers; samples have one or several."""

    places: Tensor = None  # (N,) int64: the answer that each token is of
    lengths: Tensor = None  # (samples, answers of each) fp32: trained tokens
    numbers: SampleNumbers = None
    reference: Tensor | None = None  # (samples, 2) fp32: log-probabilities by the reference model; None: not known

    def with_sample_sources(self, sources: np.ndarray) -> "AnswerTargets":
        return replace(self, numbers=self.numbers.with_sources(sources))

    def take_part(self, part: slice) -> "AnswerTargets":
        first, end = np.searchsorted(self.index.numpy(), [part.start, part.stop])
        return replace(self, **vars(super().take_part(part)), places=self.places[first:end].contiguous())

    def gather(self, row_group: RowGroup, *, num_tokens: int) -> "AnswerTargets":
        own = super().gather(row_group, num_tokens=num_tokens)
        return replace(self, index=own.index, labels=own.labels, places=torch.zeros_like(own.index))


@dataclass(frozen=True)
class AnswerLoss(TokenLoss):
    """A loss of answers' summed log-probabilities."""

    def read_logps(self, reader: TextReader, micro_batch: MicroBatch) -> Tensor:  # (S,) fp32
        """The summed log-probabilities of the micro-batch's answers, with gradients."""
        tokens, targets, row_group = self.predict(reader, micro_batch), micro_batch.targets, micro_batch.row.row_group
        logps = sum_logps(tokens, targets.places, targets.lengths.numel(), compiled=self.is_fused)
        if row_group is None:
            return logps
        # Each rank has summed up its part of the row, and has gradients for that alone.
        return logps + (sum_parts(logps, row_group) - logps.detach())


def count_once(loss: Tensor, num_ranks: int) -> Tensor:
    """A loss that several ranks have computed: its gradient as it is, and each rank's share of its value."""
    return loss + (loss / num_ranks - loss).detach()
