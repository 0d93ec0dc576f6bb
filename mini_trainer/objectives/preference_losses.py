"""Losses of preferences, as functions of a pair's few numbers: P pairs, each with a chosen and a rejected answer.

beta scales rewards, that is log-ratios of the model to its reference. Sources are named at each loss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, sigmoid


@dataclass(frozen=True)
class Pairs:
    """Summed log-probabilities of the answers' trained tokens; columns: chosen, rejected."""

    logps: Tensor  # (P, 2) fp32, with gradients
    reference: Tensor  # (P, 2), the reference model's; zeros where the loss has none
    lengths: Tensor  # (P, 2) trained tokens
    margins: Tensor  # (P,)

    @property
    def ratios(self) -> Tensor:  # (P, 2)
        return self.logps - self.reference

    @property
    def difference(self) -> Tensor:  # (P,)
        return self.ratios[:, 0] - self.ratios[:, 1]

    @property
    def mean_logps(self) -> Tensor:  # (P, 2)
        return self.logps / self.lengths.clamp(min=1)


@dataclass(frozen=True)
class Strength:
    """The numbers of a loss that options set."""

    beta: float
    smoothing: float = 0.0  # assumed share of pairs whose answers are swapped
    gamma: float = 0.0  # SimPO's target margin of rewards


def dpo(pairs: Pairs, strength: Strength) -> Tensor:
    """DPO (arXiv 2305.18290, eq. 7); with smoothing conservative DPO (Mitchell 2023); with margins ODPO (arXiv
    2402.10571)."""
    logits = strength.beta * pairs.difference - pairs.margins
    return -(1 - strength.smoothing) * logsigmoid(logits) - strength.smoothing * logsigmoid(-logits)


def ipo(pairs: Pairs, strength: Strength) -> Tensor:
    """IPO (arXiv 2310.12036, eq. 17) on log-ratios per token, as its authors advised TRL."""
    ratios = pairs.ratios / pairs.lengths.clamp(min=1)
    return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * strength.beta)).square()


def apo_zero(pairs: Pairs, strength: Strength) -> Tensor:
    """APO-zero (arXiv 2408.06266): raises chosen answers and lowers rejected ones."""
    chosen, rejected = (strength.beta * pairs.ratios).unbind(1)
    return 1 - sigmoid(chosen) + sigmoid(rejected)


def simpo(pairs: Pairs, strength: Strength) -> Tensor:
    """SimPO (arXiv 2405.14734, eq. 6): rewards per token, without a reference."""
    means = pairs.mean_logps
    return -logsigmoid(strength.beta * (means[:, 0] - means[:, 1]) - strength.gamma - pairs.margins)


def orpo(pairs: Pairs, strength: Strength) -> Tensor:
    """ORPO's odds ratio (arXiv 2403.07691, eq. 6), weighted by beta; the whole loss adds the chosen answers' NLL."""
    means = pairs.mean_logps
    odds = means - torch.log1p(-means.exp().clamp(max=1 - 1e-7))
    return -strength.beta * logsigmoid(odds[:, 0] - odds[:, 1])


@dataclass(frozen=True)
class LossKind:
    """A loss, its requirements and its defaults."""

    measure: Callable[[Pairs, Strength], Tensor]  # (P,)
    has_reference: bool = True
    takes_margins: bool = False
    beta: float = 0.1
    gamma: float | None = None
    nll_weight: float = 0.0


LOSSES = {
    "dpo": LossKind(dpo, takes_margins=True),
    "ipo": LossKind(ipo),
    "apo-zero": LossKind(apo_zero),
    "simpo": LossKind(simpo, has_reference=False, takes_margins=True, beta=2.0, gamma=0.5),
    "orpo": LossKind(orpo, has_reference=False, nll_weight=1.0),
}
