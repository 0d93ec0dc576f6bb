"""Divergences of a student's next-token distributions from a teacher's, with their derivatives by the student's logits.

p is the student's distribution, q the teacher's. R tokens of a chunk, V vocabulary size, K tokens that a teacher's file
names for each of them; its bucket K + 1 holds all others.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# A target outside of the K tokens that holds more of the others' probability than this leaves none to the rest: below,
# the difference is rounding of the file's half precision.
MOST_OF_TAIL = 1 - 1e-3


class Top(NamedTuple):
    """What a teacher's file says of a chunk's tokens."""

    ids: Tensor  # (R, K) int64
    log_q: Tensor  # (R, K + 1), of the K tokens and of all others together; sums to 1
    log_q_target: Tensor  # (R, 1)


class Divergence(NamedTuple):
    values: Tensor  # (R, 1)
    d_logits: Tensor  # (R, V)


def diverge_on_top(logits: Tensor, target: Tensor, top: Top) -> Divergence:  # (R, V), (R, 1)
    """KL(q || p) over the K tokens and one bucket for all others."""
    log_p = logits.log_softmax(dim=1)
    rest = log_p.scatter(1, top.ids, -torch.inf)
    log_p_rest = rest.logsumexp(dim=1, keepdim=True)
    log_p_buckets = torch.cat([log_p.gather(1, top.ids), log_p_rest], dim=1)
    q, log_q_rest = top.log_q.exp(), top.log_q[:, -1:]
    values = weigh_logs(q, top.log_q - log_p_buckets)
    log_scale = torch.where(log_p_rest.isfinite(), log_q_rest - log_p_rest, -torch.inf)
    d_logits = log_p.exp_().sub_(rest.add_(log_scale).exp_())  # p, less the bucket's q spread as p is
    return Divergence(values, d_logits.scatter_add_(1, top.ids, -q[:, :-1]))


def diverge_within_top(logits: Tensor, target: Tensor, top: Top) -> Divergence:
    """KL(q || p) with both renormalised over the K tokens."""
    log_p, log_q = logits.gather(1, top.ids).log_softmax(dim=1), top.log_q[:, :-1].log_softmax(dim=1)
    d_logits = torch.zeros_like(logits).scatter_(1, top.ids, log_p.exp() - log_q.exp())
    return Divergence(weigh_logs(log_q.exp(), log_q - log_p), d_logits)


def diverge_beside_target(logits: Tensor, target: Tensor, top: Top) -> Divergence:
    """KL(q || p) with the target left out of both, which are renormalised (arXiv 2605.29498): the target itself can be
    learned, and everything else is kept."""
    is_target = top.ids == target
    share = (top.log_q_target - top.log_q[:, -1:]).exp()
    without = top.log_q[:, -1:] + torch.log1p(-share.clamp(max=MOST_OF_TAIL))
    without = without.masked_fill(share > MOST_OF_TAIL, -torch.inf)
    is_named = is_target.any(dim=1, keepdim=True)
    log_q = torch.cat(
        [top.log_q[:, :-1].masked_fill(is_target, -torch.inf), torch.where(is_named, top.log_q[:, -1:], without)], dim=1
    )
    top = top._replace(log_q=log_q.log_softmax(dim=1))
    return diverge_on_top(leave_out(logits, target), target, top)


def diverge_forward(logits: Tensor, target: Tensor, teacher: Tensor) -> Divergence:  # (R, V), (R, 1), (R, V) logits
    """KL(q || p) over the whole vocabulary."""
    log_p, log_q = logits.log_softmax(dim=1), teacher.log_softmax(dim=1)
    q = log_q.exp()
    return Divergence(weigh_logs(q, log_q - log_p), log_p.exp_().sub_(q))


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
    values = (own + weigh_logs(log_q.exp(), log_q - log_m)) / 2
    return Divergence(values, p.mul_(ratio.sub_(own)).div_(2))


def weigh_logs(weights: Tensor, logs: Tensor) -> Tensor:  # (R, n) each -> (R, 1)
    """The sum of weights * logs, where a weight of 0 counts 0."""
    return (weights * logs.masked_fill(weights == 0, 0)).sum(dim=1, keepdim=True)


def leave_out(logits: Tensor, target: Tensor) -> Tensor:
    return logits.scatter(1, target, -torch.inf)


# By --teacher-divergence: from a file of the K most probable tokens, and from the teacher's own logits.
FROM_TOP = {"forward-kl": diverge_on_top, "top-k-kl": diverge_within_top, "masked-kl": diverge_beside_target}
FROM_LOGITS = {
    "forward-kl": diverge_forward,
    "masked-kl": diverge_forward_beside_target,
    "reverse-kl": diverge_in_reverse,
    "jsd": diverge_jensen_shannon,
}
