"""Scores of tokens by a server: the `prompt_logprobs` of vLLM's completions.

Rows go as token ids, and come back as each position's most probable tokens, with the one that is there.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from inference.openai_engine import MALFORMED, OpenAIEngine
from objectives.soft_targets import make_record_type, make_records

LEAST_TAIL = 1e-7  # probability of all other tokens together, where rounding leaves none


class PromptScorer:
    """A model behind an address that scores prompts."""

    def __init__(self, engine: OpenAIEngine, *, top_k: int):
        self.engine, self.top_k = engine, top_k

    def score(self, rows: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> np.ndarray:
        """Records of the trained tokens of rows: each its place in words, ids (L,) and which are trained (L,) bool."""
        with ThreadPoolExecutor(self.engine.engine.concurrency) as pool:
            records = list(pool.map(lambda row: self.score_row(*row), rows))
        return np.concatenate([np.empty(0, make_record_type(self.top_k)), *records])

    def score_row(self, where: str, input_ids: np.ndarray, is_trained: np.ndarray) -> np.ndarray:
        """ValueError for an answer that is not of these ids, or that says too little."""
        ids, engine = input_ids.tolist(), self.engine
        extra = {"prompt_logprobs": self.top_k, "return_token_ids": True}
        response = engine.call(
            lambda: engine.client.completions.create(
                model=engine.model, prompt=ids, max_tokens=1, temperature=0, extra_body=extra
            )
        )
        try:
            choice = response.choices[0].model_dump()
            positions = choice["prompt_logprobs"]
            echoed = choice.get("prompt_token_ids") or ids  # older servers do not return them
            if list(echoed) != ids or len(positions) != len(ids):
                raise ValueError("it scored other tokens than it was sent: its tokenizer is another one")
            found = [self.read_position(positions[i], ids[i]) for i in np.flatnonzero(is_trained).tolist()]
        except MALFORMED as error:
            raise ValueError(f"{engine.where}: {where}: no prompt_logprobs as vLLM returns them ({error!r})") from None
        except ValueError as error:
            raise ValueError(f"{engine.where}: {where}: {error}") from None
        if not found:
            return np.empty(0, make_record_type(self.top_k))
        return make_records(*map(np.array, zip(*found, strict=True)))

    def read_position(self, entries: dict[str, Any], token_id: int) -> tuple[list[int], list[float], float, float]:
        """Ids and -log q of the most probable tokens, -log q of all others together, and of the token itself."""
        known = {int(key): float(entry["logprob"]) for key, entry in entries.items()}
        if token_id not in known:
            raise ValueError(f"it says nothing of token {token_id}, which is there")
        top = sorted(known, key=lambda key: -known[key])[: self.top_k]
        if len(top) < self.top_k:
            raise ValueError(f"it names {len(top)} tokens of a position, expected {self.top_k}: see its --max-logprobs")
        tail = max(LEAST_TAIL, 1 - sum(np.exp(known[key]) for key in top))
        return top, [-known[key] for key in top], -np.log(tail), -known[token_id]
