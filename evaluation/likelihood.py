"""Choices by likelihood: the answer is the choice that the model finds likeliest after the prompt.

As EleutherAI's harness does it: the sum of the log-probabilities of a choice's tokens, and for the normalised answer
that sum divided by the choice's length in characters. L tokens of prompt and choice, V vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.hf_engine import HFEngine
from inference.prompts import Prompt, encode_prompt
from ranks.terminal import show_progress

MAX_BATCH_TOKENS = 4096  # that have logits at once


@dataclass(frozen=True)
class Candidate:
    """One choice after its prompt."""

    prompt: int
    choice: int
    ids: list[int]
    num_given: int  # the prompt's tokens


def encode_choices(prompt: Prompt, number: int, engine: HFEngine) -> list[Candidate]:
    """The choices' tokens. A text is tokenized with each choice as one, a chat's answer by itself."""
    given = encode_prompt(prompt, engine.tokenizer)
    is_chat = prompt.messages is not None and engine.tokenizer.chat_template is not None
    candidates = []
    for i, choice in enumerate(prompt.choices):
        if is_chat:
            ids = given + engine.tokenizer(choice, add_special_tokens=False)["input_ids"]
        else:
            text = prompt.text + choice
            ids = encode_prompt(Prompt(row={}, text=text), engine.tokenizer)
        if len(ids) <= len(given):
            raise ValueError(f"{prompt.place}: choice {i} adds no token to the prompt")
        engine.check_length(prompt, len(ids))
        candidates.append(Candidate(number, i, ids, len(given)))
    return candidates


@torch.no_grad()
def score_choices(
    engine: HFEngine, prompts: Sequence[Prompt], *, rank: int = 0, world_size: int = 1
) -> dict[int, list[float]]:
    """For each prompt of this rank's share, by its number, the log-probability of each of its choices."""
    own = range(rank, len(prompts), world_size)
    candidates = [candidate for i in own for candidate in encode_choices(prompts[i], i, engine)]
    candidates.sort(key=lambda candidate: len(candidate.ids), reverse=True)
    found = {i: [0.0] * len(prompts[i].choices) for i in own}
    for batch in show_progress(list(make_batches(candidates, engine.batch_size)), "choices", unit="batch"):
        for candidate, value in zip(batch, score_batch(engine, batch), strict=True):
            found[candidate.prompt][candidate.choice] = value
    return found


def make_batches(candidates: Sequence[Candidate], batch_size: int) -> list[list[Candidate]]:
    """In their order, the longest first."""
    batches: list[list[Candidate]] = []
    for candidate in candidates:
        room = min(batch_size, max(1, MAX_BATCH_TOKENS // len(batches[-1][0].ids))) if batches else 0
        if not batches or len(batches[-1]) >= room:
            batches.append([])
        batches[-1].append(candidate)
    return batches


def score_batch(engine: HFEngine, batch: Sequence[Candidate]) -> list[float]:
    """Padded on the right, which what comes before never sees, whatever the layers."""
    longest = max(len(candidate.ids) for candidate in batch)
    input_ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, candidate in enumerate(batch):
        input_ids[row, : len(candidate.ids)] = torch.tensor(candidate.ids)
        mask[row, : len(candidate.ids)] = 1
    logits = engine.model(
        input_ids=input_ids.to(engine.device), attention_mask=mask.to(engine.device), use_cache=False
    ).logits  # (rows, longest, V)
    return [sum_log_probabilities(row, candidate) for row, candidate in zip(logits, batch, strict=True)]


def sum_log_probabilities(logits: Tensor, candidate: Candidate) -> float:
    """Of the choice's tokens, from the logits (L, V) of the prompt and the choice."""
    targets = torch.tensor(candidate.ids[candidate.num_given :], device=logits.device)
    predicting = logits[candidate.num_given - 1 : len(candidate.ids) - 1].float()
    return predicting.log_softmax(-1).gather(1, targets[:, None]).sum().item()
