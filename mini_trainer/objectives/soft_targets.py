"""A teacher's most probable tokens at each trained token, as files and samples hold them, and divergences from a
teacher, with their derivatives by the student's logits.

p is the student's distribution, q the teacher's. N trained tokens, R of them in a chunk, V vocabulary size, K tokens
that a teacher's file names for each of them; its bucket K + 1 holds all others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_trainer.objectives import next_tokens
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.families.text import TextRowModel
from mini_trainer.objectives.objective import Scores

SOFT_COLUMN = "soft_targets"  # of samples: records (trained tokens,) of `make_record_type`


HALF, SINGLE = "<f2", "<f4"  # half precision keeps three digits of even the smallest probability


def make_record_type(top_k: int, number: str = HALF) -> np.dtype:
    """A token's record: probabilities as -log q."""
    return np.dtype([("ids", "<i4", (top_k,)), ("nll", number, (top_k,)), ("tail", number), ("target", number)])


@dataclass
class SoftTargets:
    """What records say of a micro-batch's trained tokens, or of a chunk's."""

    ids: Tensor  # (N, K) int64
    log_q: Tensor  # (N, K + 1) fp32: of the K tokens and of all others together; sums to 1

    def slice(self, part: slice) -> "SoftTargets":
        return SoftTargets(self.ids[part], self.log_q[part])


def read_records(records: Sequence[np.ndarray]) -> SoftTargets:
    """The samples' records as tensors; the rounding error of the sum of probabilities is corrected."""
    joined = np.concatenate(records)
    nll = np.concatenate([joined["nll"], joined["tail"][:, None]], axis=1).astype(np.float32)
    return SoftTargets(torch.from_numpy(joined["ids"].astype(np.int64)), torch.from_numpy(-nll).log_softmax(dim=1))


def make_records(
    ids: np.ndarray, nll: np.ndarray, tail: np.ndarray, target: np.ndarray, *, number: str = HALF
) -> np.ndarray:  # (N,)
    """Records of N tokens: ids and -log q of the most probable ones (N, K), -log q of the rest and the target (N,)."""
    records = np.empty(len(ids), make_record_type(ids.shape[1], number))
    records["ids"], records["nll"], records["tail"], records["target"] = ids, nll, tail, target
    return records


def make_even_records(num_tokens: int, top_k: int) -> np.ndarray:
    """Records for checks and measurements: the first K ids, as probable as all others together."""
    nll = np.full((num_tokens, top_k), np.log(top_k + 1))
    return make_records(np.tile(np.arange(top_k), (num_tokens, 1)), nll, nll[:, 0], nll[:, 0] + 3)


@dataclass(frozen=True)
class TopTokenLoss(next_tokens.TokenLoss):
    """Scores tokens; nothing trains on it."""

    top_k: int = 1
    temperature: float = 1.0
    num_ids: int | None = 0  # of the tokenizer: rows of the head beyond them are padding; None: all are compared

    def score(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Scores:
        """Sums: nothing. Predictions: the K ids, their -log q, that of all others together, and the target's."""
        targets, found = micro_batch.targets, self.score_top(self.read(row_model, micro_batch))
        places = targets.list_places(micro_batch.row).double()
        return Scores(found.new_zeros(targets.num_sources, 1), torch.cat([places, found], dim=1))

    def score_top(self, tokens: next_tokens.TrainedTokens) -> Tensor:  # (N, 2K + 2) fp64
        parts = [tokens.hidden.new_zeros(0, 2 * self.top_k + 2, dtype=torch.float64)]
        for chunk in next_tokens.iterate_chunks(len(tokens.targets), len(tokens.weight)):
            logits = next_tokens.compute_logits(tokens, chunk)[:, : self.num_ids].float()
            log_q = logits.div_(self.temperature).log_softmax(dim=1)
            top, of_target = log_q.topk(self.top_k, dim=1), log_q.gather(1, tokens.targets[chunk, None])
            tail = log_q.scatter_(1, top.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
            parts.append(
                torch.cat([top.indices.double(), *(-part.double() for part in (top.values, tail, of_target))], 1)
            )
        return torch.cat(parts)


@dataclass(frozen=True)
class TopTokens(next_tokens.CausalLM):
    """A language model as a teacher."""

    top_k: int = 1
    temperature: float = 1.0
    num_ids: int = 0

    def make_loss(self, *, is_fused: bool = False) -> TopTokenLoss:
        return TopTokenLoss(is_fused=is_fused, top_k=self.top_k, temperature=self.temperature, num_ids=self.num_ids)

    def read_predictions(self, predictions: np.ndarray) -> np.ndarray:  # (N, 2 + 2K + 2) -> (N,)
        """A file's records of the targets, from `Scores.predictions` of all ranks."""
        return read_top(predictions, self.top_k)


def read_top(predictions: np.ndarray, top_k: int, *, number: str = HALF) -> np.ndarray:  # (N, 2 + 2K + 2) -> (N,)
    """Records of the targets, from the predictions of `TopTokenLoss`."""
    ids, nll, rest = np.split(predictions[:, 2:], [top_k, 2 * top_k], axis=1)
    return make_records(ids, nll, *rest.T, number=number)


class Divergence(NamedTuple):
    values: Tensor  # (R, 1)
    d_logits: Tensor  # (R, V)


def diverge_from_top(log_p: Tensor, soft: SoftTargets, *, share: float = 0.0, scale: float = 1.0) -> Divergence:
    """KL(q || p) over the K tokens and one bucket for all others; and share * p + scale * its derivatives in place of
    `log_p` (R, V), so that a cross-entropy's derivatives need no memory of their own. The student's probability of all
    others counts as no less than the smallest normal number."""
    log_named = log_p.gather(1, soft.ids)
    p = log_p.exp_()
    p_named = p.gather(1, soft.ids)
    p_others = p.scatter_(1, soft.ids, 0).sum(dim=1, keepdim=True).clamp_(min=torch.finfo(p.dtype).tiny)
    q, log_buckets = soft.log_q.exp(), torch.cat([log_named, p_others.log()], dim=1)
    d_buckets = log_buckets.exp() - q
    p.mul_(share + scale * d_buckets[:, -1:] / p_others)  # the others share their bucket's as they share its p
    p.scatter_(1, soft.ids, share * p_named + scale * d_buckets[:, :-1])
    return Divergence(weigh_logs(q, soft.log_q - log_buckets), p)


def diverge_forward(logits: Tensor, teacher: Tensor) -> Divergence:  # (R, V) each
    """KL(q || p) over the whole vocabulary."""
    log_p, log_q = logits.log_softmax(dim=1), teacher.log_softmax(dim=1)
    q = log_q.exp()
    return Divergence(weigh_logs(q, log_q.sub_(log_p)), log_p.exp_().sub_(q))


def diverge_in_reverse(logits: Tensor, teacher: Tensor) -> Divergence:
    """KL(p || q) over the whole vocabulary (MiniLLM, arXiv 2306.08543)."""
    log_p = logits.log_softmax(dim=1)
    p, ratio = log_p.exp(), log_p - teacher.log_softmax(dim=1)
    values = weigh_logs(p, ratio)
    return Divergence(values, p.mul_(ratio.sub_(values)))


def diverge_jensen_shannon(logits: Tensor, teacher: Tensor) -> Divergence:
    """(KL(q || m) + KL(p || m)) / 2 with m = (p + q) / 2 (GKD, arXiv 2306.13649, equation 1 with beta 1/2)."""
    log_p, log_q = logits.log_softmax(dim=1), teacher.log_softmax(dim=1)
    log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2))
    p, ratio = log_p.exp(), log_p - log_m
    own = weigh_logs(p, ratio)
    values = (own + weigh_logs(log_q.exp(), log_q.sub_(log_m))) / 2
    return Divergence(values, p.mul_(ratio.sub_(own)).div_(2))


def weigh_logs(weights: Tensor, logs: Tensor) -> Tensor:  # (R, n) each -> (R, 1)
    """The sum of weights * logs, in which a weight of 0 counts 0; `logs` become 0 there."""
    return (weights * logs.masked_fill_(weights == 0, 0)).sum(dim=1, keepdim=True)
