"""The engine that uses transformers' generate: prompts of similar length share a left-padded batch.

Where a check finds that a model does not answer left-padded prompts as it answers each one alone, only prompts of equal
length share a batch.
"""

import copy
import itertools
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, StoppingCriteriaList, TextIteratorStreamer

from mini_trainer.data.rows.prompts import Prompt, encode_prompt, find_refusal
from mini_trainer.distributed.ending import is_out_of_memory, log
from mini_trainer.model.blocks import find_mixers
from mini_trainer.model.config import list_stops
from mini_trainer.options.tools import EngineOptions, SamplingOptions
from mini_trainer.use.inference.engine import Answer, Key, Request, make_processors, refuse
from mini_trainer.use.inference.loading import FoundModel, choose_dtype, load_answering_model

PROBE_LENGTHS = (4, 11)
# Largest change of a logit due to padding, relative to the logits' standard deviation: only rounding is allowed.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}


def find_padding_obstacle(model: nn.Module, generation_config: GenerationConfig) -> str | None:
    """Why prompts of different lengths cannot share a batch; None if they can. Applies rules, then a measurement."""
    config = model.config.get_text_config(decoder=True)
    if find_mixers(model):
        return "its layers have a recurrent state, which padding would change"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "it uses chunked attention, and padding would shift the chunks"
    rope = getattr(config, "rope_parameters", None) or {}
    entries = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    if any(entry.get("rope_type") in ("dynamic", "longrope") for entry in entries):
        return "its rotary embeddings depend on the longest prompt in a batch"
    if (generation_config.repetition_penalty or 1.0) != 1.0 or generation_config.no_repeat_ngram_size:
        return "its generation config penalizes repetition of the prompt, and padding would count"
    change = measure_padding(model, generation_config)
    limit = TOLERANCES.get(model.dtype, TOLERANCES[torch.bfloat16])
    return None if change <= limit else f"padding changes its logits by {change:.1e} of their standard deviation"


@torch.no_grad()
def measure_padding(model: nn.Module, generation_config: GenerationConfig) -> float:
    """Largest change of a prompt's logits due to left padding, relative to their standard deviation."""
    device, vocab_size = model.device, model.config.get_text_config(decoder=True).vocab_size
    short, longest = PROBE_LENGTHS
    ids = (7 * torch.arange(2 * longest) % vocab_size).view(2, longest)
    mask = torch.ones_like(ids)
    mask[0, : longest - short] = 0
    ids[0, : longest - short] = generation_config.pad_token_id
    config = copy.deepcopy(generation_config)
    config.max_new_tokens, config.output_logits, config.return_dict_in_generate = 1, True, True
    padded, alone = (
        model.generate(input_ids=rows.to(device), attention_mask=shown.to(device), generation_config=config)
        .logits[0][0]
        .float()
        for rows, shown in ((ids, mask), (ids[:1, longest - short :], mask[:1, longest - short :]))
    )
    return ((padded - alone).abs().max() / alone.std()).item()


EncodedRequest = tuple[Request, list[int]]


class HFEngine:
    """A model in this process (see `use.inference.engine.Engine`); its weights are loaded on first use."""

    def __init__(
        self, found: FoundModel, name: str, engine: EngineOptions, sampling: SamplingOptions, *, device: torch.device
    ):
        self.found, self.sampling, self.batch_size, self.device = found, sampling, engine.batch_size, device
        self.dtype, self.tokenizer = choose_dtype(found.config, engine.dtype), found.tokenizer
        self.max_length = getattr(found.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @cached_property
    def model(self) -> nn.Module:
        return load_answering_model(self.found, dtype=self.dtype, device=self.device)

    @cached_property
    def config(self) -> GenerationConfig:
        return make_generation_config(self.model.generation_config, self.tokenizer, self.sampling)

    @cached_property
    def obstacle(self) -> str | None:
        """Why prompts of different lengths cannot share a batch; None if they can."""
        if self.batch_size == 1:
            return None
        if (obstacle := find_padding_obstacle(self.model, self.config)) is not None:
            log.warning(f"note: {self.found.name}: only prompts of equal length share a batch: {obstacle}")
        return obstacle

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "hf",
            **self.found.identify(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    def answer(
        self, requests: Sequence[Request], *, done: Collection[Key] = (), rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Request, Answer]]:
        """See `Engine`. A partly done batch is computed again as a whole, since rounding depends on the batch."""
        encoded, refused = [], []
        for request in requests:
            ids = encode_prompt(request.prompt, self.tokenizer)
            if (reason := self.find_refusal(request.prompt, len(ids))) is None:
                encoded.append((request, ids))
            elif request.key not in done:
                refused.append((request, refuse(reason)))
        yield from refused[rank::world_size]
        batches = [batch for batch in self.plan_batches(encoded) if any(one.key not in done for one, _ in batch)]
        for batch in batches[rank::world_size]:
            for (request, ids), drawn in zip(batch, self.draw(batch), strict=True):
                if request.key not in done:
                    yield request, self.read_answer(drawn, num_prompt_tokens=len(ids))

    def find_refusal(self, prompt: Prompt, num_tokens: int) -> str | None:
        """Why a prompt of this length has no answer; None if it has one. ValueError for one without tokens."""
        if num_tokens == 0:
            raise ValueError(f"{prompt.place}: has no tokens, so there is nothing to continue")
        return find_refusal(num_tokens, self.max_length)

    def plan_batches(self, encoded: Sequence[EncodedRequest]) -> list[list[EncodedRequest]]:
        """Batches, longest prompts first, so that out-of-memory errors occur early; of equal length if necessary."""

        def group(item: EncodedRequest) -> int:
            length = len(item[1])
            ends_early = self.max_length is not None and length + self.sampling.max_new_tokens > self.max_length
            return length if self.obstacle is not None or ends_early else 0

        batches = []
        ordered = sorted(encoded, key=lambda item: (group(item), len(item[1])), reverse=True)
        for _, items in itertools.groupby(ordered, key=group):
            together = list(items)
            batches += [together[i : i + self.batch_size] for i in range(0, len(together), self.batch_size)]
        return sorted(batches, key=lambda batch: len(batch[0][1]), reverse=True)

    @torch.no_grad()
    def draw(self, batch: Sequence[EncodedRequest]) -> list[list[int]]:
        """The new tokens of each request, up to the first stop token, with it."""
        longest = max(len(ids) for _, ids in batch)
        input_ids = torch.full((len(batch), longest), self.config.pad_token_id)
        mask = torch.zeros_like(input_ids)
        for i, (_, ids) in enumerate(batch):
            input_ids[i, longest - len(ids) :] = torch.tensor(ids)
            mask[i, longest - len(ids) :] = 1
        try:
            outputs = self.model.generate(
                input_ids=input_ids.to(self.device),
                attention_mask=mask.to(self.device),
                generation_config=self.limit_to(longest),
                logits_processor=make_processors(self.sampling, [r.key for r, _ in batch], self.device),
            )
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise ValueError(
                    f"out of memory with {len(batch)} prompts of up to {longest:,} tokens in a batch: lower"
                    f" --batch-size or --max-new-tokens ({str(error).splitlines()[0]})"
                ) from None
            raise
        return [self.cut(ids) for ids in outputs[:, longest:].tolist()]

    def cut(self, ids: list[int]) -> list[int]:
        """The tokens up to the first stop token; the rest is padding."""
        ends = (i for i, token in enumerate(ids, start=1) if token in self.config.eos_token_id)
        return ids[: next(ends, len(ids))]

    def limit_to(self, num_prompt_tokens: int) -> GenerationConfig:
        """The generation config for a prompt of this length, with answers limited to the rest of the context."""
        room, config = self.sampling.max_new_tokens, copy.deepcopy(self.config)
        config.max_new_tokens = room if self.max_length is None else min(room, self.max_length - num_prompt_tokens)
        return config

    def read_answer(self, ids: list[int], *, num_prompt_tokens: int) -> Answer:
        """Decodes the tokens."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        has_ended = bool(ids) and ids[-1] in self.config.eos_token_id
        return Answer(text, "stop" if has_ended else "length", num_prompt_tokens, len(ids))

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Generates in a thread; closing the iterator stops the thread and waits for it."""
        ids = encode_prompt(prompt, self.tokenizer)
        if (reason := self.find_refusal(prompt, len(ids))) is not None:
            raise ValueError(f"{prompt.place}: {reason}".removeprefix(": "))
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop, errors = threading.Event(), []

        def has_stopped(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # (rows,)
            return torch.full((len(input_ids),), stop.is_set(), device=input_ids.device)

        def compute() -> None:
            try:
                self.model.generate(
                    input_ids=torch.tensor([ids], device=self.device),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self.device),
                    generation_config=self.limit_to(len(ids)),
                    logits_processor=make_processors(self.sampling, [(len(ids), 0)], self.device),
                    stopping_criteria=StoppingCriteriaList([has_stopped]),
                    streamer=streamer,
                )
            except Exception as error:  # re-raised in the consuming thread
                errors.append(error)
                streamer.end()

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        try:
            yield from streamer
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]


def make_generation_config(config: GenerationConfig, tokenizer: Any, sampling: SamplingOptions) -> GenerationConfig:
    """The model's generation config, with its stop tokens and penalties, but without its sampling settings."""
    made = copy.deepcopy(config)
    made.do_sample, made.num_beams, made.num_return_sequences, made.use_cache = False, 1, 1, True
    for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_length"):
        setattr(made, name, None)
    made.max_new_tokens = sampling.max_new_tokens
    made.eos_token_id = list_stops(made, tokenizer)
    pads = [made.pad_token_id, tokenizer.pad_token_id, *made.eos_token_id, 0]
    made.pad_token_id = next(token for token in pads if token is not None)
    return made
