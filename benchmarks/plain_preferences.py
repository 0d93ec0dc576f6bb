"""Preference losses in fp64 as the papers write them, each sequence by itself: says who is right where others differ.

c and r are summed log-probabilities of the chosen and the rejected answer, rc and rr the reference's.
"""

from dataclasses import dataclass

import torch
from preference_cases import Answer, Case, Inputs, Measured
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

GAMMA = 0.5


@dataclass(frozen=True)
class Logps:
    """Summed log-probability of an answer by the model and by the reference, and the number of its tokens."""

    own: Tensor
    reference: Tensor
    num_tokens: int

    @property
    def ratio(self) -> Tensor:
        return self.own - self.reference

    @property
    def mean(self) -> Tensor:
        return self.own / self.num_tokens


def measure_plainly(case: Case, inputs: Inputs) -> Measured:
    auto_class = AutoModelForSequenceClassification if case.trainer == "Reward" else AutoModelForCausalLM
    classes = zip((auto_class, AutoModelForCausalLM), inputs.find_models(case), strict=True)
    model, reference = (of.from_pretrained(path, dtype=torch.float32).double() for of, path in classes)
    pairs = inputs.read_answers(case)
    if case.trainer == "Reward":
        loss = mean_rewards(case, model, pairs, inputs.rows[case.data])
    else:
        logps = [tuple(measure_answer(answer, model, reference) for answer in pair) for pair in pairs]
        labels = [row.get("label") for row in inputs.rows[case.data]]
        loss = mean_feedback(case, logps, labels) if case.trainer == "KTO" else mean_pairs(case, logps)
    loss.backward()
    return Measured(float(loss.detach()), {name: param.grad for name, param in model.named_parameters()})


def measure_answer(answer: Answer, model: nn.Module, reference: nn.Module) -> Logps:
    with torch.no_grad():
        known = sum_logps(reference, answer)
    return Logps(sum_logps(model, answer), known, int(answer.is_trained.sum()))


def sum_logps(model: nn.Module, answer: Answer) -> Tensor:
    logits = model(input_ids=answer.ids[None]).logits[0, :-1]
    return -cross_entropy(logits, answer.labels[1:], ignore_index=-100, reduction="sum")


def mean_pairs(case: Case, logps: list[tuple[Logps, Logps]]) -> Tensor:
    losses = [measure_pair(case.name, chosen, rejected, case.beta) for chosen, rejected in logps]
    nll = -sum(chosen.own for chosen, _ in logps) / sum(chosen.num_tokens for chosen, _ in logps)
    return torch.stack(losses).mean() + case.nll_weight * nll


def measure_pair(loss: str, c: Logps, r: Logps, beta: float) -> Tensor:
    h = beta * (c.ratio - r.ratio)
    match loss:
        case "dpo":
            return -logsigmoid(h)
        case "ipo":
            return (c.ratio / c.num_tokens - r.ratio / r.num_tokens - 1 / (2 * beta)) ** 2
        case "apo-zero":
            return 1 - torch.sigmoid(beta * c.ratio) + torch.sigmoid(beta * r.ratio)
        case "simpo":
            return -logsigmoid(beta * (c.mean - r.mean) - GAMMA)
        case "orpo":
            odds = [side.mean.exp() / (1 - side.mean.exp()) for side in (c, r)]
            return -beta * logsigmoid((odds[0] / odds[1]).log())
    raise ValueError(loss)


def mean_feedback(case: Case, logps: list[tuple[Logps, Logps]], labels: list[bool]) -> Tensor:
    point = torch.stack([unrelated.ratio for _, unrelated in logps]).mean().clamp(min=0).detach()
    weights = {True: case.ours.get("kto_weight_ratio", 1.0), False: 1.0}
    losses = []
    for (answer, _), is_good in zip(logps, labels, strict=True):
        h = case.beta * (answer.ratio - point)
        losses.append(weights[is_good] * (1 - torch.sigmoid(h if is_good else -h)))
    return torch.stack(losses).mean()


def mean_rewards(case: Case, model: nn.Module, pairs: list[tuple[Answer, Answer]], rows: list[dict]) -> Tensor:
    losses = []
    for pair, row in zip(pairs, rows, strict=True):
        c, r = (model(input_ids=answer.ids[None]).logits[0, 0] for answer in pair)
        centering = case.ours.get("reward_centering", 0.0)
        losses.append(-logsigmoid(c - r - row.get("margin", 0.0)) + centering * (c + r) ** 2)
    return torch.stack(losses).mean()
