"""Choices by likelihood: the answer is the choice that the model finds likeliest after the prompt.

As EleutherAI's harness does it: the sum of the log-probabilities of a choice's tokens, and for the normalised answer
that sum divided by the choice's length in characters. White space that a prompt ends in is scored with its choices,
since tokenizers join it with what follows. L tokens of prompt and choice, V vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference.hf_engine import HFEngine
from inference.prompts import Prompt, encode_text, render_prompt
from ranks.ending import log
from ranks.terminal import show_progress

MAX_BATCH_TOKENS = 4096  # that have logits at once


@dataclass(frozen=True)
class Candidate:
    """One choice after its prompt."""

    prompt: int
    choice: int
    ids: list[int]
    num_given: int  # the prompt's tokens
    joins: bool = False  # one of the prompt's tokens becomes another where the choice follows


def encode_choices(prompt: Prompt, number: int, engine: HFEngine) -> list[Candidate]:
    """The choices' tokens. Prompt and choice are tokenized as one text, as in training; a chat is rendered first."""
    text, is_rendered = render_prompt(prompt, engine.tokenizer)
    context = text.rstrip()
    given = encode_text(context, engine.tokenizer, is_rendered=is_rendered)
    is_empty = not context or not given
    if is_empty:
        given = [find_prefix(prompt, engine.tokenizer)]
    candidates = []
    for i, choice in enumerate(prompt.choices):
        whole = encode_text(text + choice, engine.tokenizer, is_rendered=is_rendered)
        if is_empty:  # tokenizers may have put the prefix there already
            whole = [*given, *(whole[1:] if whole[:1] == given else whole)]
        ids = [*given, *whole[len(given) :]]
        if len(ids) == len(given):
            raise ValueError(f"{prompt.place}: choice {i} adds no token to the prompt: begin it with a space")
        engine.check_length(prompt, len(ids))
        candidates.append(Candidate(number, i, ids, len(given), joins=whole[: len(given)] != given))
    return candidates


def find_prefix(prompt: Prompt, tokenizer: Any) -> int:
    """The token that stands before a choice without a prompt."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError(f"{prompt.place}: is empty, and the tokenizer has no token for the beginning or end of a text")


def measure_length(choice: str) -> int:
    """Its characters, without the white space that only separates it from the prompt."""
    return len(choice.lstrip()) or len(choice)


@torch.no_grad()
def score_choices(
    engine: HFEngine, prompts: Sequence[Prompt], *, rank: int = 0, world_size: int = 1
) -> dict[int, list[float]]:
    """For each prompt of this rank's share, by its number, the log-probability of each of its choices."""
    own = range(rank, len(prompts), world_size)
    candidates = [candidate for i in own for candidate in encode_choices(prompts[i], i, engine)]
    num_joined = sum(candidate.joins for candidate in candidates)
    if num_joined:
        log.warning(
            f"note: {num_joined:,} of {len(candidates):,} choices share a token with the end of their prompt, and only"
            " the tokens after it are scored: begin choices with a space, or end prompts with one"
        )
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
