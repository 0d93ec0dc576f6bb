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
from torch import Tensor, nn

from mini_trainer.objectives import next_tokens
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.families.text import TextRowModel
from mini_trainer.objectives.objective import Scores

SOFT_COLUMN = "soft_targets"  # of samples: records (trained tokens,) of `make_record_type`


def make_record_type(top_k: int) -> np.dtype:
    """A token's record: probabilities as -log q in half precision, which keeps three digits of even the smallest."""
    return np.dtype([("ids", "<i4", (top_k,)), ("nll", "<f2", (top_k,)), ("tail", "<f2"), ("target", "<f2")])


@dataclass
class SoftTargets:
    """The records of a micro-batch's trained tokens."""

    ids: Tensor  # (N, K) int32
    log_q: Tensor  # (N, K + 1) fp32: of the K tokens and of all others together; sums to 1
    log_q_target: Tensor  # (N, 1) fp32

    def slice(self, part: slice) -> "SoftTargets":
        return SoftTargets(self.ids[part], self.log_q[part], self.log_q_target[part])


def read_records(records: Sequence[np.ndarray]) -> SoftTargets:
    """The samples' records as tensors; the rounding error of the sum of probabilities is corrected."""
    joined = np.concatenate(records)
    nll = np.concatenate([joined["nll"], joined["tail"][:, None]], axis=1).astype(np.float32)
    return SoftTargets(
        torch.from_numpy(joined["ids"].astype(np.int32)),
        torch.from_numpy(-nll).log_softmax(dim=1),
        torch.from_numpy(-joined["target"].astype(np.float32))[:, None],
    )


def make_records(ids: np.ndarray, nll: np.ndarray, tail: np.ndarray, target: np.ndarray) -> np.ndarray:  # (N,)
    """Records of N tokens: ids and -log q of the most probable ones (N, K), -log q of the rest and the target (N,)."""
    records = np.empty(len(ids), make_record_type(ids.shape[1]))
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
    num_ids: int = 0  # of the tokenizer: rows of the head beyond them are padding

    def score(self, row_model: TextRowModel, micro_batch: MicroBatch) -> Scores:
        """Sums: nothing. Predictions: the K ids, their -log q, that of all others together, and the target's."""
        targets, row = micro_batch.targets, micro_batch.row
        places = torch.stack([targets.find_sequences(row), row.position_ids[0, targets.index]], dim=1)
        found = self.score_top(self.read(row_model, micro_batch))
        return Scores(found.new_zeros(targets.num_sources, 1), torch.cat([places.double(), found], dim=1))

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
        ids, nll, rest = np.split(predictions[:, 2:], [self.top_k, 2 * self.top_k], axis=1)
        return make_records(ids, nll, *rest.T)


# A target outside of the K tokens that holds more of the others' probability than this leaves none to the rest: below,
# the difference is rounding of the file's half precision.
MOST_OF_TAIL = 1 - 1e-3


class Top(NamedTuple):
    """A teacher's probabilities of a chunk's tokens, from its file."""

    ids: Tensor  # (R, K) int64
    log_q: Tensor  # (R, K + 1), of the K tokens and of all others together; sums to 1
    log_q_target: Tensor  # (R, 1)


class Divergence(NamedTuple):
    values: Tensor  # (R, 1)
    d_logits: Tensor  # (R, V)


@dataclass(frozen=True)
class FromTop:
    """KL(q || p) over the K tokens and one bucket for all others. With the target left out of both, which are
    renormalised (arXiv 2605.29498), the target itself can be learned, and everything else is kept."""

    leaves_target_out: bool = False

    def __call__(self, logits: Tensor, target: Tensor, top: Top) -> Divergence:  # (R, V), (R, 1)
        return self.diverge_within(logits.log_softmax(dim=1), target, top)

    def diverge_within(
        self, log_p: Tensor, target: Tensor, top: Top, *, share: float | Tensor = 0.0, scale: float | Tensor = 1.0
    ) -> Divergence:
        """The divergence, and share * p + scale * its derivatives in place of `log_p`, so that a cross-entropy's
        derivatives need no memory of their own. `share` and `scale` are numbers, or (R, 1). The student's probability
        of all others counts as no less than the smallest normal number."""
        log_named = log_p.gather(1, top.ids)
        p = log_p.exp_()
        p_named, p_target = p.gather(1, top.ids), p.gather(1, target)
        p.scatter_(1, top.ids, 0)
        if self.leaves_target_out:
            p.scatter_(1, target, 0)
            top = leave_target_out(top, target)
        p_others = p.sum(dim=1, keepdim=True).clamp_(min=torch.finfo(p.dtype).tiny)
        log_q, log_buckets = top.log_q, torch.cat([log_named, p_others.log()], dim=1)
        if self.leaves_target_out:
            is_target = nn.functional.pad(top.ids == target, (0, 1))
            log_q, log_buckets = (
                log.masked_fill(is_target, -torch.inf).log_softmax(dim=1) for log in (log_q, log_buckets)
            )
        q = log_q.exp()
        d_buckets = log_buckets.exp() - q
        p.mul_(share + scale * d_buckets[:, -1:] / p_others)  # the others share their bucket's as they share its p
        if self.leaves_target_out:
            p.scatter_(1, target, share * p_target)
        p.scatter_(1, top.ids, share * p_named + scale * d_buckets[:, :-1])
        return Divergence(weigh_logs(q, log_q - log_buckets), p)


def leave_target_out(top: Top, target: Tensor) -> Top:
    """The file's others without a target that is one of them."""
    log_others = top.log_q[:, -1:]
    share = (top.log_q_target - log_others).exp()
    without = log_others + torch.log1p(-share.clamp(max=MOST_OF_TAIL))
    without = without.masked_fill(share > MOST_OF_TAIL, -torch.inf)
    is_named = (top.ids == target).any(dim=1, keepdim=True)
    return top._replace(log_q=torch.cat([top.log_q[:, :-1], torch.where(is_named, log_others, without)], dim=1))


def diverge_forward(logits: Tensor, target: Tensor, teacher: Tensor) -> Divergence:  # (R, V), (R, 1), (R, V) logits
    """KL(q || p) over the whole vocabulary."""
    log_p, log_q = logits.log_softmax(dim=1), teacher.log_softmax(dim=1)
    q = log_q.exp()
    return Divergence(weigh_logs(q, log_q.sub_(log_p)), log_p.exp_().sub_(q))


def diverge_forward_beside_target(logits: Tensor, target: Tensor, teacher: Tensor) -> Divergence:
    """`diverge_forward` with the target left out of both (arXiv 2605.29498)."""
    return diverge_forward(leave_out(logits, target), target, leave_out(teacher, target))


def diverge_in_reverse(logits: Tensor, target: Tensor, teacher: Tensor) -> Divergence:
    """KL(p || q) over the whole vocabulary (MiniLLM, arXiv 2306.08543)."""
    log_p = logits.log_softmax(dim=1)
    p, ratio = log_p.exp(), log_p - teacher.log_softmax(dim=1)
    values = weigh_logs(p, ratio)
    return Divergence(values, p.mul_(ratio.sub_(values)))


def diverge_jensen_shannon(logits: Tensor, target: Tensor, teacher: Tensor) -> Divergence:
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


def leave_out(logits: Tensor, target: Tensor) -> Tensor:
    return logits.scatter(1, target, -torch.inf)


FORWARD_WITHIN_TOP, FORWARD_BESIDE_TARGET = FromTop(), FromTop(leaves_target_out=True)
