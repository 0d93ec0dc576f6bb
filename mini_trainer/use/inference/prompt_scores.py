"""Scores of tokens by a server: the `prompt_logprobs` of vLLM's completions.

Rows are sent as token ids, and return as each position's most probable tokens, together with the actual one.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urljoin

import numpy as np

from mini_trainer.objectives.soft_targets import make_record_type, make_records
from mini_trainer.use.inference.openai_engine import LISTING_RETRIES, MALFORMED, MAX_SHOWN, OpenAIEngine

LEAST_TAIL = 1e-7  # probability of all other tokens together, where rounding leaves none
LARGEST_LOGPROB = 1e-3  # of a probability of 1, by a server that computes in half precision
LARGEST_ID = 2**31 - 1
LORA_METRIC = "vllm:lora_requests_info"  # only of a vLLM with --enable-lora, also if it has no adapter


class PromptScorer:
    """A model behind an address that scores prompts."""

    def __init__(self, engine: OpenAIEngine, *, top_k: int):
        self.engine, self.top_k = engine, top_k

    def check(self, longest: int) -> None:
        """ValueError if the server says that it cannot score rows of up to `longest` tokens."""
        engine = self.engine
        context = engine.context
        if context is not None and longest >= context:
            raise ValueError(
                f"{engine.where}: has a context of {context:,} tokens, but the longest row has {longest:,}, and one is"
                " generated: serve it with a larger one (vLLM: --max-model-len), or drop longer rows"
                " (process_data.py --max-sample-num-tokens)"
            )
        if "parent" in engine.listed or LORA_METRIC in self.read_metrics():
            raise ValueError(
                f"{engine.where}: vLLM runs with --enable-lora, with which scoring ends the server or leaves out"
                " parts of an adapter: serve the model without it, with adapters merged"
            )

    def read_metrics(self) -> str:
        """The server's page of metrics beside its API; "" if it has none."""
        from openai import APIError

        client = self.engine.client.with_options(max_retries=LISTING_RETRIES)
        try:
            return client.get(urljoin(str(client.base_url), "../metrics"), cast_to=str)
        except APIError:
            return ""

    def score(self, rows: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> np.ndarray:
        """Records of the trained tokens of rows: each its place in words, ids (L,) and which are trained (L,) bool."""
        with ThreadPoolExecutor(self.engine.engine.concurrency) as pool:
            records = list(pool.map(lambda row: self.score_row(*row), rows))
        return np.concatenate([np.empty(0, make_record_type(self.top_k)), *records])

    def score_row(self, where: str, input_ids: np.ndarray, is_trained: np.ndarray) -> np.ndarray:
        """ValueError, which names row and server, for an answer that is not of these ids, or that says too little."""
        ids, places = input_ids.tolist(), np.flatnonzero(is_trained).tolist()
        if not places:
            return np.empty(0, make_record_type(self.top_k))
        try:
            positions = self.read_positions(self.ask(ids), ids)
            found = [self.read_position(positions[i], i, ids[i]) for i in places]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return make_records(*map(np.array, zip(*found, strict=True)))

    def ask(self, ids: list[int]) -> Any:
        """The client's answer; one token is generated, the fewest that all servers take."""
        engine = self.engine
        extra = {"prompt_logprobs": self.top_k, "return_token_ids": True}
        return engine.call(
            lambda: engine.client.completions.create(
                model=engine.model, prompt=ids, max_tokens=1, temperature=0, extra_body=extra
            )
        )

    def read_positions(self, response: Any, ids: list[int]) -> list[Any]:
        """The server's entry for each position of a prompt."""
        try:
            choice = response.choices[0].model_dump()
            positions = list(choice["prompt_logprobs"])
            echoed = list(choice.get("prompt_token_ids") or ids)  # older servers do not return them
        except MALFORMED as error:
            raise self.describe_error(f"gave no prompt_logprobs as vLLM returns them ({error!r})") from None
        if echoed != ids:
            raise self.describe_error("scored other tokens than it was sent: its tokenizer is another one")
        if len(positions) != len(ids):
            raise self.describe_error(f"scored {len(positions)} positions of a prompt of {len(ids)} tokens")
        return positions

    def read_position(self, entries: Any, position: int, token_id: int) -> tuple[list[int], list[float], float, float]:
        """Ids and -log q of the most probable tokens, -log q of all others together, and of the token itself."""
        try:
            known = {int(key): float(entry["logprob"]) for key, entry in entries.items()}
        except (ValueError, *MALFORMED) as error:
            raise self.describe_error(f"position {position}: no log-probabilities by token id ({error!r})") from None
        if not all(0 <= key <= LARGEST_ID and logprob <= LARGEST_LOGPROB for key, logprob in known.items()):
            raise self.describe_error(f"position {position}: has ids or log-probabilities that are none")
        if token_id not in known:
            raise self.describe_error(f"position {position}: no log-probability of its token {token_id}")
        top = sorted(known, key=lambda key: -known[key])[: self.top_k]
        if len(top) < self.top_k:
            raise self.describe_error(f"position {position}: names {len(top)} tokens, expected {self.top_k}")
        tail = max(LEAST_TAIL, 1 - sum(math.exp(known[key]) for key in top))
        return top, [-known[key] for key in top], -math.log(tail), -known[token_id]

    def describe_error(self, text: str) -> ValueError:
        """The error with the server's name, short and without the key."""
        return ValueError(f"{self.engine.where}: {self.engine.hide(text)[:MAX_SHOWN]}")
