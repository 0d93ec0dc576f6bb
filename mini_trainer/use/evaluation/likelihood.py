"""Multiple choice by likelihood: the answer is the choice that is most likely after the prompt.

Scored as in EleutherAI's harness: by the sum of the log-probabilities of a choice's tokens, for the normalised answer
divided by the choice's length in characters. White space at the end of a prompt is scored with its choices, because
tokenizers join it with the next word. L tokens of prompt and choice, V vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_trainer.data.rows.prompts import Prompt, encode_text, render_prompt
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import show_progress
from mini_trainer.distributed.world import World, gather_on_rank0
from mini_trainer.use.inference.hf_engine import HFEngine

MAX_BATCH_TOKENS = 4096  # tokens with logits at once


@dataclass(frozen=True)
class Candidate:
    """One choice after its prompt."""

    prompt: int
    choice: int
    ids: list[int]
    num_given: int  # the prompt's tokens
    joins: bool  # the choice changes the tokens of its prompt


def encode_choices(prompt: Prompt, number: int, engine: HFEngine) -> list[Candidate]:
    """The tokens of a prompt's choices. Prompt and choice are tokenized as one text; a chat is rendered first."""
    text, is_rendered = render_prompt(prompt, engine.tokenizer)
    context = text.rstrip()
    given = encode_text(context, engine.tokenizer, is_rendered=is_rendered)
    is_empty = not context or not given
    if is_empty:
        given = [find_prefix(prompt, engine.tokenizer)]
    candidates = []
    for i, choice in enumerate(prompt.choices):
        whole = encode_text(text + choice, engine.tokenizer, is_rendered=is_rendered)
        if is_empty:  # some tokenizers add the prefix themselves
            whole = [*given, *(whole[1:] if whole[:1] == given else whole)]
        ids = [*given, *whole[len(given) :]]
        if len(ids) == len(given):
            raise ValueError(f"{prompt.place}: choice {i} adds no token to the prompt: begin it with a space")
        engine.check_length(prompt, len(ids))
        candidates.append(Candidate(number, i, ids, len(given), joins=whole[: len(given)] != given))
    return candidates


def find_prefix(prompt: Prompt, tokenizer: Any) -> int:
    """The token before a choice without a prompt: the bos token, else the eos token."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError(f"{prompt.place}: the prompt is empty, and the tokenizer has no bos or eos token")


def measure_length(choice: str) -> int:
    """Length in characters, without the white space that separates the choice from its prompt."""
    return len(choice.lstrip()) or len(choice)


def score_choices(engine: HFEngine, prompts: Sequence[Prompt], world: World) -> list[list[float]] | None:
    """The log-probabilities of each prompt's choices on rank 0; None on others. Each rank scores its share."""
    own = range(world.rank, len(prompts), world.world_size)
    candidates = [candidate for i in own for candidate in encode_choices(prompts[i], i, engine)]
    num_joined = sum(candidate.joins for candidate in candidates)
    shares = gather_on_rank0(world, (score_candidates(engine, candidates), num_joined))
    if shares is None:
        return None
    scores = {key: value for found, _ in shares for key, value in found.items()}
    num_joined = sum(joined for _, joined in shares)
    if num_joined:
        log.warning(
            f"note: {num_joined:,} of {len(scores):,} choices share a token with the end of their prompt, and only"
            " the tokens after it are scored: begin choices with a space, or end prompts with one"
        )
    return [[scores[i, j] for j in range(len(prompt.choices))] for i, prompt in enumerate(prompts)]


@torch.no_grad()
def score_candidates(engine: HFEngine, candidates: Sequence[Candidate]) -> dict[tuple[int, int], float]:
    """Log-probabilities by the numbers of prompt and choice."""
    longest_first = sorted(candidates, key=lambda candidate: len(candidate.ids), reverse=True)
    scores = {}
    for batch in show_progress(list(make_batches(longest_first, engine.batch_size)), "choices", unit="batch"):
        for candidate, value in zip(batch, score_batch(engine, batch), strict=True):
            scores[candidate.prompt, candidate.choice] = value
    return scores


def make_batches(candidates: Sequence[Candidate], batch_size: int) -> list[list[Candidate]]:
    """Batches of candidates, which are sorted longest first."""
    batches: list[list[Candidate]] = []
    for candidate in candidates:
        room = min(batch_size, max(1, MAX_BATCH_TOKENS // len(batches[-1][0].ids))) if batches else 0
        if not batches or len(batches[-1]) >= room:
            batches.append([])
        batches[-1].append(candidate)
    return batches


def score_batch(engine: HFEngine, batch: Sequence[Candidate]) -> list[float]:
    """Log-probabilities of a batch, padded on the right so that padding affects no token in any kind of layer."""
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
    """Log-probability of the choice's tokens, from the logits (L, V) of prompt and choice."""
    targets = torch.tensor(candidate.ids[candidate.num_given :], device=logits.device)
    predicting = logits[candidate.num_given - 1 : len(candidate.ids) - 1].float()
    return predicting.log_softmax(-1).gather(1, targets[:, None]).sum().item()
