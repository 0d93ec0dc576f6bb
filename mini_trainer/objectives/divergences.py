"""Divergences of a student's next-token distributions from a teacher's, with their derivatives by the student's logits.

p is the student's distribution, q the teacher's. R tokens of a chunk, V vocabulary size, K tokens that a teacher's file
names for each of them; its bucket K + 1 holds all others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

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
    """KL(q || p) over the K tokens and one bucket for all others, both as `restrict` leaves them."""

    restrict: Callable[[Tensor, Tensor], Tensor]  # log-probabilities (R, K + 1) and where the target is -> the same
    leaves_target_out: bool = False

    def __call__(self, logits: Tensor, target: Tensor, top: Top) -> Divergence:  # (R, V), (R, 1)
        return self.diverge_within(logits.log_softmax(dim=1), target, top)

    def diverge_within(
        self, log_p: Tensor, target: Tensor, top: Top, *, share: float | Tensor = 0.0, scale: float | Tensor = 1.0
    ) -> Divergence:
        """The divergence, and share * p + scale * its derivatives in place of `log_p`, so that a cross-entropy's
        derivatives need no memory of their own. `share` and `scale` are numbers, or (R, 1).

        The student's probability of all others counts as no less than the smallest normal number.
        """
        log_named = log_p.gather(1, top.ids)
        p = log_p.exp_()
        p_named, p_target = p.gather(1, top.ids), p.gather(1, target)
        p.scatter_(1, top.ids, 0)
        if self.leaves_target_out:
            p.scatter_(1, target, 0)
            top = leave_target_out(top, target)
        p_others = p.sum(dim=1, keepdim=True).clamp_(min=torch.finfo(p.dtype).tiny)
        is_target = top.ids == target
        log_q = self.restrict(top.log_q, is_target)
        log_buckets = self.restrict(torch.cat([log_named, p_others.log()], dim=1), is_target)
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


def keep_all(log: Tensor, is_target: Tensor) -> Tensor:
    return log


def keep_named(log: Tensor, is_target: Tensor) -> Tensor:
    """Both renormalised over the K tokens."""
    return nn.functional.pad(log[:, :-1].log_softmax(dim=1), (0, 1), value=-torch.inf)


def keep_others_than_target(log: Tensor, is_target: Tensor) -> Tensor:
    """The target left out of both, which are renormalised (arXiv 2605.29498): the target itself can be learned, and
    everything else is kept."""
    return log.masked_fill(nn.functional.pad(is_target, (0, 1)), -torch.inf).log_softmax(dim=1)


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


FORWARD_WITHIN_TOP, FORWARD_OVER_TOP = FromTop(keep_all), FromTop(keep_named)
FORWARD_BESIDE_TARGET = FromTop(keep_others_than_target, leaves_target_out=True)
